"""A process that has imported what notebooks import, and forks itself for every papermill and kernel of the tests: each
starts without the seven seconds that these imports take.

`python warm.py serve ADDRESS` is that process. `python warm.py run ADDRESS MODULE ARGUMENTS` does what `python -m
MODULE ARGUMENTS` does (or `python SCRIPT.py ARGUMENTS`), in a fork of it: with the standard streams, the environment
and the working directory of the caller, which passes signals on to it, and with which it ends. Both sides use the
standard library alone, so that the caller starts in 30 milliseconds. `python warm.py kernels FOLDER ADDRESS` writes the
kernel specification that makes Jupyter start its Python kernels so, where `JUPYTER_PATH` names the folder.
"""

import array
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

WITHOUT_HUGE_PAGES = 41  # Linux's PR_SET_THP_DISABLE, which forks inherit
LENGTH = 8  # bytes of a request's length, which comes first; 0: a lease, for which the process stays until it is closed
NEEDED_FIRST = ("papermill.cli", "papermill.engines", "nbclient", "jupyter_client.asynchronous", "click")
NEEDED = (
    "ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.debugger", "IPython.core.completerlib",
    "IPython.core.debugger", "IPython.core.oinspect", "IPython.extensions.storemagic", "matplotlib_inline.backend_inline", "ipywidgets", "torch",
    "torch.distributed", "transformers.models.llama.modeling_llama", "transformers.models.llama.tokenization_llama",
    "transformers.generation.utils", "compress", "compress.apply", "compress.recipe", "compress.inputs.gguf",
    "compress.walk.streaming", "compress.checkpoint.save", "eval.evaluate",
    "eval.run_record", "eval.speed.kernel_bench", "notebooks.study.run", "notebooks.study.measures",
    "notebooks.study.caches", "notebooks.study.strengths", "notebooks.study.inputs", "notebooks.batch.pages",
    "reports.page.render", "reports.page.folds", "reports.page.kv", "reports.page.pruning",
)  # fmt: skip


def run(address: str, module: str, *arguments: str) -> int:
    """Ask for a fork that runs a module; its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([module, arguments, dict(os.environ), os.getcwd()]).encode()
        streams = array.array("i", [0, 1, 2])
        server.sendmsg([len(request).to_bytes(LENGTH, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        server.sendall(request)
        answers = server.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        parent = os.getppid()
        while not select.select([server], [], [], 1.0)[0]:
            if os.getppid() != parent:  # nobody waits any more: the fork ends with this connection
                return 1
        return int(answers.read() or -signal.SIGKILL)  # it ended without a word


def write_kernels(folder: str, address: str) -> None:
    """Write the specification of a kernel `python3` that is forked; Jupyter prefers it to the one of ipykernel."""
    place = Path(folder, "kernels", "python3")
    place.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-I", "-S", __file__, "run", address, "ipykernel_launcher", "-f", "{connection_file}"]
    (place / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))


def serve(address: str) -> None:
    """Import, listen at `address`, and fork for each request until the last lease is closed."""
    import ctypes
    import gc
    import selectors

    sys.path[0] = ""
    if sys.platform == "linux":  # moving the weights of a model takes seconds, and no forked notebook is timed
        ctypes.CDLL(None).prctl(WITHOUT_HUGE_PAGES, 1, 0, 0, 0)
    _import_all()
    gc.collect()
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address + ".part")
    listening.listen()
    os.rename(address + ".part", address)  # it is there once it listens
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    leases, first_until = 0, time.monotonic() + 120
    while leases or time.monotonic() < first_until:
        _reap()
        for key, _ in waiting.select(0.5):
            if key.fileobj is not listening:  # a lease was closed
                waiting.unregister(key.fileobj)
                key.fileobj.close()
                leases -= 1
                continue
            caller, _ = listening.accept()
            length, streams, _, _ = socket.recv_fds(caller, LENGTH, 3)
            if not int.from_bytes(length, "big"):
                waiting.register(caller, selectors.EVENT_READ)
                caller.sendall(b"1")
                leases, first_until = leases + 1, 0.0
                continue
            if not os.fork():
                listening.close()
                waiting.close()
                _become(caller, int.from_bytes(length, "big"), streams)
            caller.close()
            for stream in streams:
                os.close(stream)
    os.unlink(address)


def _import_all() -> None:
    """What papermill needs, as a program; and what kernels need, as in a kernel, where progress bars are widgets."""
    import importlib
    from types import SimpleNamespace

    sys.modules["rfc3987_syntax"] = None  # two seconds of a grammar that no notebook's schema asks for
    sys.modules["debugpy"] = None  # every kernel would import it, for a debugger that nobody asks for
    for name in NEEDED_FIRST:
        importlib.import_module(name)
    for name in ("tqdm.auto", "tqdm.autonotebook"):
        sys.modules.pop(name, None)
    import IPython

    given, IPython.get_ipython = IPython.get_ipython, lambda: SimpleNamespace(config={"IPKernelApp": {}})
    importlib.import_module("tqdm.auto")  # looks where it is
    IPython.get_ipython = given
    for name in NEEDED:
        importlib.import_module(name)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become(caller: socket.socket, length: int, streams: list[int]) -> None:
    """In the fork: be what the caller asks for, and end with it."""
    import random
    import runpy
    import threading
    import traceback

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    caller.sendall(f"{os.getpid()}\n".encode())
    module, arguments, environment, folder = json.loads(caller.makefile("rb").read(length))
    os.environ.clear()
    os.environ.update(environment)
    os.environ.pop("JPY_PARENT_PID", None)  # no fork has that parent
    os.chdir(folder)
    random.seed()

    def end_with_caller() -> None:
        if not caller.recv(1):
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_caller, daemon=True).start()
    status = 0
    try:
        sys.argv = [module, *arguments]
        if module.endswith(".py"):
            sys.path[0] = os.path.dirname(module)
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    caller.sendall(str(status).encode())
    sys.exit(status)


if __name__ == "__main__":
    sys.exit({"run": run, "serve": serve, "kernels": write_kernels}[sys.argv[1]](*sys.argv[2:]))
