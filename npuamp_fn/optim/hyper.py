"""Hyper-parameters as data: numbers, schedules, and values that depend on the parameter."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from npuamp_fn.tree import matches

__all__ = ["ByPath", "Hyper", "Schedule"]

Schedule: TypeAlias = Callable[[Tensor], Any]
"""A hyper-parameter as a function of the number of steps taken so far (int32, shape [])."""


class Hyper(Mapping[str, Any]):
    """Hyper-parameters by name: an immutable, hashable mapping.

    >>> Hyper(lr=0.1)["lr"]
    0.1
    """

    def __init__(self, **values: Any) -> None:
        self._values = {name: _plain(value) for name, value in values.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Any]:
        """Return names and values; Mapping's own view would look every name up again."""
        return self._values.items()

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"Hyper({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


@dataclass(frozen=True)
class ByPath:
    """A hyper-parameter that depends on the parameter: the value of the first pattern that matches its path.

    >>> ByPath((("*.bias", 0.0), ("*", 0.1)))["head.bias"]
    0.0
    """

    choices: tuple[tuple[str, Any], ...]

    def __getitem__(self, path: str) -> Any:
        """Return the value for a path."""
        for pattern, value in self.choices:
            if matches(path, pattern):
                return value
        raise ValueError(f"update: no hyper-parameter for `{path}`: none of {[p for p, _ in self.choices]} matches it")


def _plain(value: Any) -> Any:
    # NumPy's scalars are numbers too, but torch's operators take Python's only.
    is_scalar = hasattr(value, "item") and not isinstance(value, Tensor)
    return value.item() if is_scalar else value
