"""bitsandbytes' own checkpoints, as transformers writes them with `save_pretrained` and reads them (bitsandbytes 0.50).

The stored form of a linear [O, I], by its format in the workbench; the tensors are those that it computes with, so that
nothing is quantised again:

    bnb_nf4    weight uint8 [O * I / 2, 1], weight.absmax, weight.quant_map [16], nested also weight.nested_absmax and
               weight.nested_quant_map; weight.quant_state.bitsandbytes__nf4: JSON in uint8, with shape and block size
    bnb_int8   weight int8 [O, I], SCB float32 [O], weight_format uint8 (0: row by row)

One `BitsAndBytesConfig` holds for all linears, so that 4 and 8 bits cannot be mixed. Linears that are not compressed
are listed under `llm_int8_skip_modules`, for 4 bits, too.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from compress.checkpoint.interop.experts import expert_shapes
from compress.checkpoint.interop.transformers_config import (
    linear_names,
    load_complete,
    other_tensors,
    problem_for_transformers,
    problem_of_quantised,
    write_reader_configuration,
)
from compress.checkpoint.load import plain_config
from compress.checkpoint.save_format import Checkpoint, SaveFormat, Verification
from compress.checkpoint.shards import write_shards
from compress.checkpoint.verify import compare_logits, compare_weights, take_computed_buffers
from compress.classes import auto_class
from compress.formats import BnbInt8, BnbNF4
from compress.formats.bnb import NESTED
from compress.linear import CompressedLinear, compressed_linears
from kernels.support.errors import errors_only

# Both libraries log a line for each linear that is dequantised or rounds its inputs.
LOGS = ("bitsandbytes.autograd", "transformers.integrations.bitsandbytes")


class Bitsandbytes(SaveFormat):
    """Read by transformers with the bitsandbytes library; see the top of this file."""

    name: ClassVar[str] = "bitsandbytes"
    readers: ClassVar[str] = "transformers"
    snippet: ClassVar[str] = """
transformers (with `pip install accelerate bitsandbytes`), on a GPU or a CPU:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH")
prompt = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=16)[0]))
```
"""

    def problem(self, linear: dict[str, Any]) -> str:
        stored = [part["format"] for part in linear["parts"]]
        if len(stored) > 1 or stored[0] not in (BnbNF4.name, BnbInt8.name) or linear["transform"]:
            held = f"and this format holds what `{BnbNF4.name}` or `{BnbInt8.name}` stores"
            return f"it is stored as {' + '.join(stored)}, {held}"
        part = linear["parts"][0]
        if part["shape"][1] % part.get("blocksize", 1):
            across = f"blocks of {part['blocksize']} weights run across its rows of {part['shape'][1]}"
            return f"{across}, which the library's kernel for CPUs does not take"
        return ""

    def problem_of_model(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        start = f"`save_format` (={self.name!r}) cannot hold this model: "
        if not linears:
            return f"{start}no weight of it is stored in a format of bitsandbytes"
        if expert_shapes(model):
            return f"{start}its experts are stored as one tensor, which transformers does not quantise"
        return problem_for_transformers(model, self.name)

    def problem_together(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        kinds = {(part["format"], part.get("threshold")) for spec in linears.values() for part in spec["parts"]}
        reason = problem_of_quantised(model, list(linears))
        if len(kinds) > 1:
            reason = "4 and 8 bits, or 8 bits with different values of `threshold`, have no place in one configuration"
        return f"`save_format` (={self.name!r}) cannot hold this model: {reason}" if reason else ""

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        model = checkpoint.model
        write_reader_configuration(checkpoint, folder, _configuration(model))
        write_shards(_tensors(model), folder, shard_bytes=checkpoint.shard_bytes)

    def verify(self, checkpoint: Checkpoint, folder: Path) -> Verification:
        model = checkpoint.model
        with errors_only(*LOGS):
            # Of a copy of its own: on some CPUs, a pass leaves rounded scales in 4-bit linears.
            plain = _load(folder, model).dequantize(model.dtype)
            compare_weights(model, plain)
            loaded = _load(folder, model)
            buffers = take_computed_buffers(model, loaded)
            take_computed_buffers(model, plain)
            agreement = compare_logits(model, loaded, checkpoint.tokenizer, plain=plain)
        reader = f"transformers {transformers.__version__} with bitsandbytes {version('bitsandbytes')}"
        return Verification(reader, agreement.largest, tuple(buffers), str(agreement))


def _configuration(model: nn.Module) -> dict[str, Any]:
    linears = compressed_linears(model)
    part = next(iter(linears.values())).parts[0]
    skipped = [name for name in linear_names(model) if name not in linears]
    if isinstance(part, BnbInt8):
        config = BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=float(part.threshold), llm_int8_skip_modules=skipped
        )
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=part.nested_absmax is not None,
            bnb_4bit_compute_dtype=model.dtype,
            llm_int8_skip_modules=skipped,
        )
    return config.to_dict()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from other_tensors(model)
    for name, linear in compressed_linears(model).items():
        for key, tensor in stored_tensors(linear, model.dtype).items():
            yield f"{name}.{key}", tensor
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias


def stored_tensors(linear: CompressedLinear, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of bitsandbytes for the weight of a linear, by the names that it uses.

    Args:
        dtype: of the dequantised weight, which a stored NF4 weight names.
    """
    part = linear.parts[0]
    if isinstance(part, BnbInt8):
        return {"weight": part.CB, "SCB": part.SCB, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    assert isinstance(part, BnbNF4), part.name
    own = part.state_dict()
    state = {
        "quant_type": "nf4",
        "blocksize": part.blocksize,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(part.shape),
    }
    if "nested_absmax" in own:
        state |= {
            "nested_blocksize": NESTED,
            "nested_dtype": "float32",
            "nested_offset": own.pop("nested_offset").item(),
        }
    packed = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    weights = {"weight": own.pop("codes")} | {f"weight.{key}": tensor for key, tensor in own.items()}
    return weights | {"weight.quant_state.bitsandbytes__nf4": packed}


def _load(folder: Path, model: nn.Module) -> nn.Module:
    """The model as transformers loads it, on the device of the model in memory.

    Raises:
        RuntimeError: tensors are missing, or there are too many.
    """
    where = {"device_map": {"": next(model.parameters()).device}}
    return load_complete(auto_class(plain_config(folder)), folder, dtype=model.dtype, **where).eval()
