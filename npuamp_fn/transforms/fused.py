"""Choosing how an optimizer is run: ``fused_update`` and ``explain``."""

from __future__ import annotations

from typing import Any, overload

from npuamp_fn import kernels
from npuamp_fn.flat import FlatTree
from npuamp_fn.optim.base import Optimizer
from npuamp_fn.optim.partition import Partition

__all__ = ["explain", "fused_update"]


@overload
def fused_update(optimizer: Optimizer, donate: bool = False, kernel: str = "auto") -> Optimizer: ...
@overload
def fused_update(optimizer: Partition, donate: bool = False, kernel: str = "auto") -> Partition: ...
def fused_update(optimizer: Any, donate: bool = False, kernel: str = "auto") -> Any:
    """Run an optimizer with the fastest kernel that fits.

    Args:
        optimizer: Any optimizer.
        donate: Whether ``update`` writes into ``params`` and the state, step count included, and returns those same
            objects. Without it new tensors are made.
        kernel: "reference" (the rule's text, eager), "aten" (torch's fused operators, Adam family), "compiled" (the
            rule's text compiled into one pass over a FlatTree's buffers), or "auto": compiled for buffers of 2**20
            elements and more (inside ``torch.compile`` the text itself, which becomes such a pass there), else aten,
            else reference.

    Returns:
        An optimizer; on a FlatTree its update is one call per buffer.

    Raises:
        TypeError: not an optimizer.
        ValueError: unknown kernel; or, at ``update``, one that cannot run this rule on these tensors.

    >>> fused_update(optim.adamw(1e-3), donate=True).donate
    True
    """
    if not isinstance(optimizer, (Optimizer, Partition)):
        raise TypeError(
            f"fused_update: expected an optimizer, found {type(optimizer).__name__}; write "
            "fused_update(optim.adamw(1e-3))"
        )
    if kernel not in kernels.KERNELS:
        raise ValueError(f"fused_update: unknown kernel {kernel!r}; known: {kernels.KERNELS}")
    return optimizer.replace(donate=donate, kernel=kernel)


def explain(optimizer: Optimizer | Partition, params: Any) -> str:
    """Say which kernel will update which parameters, and why; for a partition, for each of its parts.

    >>> print(explain(fused_update(optim.adamw(1e-3)), {"w": torch.ones(3)}))
    adamw: kernel aten, 1 float32 tensors one by one, new tensors
    because: torch's fused operator for adamw; not compiled: the parameters are separate tensors; flatten(params) would
    make it one pass
    """
    if isinstance(optimizer, Partition):
        return "\n".join(explain(group, part) for group, part in optimizer.parts(params))
    name, reason, items = optimizer.choice(params)
    dtypes = ", ".join(dict.fromkeys(str(item.param.dtype).removeprefix("torch.") for item in items))
    where = "updated in place" if optimizer.donate else "new tensors"
    if isinstance(params, FlatTree) and not optimizer.rule.whole_leaves:
        shape = f"{len(params.layout.segments)} tensors in {len(items)} {dtypes} buffers"
    else:
        shape = f"{len(items)} {dtypes} tensors one by one"
    return f"{optimizer.rule.name}: kernel {name}, {shape}, {where}\nbecause: {reason}"
