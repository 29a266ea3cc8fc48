"""MatryoshkaKV (Lin et al., 2024, arXiv:2410.14731) without its training: principal components of keys and values."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from compress.kv.policy import Projecting
from compress.kv.precision import Projection
from compress.kv.support import key_shapes
from compress.method import knob

STEP = 4  # ranks are multiples of this, so that codes of 2 bits fill their bytes


@dataclass(frozen=True, kw_only=True)
class Matryoshka(Projecting):
    """Keeps keys and values as their projections onto the first principal components of each kv head.

    Queries are multiplied by projected keys, q · k ≈ (q U) · (k U), and the sums of projected values are lifted back to
    all channels once a step. The components are found once per model, on calibration tokens, by
    `compress.commands.find_components`. One file serves all ranks, because the components are sorted by their share.
    Prompts are read with exact keys and values, which are projected when they are kept. Projections come first:
    policies score the projected keys, and `kv_int` makes codes of them. The components belong to the model and are not
    counted in the bytes of a cache. Keys and values of different ranks are read by plain torch, because the decode
    kernels need the same number of channels in both.

    The paper starts its training from this form (PCA), and gives its loss at low ranks as the reason to train. Neither
    the training nor the search for a rank of each head is implemented here. Projecting values loses far more accuracy
    than projecting keys, and integer codes of the same size lose far less than either: compress/kv/README.md has the
    figures. Keys are projected after RoPE, which spreads them over more directions; keys that are stored before RoPE
    would have to be lifted and rotated again at every step. `find_components` prints the shares for both.
    """

    path: str = knob("", "file of the components, as `python -m compress.commands.find_components` writes it")
    key_rank: float = knob(
        0.5, "components of keys that are kept, as a share of the channels of a head", range=(0.0, 1.0), describes=True
    )
    value_rank: float = knob(
        1.0,
        "components of values that are kept, as a share of the channels of a head",
        range=(0.0, 1.0),
        describes=True,
    )

    name = "matryoshka"
    source = "Lin et al. 2024, arXiv:2410.14731, its PCA without training"

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob_name in ("key_rank", "value_rank"):
            if getattr(self, knob_name) == 0:
                raise ValueError(f"`{knob_name}` (=0) of {self.name} must be above 0, such as 0.5")

    def check(self, model: nn.Module) -> None:
        super().check(model)
        command = "`python -m compress.commands.find_components --model MODEL --out FILE` writes one"
        if not self.path:
            raise ValueError(f"`path` (='') of {self.name} must name a file of components; {command}")
        if not Path(self.path).is_file():
            raise ValueError(f"`path` (={self.path!r}) of {self.name} is no file; {command}")
        try:
            found = {number: tuple(one.keys.shape[:2]) for number, one in components(self.path).items()}
        except Exception as error:
            raise ValueError(f"`path` (={self.path!r}) of {self.name} holds no components; {command}") from error
        own, layers = key_shapes(model), model.config.get_text_config(decoder=True).num_hidden_layers
        for number, shape in found.items():
            if number >= layers or shape != own.get(number, shape):
                heads, channels = own[max(own)] if number >= layers else own[number]
                raise ValueError(
                    f"`path` (={self.path!r}) of {self.name} is of a model with {shape[0]} kv heads of {shape[1]} "
                    f"channels and {max(found) + 1} layers or more; this one has {heads} of {channels} and {layers}"
                )
        if lacking := [number for number in own if number not in found]:
            raise ValueError(
                f"`path` (={self.path!r}) of {self.name} has no components of layer {lacking[0]}; {command}"
            )

    def projection(self, layer: int) -> Projection | None:
        return _leading(self.path, Path(self.path).stat().st_mtime_ns, layer, self.key_rank, self.value_rank)


def rank_of(share: float, channels: int) -> int:
    """The number of components for a share of the channels: a multiple of 4, and at least 4."""
    return min(max(round(share * channels / STEP), 1) * STEP, channels)


def components(path: str) -> dict[int, Projection]:
    """All components of a file by layer, [H_kv, D, D] of keys and of values, the largest first."""
    return _read(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _leading(path: str, changed: int, layer: int, key_rank: float, value_rank: float) -> Projection | None:
    whole = _read(path, changed).get(layer)
    if whole is None:  # a layer whose attention was dropped
        return None

    def first(x: Tensor, share: float) -> Tensor:
        return x[..., : rank_of(share, x.shape[1])]

    return Projection(first(whole.keys, key_rank), first(whole.values, value_rank))


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> dict[int, Projection]:
    with safe_open(path, "pt") as file:
        layers = sorted({int(name.partition(".")[0]) for name in file.keys()})  # noqa: SIM118
        return {i: Projection(file.get_tensor(f"{i}.keys"), file.get_tensor(f"{i}.values")) for i in layers}
