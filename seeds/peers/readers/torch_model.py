"""A model that is a torch module with transformers' interface, whichever library made it: the task, carried out."""

import torch
from safetensors.torch import save_file
from shared import Answer, Task, rates
from torch import Tensor, nn


@torch.no_grad()
def carry_out(task: Task, model: nn.Module, answer: Answer) -> None:
    """Fill tokens, likelihoods and rates of the answer."""
    torch.set_num_threads(task.threads)
    answer.tokens = [greedy(model, prompt, task.new_tokens) for prompt in task.prompts]
    answer.token_nll = [token_nll(model, window) for window in task.windows]
    if task.speed_prompt:
        rate = rates(lambda n: greedy(model, task.speed_prompt, n), task)
        answer.decode_tokens_per_s, answer.prefill_tokens_per_s = rate


def greedy(model: nn.Module, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens of largest logit after a prompt, one at a time; tokens that end a text are tokens like others."""
    tokens: list[int] = []
    ids, cache = torch.tensor([prompt]), None
    for _ in range(new_tokens):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        tokens.append(int(ids))
    return tokens


def token_nll(model: nn.Module, window: list[int]) -> list[float]:
    """Negative log-likelihood in nats of each token of a window but the first."""
    ids = torch.tensor([window])
    logits = model(ids, use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()


def keep_weights(task: Task, weights: dict[str, Tensor]) -> None:
    """Write the weights [out, in] of linears, by the linear's name, where the task wants them."""
    if task.weights:
        save_file({name: W.detach().float().contiguous() for name, W in weights.items()}, task.weights)
