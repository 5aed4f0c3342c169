"""Schedules: hyper-parameters as functions of the number of steps taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.optim.base import Schedule

__all__ = [
    "constant",
    "cosine",
    "join",
    "linear",
    "polynomial",
    "warmup",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]


@dataclass(frozen=True)
class Constant:
    """See :func:`constant`."""

    value: float

    def __call__(self, count: Tensor) -> Tensor:
        """Return the value at ``count``: float64, shape of ``count``."""
        return torch.full_like(_real(count), self.value)


@dataclass(frozen=True)
class Polynomial:
    """See :func:`polynomial`."""

    start: float
    end: float
    steps: int
    power: float

    def __call__(self, count: Tensor) -> Tensor:
        """Return the value at ``count``: float64, shape of ``count``."""
        left = 1 - (_real(count) / self.steps).clamp(0.0, 1.0)
        return self.end + (self.start - self.end) * left**self.power


@dataclass(frozen=True)
class Cosine:
    """See :func:`cosine`."""

    start: float
    steps: int
    end: float

    def __call__(self, count: Tensor) -> Tensor:
        """Return the value at ``count``: float64, shape of ``count``."""
        share = (_real(count) / self.steps).clamp(0.0, 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1 + torch.cos(math.pi * share))


@dataclass(frozen=True)
class Join:
    """See :func:`join`."""

    schedules: tuple[Any, ...]
    boundaries: tuple[int, ...]

    def __call__(self, count: Tensor) -> Tensor:
        """Return the value at ``count``: float64, shape of ``count``."""
        count = torch.as_tensor(count)
        value = _evaluate(self.schedules[0], count)
        for schedule, boundary in zip(self.schedules[1:], self.boundaries, strict=True):
            value = torch.where(count < boundary, value, _evaluate(schedule, (count - boundary).clamp(min=0)))
        return value


def constant(value: float) -> Schedule:
    """Make a schedule that always gives the same value.

    >>> optim.schedules.constant(0.1)(torch.tensor(5)).item()
    0.1
    """
    return Constant(_number("constant", "value", value))


def linear(start: float, end: float, steps: int) -> Schedule:
    r"""Make a straight line from ``start`` to ``end``, which it keeps after ``steps`` steps.

    Raises:
        ValueError: ``steps`` is less than 1, or a value is not finite.

    >>> schedule = optim.schedules.linear(1.0, 0.0, 4)
    >>> [schedule(torch.tensor(count)).item() for count in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    return polynomial(start, end, steps)


def polynomial(start: float, end: float, steps: int, power: float = 1.0) -> Schedule:
    r"""Make a polynomial from ``start`` to ``end``, which it keeps after ``steps`` steps.

    .. math:: \text{end} + (\text{start} - \text{end}) (1 - t / \text{steps})^{\text{power}}

    Raises:
        ValueError: ``steps`` is less than 1, ``power`` is not positive, or a value is not finite.

    Source: the numbers of ``torch.optim.lr_scheduler.PolynomialLR`` (with ``end`` 0).

    >>> optim.schedules.polynomial(1.0, 0.0, 4, power=2.0)
    Polynomial(start=1.0, end=0.0, steps=4, power=2.0)
    """
    if not power > 0:
        raise ValueError(f"polynomial: power: expected a positive number, found {power!r}")
    start, end = _number("polynomial", "start", start), _number("polynomial", "end", end)
    return Polynomial(start, end, _count("polynomial", steps), float(power))


def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    r"""Make half a cosine wave from ``start`` to ``end``, which it keeps after ``steps`` steps.

    .. math:: \text{end} + (\text{start} - \text{end}) (1 + \cos \pi t / \text{steps}) / 2

    Raises:
        ValueError: ``steps`` is less than 1, or a value is not finite.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    >>> schedule = optim.schedules.cosine(1.0, 4)
    >>> round(schedule(torch.tensor(2)).item(), 6), schedule(torch.tensor(99)).item()
    (0.5, 0.0)
    """
    return Cosine(_number("cosine", "start", start), _count("cosine", steps), _number("cosine", "end", end))


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Put schedules one after the other; each counts from 0 at its own beginning.

    Args:
        schedules: In order.
        boundaries: The step at which each but the first takes over, rising.

    Raises:
        TypeError: a schedule is not callable.
        ValueError: the numbers of schedules and boundaries do not fit, or boundaries do not rise.

    >>> schedule = optim.schedules.join([optim.schedules.constant(1.0), optim.schedules.linear(1.0, 0.0, 2)], [3])
    >>> [schedule(torch.tensor(count)).item() for count in (2, 3, 4, 5)]
    [1.0, 1.0, 0.5, 0.0]
    """
    schedules, boundaries = tuple(schedules), tuple(boundaries)
    for schedule in schedules:
        if not callable(schedule):
            raise TypeError(
                f"join: expected schedules, found {schedule!r} of type {type(schedule).__name__}; for a fixed value "
                "write constant(value)"
            )
    if not schedules:
        raise ValueError("join: expected at least one schedule, found none")
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"join: expected {len(schedules) - 1} boundaries between {len(schedules)} schedules, found "
            f"{len(boundaries)}"
        )
    if any(a >= b for a, b in zip((0, *boundaries), boundaries, strict=False)):
        raise ValueError(f"join: expected positive, rising boundaries, found {list(boundaries)}")
    return Join(schedules, boundaries)


def warmup(steps: int, schedule: Schedule | float, start: float = 0.0) -> Schedule:
    """Rise in a straight line from ``start`` to the first value of a schedule, then follow it.

    Args:
        steps: How long the rise takes; the schedule then counts from 0.
        schedule: What follows: a schedule of this module, or a number to stay at.
        start: The value at step 0.

    Raises:
        TypeError: ``schedule`` is not a schedule.
        ValueError: ``steps`` is less than 1, or ``start`` is not finite.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017.

    >>> schedule = optim.schedules.warmup(4, optim.schedules.cosine(1.0, 100))
    >>> [round(schedule(torch.tensor(count)).item(), 4) for count in (0, 1, 4, 104)]
    [0.0, 0.25, 1.0, 0.0]
    """
    after = constant(schedule) if isinstance(schedule, (int, float)) else schedule
    if not callable(after):
        raise TypeError(f"warmup: expected a schedule or a number, found {type(schedule).__name__}")
    steps = _count("warmup", steps)
    peak = float(_evaluate(after, torch.zeros((), dtype=torch.int32)))
    return join([linear(start, peak, steps), after], [steps])


def warmup_constant(value: float, warmup_steps: int) -> Schedule:
    """Rise from 0 to ``value`` and stay there; see :func:`warmup`.

    >>> optim.schedules.warmup_constant(1.0, 10)(torch.tensor(5)).item()
    0.5
    """
    return warmup(warmup_steps, value)


def warmup_linear(peak: float, warmup_steps: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to ``peak`` in ``warmup_steps`` and fall in a straight line to ``end`` at step ``steps``.

    Raises:
        ValueError: ``steps`` is not greater than ``warmup_steps``.

    >>> schedule = optim.schedules.warmup_linear(1.0, 2, 6)
    >>> [schedule(torch.tensor(count)).item() for count in (1, 2, 4, 6)]
    [0.5, 1.0, 0.5, 0.0]
    """
    return warmup(warmup_steps, linear(peak, end, _rest("warmup_linear", warmup_steps, steps)))


def warmup_cosine(peak: float, warmup_steps: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to ``peak`` in ``warmup_steps`` and fall in half a cosine wave to ``end`` at step ``steps``.

    Raises:
        ValueError: ``steps`` is not greater than ``warmup_steps``.

    >>> schedule = optim.schedules.warmup_cosine(1.0, 2, 6)
    >>> [round(schedule(torch.tensor(count)).item(), 4) for count in (1, 2, 4, 6)]
    [0.5, 1.0, 0.5, 0.0]
    """
    return warmup(warmup_steps, cosine(peak, _rest("warmup_cosine", warmup_steps, steps), end))


def _real(count: Any) -> Tensor:
    return torch.as_tensor(count).double()


def _evaluate(schedule: Any, count: Tensor) -> Tensor:
    value = schedule(count)
    return value.double() if isinstance(value, Tensor) else torch.full_like(_real(count), value)


def _number(schedule: str, name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{schedule}: {name}: expected a finite number, found {value!r}")
    return float(value)


def _count(schedule: str, steps: int) -> int:
    if steps < 1:
        raise ValueError(f"{schedule}: steps: expected at least 1, found {steps!r}")
    return steps


def _rest(schedule: str, warmup_steps: int, steps: int) -> int:
    if steps <= warmup_steps:
        raise ValueError(f"{schedule}: expected more steps than the {warmup_steps} of the warm-up, found {steps}")
    return steps - warmup_steps
