"""Keys and values of a prompt as products of two small matrices; several layers share one of the two."""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.kv.precision import Precision
from compress.kv.storage import Slab
from kernels.kv_decode import KV, Listed, kv_decode
from kernels.kv_decode import MAX_TOKENS as KERNEL_TOKENS

Turn = Callable[[Tensor, Tensor, bool], Tensor]  # as `compress.kv.rotation.turn_of` gives it


def ranks_of(share: float, tokens: Tensor, channels: int) -> Tensor:
    """Rank of two factors that take this share of the bytes of [tokens, channels], at least 1; tokens: [B]."""
    rank = (share * tokens * channels / (tokens + channels).clamp(min=1)).floor().long()
    return rank.clamp(min=1).minimum(tokens.clamp(min=1)).clamp(max=channels)


def factors(x: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The best approximation of every x[b] [T, C] by a product of rank ranks[b] (Eckart and Young), in float64.

    Returns:
        [B, T, R], with R the largest rank, zeros behind a row's own rank, and columns of mean square 1; and [B, R, C].
    """
    B, T, C = x.shape
    x, most = x.double(), int(ranks.max())
    if T <= C:
        left = torch.linalg.eigh(x @ x.mT).eigenvectors[..., -most:].flip(-1)  # [B, T, R]
        right = left.mT @ x
    else:
        right = torch.linalg.eigh(x.mT @ x).eigenvectors[..., -most:].flip(-1).mT  # [B, R, C]
        left = x @ right.mT
    scale = left.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)
    unused = torch.arange(most, device=x.device) >= ranks[:, None, None]
    return (left / scale).masked_fill(unused, 0), right * scale.mT


class Basis:
    """The factor that several layers share: a row for every token. One layer `owns` it, and counts and reorders it.

    Attributes:
        tokens: [B, 1, T, R].
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class Factored:
    """Keys or values of one layer, basis.tokens @ lift; lift: [B, H, R, D]."""

    def __init__(self, basis: Basis, lift: Tensor, owns: bool) -> None:
        self.basis, self.lift, self.owns = basis, lift, owns

    @property
    def held(self) -> list[Tensor]:
        return [self.lift, *([self.basis.tokens] if self.owns else [])]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Choose or reorder batch rows, in all layers that share the basis or in none."""
        self.lift = change(self.lift)
        if self.owns:
            self.basis.tokens = change(self.basis.tokens)

    def dense(self) -> Tensor:
        """[B, H, T, D]"""
        return self.basis.tokens @ self.lift


class Whole:
    """Keys or values in their original form, [B, H, T, D]."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.contiguous()

    @property
    def held(self) -> list[Tensor]:
        return [self.x]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.x = change(self.x)

    def dense(self) -> Tensor:
        return self.x


class SharedSlab:
    """A prompt in factors, and behind it uncompressed tokens; it has the interface of `compress.kv.storage.Slab`.

    Keys in factors are held before RoPE, and turned whenever they are read.

    Attributes:
        due: whether there is a prompt behind the factors that is not part of them yet.
    """

    def __init__(self, keys: Factored | Whole, values: Factored | Whole, starts: Tensor, turn: Turn) -> None:
        """keys, values: of T positions; row (b, h) is positions starts[b, h] to T."""
        self.keys, self.values, self.turn = keys, values, turn
        self.starts, self.precision, self.due = starts, Precision(), False
        k, v = self.dense_prompt()
        self.prompt = k.shape[2]
        none = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (k, v))  # a slice would keep all of x in memory
        self.tail = Slab(*none, torch.zeros_like(starts), self.precision)

    @classmethod
    def of_tail(cls, slab: Slab, turn: Turn) -> "SharedSlab":
        """The positions of a slab, none of them in factors."""
        k, v = slab.dense()
        none = (Whole(x.new_empty(*x.shape[:2], 0, x.shape[3])) for x in (k, v))
        made = cls(*none, slab.starts, turn)
        made.tail = slab
        return made

    @property
    def length(self) -> int:
        """Number of positions of the longest row."""
        return self.prompt + self.tail.length

    @property
    def lengths(self) -> Tensor:
        """[B, H] int32"""
        return self.length - self.starts

    @property
    def held(self) -> list[Tensor]:
        """Every tensor that it holds; shared tensors count for their owner alone."""
        return [*self.keys.held, *self.values.held, *self.tail.held, self.starts]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Choose or reorder batch rows."""
        self.starts = change(self.starts).contiguous()
        for one in (self.keys, self.values, self.tail):
            one.rows(change)

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [B, H, m, D], for every row."""
        self.tail.append(k, v)
        self.due = self.due or k.shape[2] > KERNEL_TOKENS

    def drop_last(self, count: int) -> None:
        """Remove the last positions, which must not be in factors yet."""
        if count > self.tail.length:
            raise ValueError(
                f"the last {count} tokens cannot be taken back: all but {self.tail.length} are stored in factors"
            )
        self.tail.drop_last(count)

    def dense_prompt(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, T, D] of the positions in factors."""
        k, v = self.keys.dense(), self.values.dense()
        if isinstance(self.keys, Factored):
            k = self.turn(k.float(), places(self.starts, k.shape[2]), False).to(k.dtype)
        return k, v

    def dense(self) -> tuple[Tensor, Tensor]:
        """k, v [B, H, length, D]; values before a row's start are undefined."""
        if not self.prompt:
            return self.tail.dense()
        k, v = (torch.cat(pair, 2) for pair in zip(self.dense_prompt(), self.tail.dense(), strict=True))
        return k, v

    def attend(
        self, q: Tensor, *, scale: float, softcap: float | None, count: bool = False, listed: Listed | None = None
    ) -> tuple[Tensor, None]:
        """As `Slab.attend`, over all positions, without counting attention."""
        assert not count and listed is None, "methods that need these are refused beside it"
        y = kv_decode(q, KV(*self.dense()), self.lengths, starts=self.starts, scale=scale, softcap=softcap)
        return y, None


def places(starts: Tensor, length: int) -> Tensor:
    """[B, length]: positions of tokens, counted from the start of each row; starts: [B, H], equal for all heads."""
    return (torch.arange(length, device=starts.device) - starts[:, :1]).clamp(min=0)
