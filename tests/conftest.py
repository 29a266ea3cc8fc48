"""Tiny random models of many architectures for mechanics, and the embedded real model for every claim about
accuracy."""

from __future__ import annotations

import atexit
import copy
import fcntl
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # each of a hundred processes would compile torch and transformers
    sys.dont_write_bytecode = False
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # several at once: threads of several processes on the same cores wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["WORKBENCH_LOCKS"] = tempfile.mkdtemp(prefix="workbench-")  # nor do they wait to time what nobody reads
    atexit.register(shutil.rmtree, os.environ["WORKBENCH_LOCKS"], ignore_errors=True)
    sys.modules["rfc3987_syntax"] = None  # two seconds of a grammar that no notebook's schema asks for
    gc.disable()  # while torch and transformers come in: half a million objects, none of which goes again
    startup = str(Path(__file__).with_name("startup"))  # for the processes that tests start
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH"))))

import pytest

# The process that only hands tests out (`-n`, but not `-n 0`) starts the others seconds earlier without these.
if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv or sys.argv[sys.argv.index("-n") + 1 :][:1] == ["0"]:
    import torch
    from torch import Tensor, nn

    from tests.architectures import USUAL, tiny_model
else:
    USUAL = ()

gc.freeze()  # nor is any of them looked at again
gc.set_threshold(10_000, 10, 10)
gc.enable()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
MODELS = ROOT.parent / "shared" / "models"
WARM = str(Path(__file__).with_name("warm.py"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Cases that others prove are slow; long tests come first in either half of what is left, so that two processes
    share them and end together."""
    if not os.environ.get("EVERY_CASE"):  # sanitizers and emulators take the whole products of the kernels
        _mark_turns(items)
    yield  # what `-m` leaves out is taken from the list
    long = [item for item in items if item.get_closest_marker("long")]
    short = [item for item in items if not item.get_closest_marker("long")]
    middle = len(short) // 2
    items[:] = [*long[::2], *short[:middle], *long[1::2], *short[middle:]]


def _mark_turns(items: list[pytest.Item]) -> None:
    """Mark the cases that `in_turns` and `any_model` leave to `make test-all` as slow."""
    for item in items:
        if "any_model" in item.fixturenames and (_turn_of(item) + FEW.index(item.callspec.params["any_model"])) % 2:
            item.add_marker(pytest.mark.slow)
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_turns") and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        if every := cases[0].get_closest_marker("in_turns").args:
            for i, case in enumerate(cases):
                if (i + _turn_of(case)) % every[0]:
                    case.add_marker(pytest.mark.slow)
        else:
            _keep_turns(cases)


def _turn_of(item: pytest.Item) -> int:
    """A number of a test's name, the same whichever other tests there are."""
    return zlib.crc32(item.nodeid.partition("[")[0].encode())


def _keep_turns(cases: list[pytest.Item]) -> None:
    """Mark cases of one test as slow, so that those that stay take the values of the parameter with the most values one
    after the other, and those of every other parameter in turns. No value is left out."""
    columns = zip(*(case.callspec._idlist for case in cases), strict=True)  # the values of each `parametrize`
    ranks = [[list(dict.fromkeys(column)).index(value) for value in column] for column in columns]
    ranks.sort(key=max, reverse=True)
    sizes, kept, rest = [max(column) + 1 for column in ranks], set(), []
    for case, (turn, *others) in zip(cases, zip(*ranks, strict=True), strict=True):
        wanted, before = [], 1
        for size in sizes[1:]:
            wanted.append((turn + (turn // before if wanted else 0)) % size)
            before *= size
        values = set(enumerate((turn, *others)))
        if others == wanted:
            kept |= values
        else:
            rest.append((case, values))
    for case, values in rest:
        if values <= kept:
            case.add_marker(pytest.mark.slow)
        kept |= values


def pytest_terminal_summary(terminalreporter) -> None:
    """The ten tests that took longest, with all their parameters, so that growth is seen."""
    seconds: Counter[str] = Counter()
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        seconds[getattr(report, "nodeid", "").partition("[")[0]] += getattr(report, "duration", 0.0)
    if seconds.total() > 60:
        terminalreporter.write_line(f"{seconds.total():.0f} s in all processes; the longest tests:")
        for name, took in seconds.most_common(10):
            terminalreporter.write_line(f"{took:7.1f} s  {name}")


def pytest_collection_finish() -> None:
    gc.freeze()  # nor are the tests and what they import, by the models that collect garbage before they are measured


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _trusted(monkeypatch, tmp_path_factory):
    """Notebooks and task files that tests write may be executed; `monkeypatch.delenv` takes that away."""
    monkeypatch.setenv("WORKBENCH_TRUST", str(tmp_path_factory.getbasetemp()))


# Whose blocks are built as those of others here: `make test-all` takes them, too. (Gemma 3 has the norms of queries and
# keys that Qwen 3 has, and the norms behind its parts that Gemma 2 has.)
ALIKE = {"mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox", "qwen3_moe", "mixtral"}
FEW = [*(name for name in USUAL if name not in ALIKE), *sorted(ALIKE)]


# Of those that are not alike, each test takes every second one, half of the tests the others.
@pytest.fixture(params=[pytest.param(a, marks=[pytest.mark.slow] * (a in ALIKE)) for a in USUAL])
def any_model(request) -> nn.Module:
    return tiny_model(request.param)


# Of each kind one: what is proven of them by more than one case needs no more here, and `make test-all` takes all.
OF_A_KIND = {"llama", "gpt2", "qwen2_moe"}


@pytest.fixture(params=[pytest.param(a, marks=[pytest.mark.slow] * (a not in OF_A_KIND)) for a in USUAL])
def one_of_each_kind(request) -> nn.Module:
    return tiny_model(request.param)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request) -> str:
    """What compiles a graph that holds an op of ours. Whether the op can be traced and what it does in a graph show
    without code being generated; `make test` has that generated for graphs that are timed and for frozen ones."""
    torch._dynamo.reset()  # other tests have compiled the same code, and the compiler counts
    return request.param


@pytest.fixture
def architectures() -> tuple[str, ...]:
    return USUAL


@pytest.fixture
def tiny() -> Callable[..., nn.Module]:
    return tiny_model


@pytest.fixture
def tokens() -> Callable[..., list[Tensor]]:
    """Random batches [1, length] below the tiny models' vocabulary."""

    def make(count: int = 6, length: int = 24, vocabulary: int = 96, seed: int = 1) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(count)]

    return make


@pytest.fixture
def with_outliers() -> Callable[..., nn.Module]:
    """Copies of Llamas that compute the same with a few channels far larger than the others, of what norms give to
    linears, and with `inside` of what up_proj gives to down_proj: producers are scaled up there, and readers down."""

    def make(
        model: nn.Module, factor: float, *, channels: tuple[int, ...] = (3, 17, 40), inside: bool = False
    ) -> nn.Module:
        model, chosen = copy.deepcopy(model), list(channels)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            links = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
                **({mlp.up_proj: (mlp.down_proj,)} if inside else {}),
            }
            for producer, readers in links.items():
                producer.weight[chosen] *= factor
                for linear in readers:
                    linear.weight[:, chosen] /= factor
        return model

    return make


@pytest.fixture
def with_massive() -> Callable[..., nn.Module]:
    """Copies of models for which one channel of the residual stream is massive at token 0, and at no other, as it is at
    the first token of real ones (arXiv:2402.17762)."""

    def make(model: nn.Module, factor: float = 1000.0, *, channel: int = 5) -> nn.Module:
        model = copy.deepcopy(model)
        embedding = model.get_input_embeddings().weight
        embedding[0, channel] = factor * embedding.std()
        return model

    return make


@pytest.fixture(scope="session")
def _real():
    from compress import load_model

    return load_model("smollm2-135m")


@pytest.fixture
def real(_real):
    """The embedded real model (a copy of one's own) and its tokenizer."""
    model, tokenizer = _real
    return copy.deepcopy(model), tokenizer


@pytest.fixture
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"no local data sets in {DATA}")
    return DATA


@pytest.fixture
def stories() -> Path:
    folder = MODELS / "stories15M"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}")
    return folder


