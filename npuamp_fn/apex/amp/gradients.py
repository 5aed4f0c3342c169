"""From the model's scaled gradients to the gradients an optimizer sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npuamp_fn import cast
from npuamp_fn.apex.amp.distributed import check_agreement, reduce_gradients
from npuamp_fn.apex.grads import add_all, dense, finite_flags, gather, unscale_all
from npuamp_fn.apex.masters import low_of, set_grad
from npuamp_fn.apex.optimizers.fused import FusedOptimizer
from npuamp_fn.apex.storage import Bucket, Waiting
from npuamp_fn.tree import HALVES
from npuamp_fn.tree_math import all_true

__all__ = ["clear_low_grads", "collect", "drop", "has_grads", "keep_scaled", "prepare", "restore"]


def prepare(optimizer: Any) -> None:
    """Take the gradients that are unscaled already out of the way of a backward pass."""
    kept = optimizer._amp_stash.kept
    for _, weights in optimizer._amp_stash.groups():
        for weight in weights:
            low = low_of(weight)
            if low is not None:
                low.grad = None  # its accumulated gradient is the master's
            elif weight.grad is not None:
                # A view may lie in a buffer of torch's DDP, which the backward pass will overwrite.
                kept.append((weight, weight.grad.clone() if weight.grad._is_view() else weight.grad))
                weight.grad = None


def has_grads(optimizer: Any) -> bool:
    """Tell whether a backward pass left gradients."""
    for _, weights in optimizer._amp_stash.groups():
        for weight in weights:
            low = low_of(weight)
            if (weight if low is None else low).grad is not None:
                return True
    return False


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
def keep_scaled(stash: Any, scale: Any) -> None:
    """Leave the gradients scaled, those of earlier passes too: then whoever clears them clears all."""
    for weight, old in stash.kept:
        again = old * float(scale.value)
        weight.grad = again if weight.grad is None else _sum(weight.grad, again)
    stash.kept = []


def drop(optimizer: Any, buckets: Sequence[Bucket] = ()) -> None:
    """Clear gradients that overflowed, so that no later pass adds to them."""
    for _, weights in optimizer._amp_stash.groups():
        for weight in weights:
            set_grad(weight, None)
    for bucket in buckets:
        if bucket.half is not None:
            bucket.clear_grads()


@torch.no_grad()
def collect(optimizer: Any, scale: Any, taken: set[int] | None = None) -> Tensor | None:
    """Unscale what a backward pass left, and add it to the gradients of earlier passes.

    Args:
        optimizer: Initialized.
        scale: The loss scale that the gradients carry.
        taken: Weights whose gradients were collected for another optimizer of this pass; this one's are added.

    Returns:
        shape [], bool: whether the new gradients are finite, all of them; ``None`` if there are none.
    """
    stash = optimizer._amp_stash
    flags: list[Tensor] = []
    in_buckets: set[int] = set()
    combined = stash.properties.combine_grad or stash.properties.combine_ddp
    fused = isinstance(optimizer, FusedOptimizer)
    stash.adopt_unfrozen()
    buckets = stash.buckets() if combined or fused else []
    if stash.properties.combine_ddp and buckets:
        check_agreement(optimizer, buckets[0].device)
    known = taken or set()
    for bucket in buckets:
        if combined or bucket.half is not None:
            in_buckets.update(map(id, bucket.weights))
            flags += _collect_bucket(bucket, scale, stash.properties, fused, known)
    in_buckets |= known
    weights = [w for _, group in stash.groups() for w in group if id(w) not in in_buckets]
    if taken is not None:
        taken |= in_buckets
        taken.update(map(id, weights))
    lows = [low_of(weight) for weight in weights]
    loose = [w.grad for w, low in zip(weights, lows, strict=True) if low is None and w.grad is not None]
    wide = [
        (w, _widened(low.grad))
        for w, low in zip(weights, lows, strict=True)
        if low is not None and low.grad is not None
    ]
    if loose or wide:
        flags += unscale_all([*map(_values, loose), *(grad for _, grad in wide)], scale)
    for master, grad in wide:
        master.grad = grad if master.grad is None else _sum(grad, master.grad)
    for weight, old in stash.kept:
        weight.grad = old if weight.grad is None else _sum(weight.grad, old)
    stash.kept, stash.scaled_by = [], None
    return all_true(flags) if flags else None


def _collect_bucket(bucket: Bucket, scale: Any, properties: Any, deferred: bool, taken: set[int]) -> list[Tensor]:
    """Give a bucket's weights their new gradients; ``deferred``: half ones may wait for an update that unscales."""
    sources = bucket.sources()
    found = [None if source is None else source.grad for source in sources]
    shared = [id(weight) in taken for weight in bucket.weights] if taken else [False] * len(found)
    for i, weight in enumerate(bucket.weights if taken else ()):
        if shared[i]:
            found[i] = None
            set_grad(weight, weight.grad)  # computes one that waits in the other optimizer's bucket
    fresh = [grad is not None for grad in found]
    if not any(fresh) and not properties.combine_ddp:  # with it, every rank takes part in every reduction
        return []
    low: Any = None
    if bucket.half is not None and properties.combine_grad:
        low = gather(bucket.layout, found, bucket.half, bucket.device)
        bucket.low_grads = low.buffers[0]
        for source, view, on in zip(sources, low.tensors(), fresh, strict=True):
            if source is not None and on:
                source.grad = view.data
    deferred = deferred and not properties.combine_ddp and not bucket.has_grads()
    if deferred and bucket.half is not None and all(grad is None or grad.dtype == bucket.half for grad in found):
        low = gather(bucket.layout, found, bucket.half, bucket.device) if low is None else low
        bucket.wait(Waiting(low, scale, fresh))
        return finite_flags(low.buffers, scale)
    wide = torch.float32 if bucket.dtype in HALVES else bucket.dtype
    flat: Any = gather(bucket.layout, found, wide, bucket.device) if low is None else cast(low, wide)
    if properties.combine_ddp:
        flat, fresh = reduce_gradients(flat, fresh, bucket.device)
        if not any(fresh):
            return []
    flags = unscale_all(flat.buffers, scale)
    old = [
        w.grad if bucket.half is not None or known else None for w, known in zip(bucket.weights, shared, strict=True)
    ]
    bucket.set_grads(
        cast(flat, bucket.dtype), [new or before is not None for new, before in zip(fresh, old, strict=True)]
    )
    pairs = [(weight.grad, before) for weight, before in zip(bucket.weights, old, strict=True) if before is not None]
    if pairs:
        add_all([grad for grad, _ in pairs], [before for _, before in pairs])
    return flags


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


def _widened(grad: Tensor) -> Tensor:
    return (grad if grad.layout == torch.strided else grad.to_dense()).to(torch.float32, copy=True)


def _values(grad: Tensor) -> Tensor:
    return grad if grad.layout == torch.strided else grad._values()


def _sum(grad: Tensor, old: Tensor) -> Tensor:
    if grad.layout == torch.strided:
        return (grad.detach() if grad.requires_grad else grad).add_(dense(old))  # views must stay recognisable
    return grad + old if old.layout == grad.layout else dense(grad).add_(old)
