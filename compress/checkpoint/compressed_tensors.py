"""compressed-tensors: the files of llm-compressor, which vLLM and transformers load (compressed-tensors 0.20).

The stored form of a linear, by its format in the workbench (O out, I in, g groups, b bits):

    int_group       pack-quantized   weight_packed int32 [O, ceil(I*b/32)], weight_scale [O, g], weight_shape int64 [2],
                                     asymmetric also weight_zero_point int32 [ceil(O*b/32), g]
    eight_bit int8  int-quantized    weight int8 [O, I], weight_scale float32 [O, 1], static steps: input_scale [1]
    eight_bit fp8   float-quantized  weight float8_e4m3 [O, I], weight_scale float32 [O, 1] or [O/128, I/128]
    dense, pruned   dense            weight [O, I], with its zeros

The codes, scales and zero points are those of the workbench: nothing is quantised again. Readers use them as follows:

- **Negative scales**, which a search of scales may give, are stored as they are: a scale is a factor of (code - zero)
  in compressed-tensors (`_dequantize`) and in vLLM 0.33 (its Triton kernel, and the input of its compiled kernels), and
  no code tests its sign; `make interop` compares the tokens. Changing the sign would need the code +2^(b-1), which does
  not exist.
- **The scales' dtype**: transformers casts scales to the model's dtype when it loads; vLLM keeps float32 for 8-bit
  weights and casts to the model's dtype for packed ones. Scales of packed weights are therefore stored in the model's
  dtype, those of 8-bit weights in float32. Where a cast rounds them, a remark of the verification says so.
- **Zero points**: vLLM takes them packed, as they are specified; transformers 5.23 with compressed-tensors 0.20 only
  if it dequantises while loading (`load_with_transformers` gives the reason).
- **Rotations**: compressed-tensors 0.20 describes them in a `transform_config`, which transformers 5.23 does not read:
  it would load the rotated weights without their rotations, and without a warning. Linears that rotate their inputs
  are refused.
- **Experts** of a mixture are stored one by one, gate and up projection apart (`interop/experts.py`), and the readers
  take one scheme for all of them; reports/published/interop-experts.md says which schemes each reader takes.
- **Steps of activations per token**: transformers takes max|x| / 127.5 for int8, in the model's dtype; vLLM and this
  workbench take max|x| / 127, in float32. The weights are the same, the products differ by that rounding.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import CompressedTensorsConfig

from compress.checkpoint.interop.experts import (
    StoredNames,
    expert_remarks,
    expert_shapes,
    problem_of_experts,
    unread_experts,
)
from compress.checkpoint.interop.reading_experts import decoded, round_inputs, same_routing, with_split_experts
from compress.checkpoint.interop.schemes import Scheme, quantization_config, scheme_of, vllm_remarks, vllm_snippet
from compress.checkpoint.interop.transformers_config import (
    load_complete,
    other_tensors,
    plain_config,
    problem_for_transformers,
    problem_of_quantised,
    write_reader_configuration,
)
from compress.checkpoint.interop.words import to_words, words_of_bytes
from compress.checkpoint.save_format import Checkpoint, SaveFormat, Verification
from compress.checkpoint.shards import write_shards
from compress.checkpoint.verify import compare_logits, compare_weights, take_computed_buffers
from compress.classes import auto_class, has_images
from compress.formats import Dense, EightBit, Format, IntGroup
from compress.formats.sparse import Sparse
from compress.linear import CompressedLinear, compressed_linears
from compress.walk.experts import split_experts
from kernels.int_matmul import to_rows, unpack
from kernels.w8a8_matmul import to_rows as to_rows8

INSTALL = "pip install compressed-tensors==0.20.0"
DEQUANTIZE = "from_pretrained(..., quantization_config=CompressedTensorsConfig(dequantize=True))"


class CompressedTensors(SaveFormat):
    """Read by transformers (with the compressed-tensors library) and vLLM; see the top of this file."""

    name: ClassVar[str] = "compressed-tensors"
    readers: ClassVar[str] = "transformers, vLLM"
    snippet: ClassVar[str] = """
transformers (with `pip install compressed-tensors`):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

VLLM