@pytest.fixture(scope="session")
def forked():
    """The command that starts a module as `python -m` does, in a fork of a process that has imported what notebooks
    import, and the variables with which Jupyter starts kernels so. The processes of one pytest share that process."""
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    place = Path(tempfile.gettempdir(), f"workbench-{name[:16]}")
    place.mkdir(exist_ok=True)
    address, started = str(place / "socket"), None
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (lease := _leased(address)) is None:
            command = [sys.executable, WARM, "serve", address]
            started = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"TORCHDYNAMO_DISABLE": "1"}
            )
            while (lease := _leased(address)) is None:
                assert started.poll() is None, "the process that imports what notebooks import has ended"
                time.sleep(0.05)
            subprocess.run([sys.executable, WARM, "kernels", place, address], check=True)
    yield [sys.executable, "-I", "-S", WARM, "run", address], {"JUPYTER_PATH": str(place)}
    lease.close()
    if started is not None:
        started.wait()
        shutil.rmtree(place, ignore_errors=True)


def _leased(address: str) -> socket.socket | None:
    """A connection for which the process at that address stays; None if there is none."""
    lease = socket.socket(socket.AF_UNIX)
    try:
        lease.connect(address)
        lease.sendall(bytes(8))
        if lease.recv(1):
            return lease
    except OSError:
        pass
    lease.close()
    return None
