"""A list of operation names whose edits reach the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

from npuamp_fn import APEX_OPS
from npuamp_fn.apex.amp import registry

__all__ = ["OperationList", "names_of"]


class OperationList(list[str]):
    """Names of functions of one namespace that run by one rule; every edit of the names edits the O1 table.

    Args:
        module: The namespace.
        rule: ``"low"``, ``"full"`` or ``"promote"``; the list begins with what the built-in table gives this rule.

    >>> from npuamp_fn.apex.amp.lists.editable import OperationList
    >>> OperationList(torch.Tensor, "low")[:3]
    ['addbmm', 'addmm', 'addmv']
    """

    def __init__(self, module: Any, rule: str) -> None:
        super().__init__(names_of(module, rule))
        self._module, self._rule = module, rule

    def append(self, name: str) -> None:
        """Give a function this rule."""
        self.extend([name])

    def insert(self, index: SupportsIndex, name: str) -> None:
        """Give a function this rule."""
        self[index:index] = [name]  # type: ignore[misc]

    def extend(self, names: Iterable[str]) -> None:
        """Give functions this rule."""
        self[len(self) :] = list(names)

    def __iadd__(self, names: Iterable[str]) -> OperationList:  # type: ignore[override, misc]
        self.extend(names)
        return self

    def remove(self, name: str) -> None:
        """Leave a function alone."""
        del self[self.index(name)]

    def pop(self, index: SupportsIndex = -1) -> str:
        """Leave a function alone, and return its name."""
        name = self[index]
        del self[index]
        return name

    def clear(self) -> None:
        """Leave all of them alone."""
        del self[:]

    def __delitem__(self, index: Any) -> None:
        rest = list(self)
        del rest[index]
        self._become(rest, [])

    def __setitem__(self, index: Any, value: Any) -> None:
        new = list(self)
        value = list(value) if isinstance(index, slice) else value
        new[index] = value
        self._become(new, value if isinstance(index, slice) else [value])

    def _become(self, names: list[str], added: Iterable[str]) -> None:
        registry.follow(self._module, self._rule, added, set(self).difference(names))
        super().__setitem__(slice(None), names)


def names_of(module: Any, rule: str) -> list[str]:
    """Return the names in a namespace that the built-in table gives this rule."""
    return sorted(
        name for name, own in APEX_OPS.rules if own == rule and isinstance(name, str) and hasattr(module, name)
    )
