"""YAML of sweeps, read strictly."""

import re
from typing import Any

import yaml

from notebooks.study.parameters import bounded, short_repr

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it: nine times as fast
MOST_ALIASED = 100_000  # values that aliases may add to those of the file


class Loader(FAST):
    """YAML with stricter rules: a key written twice is refused, as are aliases that multiply, and 1e-3 is a number."""

    def __init__(self, text: str):
        super().__init__(text)
        self._most = len(text) + MOST_ALIASED

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._count(node, {})
        return node

    def _count(self, node: yaml.Node, counts: dict[int, int]) -> int:
        """The number of values for which a node stands, with every alias written out."""
        if id(node) in counts:
            return counts[id(node)]
        counts[id(node)] = self._most  # until it is known: a node that holds itself stands for too many
        inside = () if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            inside = [one for pair in inside for one in pair]
        whole = 1 + sum(self._count(one, counts) for one in inside)
        if whole > self._most:
            said = f"with its aliases it stands for more than {self._most:,} values"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark)
        counts[id(node)] = whole
        return whole

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value):
            if not isinstance(key, str):
                said = f"the key {short_repr(key)} must be text"
                raise yaml.constructor.ConstructorError(None, None, said, node.start_mark)
            if key in seen:
                said = f"`{bounded(key, 100)}` is there twice"
                raise yaml.constructor.ConstructorError(None, None, said, node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)