Copy this folder as it is. `save_pretrained` of a model that transformers loaded from it and that has run writes weights
that are decompressed, under a configuration that calls them packed: vLLM and this workbench refuse such a folder."""

    def read_by(self, model: nn.Module) -> str:
        return "vLLM" if unread_experts(StoredNames.of(model).experts, schemes_of(model)) else self.readers

    def how_to_load(self, model: nn.Module) -> str:
        schemes = schemes_of(model)
        snippet = self.snippet.replace("VLLM", vllm_snippet(schemes.values()))
        if unread_experts(StoredNames.of(model).experts, schemes):
            return snippet[snippet.index("\nvLLM") :]
        auto = "AutoModelForImageTextToText" if has_images(type(model).__name__) else "AutoModelForCausalLM"
        snippet = snippet.replace("AutoModelForCausalLM", auto)
        if not is_asymmetric(schemes):
            return snippet
        dequantized = 'dtype="auto", quantization_config=CompressedTensorsConfig(dequantize=True)'
        snippet = snippet.replace("AutoTokenizer\n", "AutoTokenizer, CompressedTensorsConfig\n", 1)
        return snippet.replace('dtype="auto"', dequantized, 1)

    def problem(self, linear: dict[str, Any]) -> str:
        try:
            scheme_of(linear)
        except ValueError as reason:
            return str(reason)
        return ""

    def problem_of_model(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        if importlib.util.find_spec("compressed_tensors") is None:
            return f"`save_format` (={self.name!r}) is verified with the compressed-tensors library: `{INSTALL}`"
        if problem := problem_for_transformers(model, self.name):
            return problem
        if any(map(self.problem, linears.values())):  # the caller names the linear and the reason
            return ""
        if problem := problem_of_experts(model, linears):
            return f"`save_format` (={self.name!r}) cannot hold this model: {problem}"
        schemes = {name: scheme for name, spec in linears.items() if (scheme := scheme_of(spec)) is not None}
        read = not unread_experts(StoredNames.of(model).experts, schemes)
        if read and is_asymmetric(schemes) and len(set(schemes.values())) > 1:
            shown = "; ".join(str(scheme) for scheme in dict.fromkeys(schemes.values()))
            return (
                f"`save_format` (={self.name!r}) cannot hold this model: transformers loads asymmetric weights only "
                f"where all linears are stored alike, and these are not ({shown}); symmetric=True works"
            )
        return ""

    def problem_together(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        quantised = [name for name, spec in linears.items() if scheme_of(spec) is not None]
        reason = problem_of_quantised(model, quantised)
        return f"`save_format` (={self.name!r}) cannot hold this model: {reason}" if reason else ""

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        model = with_split_experts(checkpoint.model)
        schemes = schemes_of(model)
        write_reader_configuration(
            checkpoint, folder, quantization_config(schemes, model, StoredNames.of(model).targets) if schemes else None
        )
        write_shards(tensors(model), folder, shard_bytes=checkpoint.shard_bytes)

    def verify(self, checkpoint: Checkpoint, folder: Path) -> Verification:
        model, schemes = with_split_experts(checkpoint.model), schemes_of(checkpoint.model)
        experts = StoredNames.of(model).experts
        unread = unread_experts(experts, schemes)
        if unread:
            loaded = load_decoded(folder, model, schemes)
        else:
            loaded = load_with_transformers(folder, model.dtype, schemes)
        buffers = take_computed_buffers(model, loaded)
        with _without_bars():
            loaded(torch.zeros(1, 1, dtype=torch.long), use_cache=False)  # the library decompresses at the first pass
        rounded = {name: rounding(linear, model.dtype) for name, linear in compressed_linears(model).items()}
        compare_weights(model, with_split_experts(loaded), rounded)
        steps = any(scheme.inputs for scheme in schemes.values())
        if any(name in schemes and schemes[name].inputs for name in experts):
            split_experts(loaded)
            round_inputs(loaded, model, schemes)
        with same_routing(model, loaded):
            agreement = compare_logits(
                model, loaded, checkpoint.tokenizer, activations_as_they_are=unrounded_inputs if steps else None
            )
        remarks = [*scale_remarks(rounded, model.dtype), *buffers, *vllm_remarks(schemes, model)]
        reader = f"transformers {transformers.__version__}"
        remarks += expert_remarks(experts, schemes)
        if schemes:
            reader += f" with compressed-tensors {version('compressed-tensors')}"
        if is_asymmetric(schemes) and not unread:
            remarks.append(f"transformers loads asymmetric weights with `{DEQUANTIZE}` only")
        return Verification(reader, agreement.largest, tuple(remarks), str(agreement))


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without the progress bars of the compressed-tensors library, which has no setting for them and writes them to the
    error stream, in red in a notebook."""
    importlib.import_module("compressed_tensors")
    libraries = [module for name, module in sys.modules.items() if name.startswith("compressed_tensors.")]
    bars = {module: bar for module in libraries if isinstance(bar := vars(module).get("tqdm"), type)}
    try:
        for module, bar in bars.items():
            module.tqdm = partial(_disabled, bar)
        yield
    finally:
        for module, bar in bars.items():
            module.tqdm = bar


def _disabled(bar: type, *arguments: Any, **settings: Any) -> Any:
    return bar(*arguments, **{**settings, "disable": True})  # the library gives this argument itself


