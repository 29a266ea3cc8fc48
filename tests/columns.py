"""The columns of `compress/ARCHITECTURES.md`: what the workbench does with a model of each architecture.

A column is a function of a `Subject` that returns if the result is right, with a remark or None, raises `Wrong` if it
is not, and lets a refusal of the workbench pass. Right values come from transformers, or from hooks on a copy of the
model.
"""

import copy
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint.save import check_holds
from compress.inputs.on_disk import load_on_disk
from compress.kv import CompressedCache, attached
from compress.kv.policy import Policy
from compress.recipe import parse_recipe
from compress.result import Result
from compress.walk.blocks import find_blocks
from compress.walk.experts import has_experts
from compress.walk.offload import named_tensors
from kernels.step.accelerate import accelerate
from tests.architectures import VOCABULARY, depth_of, tiny_model

SAME = 1e-3  # relative difference of logits in float32 that sums in another order may make
GPTQ = "gptq(bits=4, group_size=16, min_tokens=8)"
SMALL = {"snapkv": {"observed": 4}, "expected_attention": {"future": 16}}  # knobs for short prompts
LLAMA_CPP = "LLAMA_CPP_PYTHON"  # environment variable: a Python that imports llama_cpp
READER = Path(__file__).with_name("read_gguf.py")


class Wrong(Exception):
    """A result that is not right, or a refusal that comes too late."""


class Moot(Exception):
    """Transformers itself cannot do what a column compares with."""


@contextmanager
def transformers_alone() -> Iterator[None]:
    """Inside the context a model runs by transformers' own code; what fails there is not the workbench's."""
    try:
        yield
    except Exception as error:
        raise Moot(f"transformers itself fails: {type(error).__name__}: {str(error).strip()[:160]}") from error


class Subject:
    """A tiny model of one architecture, and what is asked of it."""

    def __init__(self, architecture: str) -> None:
        self._model = tiny_model(architecture, layers=depth_of(architecture))
        generator = torch.Generator().manual_seed(5)
        for p in self._model.parameters():
            if p.dim() == 1:  # norms of ones and biases of zeros would hide what forgets them
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
        self._model.generation_config.eos_token_id = None
        self.ids = torch.randint(3, VOCABULARY, (2, 20), generator=generator)
        self.batches = list(torch.randint(3, VOCABULARY, (6, 1, 24), generator=generator))
        self.folder = Path(tempfile.mkdtemp(prefix="architecture-"))

    def model(self) -> nn.Module:
        return copy.deepcopy(self._model)

    @cached_property
    def base(self) -> Tensor:
        return self.logits(self._model)

    def logits(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(self.ids, use_cache=False).logits.float()

    def apply(self, recipe: str, model: nn.Module) -> Result:
        """`compress.apply`, which leaves the model as it was if it refuses."""
        with refusing(model):
            return apply(parse_recipe(recipe), model, self.batches)

    def saved(self, result: Result, save_format: str = "workbench") -> Path:
        """The folder of a compressed model, which stays as it was if the format refuses it."""
        path = self.folder / save_format
        shutil.rmtree(path, ignore_errors=True)
        with refusing(result.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_compressed(result, path, save_format=save_format)
        return path

    def check_reload(self, result: Result) -> nn.Module:
        """The model loaded from its folder, whose logits are those of the one in memory."""
        try:
            folder = self.saved(result)
        except ValueError as error:
            raise Wrong(f"what was compressed cannot be saved: {error}") from error
        expected, loaded = self.logits(result.model), load_compressed(folder)
        if not torch.equal(self.logits(loaded), expected):
            raise Wrong(f"reloaded, logits differ by {difference(self.logits(loaded), expected):.1e}")
        return loaded

    def written(self, model: nn.Module, ids: Tensor, mask: Tensor | None = None, **more) -> tuple[Tensor, Tensor]:
        """New tokens and the logits from which they were chosen, greedily or by beams."""
        mask = torch.ones_like(ids) if mask is None else mask
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, output_logits=True, **how, **more)
        return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1).float()

    @cached_property
    def steady(self) -> bool:
        """Whether transformers itself writes the same with a cache and without one."""
        return self._writes_the_same(self._model)

    def _writes_the_same(self, model: nn.Module) -> bool:
        (_, with_cache), (_, without) = (self.written(model, self.ids[:1], use_cache=use) for use in (True, False))
        return difference(with_cache, without) < SAME

    def check_writing(self, model: nn.Module, loaded: nn.Module) -> str | None:
        one, other = (self.written(each, self.ids[:1])[0] for each in (model, loaded))
        if not torch.equal(one, other):
            raise Wrong("the reloaded model writes other tokens")
        if not self.steady:
            return "transformers writes otherwise with a cache than without one, before anything was dropped"
        if not self._writes_the_same(model):
            raise Wrong("with a cache it writes otherwise than without one")


def difference(a: Tensor, b: Tensor) -> float:
    """Of logits, relative to the second; nan where either is not finite."""
    return float((a - b).norm() / b.norm().clamp_min(1e-9)) if a.isfinite().all() and b.isfinite().all() else torch.nan


