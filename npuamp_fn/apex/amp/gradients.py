"""From the model's scaled gradients to the gradients an optimizer sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn import all_finite, cast
from npuamp_fn.apex.amp.distributed import check_agreement, reduce_gradients
from npuamp_fn.apex.masters import low_of
from npuamp_fn.apex.storage import Bucket, Waiting, add_all, copy_all, dense, gather

__all__ = ["clear_low_grads", "collect", "prepare", "restore"]


def prepare(optimizer: Any) -> None:
    """Take the gradients that are unscaled already out of the way of a backward pass."""
    kept = optimizer._amp_stash.kept
    for _, weights in optimizer._amp_stash.groups():
        for weight in weights:
            low = low_of(weight)
            if low is not None:
                low.grad = None  # its accumulated gradient is the master's
            elif weight.grad is not None:
                kept.append((weight, weight.grad))
                weight.grad = None


def restore(optimizer: Any) -> None:
    """Undo a backward pass that was broken off: drop what it left, put back what was there before."""
    for _, weights in optimizer._amp_stash.groups():
        for weight in weights:
            low = low_of(weight)
            (weight if low is None else low).grad = None
    for weight, grad in optimizer._amp_stash.kept:
        weight.grad = grad
    optimizer._amp_stash.kept = []


@torch.no_grad()
def collect(optimizer: Any, scale: Any) -> Tensor | None:
    """Unscale what a backward pass left, and add it to the gradients of earlier passes.

    Args:
        optimizer: Initialized.
        scale: The loss scale that the gradients carry.

    Returns:
        shape [], bool: whether the new gradients are finite, all of them; ``None`` if there are none.
    """
    flags: list[Tensor] = []
    in_buckets: set[int] = set()
    buckets = optimizer._amp_stash.buckets()
    if optimizer._amp_stash.properties.combine_ddp and buckets:
        check_agreement(optimizer, buckets[0].device)
    for bucket in buckets:
        in_buckets.update(map(id, bucket.weights))
        _collect_bucket(bucket, scale, flags, optimizer._amp_stash.properties)
    loose = [
        weight
        for _, weights in optimizer._amp_stash.groups()
        for weight in weights
        if id(weight) not in in_buckets and weight.grad is not None
    ]
    if loose:
        grads = [_values(weight.grad) for weight in loose]
        unscaled = scale.unscale(grads)
        flags.append(all_finite(unscaled))
        copy_all(grads, unscaled)
    stash = optimizer._amp_stash
    for weight, old in stash.kept:
        weight.grad = old if weight.grad is None else _sum(weight.grad, old)
    stash.kept, stash.scaled_by = [], None
    if not flags:
        return None
    return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()


def _collect_bucket(bucket: Bucket, scale: Any, flags: list[Tensor], properties: Any) -> None:
    sources = bucket.sources()
    found = [None if source is None else source.grad for source in sources]
    fresh = [grad is not None for grad in found]
    if not any(fresh) and not properties.combine_ddp:  # with it, every rank takes part in every reduction
        return
    wide = torch.float64 if bucket.dtype == torch.float64 else torch.float32
    if properties.combine_grad and bucket.half is not None:
        low = gather(bucket.layout, found, bucket.half, bucket.device)
        bucket.low_grads = low.buffers[0]
        for source, view, on in zip(sources, low.unflatten(), fresh, strict=True):
            if source is not None and on:
                source.grad = view.data
    else:
        low = None
    earlier = bucket.half is not None and (bucket.waiting is not None or bucket.grads is not None or _any_grad(bucket))
    if bucket.half is not None and not earlier and not properties.combine_ddp and _all_of(found, bucket.half):
        low = gather(bucket.layout, found, bucket.half, bucket.device) if low is None else low
        flags.append(all_finite(low, scale.unscale(torch.ones((), device=bucket.device))))
        bucket.wait(Waiting(low, scale, fresh))
        return
    flat = gather(bucket.layout, found, wide, bucket.device) if low is None else cast(low, wide)
    if properties.combine_ddp:
        flat, fresh = reduce_gradients(flat, fresh, bucket.device)
        if not any(fresh):
            return
    flat = scale.unscale(flat)
    flags.append(all_finite(flat))
    old = [weight.grad for weight in bucket.weights] if bucket.low is not None else [None] * len(found)
    bucket.set_grads(
        cast(flat, bucket.dtype),
        [new or before is not None for new, before in zip(fresh, old, strict=True)],
    )
    pairs = [(weight.grad, before) for weight, before in zip(bucket.weights, old, strict=True) if before is not None]
    if pairs:
        add_all([grad for grad, _ in pairs], [before for _, before in pairs])


def _any_grad(bucket: Bucket) -> bool:
    return any(weight.grad is not None for weight in bucket.weights)


def _all_of(grads: list[Tensor | None], dtype: torch.dtype) -> bool:
    return all(grad is None or grad.dtype == dtype for grad in grads)


def clear_low_grads(optimizer: Any, set_to_none: bool) -> None:
    """Clear the gradients of the model's half parameters."""
    for _, weights in optimizer._amp_stash.groups():
        for weight in weights:
            low = low_of(weight)
            if low is None or low.grad is None:
                continue
            if set_to_none:
                low.grad = None
            else:
                low.grad.detach().zero_()


def _values(grad: Tensor) -> Tensor:
    return grad.detach() if grad.layout == torch.strided else grad.detach()._values()


def _sum(grad: Tensor, old: Tensor) -> Tensor:
    if grad.layout == torch.strided:
        return grad.detach().add_(dense(old))
    return grad + old
