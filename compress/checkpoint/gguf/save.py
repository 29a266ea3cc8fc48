"""GGUF: one file for llama.cpp with our codes in its blocks, tensor by tensor in the smallest type that holds them."""

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as GGML
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from compress.checkpoint.gguf import models
from compress.checkpoint.gguf.embedded import gguf_file
from compress.checkpoint.gguf.tokenizer import Vocabulary, fields_of, from_file, from_transformers, without_tokens
from compress.checkpoint.gguf.types import (
    ROUNDING,
    Encoded,
    Grid,
    encode,
    encode_floats,
    grid_of,
    keeps_zeros,
    of_floats,
    rounding,
)
from compress.checkpoint.save_format import Checkpoint, Verification
from compress.checkpoint.tied import true_config
from compress.checkpoint.verify import prompts
from compress.embedding import compressed_embeddings
from compress.linear import compressed_linears, replace
from kernels.support.errors import errors_only
from kernels.support.modes import evaluating

FLOATS = (GGML.F32, GGML.F16, GGML.BF16)
# Largest difference of the logits at the median position, relative to their standard deviation, that 16-bit embeddings
# and scales and computation in 16 bits explain. Rows in a wrong order, or a wrong setting, move the logits of all
# positions by more than their deviation; at a few positions, such as the first tokens, rounding alone does so.
TOLERANCE = {torch.float32: 0.05, torch.float16: 0.1, torch.bfloat16: 0.3}
UNREAD = (
    "transformers' GGUF reader does not know this architecture; llama.cpp does. The tensors were compared, in "
    "transformers' own model; their order, the settings and the tokens of the file were not"
)
TEXTS = ("The capital of France is Paris.", "def f(x):\n    return x  # 3 + 4", "Grüße, 世界! It's 12:30.")
GENERAL = tuple(f"general.{key}" for key in ("basename", "organization", "size_label", "license", "languages", "tags"))


