"""A list of operation names whose edits reach the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from npuamp_fn import APEX_OPS
from npuamp_fn.apex.amp import registry

__all__ = ["OperationList", "names_of"]


class OperationList(list[str]):
    """Names of functions of one namespace that run by one rule; adding and removing names edits the O1 table."""

    def __init__(self, module: Any, names: Iterable[str], register: Callable[[Any, str], None]) -> None:
        super().__init__(names)
        self._module, self._register = module, register

    def append(self, name: str) -> None:
        """Give a function this rule."""
        self._register(self._module, name)
        super().append(name)

    def extend(self, names: Iterable[str]) -> None:
        """Give functions this rule."""
        for name in names:
            self.append(name)

    def __iadd__(self, names: Iterable[str]) -> OperationList:  # type: ignore[override, misc]
        self.extend(names)
        return self

    def remove(self, name: str) -> None:
        """Leave a function alone."""
        super().remove(name)
        registry.forget(self._module, name)


def names_of(module: Any, rule: str) -> list[str]:
    """Return the names in a namespace that the built-in table gives this rule."""
    return sorted(
        name for name, own in APEX_OPS.rules if own == rule and isinstance(name, str) and hasattr(module, name)
    )