def check_same(found: Tensor, expected: Tensor, what: str, tolerance: float = SAME) -> None:
    if not difference(found, expected) <= tolerance:
        raise Wrong(f"{what}: logits differ by {difference(found, expected):.1e}")


def state_of(model: nn.Module) -> str:
    """Hash of every tensor, module, hook and setting of a model."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module)} {len(module._forward_hooks)} {len(module._forward_pre_hooks)}".encode())
    for name, tensor in named_tensors(model):
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """A `ValueError` inside the context must find the model as it was."""
    before = state_of(model)
    try:
        yield
    except ValueError as error:
        if state_of(model) != before:
            raise Wrong(f"refused after the model was changed: {error}") from error
        raise


def gptq(subject: Subject) -> None:
    """`gptq` compresses, and the model that is saved and loaded again gives equal logits."""
    result = subject.apply(GPTQ, subject.model())
    found = subject.logits(result.model)
    if not 0 < difference(found, subject.base) < 1.5:
        raise Wrong(f"compressed, logits differ by {difference(found, subject.base):.1e}")
    subject.check_reload(result)


def dropped(kind: str) -> Callable[[Subject], str | None]:
    def column(subject: Subject) -> str | None:
        """`layer_drop` gives the logits of the model whose part is skipped; saved, loaded again, and generating with
        a cache as without one."""
        result = subject.apply(f"layer_drop(target={kind}, count=1)", subject.model())
        expected = subject.model()
        prefix, blocks = find_blocks(expected)
        for drop in result.drops:
            if drop.order is None:
                continue
            block = blocks[drop.block]
            if kind == "block":
                block.register_forward_hook(_skipped, with_kwargs=True)
                continue
            for name in drop.name.removeprefix(f"{prefix}.{drop.block}.").split(", "):
                block.get_submodule(name).register_forward_hook(_zeroed)
        check_same(subject.logits(result.model), subject.logits(expected), "without the part", 1e-5)
        return subject.check_writing(result.model, subject.check_reload(result))

    return column


def _skipped(block: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> Tensor | tuple:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple | list) else hidden


def _zeroed(module: nn.Module, args: tuple, output: Tensor | tuple) -> Tensor | tuple:
    zeros = torch.zeros_like(output[0] if isinstance(output, tuple | list) else output)
    if not isinstance(output, tuple | list):
        return zeros
    rest = (torch.zeros_like(x) if isinstance(x, Tensor) and x.dim() == 1 else x for x in output[1:])  # its bias
    return zeros, *rest


def ends(subject: Subject) -> None:
    """The embedding and the head are stored in 8 bits, saved and loaded again."""
    result = subject.apply("rtn(bits=8, group_size=16, where=embedding)", subject.model())
    check_same(subject.logits(result.model), subject.base, "with an embedding of 8 bits", 0.5)
    subject.check_reload(result)


def unchanged(recipe: str) -> Callable[[Subject], None]:
    def column(subject: Subject) -> None:
        """The model computes the same as before."""
        result = subject.apply(recipe, subject.model())
        if not result.folds:
            raise Wrong("nothing was folded or rotated, and nothing was said")
        check_same(subject.logits(result.model), subject.base, "the function changed")

    return column


def on_disk(subject: Subject) -> None:
    """With its weights on disk the model is compressed to the same bits as in memory."""
    folder = subject.folder / "plain"
    subject.model().save_pretrained(folder)
    memory = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    memory = copy.deepcopy(memory)  # tensors at any address of a file give other last bits
    disk = load_on_disk(folder, torch.float32, home="cpu", offload_path=subject.folder).eval().requires_grad_(False)
    check_same(subject.logits(disk), subject.logits(memory), "read from disk", 1e-6)
    disk, memory = (subject.apply("wanda(ratio=0.5)", model).model for model in (disk, memory))
    stored = dict(named_tensors(disk))
    if stored.keys() != memory.state_dict().keys():
        raise Wrong("other tensors than in memory")
    if not all(torch.equal(tensor, stored[name]) for name, tensor in memory.state_dict().items()):
        raise Wrong("other codes than in memory")
    check_same(subject.logits(disk), subject.logits(memory), "compressed on disk", 1e-6)


def compressed_tensors(subject: Subject) -> None:
    """Exported to compressed-tensors in 4 bits and read by transformers, the model gives the same logits."""
    result = subject.apply("rtn(bits=4, group_size=16)", subject.model())
    path = subject.saved(result, "compressed-tensors")
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    check_same(subject.logits(loaded), subject.logits(result.model), "read by transformers")


def gguf(subject: Subject) -> str | None:
    """Exported to GGUF in 8 bits, the model gives the same logits, read by transformers where its reader knows the
    architecture and, where the environment variable LLAMA_CPP_PYTHON names a Python that imports llama_cpp, by
    llama.cpp."""
    model = subject.model()
    check_holds("gguf", model, {})
    result = subject.apply("rtn(bits=8, group_size=32)", model)
    path = subject.saved(result, "gguf")  # verified by transformers' reader, or by `gguf` in transformers' model
    if python := os.environ.get(LLAMA_CPP):
        file, found = next(path.glob("*.gguf")), path / "logits.json"
        command = [python, READER, file, json.dumps(subject.ids[0].tolist()), found]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if "error" in line] or [f"status {ended.returncode}"]
            return f"read by transformers; llama.cpp does not load so small a model: {Path(said[0]).name}"
        logits = torch.tensor(json.loads(found.read_text()))
        # It rounds activations to 8 bits.
        check_same(logits, subject.logits(result.model)[0], "read by llama.cpp", 0.03)


def full_cache(subject: Subject) -> None:
    """With a cache that compresses nothing the model gives the logits of transformers' own cache: a batch with
    padding, one prompt, beams, turns that go on."""
    model, mask = subject.model(), (torch.arange(20) >= torch.tensor([[0], [7]])).long()
    asked = {
        "a batch with padding": ((subject.ids, mask), {}),
        "one prompt": ((subject.ids[:1],), {}),
        "beams": ((subject.ids[:1],), {"num_beams": 3}),
    }
    turns = [8, 1, 1, 6, 1, 3]
    check_attach(model)
    with transformers_alone():
        expected = {what: subject.written(model, *args, **how)[1] for what, (args, how) in asked.items()}
        in_turns = _read(subject, model, DynamicCache(config=model.config), turns)
    with refusing(model), attached(model) as attachment:
        for what, (args, how) in asked.items():
            check_same(subject.written(model, *args, **how)[1], expected[what], what)
        cache = attachment.cache()
        check_same(_read(subject, model, cache, turns), in_turns, "three turns")
        if not isinstance(cache, CompressedCache) or not cache.own:
            raise Wrong("no layer of the cache is the workbench's own")


def check_attach(model: nn.Module) -> None:
    with refusing(model), attached(model):
        pass


def policies(subject: Subject) -> str | None:
    """With every policy of the cache at a budget of 1.0 the model gives the logits of transformers' own cache."""
    model, steps = subject.model(), [14, 1, 1, 3, 1]
    check_attach(model)
    with transformers_alone():
        expected = _read(subject, model, DynamicCache(config=model.config), steps)
    refused: dict[str, list[str]] = {}
    names = [name for name, method in METHODS.items() if issubclass(method, Policy) and "path" not in method.knobs()]
    for name in names:
        method = METHODS[name](**SMALL.get(name, {}), budget=1.0)
        try:
            with refusing(model), attached(model, [method]) as attachment:
                found = _read(subject, model, attachment.cache(), steps)
        except ValueError as error:
            first = error
            refused.setdefault(str(error), []).append(name)
        else:
            check_same(found, expected, name)
    if len(refused) == 1 and len(refused[str(first)]) == len(names):
        raise first
    return "; ".join(f"{', '.join(names)}: refused, {reason}" for reason, names in refused.items()) or None