@dataclass
class _Tally:
    """The content of the file by type, and the losses of storing it."""

    count: Counter = field(default_factory=Counter)
    nbytes: Counter = field(default_factory=Counter)
    linears: int = 0  # bytes of compressed linears in the file
    rounding: float = 0.0
    pruned: set[str] = field(default_factory=set)
    as_floats: dict[str, None] = field(default_factory=dict)  # compressed linears that no type of codes holds
    beside: dict[str, None] = field(default_factory=dict)  # those beside experts that are not compressed

    def add(self, entry: models.Entry, kind: GGML, nbytes: int, change: float) -> None:
        self.count[kind.name] += 1
        self.nbytes[kind.name] += nbytes
        self.rounding = max(self.rounding, change)
        every = entry.experts or (entry,)
        for one in every:
            if one.linear is None:
                continue
            self.linears += nbytes // len(every)
            name, parts = one.source.removesuffix(".weight"), list(one.linear.parts)
            if keeps_zeros(parts):
                self.pruned.add(name)
            if kind in FLOATS and not of_floats(parts):
                fits = any(other.linear is None for other in entry.experts) and grid_of(parts) is not None
                (self.beside if fits else self.as_floats)[name] = None


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the file into a folder."""
    model, config = checkpoint.model, checkpoint.model.config
    arch = gguf.MODEL_ARCH_NAMES[models.ARCHITECTURES[config.model_type].arch]
    vocabulary = _vocabulary(checkpoint)
    writer = gguf.GGUFWriter(folder / file_name(checkpoint), arch, use_temp_file=True)
    try:
        writer.add_type("model")
        methods = [entry["method"] for entry in checkpoint.info.recipe]
        writer.add_name(" ".join([file_name(checkpoint).removesuffix(".gguf"), *methods]))
        if (source := _source(checkpoint)) is not None:
            Vocabulary({key: v for key, v in fields_of(source).items() if key in GENERAL}).write(writer)
        models.write_metadata(writer, config)
        vocabulary.write(writer)
        nbytes: Counter = Counter()
        for entry in tqdm(list(models.entries(model)), desc="GGUF blocks", unit="tensor"):
            stored = _encoded(entry)
            nbytes[stored.kind.name] += stored.data.nbytes
            writer.add_tensor(entry.name, stored.data, raw_dtype=stored.kind)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(_file_type(nbytes))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


@torch.no_grad()
def verify(checkpoint: Checkpoint, folder: Path) -> Verification:
    """Read the file again, with `gguf` and with transformers, and compare."""
    tally = _compare_tensors(checkpoint, folder / file_name(checkpoint))
    difference, agreement, remarks = _compare_logits(checkpoint, folder)
    remarks = [*_remarks(checkpoint, tally), *remarks, *_compare_tokens(checkpoint, folder)]
    readers = f"gguf {version('gguf')}"
    if models.read_by_transformers(checkpoint.model.config):
        readers = f"transformers {version('transformers')}, {readers}"
    return Verification(readers, difference, tuple(remarks), agreement)


def file_name(checkpoint: Checkpoint) -> str:
    """Name of the file in the folder, from the name of the model."""
    name = Path(str(checkpoint.info.model.get("name") or "model")).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", name) + ".gguf"


def _encoded(entry: models.Entry) -> Encoded:
    """The stored form of an entry: norms and biases in 32 bits, the rest by `encode`."""
    W = entry.values()
    if entry.experts:
        grids = [_grid(expert) for expert in entry.experts]
        zeros = any(expert.linear is not None and keeps_zeros(list(expert.linear.parts)) for expert in entry.experts)
        made = encode(W.flatten(0, 1), Grid.joined(grids), keep_zeros=zeros)
        return made._replace(data=made.data.reshape(*W.shape[:2], -1))
    if W.dim() == 1:
        return encode_floats(W, (GGML.F32,))
    zeros = entry.linear is not None and keeps_zeros(list(entry.linear.parts))
    return encode(W, _grid(entry), keep_zeros=zeros)


def _grid(entry: models.Entry) -> Grid | None:
    grid = None if entry.linear is None else grid_of(list(entry.linear.parts))
    return grid if grid is None or entry.order is None else grid.rows(entry.order)


def _file_type(nbytes: Counter) -> gguf.LlamaFileType:
    """llama.cpp's name for a file of mostly this type."""
    most = max((kind for kind in nbytes if kind != "F32"), key=lambda kind: nbytes[kind], default="F32")
    blocks = [kind for kind in nbytes if kind not in ("F32", "F16", "BF16")]
    most = max(blocks, key=lambda kind: nbytes[kind], default=most)
    if most == "F32":
        return gguf.LlamaFileType.ALL_F32
    return gguf.LlamaFileType["MOSTLY_MXFP4_MOE" if most == "MXFP4" else f"MOSTLY_{most}"]


def _source(checkpoint: Checkpoint) -> Path | None:
    """The GGUF file from which the model was loaded, if there is one and it still exists."""
    try:
        return gguf_file(str(checkpoint.info.model.get("name") or ""))
    except ValueError:
        return None


def _vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    source, tokenizer, rows = _source(checkpoint), checkpoint.tokenizer, checkpoint.model.config.vocab_size
    if source is not None:
        vocabulary = from_file(source)
        if len(vocabulary.fields.get("tokenizer.ggml.tokens", ([],))[0]) == rows:
            return vocabulary
    if tokenizer is None:
        return without_tokens("none was given", checkpoint.model.config)
    return from_transformers(tokenizer, checkpoint.model.config)


def _compare_tensors(checkpoint: Checkpoint, path: Path) -> _Tally:
    """Decode every tensor with the package `gguf` and compare it with the weight in memory.

    Raises:
        RuntimeError: a tensor differs, is missing, or has no weight in memory.
    """
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tally = _Tally()
    for entry in tqdm(list(models.entries(checkpoint.model)), desc="GGUF check", unit="tensor"):
        tensor = stored.pop(entry.name, None)
        if tensor is None:
            raise RuntimeError(f"the GGUF file lacks {entry.name} ({entry.source} in the model)")
        W, shape = entry.values(), tuple(int(size) for size in reversed(tensor.shape))
        if shape != tuple(W.shape):
            raise RuntimeError(f"{entry.name} has the shape {shape} in the GGUF file, not {tuple(W.shape)}")
        if (change := rounding(W, tensor.data, tensor.tensor_type)) > ROUNDING:
            raise RuntimeError(
                f"{entry.name} ({entry.source} in the model) is another weight in the GGUF file: the largest change is "
                f"{change:.1e} of the range of its block"
            )
        tally.add(entry, tensor.tensor_type, int(tensor.n_bytes), change)
    if stored:
        raise RuntimeError(f"the GGUF file holds {', '.join(sorted(stored))}, which the model does not have")
    return tally


