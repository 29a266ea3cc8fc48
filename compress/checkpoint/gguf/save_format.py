"""GGUF as a checkpoint format. The package `gguf` is imported when a file is written: nothing else needs it."""

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from compress.checkpoint.save_format import Checkpoint, SaveFormat, Verification

LLAMA_CPP = """With llama.cpp (`llama-cli`, `llama-server`, or `pip install llama-cpp-python`):

```sh
llama-cli -m PATH/*.gguf -p "The capital of France is" -n 32
```
"""
SNIPPET = (
    LLAMA_CPP
    + """
With transformers, which dequantises the weights:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
where = {"pretrained_model_name_or_path": "PATH", "gguf_file": "NAME.gguf"}  # the file in this folder
model, tokenizer = AutoModelForCausalLM.from_pretrained(**where), AutoTokenizer.from_pretrained(**where)
```
"""
)


# Bits of codes in groups of 32 that take as many bytes in a file, by format, grid and kind of scales (None: 16 bits).
AS_THEY_ARE = {
    ("int_group", "int", None): (4, 5, 8),
    ("codebook", "iq4_nl", None): (4,),
    ("codebook", "mxfp4", "e8m0"): (4,),
}


class GGUF(SaveFormat):
    """Holds decoders of the architectures in `models.py`; weights whose codes fit no type are written as floats."""

    name: ClassVar[str] = "gguf"
    readers: ClassVar[str] = "llama.cpp, transformers"

    snippet: ClassVar[str] = SNIPPET
    library: ClassVar[str] = "gguf"

    def how_to_load(self, model: nn.Module) -> str:
        return self.snippet if self.read_by(model) == self.readers else LLAMA_CPP

    def read_by(self, model: nn.Module) -> str:
        from compress.checkpoint.gguf.models import read_by_transformers

        return self.readers if read_by_transformers(model.config) else "llama.cpp"

    def problem(self, linear: dict[str, Any]) -> str:
        # Codes that fit no type are written in 16 bits; `verify` reports the cost.
        return "llama.cpp cannot transform the input of a linear" if linear.get("transform") else ""

    def grows(self, linear: dict[str, Any], grids: Collection[str]) -> bool:
        part, *more = linear["parts"]
        if more or part["format"] == "dense":  # sums become floats, and floats stay floats
            return bool(more)
        widths = [AS_THEY_ARE.get((part["format"], grid, part.get("scales")), ()) for grid in grids or ("int",)]
        plain = part.get("symmetric", True) and not part.get("double_quant") and part.get("group_size") == 32
        return not (plain and all(part.get("bits") in of for of in widths))

    def problem_of_model(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        if importlib.util.find_spec("gguf") is None:
            return "the package `gguf` is not installed, which `pip install gguf` brings"
        from compress.checkpoint.gguf.models import problem_of

        return problem_of(model)

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        from compress.checkpoint.gguf.save import write

        write(checkpoint, folder)

    def verify(self, checkpoint: Checkpoint, folder: Path) -> Verification:
        from compress.checkpoint.gguf.save import verify

        return verify(checkpoint, folder)
