"""Small networks that score positions, one for each layer: how they are trained, written, read and checked."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss
from tqdm.auto import tqdm

from compress.kv.policy import Policy
from compress.kv.seen import Seen
from compress.kv.support import keeping_layers

Loss = Callable[[Tensor, Tensor], Tensor]
Example = tuple[int, Tensor, Tensor]  # a layer, the inputs [n, inputs] and the targets [n, H_kv] of a text's tokens


class ScoringNetwork(NamedTuple):
    """The network of a layer: scores [n, H_kv] = gelu((x - mean) / deviation up) down + bias, inputs x [n, inputs].

    up: [inputs, width], first_bias: [width], down: [width, H_kv], bias: [H_kv]; mean, deviation: [inputs].
    """

    mean: Tensor
    deviation: Tensor
    up: Tensor
    first_bias: Tensor
    down: Tensor
    bias: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [..., inputs] -> [..., H_kv], float32."""
        x = (inputs.float() - self.mean) / self.deviation
        return gelu(x @ self.up + self.first_bias) @ self.down + self.bias


class Fitted(NamedTuple):
    """The accuracy of a network on tokens that it was not trained on.

    Attributes:
        explained: share of the variance of the targets, R².
        overlap: share of the tenth of the tokens with the largest targets that is in the tenth with the highest
            scores, mean over heads; 0.1 by chance.
    """

    explained: float
    overlap: float


def fit(
    inputs: Tensor,
    target: Tensor,
    *,
    width: int,
    epochs: int = 15,
    rate: float = 3e-3,
    batch: int = 512,
    seed: int = 0,
    span: int = 1,
    loss: Loss = mse_loss,
) -> tuple[ScoringNetwork, Fitted]:
    """A network for one layer, trained on a nine-tenths share of the tokens.

    Args:
        inputs: [n, inputs]. target: [n, H_kv].
        batch: the number of tokens of an update.
        span: consecutive tokens that are drawn together, for losses that compare neighbours; it divides n.
        loss: of predictions and targets, both [batch / span, span, H_kv].
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = (t.float().unflatten(0, (-1, span)) for t in (inputs, target))  # [spans, span, ...]
    order = torch.randperm(len(x), generator=generator)
    held, used = order[: len(order) // 10], order[len(order) // 10 :]
    mean, deviation = x[used].mean((0, 1)), x[used].flatten(0, 1).std(0).clamp(min=1e-4)
    up = torch.randn(x.shape[-1], width, generator=generator) / x.shape[-1] ** 0.5
    down = torch.randn(width, y.shape[-1], generator=generator) / width**0.5
    parameters = [up, torch.zeros(width), down, y[used].mean((0, 1)).clone()]
    batch = max(batch // span, 1)
    with torch.enable_grad():
        for p in parameters:
            p.requires_grad_()
        optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
        steps = max(len(used) // batch, 1) * epochs
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
        for _ in range(steps):
            at = used[torch.randint(len(used), (batch,), generator=generator)]
            error = loss(ScoringNetwork(mean, deviation, *parameters)(x[at]), y[at])
            optimiser.zero_grad()
            error.backward()
            optimiser.step()
            schedule.step()
    scorer = ScoringNetwork(mean, deviation, *(p.detach() for p in parameters))
    return scorer, _fitted(scorer(x[held]).flatten(0, 1), y[held].flatten(0, 1))


def _fitted(predicted: Tensor, target: Tensor) -> Fitted:
    """predicted, target: [n, H_kv]."""
    rest = (target - target.mean(0)).square().sum().clamp(min=1e-30)
    count = max(len(target) // 10, 1)
    top = (torch.zeros_like(x).scatter_(0, x.topk(min(count, len(x)), 0).indices, 1) for x in (predicted, target))
    both = torch.stack(list(top)).prod(0)
    return Fitted(1 - ((predicted - target).square().sum() / rest).item(), both.sum(0).mean().item() / count)


def by_layer(examples: Iterable[Example]) -> dict[int, tuple[Tensor, Tensor]]:
    """{layer: inputs [n, inputs] in bfloat16, targets [n, H_kv]} of all texts."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for number, inputs, target in examples:
        found.setdefault(number, []).append((inputs.bfloat16().cpu(), target.cpu()))
    return {number: tuple(map(torch.cat, zip(*pairs, strict=True))) for number, pairs in found.items()}


