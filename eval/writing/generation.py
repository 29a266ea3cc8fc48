"""What the models write: greedy generations side by side, and the one way in which text is generated here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a robot that learns to paint.",
)
_NO_SETTINGS = {  # of a generation configuration: which tokens there are, and what is handed back; not how to write
    "eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "transformers_version", "_from_model_config",
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One prompt, what each model wrote, and where each first differs from the baseline (tokens; None: nowhere)."""

    prompt: str
    texts: dict[str, str]
    first_difference: dict[str, int | None]


class Written(NamedTuple):
    """Tokens that were written, without the one that ends the text; ended: was there one."""

    tokens: list[int]
    ended: bool


def generate_samples(
    models: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] = PROMPTS,
    *,
    new_tokens: int = 48,
    baseline: str = "baseline",
) -> list[Sample]:
    """Greedy generations of each model, as a chat where the tokenizer has a template for it."""
    samples = []
    for prompt in prompts:
        ids, ends = encode_prompt(tokenizer, prompt), end_tokens(models[baseline], tokenizer)
        tokens = {name: write(model, ids, ends=ends, new_tokens=new_tokens)[0].tokens for name, model in models.items()}
        texts = {name: tokenizer.decode(t, skip_special_tokens=True).strip() for name, t in tokens.items()}
        differ = {name: first_difference(tokens[baseline], t) for name, t in tokens.items() if name != baseline}
        samples.append(Sample(prompt, texts, differ))
    return samples


@torch.no_grad()
def write(
    model: nn.Module, ids: Tensor, *, ends: Sequence[int], new_tokens: int, processors: Sequence[LogitsProcessor] = ()
) -> list[Written]:
    """What a model writes after ids [rows, n], which hold no padding: always the token with the highest score.

    Scores are the model's logits in float32, through the processors if there are any. Whatever the model's own
    `generation_config` asks for (penalties, banned tokens, shortest lengths, a kind of cache, ...) is set aside
    meanwhile, since it would be a part of the model for one and not for another; `settings_aside` tells what there is.

    Args:
        ends: tokens that end a text; none: all rows have `new_tokens`.
    """
    ids = ids.to(next(model.parameters()).device)
    plain = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else None,
    )
    own = model.generation_config
    model.generation_config = (
        plain  # what is None in the configuration that `generate` is given is filled from the model's
    )
    try:
        out = model.generate(
            ids,
            generation_config=plain,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList(processors),
        )
    finally:
        model.generation_config = own
    return [_until_end(row, ends) for row in out[:, ids.shape[1] :].tolist()]


def _until_end(row: list[int], ends: Sequence[int]) -> Written:
    at = next((i for i, token in enumerate(row) if token in ends), None)
    return Written(row[:at], at is not None)


def settings_aside(model: nn.Module) -> dict[str, Any]:
    """Settings of a model's own `generation_config`, as far as they are not transformers' defaults: `write` uses none
    of them."""
    if model.generation_config is None:
        return {}
    return {name: value for name, value in model.generation_config.to_diff_dict().items() if name not in _NO_SETTINGS}


def end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a text: those of the model's `generation_config`, else the tokenizer's; possibly none."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = getattr(tokenizer, "eos_token_id", None) if found is None else found
    return list(found) if isinstance(found, list | tuple) else [] if found is None else [int(found)]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two generations differ; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
    """Ids [1, n] of a prompt: a chat's first turn where the tokenizer has a template for it."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids
