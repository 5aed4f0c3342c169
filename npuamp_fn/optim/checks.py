"""Validation that all optimizers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from npuamp_fn.tree import describe

__all__ = ["check_closed_fraction", "check_fraction", "check_not_negative"]


def check_not_negative(optimizer: str, **values: Any) -> None:
    """Raise ``ValueError`` for a negative number, ``TypeError`` for none; tensors and schedules are not looked at.

    >>> check_not_negative("sgd", lr=-1.0)
    Traceback (most recent call last):
    ValueError: sgd: lr: expected a number of at least 0, found -1.0
    """
    for name, value in _numbers(optimizer, values):
        if not value >= 0:
            raise ValueError(f"{optimizer}: {name}: expected a number of at least 0, found {value!r}")


def check_fraction(optimizer: str, **values: Any) -> None:
    """Raise ``ValueError`` for a number outside [0, 1).

    >>> check_fraction("adam", beta1=1.0)
    Traceback (most recent call last):
    ValueError: adam: beta1: expected a number in [0, 1), found 1.0
    """
    for name, value in _numbers(optimizer, values):
        if not 0 <= value < 1:
            raise ValueError(f"{optimizer}: {name}: expected a number in [0, 1), found {value!r}")


def check_closed_fraction(optimizer: str, **values: Any) -> None:
    """Raise ``ValueError`` for a number outside [0, 1], both ends allowed.

    >>> check_closed_fraction("rmsprop", alpha=1.5)
    Traceback (most recent call last):
    ValueError: rmsprop: alpha: expected a number in [0, 1], found 1.5
    """
    for name, value in _numbers(optimizer, values):
        if not 0 <= value <= 1:
            raise ValueError(f"{optimizer}: {name}: expected a number in [0, 1], found {value!r}")


def _numbers(optimizer: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if _varies(value):
            continue
        try:
            bool(value >= 0)  # whatever orders like a number will do
        except TypeError:
            found, advice = f"a {type(value).__name__}", ""
            if isinstance(value, str):
                found, advice = describe(value), f"; write float({value!r})"
            elif name == "lr":
                advice = f"; parameters come later: write `state = optim.{optimizer}(1e-3).init(params)`"
            raise TypeError(
                f"{optimizer}: {name}: expected a number, a 0-dim tensor or a schedule, found {found}{advice}"
            ) from None
        yield name, value


def _varies(value: Any) -> bool:
    return isinstance(value, Tensor) or (callable(value) and not isinstance(value, nn.Module))
