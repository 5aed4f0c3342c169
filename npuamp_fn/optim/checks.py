"""Validation that all optimizers share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["check_fraction", "check_not_negative"]


def check_not_negative(optimizer: str, **values: Any) -> None:
    """Raise ``ValueError`` for a negative number; tensors and schedules are not looked at.

    >>> check_not_negative("sgd", lr=-1.0)
    Traceback (most recent call last):
    ValueError: sgd: lr: expected a number of at least 0, found -1.0
    """
    for name, value in values.items():
        if not isinstance(value, Tensor) and not callable(value) and not value >= 0:
            raise ValueError(f"{optimizer}: {name}: expected a number of at least 0, found {value!r}")


def check_fraction(optimizer: str, **values: Any) -> None:
    """Raise ``ValueError`` for a number outside [0, 1).

    >>> check_fraction("adam", beta1=1.0)
    Traceback (most recent call last):
    ValueError: adam: beta1: expected a number in [0, 1), found 1.0
    """
    for name, value in values.items():
        if not isinstance(value, Tensor) and not callable(value) and not 0 <= value < 1:
            raise ValueError(f"{optimizer}: {name}: expected a number in [0, 1), found {value!r}")


def check_closed_fraction(optimizer: str, **values: Any) -> None:
    """Raise ``ValueError`` for a number outside [0, 1], both ends allowed.

    >>> check_closed_fraction("rmsprop", alpha=1.5)
    Traceback (most recent call last):
    ValueError: rmsprop: alpha: expected a number in [0, 1], found 1.5
    """
    for name, value in values.items():
        if not isinstance(value, Tensor) and not callable(value) and not 0 <= value <= 1:
            raise ValueError(f"{optimizer}: {name}: expected a number in [0, 1], found {value!r}")
