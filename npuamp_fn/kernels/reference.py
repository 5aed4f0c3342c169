"""The reference kernel: the rule's text, run eagerly; every other kernel must agree with it."""

from __future__ import annotations

import torch
from torch import Tensor

from npuamp_fn.kernels.rounding import round_stochastically
from npuamp_fn.kernels.rule import HyperValues, Item, Result, Step, compute_dtype
from npuamp_fn.tracing import materialized

__all__ = ["run"]


def run(step: Step, items: list[Item]) -> list[Result]:
    """Update every item by the rule; where ``finite`` is False nothing changes, bit for bit."""
    return [_run_one(step, item) for item in items]


def _run_one(step: Step, item: Item) -> Result:
    dtype = compute_dtype(item.weights.dtype)
    grad = item.grad.to(dtype)
    if step.factor is not None:
        grad = grad * materialized(step.factor.to(dtype))
    expand = item.segments.expand
    hyper = {name: expand(v.double()) if isinstance(v, Tensor) else v for name, v in item.hyper.items()}
    slots = {name: slot.to(dtype) for name, slot in item.slots.items()}
    new, new_slots = step.rule.update(
        grad, item.weights.to(dtype), slots, expand(item.count), HyperValues(hyper), item.segments
    )
    per_tensor = {slot.name for slot in step.rule.slots if slot.per == "tensor"}
    if item.real is not None:
        new = torch.where(item.real, new, 0.0)
        new_slots = {n: s if n in per_tensor else torch.where(item.real, s, 0.0) for n, s in new_slots.items()}

    flags = None if item.finite is None else expand(item.finite)

    def keep(value: Tensor, old: Tensor, where: Tensor | None = flags) -> Tensor:
        value = value.to(old.dtype)
        if where is not None:
            value = torch.where(where, value, old)
        return old.copy_(value) if step.donate else value

    kept_slots = {  # in the order of the item's, whatever the rule's
        name: keep(new_slots[name], old, item.finite if name in per_tensor else flags)
        for name, old in item.slots.items()
    }
    if item.master is None:
        return Result(keep(new, item.param), kept_slots, None)
    master = keep(new, item.master)
    if item.index is not None:
        half = round_stochastically(new, item.param.dtype, expand(item.count), item.index(new))
        return Result(keep(half, item.param), kept_slots, master)
    # The half copy always is the rounded master, also after a skip: it need not be read.
    half = item.param.copy_(master) if step.donate else master.to(item.param.dtype)
    return Result(half, kept_slots, master)
