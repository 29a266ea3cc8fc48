"""One choice for each layer under several limits, by integer programming."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

GAP = 1e-4  # relative distance from the optimum at which the solver stops
SECONDS = 20.0  # for one solution
INFEASIBLE = 2  # of scipy.optimize.milp


@dataclass(frozen=True)
class Costs:
    """What one choice of a layer costs, or a whole model.

    Attributes:
        bytes: stored. loss: nats per token.
        decode, prefill: change of the time of a decoded token and of a prompt, as shares of the original's.
    """

    bytes: float
    loss: float
    decode: float = 0.0
    prefill: float = 0.0

    def __add__(self, other: "Costs") -> "Costs":
        pairs = zip(self.values(), other.values(), strict=True)
        return Costs(*(a + b for a, b in pairs))

    def values(self) -> tuple[float, float, float, float]:
        """In the order of NAMES."""
        return self.bytes, self.loss, self.decode, self.prefill


NAMES = ("bytes", "loss", "decode", "prefill")
NOTHING = Costs(0.0, 0.0)


class LayersProgram:
    """A multiple-choice knapsack with up to four limits.

    Args:
        layers: the choices of each layer, by their names; at least one each.
        tied: groups of layers with the same choice, {layer: choice}, which all of them get or none of them.

    Source: the additive program of arXiv:2308.10438, section 4, solved exactly (HiGHS, scipy.optimize.milp).
    """

    def __init__(self, layers: Mapping[str, Mapping[str, Costs]], tied: Sequence[Mapping[str, str]] = ()) -> None:
        self.layers = {name: dict(choices) for name, choices in layers.items()}
        self.places = [(name, choice) for name, choices in self.layers.items() for choice in choices]
        self.costs = np.array([self.layers[name][choice].values() for name, choice in self.places])  # [choices, 4]
        numbers = {name: i for i, name in enumerate(self.layers)}
        rows = [numbers[name] for name, _ in self.places]
        ones = np.ones(len(rows))
        self._one_each = csr_matrix((ones, (rows, range(len(rows)))), shape=(len(numbers), len(rows)))
        self._tied = {place for group in tied for place in group.items()}
        pairs = [(first, other) for group in tied for first, *more in [list(group.items())] for other in more]
        columns = {place: column for column, place in enumerate(self.places)}
        entries = [(1, row, columns[first]) for row, (first, _) in enumerate(pairs)]
        entries += [(-1, row, columns[other]) for row, (_, other) in enumerate(pairs)]
        values, rows, chosen = (list(one) for one in zip(*entries, strict=True)) if entries else ([], [], [])
        self._same = csr_matrix((values, (rows, chosen)), shape=(len(pairs), len(self.places)))

    def best(self, minimise: str, limits: Mapping[str, float]) -> dict[str, str] | None:
        """The choice of every layer that makes the sum of `minimise` least; None if no choices keep all limits.

        Args:
            minimise: one of NAMES. limits: the largest sums, by these names.
        """
        scale = np.abs(self.costs).max(0) + 1e-30  # the solver's tolerances are absolute
        scaled = self.costs / scale
        constraints = [LinearConstraint(self._one_each, 1, 1)]
        if self._same.shape[0]:
            constraints.append(LinearConstraint(self._same, 0, 0))
        for name, limit in limits.items():
            k = NAMES.index(name)
            constraints.append(LinearConstraint(scaled[:, k][None], -np.inf, limit / scale[k]))
        found = milp(
            scaled[:, NAMES.index(minimise)],
            constraints=constraints,
            integrality=np.ones(len(self.places)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": GAP, "time_limit": SECONDS},
        )
        if found.status == INFEASIBLE:
            return None
        if found.x is None:
            raise ValueError(f"no choices were found: {found.message}")
        if found.status:
            warnings.warn(f"the choices may not be the best ones: {found.message}", stacklevel=2)
        return {name: choice for (name, choice), x in zip(self.places, found.x, strict=True) if x > 0.5}

    def uniform(
        self, minimise: str, limits: Mapping[str, float], kinds: Sequence[Sequence[str]]
    ) -> dict[str, str] | None:
        """As `best`, with one choice, none that is tied, for all layers of a kind; None if none keep all limits.

        Args:
            kinds: layers by their names, each in one kind; at most a few kinds.
        """
        free = {name: {c for c in own if (name, c) not in self._tied} for name, own in self.layers.items()}
        shared = [set.intersection(*(free[name] for name in kind)) for kind in kinds if kind]
        made = [
            {name: choice for kind, choice in zip(filter(None, kinds), several, strict=True) for name in kind}
            for several in itertools.product(*(sorted(one) for one in shared))
        ]
        within = [one for one in made if all(getattr(self.of(one), name) <= limit for name, limit in limits.items())]
        return min(within, key=lambda one: getattr(self.of(one), minimise), default=None)

    def of(self, chosen: Mapping[str, str]) -> Costs:
        """The sums of these choices."""
        return sum((self.layers[name][choice] for name, choice in chosen.items()), NOTHING)

    def front(self, minimise: str, over: str, limits: Mapping[str, float], points: int) -> list[Costs]:
        """The least sums of `minimise` at evenly spread limits of `over`, from the least possible without tied choices
        to the largest."""
        columns = self.costs[:, NAMES.index(over)]
        free = [(c, place) for c, place in zip(columns, self.places, strict=True) if place not in self._tied]
        rows = [[c for c, (layer, _) in free if layer == name] for name in self.layers]
        least, most = sum(map(min, rows)), sum(map(max, rows))
        found = [self.best(minimise, {**limits, over: limit}) for limit in _spread(least, most, points)]
        return [self.of(one) for one in found if one is not None]


def _spread(least: float, most: float, points: int) -> Sequence[float]:
    """Numbers from the least, a little more than which the program needs for its rounding, to the largest."""
    return np.linspace(least + 1e-9 * abs(least), most, points)
