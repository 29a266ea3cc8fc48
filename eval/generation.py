"""What the models write: greedy generations side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a robot that learns to paint.",
)


@dataclass(frozen=True)
class Sample:
    """One prompt, what each model wrote, and where each first differs from the baseline (tokens; None: nowhere)."""

    prompt: str
    texts: dict[str, str]
    first_difference: dict[str, int | None]


@torch.no_grad()
def generate_samples(
    models: dict[str, nn.Module], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str] = PROMPTS, *,
    new_tokens: int = 48, baseline: str = "baseline",
) -> list[Sample]:  # fmt: skip
    """Greedy generations of each model, as a chat where the tokenizer has a template for it."""
    samples = []
    for prompt in prompts:
        ids = _encode(tokenizer, prompt)
        tokens = {}
        for name, model in models.items():
            device = next(model.parameters()).device
            out = model.generate(ids.to(device), attention_mask=torch.ones_like(ids).to(device), max_new_tokens=new_tokens,
                                 do_sample=False, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id)  # fmt: skip
            tokens[name] = out[0, ids.shape[1] :].tolist()
        texts = {name: tokenizer.decode(t, skip_special_tokens=True).strip() for name, t in tokens.items()}
        differ = {name: first_difference(tokens[baseline], t) for name, t in tokens.items() if name != baseline}
        samples.append(Sample(prompt, texts, differ))
    return samples


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two generations differ; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids
