"""GPTQ's format: qweight, qzeros, scales and g_idx for every linear, as GPTQModel, transformers and vLLM read them.

For a linear [O, I] of b bits in g groups (b one of 2, 3, 4, 8; I and O multiples of 32):

    qweight int32 [I*b/32, O]   the codes of each column one after the other: element i at bit i*b, low bits first
    qzeros  int32 [g, O*b/32]   zero points of a group likewise; version 1 stores them minus one
    scales  [g, O]              in 16 bits: the model's dtype, or that of the scales if the model is float32
    g_idx   int32 [I]           the group of each column: i // group_size, as codes stay in the order of the columns

w = scale * (code - zero). Readers do the following, by the sources of GPTQModel 7.7 and vLLM 0.33:

- **Negative scales** are factors like any others: they are stored unchanged.
- **Asymmetric weights** are written as version 2 (`checkpoint_format: gptq_v2`), which stores zero points unchanged: in
  version 1 a zero point of 0 would be stored as -1, which readers take for 2^b, for 0, or carry into the zero point
  beside it; and GPTQModel refuses asymmetric files of version 1 that it did not write itself.
- **vLLM** reads symmetric weights of 4 and 8 bits and assumes their zero points; groups of 32, 64, 128 or whole rows on
  NVIDIA GPUs; one scheme for q, k and v, and one for gate and up.
- **Linears that are stored differently** are listed under `dynamic`, by a pattern of their names.

transformers reads such files with optimum and GPTQModel, which this process does not need: the written files are
verified by `decode`, which follows this description and shares no code with the writer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.checkpoint.compressed_tensors import plain_part, rounding, scale_remarks
from compress.checkpoint.interop.experts import expert_shapes
from compress.checkpoint.interop.schemes import (
    PACKED,
    Scheme,
    fused_linears,
    plain_spec,
    scheme_of,
    vllm_remarks,
    vllm_snippet,
)
from compress.checkpoint.interop.transformers_config import (
    linear_names,
    model_of_tensors,
    other_tensors,
    problem_for_transformers,
    write_reader_configuration,
)
from compress.checkpoint.interop.words import to_words
from compress.checkpoint.save_format import Checkpoint, SaveFormat, Verification
from compress.checkpoint.shards import Shards, write_shards
from compress.checkpoint.verify import compare_logits, compare_weights, take_computed_buffers
from compress.formats import IntGroup
from compress.linear import CompressedLinear, compressed_linears
from kernels.int_matmul import to_rows, unpack

BITS = (2, 3, 4, 8)
TENSORS = ("qweight", "qzeros", "scales", "g_idx")


class GPTQFormat(SaveFormat):
    """Read by GPTQModel, transformers (with GPTQModel) and vLLM; see the top of this file."""

    name: ClassVar[str] = "gptq"
    readers: ClassVar[str] = "GPTQModel, transformers, vLLM"
    snippet: ClassVar[str] = """
GPTQModel (`pip install gptqmodel`):

```python
from gptqmodel import GPTQModel

model = GPTQModel.load("PATH")
print(model.tokenizer.decode(model.generate("The capital of France is")[0]))
```