def _compare_logits(checkpoint: Checkpoint, folder: Path) -> tuple[float, str, list[str]]:
    """Load the file with transformers' GGUF reader and compare logits. Where it does not know the architecture, the
    tensors are decoded by `gguf` and put into transformers' own model.

    Returns:
        the largest difference; in words the number of equal tokens and the difference of the logits at the median
        position, which decides; and remarks on settings that this reader ignores.

    Raises:
        RuntimeError: the logits differ by more than rounding to 16 bits explains.
    """
    model, knows = checkpoint.model, models.read_by_transformers(checkpoint.model.config)
    again, missed = _by_transformers(checkpoint, folder) if knows else (_by_package(checkpoint, folder), [])
    device = next(model.parameters()).device
    again.set_attn_implementation(model.config._attn_implementation)
    ids = prompts(model, checkpoint.tokenizer).to(device)
    with _weights_alone(model), evaluating(model):
        expected = model(ids).logits.float()
    found = again.to(device)(ids).logits.float()
    by_position = (expected - found).abs().amax(-1)  # [prompts, T]
    median, largest = by_position.median().item(), by_position.max().item()
    spread = expected.std().item() or 1.0
    if not median <= TOLERANCE[model.dtype] * spread:
        reader = "transformers" if knows else "gguf"
        raise RuntimeError(
            f"the GGUF file, read by {reader}, gives other logits than the model in memory: they differ by up to "
            f"{median:.2e} at the median position, and spread by {spread:.2e}, although every tensor agrees"
        )
    same = expected.argmax(-1) == found.argmax(-1)
    agreement = (
        f"{int(same.sum())} of {same.numel()} positions have the same most likely next token; logits differ by up to "
        f"{median:.1e} at the median position, where rounding explains {TOLERANCE[model.dtype] * spread:.1e} "
        f"({largest:.1e} at most; they spread by {spread:.1e})"
    )
    remarks = [] if knows else [UNREAD]
    if missed:
        remarks.append(
            f"transformers' GGUF reader does not read {', '.join(missed)} of this architecture: there, give "
            "`from_pretrained` a configuration with them; llama.cpp reads them, or has the same values fixed"
        )
    return largest, agreement, remarks


def _by_transformers(checkpoint: Checkpoint, folder: Path) -> tuple[nn.Module, list[str]]:
    """The model that transformers' reader makes of the file, and the settings that it does not read."""
    model, name = checkpoint.model, file_name(checkpoint)
    with errors_only("transformers"):  # no advice on packed weights
        config, ours = AutoConfig.from_pretrained(folder, gguf_file=name), true_config(model)
        missed = _not_read(ours, config)
        for setting in missed:
            setattr(config, setting, getattr(ours, setting))
        again = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, config=config, dtype=model.dtype)
    return again.eval(), missed


def _by_package(checkpoint: Checkpoint, folder: Path) -> nn.Module:
    """A model of transformers with the weights of the file."""
    model = checkpoint.model
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / file_name(checkpoint)).tensors}
    again = AutoModelForCausalLM.from_config(true_config(model), dtype=model.dtype).eval()
    weights = again.state_dict()
    for entry in models.entries(model):
        tensor = stored[entry.name]
        read = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()) - entry.shift
        if entry.source:
            weights[entry.source][... if entry.order is None else entry.order] = read.to(model.dtype)
    return again


def _not_read(ours: PreTrainedConfig, theirs: PreTrainedConfig) -> list[str]:
    """Settings that change the model's outputs, and to which the reader gives another value."""
    names = (
        "head_dim", "rope_parameters", "layer_types", "sliding_window", "attn_logit_softcapping", "attention_bias",
        "final_logit_softcapping", "query_pre_attn_scalar", "rms_norm_eps", "mlp_bias", "tie_word_embeddings",
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "norm_topk_prob",
    )  # fmt: skip
    both = [name for name in names if hasattr(ours, name) and hasattr(theirs, name)]
    return [name for name in both if not _alike(getattr(ours, name), getattr(theirs, name))]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_alike(a.get(key), b.get(key)) for key in {*a, *b})
    if isinstance(a, float) and isinstance(b, int | float):
        return abs(a - b) <= 1e-6 * abs(a)
    return a == b


