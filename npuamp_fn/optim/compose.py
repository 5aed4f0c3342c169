"""Rules made of rules, so that whatever surrounds an algorithm runs in the same pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot
from npuamp_fn.optim.base import Hyper, Optimizer

__all__ = ["GradientRule", "extend", "put_before"]


@dataclass(frozen=True)
class GradientRule:
    """A gradient transform in the form of a rule, run on each tensor right before the optimizer's own rule.

    Args:
        name: What error messages call it.
        update: ``(grad, param, slots, count, hyper, seg) -> (grad, slots)``, pure; see :class:`Rule`.
        hyper: Its hyper-parameters; they join those of the optimizer, so their names must be its own.
        slots: Its state per parameter; likewise.
        whole_leaves: Whether it needs each tensor in its own shape.

    >>> optim.clip_by_value(1.0).hyper
    Hyper(clip_value=1.0)
    """

    name: str
    update: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    hyper: Hyper = field(default_factory=Hyper)
    slots: tuple[Slot, ...] = ()
    whole_leaves: bool = False


@dataclass(frozen=True)
class _Before:
    """The update of a rule with a gradient transform before it."""

    first: GradientRule
    rule: Rule

    def __call__(
        self, grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Transform the gradient, then run the rule; each sees its own slots only."""
        grad, own = self.first.update(grad, param, _chosen(slots, self.first.slots), count, hyper, seg)
        param, rest = self.rule.update(grad, param, _chosen(slots, self.rule.slots), count, hyper, seg)
        return param, {**rest, **own}


def put_before(first: GradientRule, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with a gradient transform before its rule.

    Raises:
        ValueError: a hyper-parameter or slot of the transform is there already.
    """
    return extend(
        optimizer, first.name, _Before(first, optimizer.rule), first.hyper, first.slots, whole_leaves=first.whole_leaves
    )


def extend(
    optimizer: Optimizer,
    name: str,
    update: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    hyper: Hyper,
    slots: tuple[Slot, ...],
    whole_leaves: bool = False,
) -> Optimizer:
    """Return the optimizer with another update function, and more hyper-parameters and slots.

    Raises:
        ValueError: a hyper-parameter or slot is there already.
    """
    rule = optimizer.rule
    there = {*optimizer.hyper, *(slot.name for slot in rule.slots)}
    twice = there & {*hyper, *(slot.name for slot in slots)}
    if twice:
        raise ValueError(f"{name}: {rule.name} already has {sorted(twice)}; use {name} once")
    composed = Rule(f"{name}, {rule.name}", update, (*rule.slots, *slots), rule.whole_leaves or whole_leaves)
    return optimizer.replace(rule=composed, hyper=Hyper(**optimizer.hyper, **hyper))


def _chosen(slots: dict[str, Tensor], names: tuple[Slot, ...]) -> dict[str, Tensor]:
    return {slot.name: slots[slot.name] for slot in names}
