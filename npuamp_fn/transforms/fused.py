"""Choosing how an optimizer is run: ``fused_update`` and ``explain``."""

from __future__ import annotations

from typing import Any

from npuamp_fn import kernels
from npuamp_fn.flat import FlatTree
from npuamp_fn.optim.base import Optimizer

__all__ = ["explain", "fused_update"]


def fused_update(optimizer: Optimizer, donate: bool = False, kernel: str = "auto") -> Optimizer:
    """Run an optimizer with the fastest kernel that fits.

    Args:
        optimizer: Any optimizer.
        donate: Whether ``update`` consumes ``params`` and the state: they are updated in place and must be
            rebound to what it returns. Without it new tensors are made.
        kernel: "auto", "reference" (the rule's text, eager) or "aten" (torch's fused operators, Adam family).

    Returns:
        An optimizer; on a FlatTree its update is one call per buffer.

    Raises:
        TypeError: not an optimizer.
        ValueError: unknown kernel; or, at ``update``, one that cannot run this rule on these tensors.

    >>> fused_update(optim.adamw(1e-3), donate=True).donate
    True
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"fused_update: expected an optimizer, found {type(optimizer).__name__}; write "
            "fused_update(optim.adamw(1e-3))"
        )
    if kernel not in kernels.KERNELS:
        raise ValueError(f"fused_update: unknown kernel {kernel!r}; known: {kernels.KERNELS}")
    return optimizer.replace(donate=donate, kernel=kernel)


def explain(optimizer: Optimizer, params: Any) -> str:
    """Say which kernel will update which parameters, and why.

    >>> print(explain(fused_update(optim.sgd(0.1)), flatten({"w": torch.ones(3)})))
    sgd: kernel reference (torch has no fused operator for sgd), 1 call on float32 buffers of 1 tensors, new tensors
    """
    name, reason, items = optimizer.choice(params)
    dtypes = ", ".join(dict.fromkeys(str(item.param.dtype).removeprefix("torch.") for item in items))
    where = "updated in place" if optimizer.donate else "new tensors"
    if isinstance(params, FlatTree):
        shape = f"{len(items)} call on {dtypes} buffers of {len(params.layout.segments)} tensors"
    else:
        shape = f"{len(items)} {dtypes} tensors one by one; flatten(params) would make it one call"
    return f"{optimizer.rule.name}: kernel {name} ({reason}), {shape}, {where}"