@contextmanager
def _weights_alone(model: nn.Module):
    """In the context, products do not round activations, even if the format of the weights does."""
    rounded = {
        name: linear
        for name, linear in compressed_linears(model).items()
        if any(part.activation_bits is not None for part in linear.parts)
    }
    try:
        for name, linear in rounded.items():
            replace(model, name, _dense(linear))
        yield
    finally:
        for name, linear in rounded.items():
            replace(model, name, linear)


def _dense(linear: Any) -> nn.Linear:
    W: Tensor = linear.weight
    dense = nn.Linear(W.shape[1], W.shape[0], bias=linear.bias is not None, device="meta", dtype=W.dtype)
    dense.weight = nn.Parameter(W, requires_grad=False)
    if linear.bias is not None:
        dense.bias = nn.Parameter(linear.bias.to(W.dtype), requires_grad=False)
    return dense


def _compare_tokens(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Compare the tokenizer that transformers' GGUF reader builds from the file with the given one.

    Raises:
        RuntimeError: a token has another number.
    """
    tokenizer, vocabulary = checkpoint.tokenizer, _vocabulary(checkpoint)
    names = "tokenizer.ggml.tokens" in vocabulary.fields
    if tokenizer is None or not names or not models.read_by_transformers(checkpoint.model.config):
        return list(vocabulary.remarks)
    with errors_only("transformers"):  # no advice on packed weights
        again = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file_name(checkpoint))
    theirs = again.get_vocab()
    moved = [text for text, number in tokenizer.get_vocab().items() if theirs.get(text, number) != number]
    if moved:
        raise RuntimeError(f"in the GGUF file {len(moved)} tokens have different ids: {', '.join(moved[:3])}")
    other = [text for text in TEXTS if tokenizer(text).input_ids != again(text).input_ids]
    if not other:
        return list(vocabulary.remarks)
    pre = vocabulary.fields.get("tokenizer.ggml.pre", ("default",))[0]
    return [
        *vocabulary.remarks,
        f"transformers' GGUF reader splits {other[0]!r} otherwise than the model's tokenizer; llama.cpp goes by the "
        f"pre-tokeniser that the file names ({pre})",
    ]


def _remarks(checkpoint: Checkpoint, tally: _Tally) -> list[str]:
    model = checkpoint.model
    linears = compressed_linears(model)
    stored = ", ".join(
        f"{tally.count[kind]} as {kind} ({size / 1e6:.1f} MB)" for kind, size in tally.nbytes.most_common()
    )
    said = [f"tensors: {stored}"]
    if linears:
        tables = [one for one in compressed_embeddings(model).values() if not one.tied]
        own = sum(stored.nbytes for stored in (*linears.values(), *tables))
        said.append(f"compressed linears take {tally.linears / 1e6:.1f} MB here, {own / 1e6:.1f} MB as the workbench's")
    if tally.as_floats:
        said.append(
            f"{len(tally.as_floats)} compressed linears have codes that no type of GGUF holds, and are written as "
            f"floats: {', '.join([*tally.as_floats][:3])}"
        )
    if tally.beside:
        said.append(
            f"{len(tally.beside)} compressed linears are written as floats, because an expert beside them is not "
            f"compressed, and a layer's experts are one tensor: {', '.join([*tally.beside][:3])}"
        )
    if tally.pruned:
        said.append(f"zeros of {len(tally.pruned)} pruned linears are stored as zeros: no type of GGUF leaves them out")
    if tally.rounding:
        said.append(
            f"GGUF has scales, offsets and floats of 16 bits: weights change by up to {tally.rounding:.1e} of the "
            "range of their block"
        )
    if any(part.activation_bits is not None for linear in linears.values() for part in linear.parts):
        said.append("llama.cpp rounds activations in its own way (blocks of 32 in 8 bits), not as this recipe says")
    return said + models.remarks(model.config)