def _read(subject: Subject, model: nn.Module, cache: DynamicCache, lengths: list[int]) -> Tensor:
    """Logits of all positions of a prompt that is read in parts."""
    parts = subject.ids[:1].split(lengths, 1)
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1).float()


def accelerated(subject: Subject) -> None:
    """`accelerate` in bfloat16 is as near to float32 as the model's own code in bfloat16, or leaves the model alone. Of
    mixtures, most tokens are: rounding makes a router choose other experts for some."""
    model = subject.model().bfloat16()
    plain, before = copy.deepcopy(model), state_of(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerate(model)
    if not hasattr(model, "acceleration"):
        if state_of(model) != before:
            raise Wrong("left alone, but changed")
        raise ValueError(next(str(one.message) for one in said if "not accelerated" in str(one.message)))
    steps = [14, 1, 1, 1, 1, 1, 1]

    def read(one: nn.Module) -> Tensor:
        return _read(subject, one, DynamicCache(config=one.config), steps)

    with transformers_alone():
        own, expected = read(plain), read(copy.deepcopy(plain).float())
    found = read(model)
    if has_experts(model):
        each = (found - expected).norm(dim=-1)[0] / expected.norm(dim=-1)[0]
        usual = each.argsort()[len(each) // 2]
        found, own, expected = (logits[0, usual] for logits in (found, own, expected))
    check_same(found, expected, "accelerated", 3 * difference(own, expected) + 5e-3)


COLUMNS: dict[str, Callable[[Subject], str | None]] = {
    "gptq": gptq,
    "drop attention": dropped("attention"),
    "drop MLP": dropped("mlp"),
    "drop block": dropped("block"),
    "embedding and head": ends,
    "rotate": unchanged("rotate()"),
    "smoothquant": unchanged("smoothquant()"),
    "on disk": on_disk,
    "compressed-tensors": compressed_tensors,
    "GGUF": gguf,
    "full cache": full_cache,
    "policies": policies,
    "accelerate": accelerated,
}
