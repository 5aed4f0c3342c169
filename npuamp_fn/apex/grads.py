"""Lists of gradients: laid out in one buffer, unscaled and tested in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from npuamp_fn import FlatTree, all_finite
from npuamp_fn.flat import ROW

copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
add_all: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["add_all", "clip_grads", "copy_all", "dense", "gather", "finite_flags", "unscale_all"]


def gather(layout: Any, tensors: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> FlatTree:
    """Lay tensors out in one new buffer, zero where there is none."""
    with torch.no_grad():
        if all(t is None or (t.dtype == dtype and t.layout == torch.strided) for t in tensors):
            parts: list[Tensor] = []
            for segment, tensor in zip(layout.segments, tensors, strict=True):
                parts.append(_zeros(segment.size, dtype, device) if tensor is None else segment.pack(tensor))
                if segment.size % ROW:
                    parts.append(_padding(-segment.size % ROW, dtype, device))
            return FlatTree((torch.cat(parts),), (), layout)
        flat = FlatTree((_zeros(layout.buckets[0].size, dtype, device),), (), layout)
        pairs = [(view, t) for view, t in zip(flat.tensors(), tensors, strict=True) if t is not None]
        copy_all([view for view, _ in pairs], [t if t.layout == torch.strided else t.to_dense() for _, t in pairs])
        return flat


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


_padding = functools.cache(_zeros)  # always less than a row


def unscale_all(grads: Sequence[Tensor], scale: Any) -> list[Tensor]:
    """Divide gradients by a loss scale, in place and in one pass; return flags that tell whether they are finite.

    Returns:
        A flag of shape [], bool, for each device and dtype.
    """
    return _in_one_pass(grads, scale, lambda device: scale.unscale(_one(device)))


def finite_flags(grads: Sequence[Tensor], scale: Any) -> list[Tensor]:
    """Return flags as :func:`unscale_all` does, but leave the gradients as they are."""
    if scale.value < 1:
        return [all_finite(grads, scale.unscale(_one(grads[0].device)))]
    return _in_one_pass(grads, scale, _one)


def _in_one_pass(grads: Sequence[Tensor], scale: Any, factor: Callable[[torch.device], Tensor]) -> list[Tensor]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    flags = []
    for (device, dtype), alike in kinds.items():
        if dtype.is_complex:
            copy_all(alike, scale.unscale(alike))
            flags.append(all_finite(alike))
            continue
        found = torch.zeros((), device=device)
        _unscale(alike, found, factor(device))
        # The operator tests what it reads. A scale below 1 makes gradients larger: test those again.
        flags.append(found == 0 if scale.value >= 1 else all_finite(alike))
    return flags


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def clip_grads(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients down, in place, to a norm over all of them; return the norm before: shape []."""
    if not grads:
        return torch.zeros(())
    total = torch.nn.utils.get_total_norm(grads, norm_type)
    holders: Any = [SimpleNamespace(grad=grad) for grad in grads]
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total)
    return total


def dense(tensor: Tensor) -> Tensor:
    """Return a gradient as an ordinary tensor without a graph."""
    return tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