def fit_all(examples: Iterable[Example], path: str | Path, *, width: int, **more: object) -> dict[int, Fitted]:
    """Train a network for every layer, and write the file that a policy takes.

    Args:
        examples: of texts, layer by layer. width, more: arguments of `fit`.

    Returns:
        {layer: the accuracy of its network on tokens that were held out}
    """
    networks, fitted = {}, {}
    for number, (inputs, target) in tqdm(by_layer(examples).items(), desc="networks", unit="layer"):
        networks[number], fitted[number] = fit(inputs, target, width=width, **more)
    write(networks, path)
    return fitted


def write(networks: Mapping[int, ScoringNetwork], path: str | Path) -> None:
    """Write the file that `scorers` reads."""
    tensors = {f"{i}.{field}": t.contiguous() for i, one in networks.items() for field, t in one._asdict().items()}
    save_file(tensors, str(path))


def averages(fitted: Mapping[int, Fitted]) -> dict[str, float]:
    """Over the networks of all layers: the means of both shares of `Fitted`, and the least that one layer explains."""
    explained, overlap = (sum(of) / len(fitted) for of in zip(*fitted.values(), strict=True))
    least = min(one.explained for one in fitted.values())
    return {"layers": len(fitted), "explained": explained, "least_explained": least, "overlap": overlap}


def summary(fitted: Mapping[int, Fitted]) -> str:
    """What a command prints about the networks of all layers."""
    of = averages(fitted)
    mean, least, overlap = (of[name] for name in ("explained", "least_explained", "overlap"))
    return f"{of['layers']} layers, R² {mean:.3f} on average, {least:.3f} at least, top tenth {overlap:.3f}"


def scorers(path: str, device: torch.device | str = "cpu") -> dict[int, ScoringNetwork]:
    """The networks of a file by layer, on this device; they are read and copied to it once."""
    return _read(path, Path(path).stat().st_mtime_ns, str(device))


@lru_cache(maxsize=4)
def _read(path: str, changed: int, device: str) -> dict[int, ScoringNetwork]:
    with safe_open(path, "pt") as file:
        layers = sorted({int(name.partition(".")[0]) for name in file.keys()})  # noqa: SIM118
        return {
            i: ScoringNetwork(*(file.get_tensor(f"{i}.{field}").to(device) for field in ScoringNetwork._fields))
            for i in layers
        }


def check_networks(policy: Policy, path: str, model: nn.Module, inputs: int, *, command: str, kind: str) -> None:
    """Raise ValueError if a file does not hold networks for this model.

    Args:
        inputs: the number of channels that the networks read. kind: their name. command: the command for such files.
    """
    writes = f"`python -m {command} --model MODEL --out FILE` writes one"
    if not path:
        raise ValueError(f"`path` (='') of {policy.name} must name a file of trained networks; {writes}")
    if not Path(path).is_file():
        raise ValueError(f"`path` (={path!r}) of {policy.name} is no file; {writes}")
    try:
        found = scorers(path)
        own = next(iter(found.values())).up.shape[0]
    except Exception as error:
        raise ValueError(f"`path` (={path!r}) of {policy.name} holds no trained networks; {writes}") from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if own != inputs or max(found) >= layers:
        raise ValueError(
            f"`path` (={path!r}) of {policy.name} is of a model with {kind} of {own} channels and {max(found) + 1} "
            f"layers or more; this one has {inputs} and {layers}"
        )
    if lacking := [i for i in keeping_layers(model) if i not in found]:
        raise ValueError(f"`path` (={path!r}) of {policy.name} has no network of layer {lacking[0]}; {writes}")


def remembered(seen: Seen, path: str, inputs: Tensor) -> Tensor:
    """The memory of a policy: the scores of the kept positions, with those of the pass's tokens at the end.

    Args:
        inputs: [B, n, inputs], for the last n tokens.
    """
    scorer, n = scorers(path, inputs.device)[seen.layer], inputs.shape[1]
    new = scorer(inputs).transpose(1, 2)  # [B, H, n]
    memory = seen.memory.clone()
    memory[:, :, -n:] = torch.where(seen.asked[:, None], new.to(memory.dtype), memory[:, :, -n:])
    return memory


def with_ends(scores: Tensor, seen: Seen, sinks: int, recent: int) -> Tensor:
    """Scores [B, H_kv, T] in which a row's first and last tokens stay in any case."""
    order = seen.order()
    certain = ((order >= 0) & (order < sinks)) | seen.last(recent)
    return scores.masked_fill(certain, torch.inf)
