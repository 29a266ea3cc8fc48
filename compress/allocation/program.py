"""The best choice for every layer under a budget, by dynamic programming."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MOST_STATES = 1 << 16  # largest number of states of the dynamic program


class Choice(NamedTuple):
    """One way to store a layer: its cost (bytes, or another unit of the budget) and its loss."""

    cost: int
    loss: float


class BudgetProgram:
    """One choice for each layer, so that the sum of losses is least for every possible sum of costs.

    The state of the program is the sum of costs so far (a multiple-choice knapsack). Costs are counted in units of
    their greatest common divisor. If that would give more than `MOST_STATES` states, a coarser unit is used and every
    layer's cost is rounded up: the budget is still kept, and up to one unit for each layer may be unused.
    """

    def __init__(self, layers: Mapping[str, Sequence[Choice]]) -> None:
        """
        Args:
            layers: at least one choice for each layer.
        """
        self.layers = {name: list(choices) for name, choices in layers.items()}
        least = {name: min(choice.cost for choice in choices) for name, choices in self.layers.items()}
        self.smallest = sum(least.values())  # the least cost of all layers
        more = [[choice.cost - least[name] for choice in choices] for name, choices in self.layers.items()]
        most = sum(map(max, more))
        self._unit = max(math.gcd(*(cost for costs in more for cost in costs)), math.ceil(most / MOST_STATES), 1)
        self._steps = [[math.ceil(cost / self._unit) for cost in costs] for costs in more]
        states = sum(map(max, self._steps)) + 1
        self._least = np.full(states, np.inf)  # least loss of all layers for at most this number of units
        self._least[:] = 0.0
        self._chosen = np.zeros((len(self.layers), states), dtype=np.int16)
        for i, choices in enumerate(self.layers.values()):
            before, self._least = self._least, np.full(states, np.inf)
            for k, (choice, units) in enumerate(zip(choices, self._steps[i], strict=True)):
                total = before[: states - units] + choice.loss
                better = total < self._least[units:]
                self._least[units:][better] = total[better]
                self._chosen[i, units:][better] = k

    def within(self, budget: float) -> dict[str, int]:
        """The number of each layer's choice, so that their total cost is at most `budget`.

        Raises:
            ValueError: even the smallest choices cost more.
        """
        if budget < self.smallest:
            raise ValueError(f"the budget (={budget:g}) is less than the smallest choices cost, {self.smallest}")
        return self._at(min(int((budget - self.smallest) // self._unit), len(self._least) - 1))

    def losing(self, most: float) -> dict[str, int]:
        """The number of each layer's choice, so that their total cost is least and their total loss is at most `most`.

        Raises:
            ValueError: the choices that lose least lose more.
        """
        if not self._least[-1] <= most:
            raise ValueError(f"the loss (={most:g}) is less than the best choices lose, {self._least[-1]:.4g}")
        return self._at(int(np.argmax(self._least <= most)))  # losses fall with the budget

    def _at(self, state: int) -> dict[str, int]:
        """The number of each layer's choice in the best solution of this state."""
        numbers: dict[str, int] = {}
        for i, name in reversed(list(enumerate(self.layers))):
            numbers[name] = int(self._chosen[i, state])
            state -= self._steps[i][numbers[name]]
        return {name: numbers[name] for name in self.layers}

    def of(self, numbers: Mapping[str, int]) -> Choice:
        """The total cost and loss of these choices."""
        made = [self.layers[name][number] for name, number in numbers.items()]
        return Choice(sum(choice.cost for choice in made), sum(choice.loss for choice in made))

    def curve(self, points: int = 48) -> list[Choice]:
        """Costs and least losses from the smallest choices to the largest, at evenly spread budgets."""
        states = np.unique(np.linspace(0, len(self._least) - 1, points).round().astype(int))
        return [self.of(self.within(self.smallest + int(state) * self._unit)) for state in states]