transformers (`pip install optimum`, and after it `pip install gptqmodel`):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```
"""

    def how_to_load(self, model: nn.Module) -> str:
        layout = Layout.of(model)
        return f"{self.snippet}\n{vllm_snippet(layout.schemes.values())}" if layout.is_for_vllm else self.snippet

    def read_by(self, model: nn.Module) -> str:
        return self.readers if Layout.of(model).is_for_vllm else self.readers.removesuffix(", vLLM")

    def problem(self, linear: dict[str, Any]) -> str:
        try:
            scheme = scheme_of(linear)
        except ValueError as reason:
            return str(reason)
        if scheme is None or scheme.format != PACKED:
            return f"it is stored as {plain_spec(linear)['format']}, and this format holds integer codes in groups"
        if scheme.bits not in BITS:
            return f"it has {scheme.bits} bits, and this format stores {', '.join(map(str, BITS))}"
        if any(size % 32 for size in linear["parts"][0]["shape"]):
            return (
                f"its shape {tuple(linear['parts'][0]['shape'])} is not in multiples of 32, which codes are packed by"
            )
        return ""

    def problem_of_model(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        if expert_shapes(model):
            return (
                f"`save_format` (={self.name!r}) cannot hold this model: its experts are linears of their own, which "
                "its readers do not quantise"
            )
        return problem_for_transformers(model, self.name)

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        model = checkpoint.model
        layout = Layout.of(model)
        config = layout.as_config(model)
        write_reader_configuration(checkpoint, folder, config)
        (folder / "quantize_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_shards(_tensors(model, layout), folder, shard_bytes=checkpoint.shard_bytes)

    def verify(self, checkpoint: Checkpoint, folder: Path) -> Verification:
        model, layout = checkpoint.model, Layout.of(checkpoint.model)
        config = json.loads((folder / "quantize_config.json").read_text(encoding="utf-8"))
        offset = {"gptq": 1, "gptq_v2": 0}[config["checkpoint_format"]]
        shards, dense = Shards(folder), {}
        for name in shards.names():
            owner, _, key = name.rpartition(".")
            if key == "qweight":
                stored = {key: shards.read(f"{owner}.{key}") for key in TENSORS}
                dense[f"{owner}.weight"] = decode(**stored, offset=offset).to(model.dtype)
            elif key not in TENSORS:
                dense[name] = shards.read(name)
        loaded = model_of_tensors(type(model), folder, dense)
        buffers = take_computed_buffers(model, loaded)
        rounded = {n: rounding(linear, _scale_dtype(linear)) for n, linear in compressed_linears(model).items()}
        compare_weights(model, loaded, rounded)
        agreement = compare_logits(model, loaded, checkpoint.tokenizer)
        remarks = (*scale_remarks(rounded, torch.float16), *buffers, *layout.vllm_remarks(model))
        reader = "a decoder written from the description of the format"
        return Verification(reader, agreement.largest, remarks, str(agreement))


@dataclass(frozen=True)
class Layout:
    """The schemes of a model's linears: one scheme for most of them, and others for `others`."""

    scheme: Scheme
    schemes: dict[str, Scheme]
    version: int

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        schemes = {name: scheme_of(linear.spec()) for name, linear in compressed_linears(model).items()}
        (scheme, _), *_ = Counter(schemes.values()).most_common(1)
        return cls(scheme, schemes, 1 if all(one.symmetric for one in schemes.values()) else 2)

    def as_config(self, model: nn.Module) -> dict[str, Any]:
        """The content of quantize_config.json, which config.json repeats."""
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "bits": self.scheme.bits,
            "group_size": self.scheme.group_size or -1,
            "sym": self.scheme.symmetric,
            "desc_act": False,
            "lm_head": False,
            "pack_dtype": "int32",
            "dynamic": self._dynamic(model) or None,
            "meta": {"quantizer": ["model-compression-workbench:0.1.0"]},
        }

    def _dynamic(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Patterns of the linears that differ from most others; "-:" is put before those that are not quantised."""
        head = next((n for n, m in model.named_modules() if m is model.get_output_embeddings()), None)
        own = {name: self.schemes.get(name) for name in linear_names(model) if name != head}
        own = {name: scheme for name, scheme in own.items() if scheme != self.scheme}
        for one, names in fused_linears(model).items():  # vLLM looks them up by the name of the fused linear
            if all(name in own for name in names) and len({own[name] for name in names}) == 1:
                own[one] = own[names[0]]
        patterns = {}
        for name, scheme in own.items():
            start = "-:" if scheme is None else "+:"
            patterns[f"{start}^{re.escape(name)}$"] = (
                {}
                if scheme is None
                else {"bits": scheme.bits, "group_size": scheme.group_size or -1, "sym": scheme.symmetric}
            )
        return patterns

    @property
    def is_for_vllm(self) -> bool:
        return all(scheme.bits in (4, 8) and scheme.symmetric for scheme in self.schemes.values())

    def vllm_remarks(self, model: nn.Module) -> list[str]:
        if not self.is_for_vllm:
            return ["vLLM does not load this: it reads this format with symmetric weights of 4 or 8 bits"]
        return vllm_remarks(self.schemes, model)


def _tensors(model: nn.Module, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    yield from other_tensors(model)
    for name, linear in compressed_linears(model).items():
        for key, tensor in encode(linear, layout.version).items():
            yield f"{name}.{key}", tensor
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias


def encode(linear: CompressedLinear, version: int) -> dict[str, Tensor]:
    """The tensors of a linear; see the top of this file."""
    part = plain_part(linear)
    assert isinstance(part, IntGroup), part.name
    rows = to_rows(part.packed)
    codes, zero = unpack(rows)  # uint8 [out, in], [out, groups] or [1, 1]
    zero = zero.expand(rows.scale.shape) - (1 if version == 1 else 0)
    columns = torch.arange(rows.shape[1], device=codes.device)
    return {
        "qweight": to_words(codes, rows.bits).T,
        "qzeros": to_words(zero.T, rows.bits),
        "scales": rows.scale.T.to(_scale_dtype(linear)),
        "g_idx": (columns // rows.group_size).to(torch.int32),
    }


def decode(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, *, offset: int) -> Tensor:
    """W [out, in] in float32, bit by bit.

    Args:
        offset: the number that was subtracted from the zero points: 1 in version 1.
    """
    columns = len(g_idx)
    bits = 32 * qweight.shape[0] // columns
    place = torch.arange(32)
    weights = 1 << torch.arange(bits)
    stream = (qweight[:, None, :] >> place[None, :, None]) & 1  # [words, 32, out], lowest bit first
    codes = (stream.reshape(columns, bits, -1) * weights[None, :, None]).sum(1)  # [in, out]
    stream = (qzeros[:, :, None] >> place) & 1  # [groups, words, 32]
    zeros = (stream.reshape(len(qzeros), -1, bits) * weights).sum(-1) + offset  # [groups, out]
    group = g_idx.long()
    return ((codes - zeros[group]).float() * scales.float()[group]).T


def _scale_dtype(linear: CompressedLinear) -> torch.dtype:
    """16 bits, in which every reader of this format computes."""
    if linear.dtype != torch.float32:
        return linear.dtype
    stored = plain_part(linear).scale.dtype
    return stored if stored != torch.float32 else torch.bfloat16