def load_with_transformers(folder: Path, dtype: torch.dtype, schemes: Mapping[str, Scheme]) -> nn.Module:
    """The model as transformers loads it.

    compressed-tensors 0.20 prepares a place for unpacked zero points when transformers loads packed ones, and refuses
    them for their shape. They are read if the weights are dequantised while loading.

    Raises:
        RuntimeError: tensors are missing, or there are too many.
    """
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_asymmetric(schemes) else {}
    with warnings.catch_warnings(), _without_bars():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return _complete(auto_class(plain_config(folder)), folder, dtype=dtype, **more)


def load_decoded(folder: Path, model: nn.Module, schemes: Mapping[str, Scheme]) -> nn.Module:
    """The model as transformers loads it after all its weights were dequantised by the compressed-tensors library.

    For experts that transformers 5.23 does not read itself (`unread_experts`).

    Raises:
        RuntimeError: as in `load_with_transformers`.
    """
    dense = decoded(folder, model, schemes)
    return _complete(type(model), None, config=plain_config(folder), state_dict=dense, dtype=model.dtype)


def _complete(kind: Any, folder: Path | None, **more: Any) -> nn.Module:
    loaded = load_complete(kind, folder, **more)
    if expert_shapes(loaded):
        loaded.set_experts_implementation("eager")  # the only one that computes in float64, too
    return loaded


def is_asymmetric(schemes: Mapping[str, Scheme]) -> bool:
    return any(not scheme.symmetric for scheme in schemes.values())


def schemes_of(model: nn.Module) -> dict[str, Scheme]:
    """The scheme of every quantised linear, by name."""
    found = {name: scheme_of(linear.spec()) for name, linear in compressed_linears(model).items()}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors, each shared one (a tied embedding) once, under its first name."""
    names = StoredNames.of(model)
    for name, tensor in other_tensors(model):
        linear, _, key = name.rpartition(".")
        if linear in names.experts:
            yield from names.stored(linear, {key: tensor})
        else:
            yield names.others.get(name, name), tensor
    for name, linear in compressed_linears(model).items():
        bias = {} if linear.bias is None else {"bias": linear.bias}
        yield from names.stored(name, stored_tensors(linear, model.dtype) | bias)


def stored_tensors(linear: CompressedLinear, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of compressed-tensors for the weight of a linear, by the names that it uses."""
    part = plain_part(linear)
    if isinstance(part, Dense):
        return {"weight": part.weight.to(dtype)}
    if isinstance(part, EightBit):
        scale = part.scale.float()
        kept = {
            "weight": to_rows8(part.w8).codes,
            "weight_scale": scale[:, None] if scale.dim() == 1 else scale,  # [out, 1] or blocks
        }
        return kept if part.x_scale is None else {**kept, "input_scale": part.x_scale.float().reshape(1)}
    assert isinstance(part, IntGroup), part.name
    rows = to_rows(part.packed)
    kept = {
        "weight_packed": words_of_bytes(rows.codes, rows.bits, rows.shape[1]),
        "weight_scale": rows.scale.to(dtype),
        "weight_shape": torch.tensor(rows.shape),
    }
    if rows.zero is not None:
        _, zero = unpack(rows)  # [out, groups]
        kept["weight_zero_point"] = to_words(zero.T, rows.bits).T
    return kept


def plain_part(linear: CompressedLinear) -> Format:
    """The one part of a linear, with the zeros of pruning in place."""
    part = linear.parts[0]
    return part.expanded() if isinstance(part, Sparse) else part


def rounding(linear: CompressedLinear, dtype: torch.dtype) -> float:
    """The largest |difference| / |weight| of a dequantised weight that rounding its scales to a dtype may cause; 0 if
    no scale is changed.

    A scale, its product with the code, and the product that is compared with it are each rounded by half an eps.
    """
    part = plain_part(linear)
    scale = getattr(part, "scale", None)
    if scale is None or torch.equal(scale.to(dtype).float(), scale.float()):
        return 0.0
    return 2 * torch.finfo(dtype).eps


def scale_remarks(rounded: Mapping[str, float], dtype: torch.dtype) -> list[str]:
    count, kind = sum(one > 0 for one in rounded.values()), str(dtype).removeprefix("torch.")
    if not count:
        return []
    return [
        f"the scales of {count} linears are not all {kind} numbers: a reader that holds them in {kind}, as "
        f"transformers does, gets weights that differ by up to {max(rounded.values()):.1e} of their size"
    ]


@contextmanager
def unrounded_inputs(loaded: nn.Module) -> Iterator[None]:
    """In the context, compressed-tensors' linears do not round their inputs."""
    quantised = [module for module in loaded.modules() if hasattr(module, "quantization_scheme")]
    for module in quantised:
        module.quantization_enabled = False
    try:
        yield
    finally:
        for module in quantised:
            module.quantization_enabled = True
