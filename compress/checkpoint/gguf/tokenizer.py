"""A tokenizer as GGUF metadata: from the GGUF file of the original model, or from transformers' tokenizer.

Source: llama.cpp's `llama-vocab.cpp` for the meaning of each key, and for its pre-tokenisers, which are only named in a
file.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType, TokenType
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
# llama.cpp's name of the pre-tokeniser that splits by this expression
_EXPRESSIONS = {
    _CASES + _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST: "llama-bpe",
    _CASES + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST: "qwen2",
    f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST: "tekken",
    f"{_START}{_UPPER}*{_LOWER}+{_CASES}?|{_START}{_UPPER}+{_LOWER}*{_CASES}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST: "gpt-4o",
}  # fmt: skip
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}

Fields = dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]]


@dataclass(frozen=True)
class Vocabulary:
    """Metadata of a tokenizer.

    Attributes:
        fields: value and types by key, as `GGUFWriter.add_key_value` takes them.
        remarks: remarks for users of the file.
    """

    fields: Fields
    remarks: tuple[str, ...] = ()

    def write(self, writer: gguf.GGUFWriter) -> None:
        for key, (value, kind, inner) in self.fields.items():
            writer.add_key_value(key, value, kind, inner)


@lru_cache(maxsize=1)  # the library takes seconds for a vocabulary
def fields_of(path: Path) -> Fields:
    """Metadata of a GGUF file that describes the model in general, and its tokenizer."""
    return {
        key: (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for key, field in gguf.GGUFReader(path).fields.items()
        if key.startswith(("general.", "tokenizer."))
    }


def from_file(path: Path) -> Vocabulary:
    """The tokenizer of another GGUF file."""
    return Vocabulary({key: value for key, value in fields_of(path).items() if key.startswith("tokenizer.")})


def without_tokens(reason: str, config: PreTrainedConfig) -> Vocabulary:
    """No tokenizer: llama.cpp then reads and writes only numbers of tokens."""
    fields = {"tokenizer.ggml.model": ("none", GGUFValueType.STRING, None)}
    for key, to in _SPECIAL.items():
        number = getattr(config, key, None)
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            fields[f"tokenizer.ggml.{to}_token_id"] = (number, GGUFValueType.UINT32, None)
    return Vocabulary(fields, (f"the file holds no tokenizer ({reason}): llama.cpp can only be given token numbers",))


def from_transformers(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> Vocabulary:
    """A tokenizer of transformers: byte-level BPE, or BPE of SentencePiece; numbers without a token are filled up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return without_tokens(f"{type(tokenizer).__name__} has no tokenizer.json", config)
    layout = json.loads(backend.to_str())
    model = layout["model"]
    if model["type"] != "BPE":
        return without_tokens(f"its model is {model['type']}; BPE can be written", config)
    byte_level = "ByteLevel" in _kinds(layout.get("decoder")) or "ByteLevel" in _kinds(layout.get("pre_tokenizer"))
    if not byte_level and not model.get("byte_fallback"):
        return without_tokens("its BPE neither works on bytes nor falls back to bytes", config)
    tokens, kinds = _tokens(tokenizer, config.vocab_size)
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    fields: dict[str, Any] = {"model": "gpt2" if byte_level else "llama", "pre": "default"}
    remarks: tuple[str, ...] = ()
    if byte_level:
        fields["pre"], remarks = _pre_tokeniser(layout)
        fields["merges"] = [" ".join(merge) for merge in merges]
    else:
        fields["scores"] = _scores(tokens, merges)
        fields["add_space_prefix"] = _adds_space(layout)
    fields |= {"tokens": tokens, "token_type": [int(kind) for kind in kinds]}
    fields |= {f"{to}_token_id": i for key, to in _SPECIAL.items() if (i := getattr(tokenizer, key, None)) is not None}
    probe = tokenizer("a").input_ids
    fields["add_bos_token"] = bool(probe) and probe[0] == tokenizer.bos_token_id
    fields["add_eos_token"] = bool(probe) and probe[-1] == tokenizer.eos_token_id
    typed = {f"tokenizer.ggml.{key}": _typed(value) for key, value in fields.items()}
    if isinstance(tokenizer.chat_template, str):
        typed["tokenizer.chat_template"] = _typed(tokenizer.chat_template)
    return Vocabulary(typed, remarks)


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[list[str], list[TokenType]]:
    """Every token's text and type, by number."""
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for number in range(rows):
        text, kind = texts.get(number, f"[PAD{number}]"), TokenType.NORMAL
        if number not in texts:
            kind = TokenType.UNUSED
        elif number in added:
            kind = TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED
        elif _BYTE.fullmatch(text):
            kind = TokenType.BYTE
        tokens.append(text)
        kinds.append(kind)
    return tokens, kinds


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """SentencePiece merges the pair whose result has the highest score: minus the rank of the merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _adds_space(layout: dict[str, Any]) -> bool:
    """Whether a space is put before a text."""
    return any(
        one["type"] == "Prepend" or (one["type"] == "Metaspace" and one.get("prepend_scheme") != "never")
        for one in (*_steps(layout.get("normalizer")), *_steps(layout.get("pre_tokenizer")))
    )


def _pre_tokeniser(layout: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """llama.cpp's name for the splitting of a text before BPE, and a remark if no name is known here."""
    steps = _steps(layout.get("pre_tokenizer"))
    splits = [one for one in steps if one["type"] != "ByteLevel"]
    by_itself = any(one["type"] == "ByteLevel" and one.get("use_regex", True) for one in steps)
    name = None
    if not splits and by_itself:
        name = "gpt-2"
    elif by_itself and [(one["type"], one.get("individual_digits")) for one in splits] == [("Digits", True)]:
        name = "smollm"
    elif len(splits) == 1 and splits[0]["type"] == "Split" and not by_itself:
        name = _EXPRESSIONS.get(splits[0]["pattern"].get("Regex"))
    if name == "llama-bpe" and not layout["model"].get("ignore_merges"):
        name = "smaug-bpe"  # the same expression; llama-bpe looks up whole words first
    if name is None:
        return "default", ("how this tokenizer splits words is not known here: llama.cpp may give other tokens",)
    return name, ()


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normaliser, pre-tokeniser or decoder as the list of its steps."""
    if part is None:
        return []
    inner = next((part[key] for key in ("pretokenizers", "normalizers", "decoders") if key in part), None)
    return [part] if inner is None else [step for one in inner for step in _steps(one)]


def _kinds(part: dict[str, Any] | None) -> list[str]:
    return [one["type"] for one in _steps(part)]


def _typed(value: Any) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    if isinstance(value, list):
        inner = _typed(value[0])[1] if value else GGUFValueType.STRING
        return value, GGUFValueType.ARRAY, GGUFValueType.INT32 if inner == GGUFValueType.UINT32 else inner
    if isinstance(value, bool):
        return value, GGUFValueType.BOOL, None
    if isinstance(value, int):
        return value, GGUFValueType.UINT32, None
    kinds = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}
    return value, kinds[type(value)], None
