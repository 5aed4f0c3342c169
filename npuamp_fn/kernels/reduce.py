"""Norm and finite test of large buffers in one read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npuamp_fn import tree_math
from npuamp_fn.flat import FlatTree
from npuamp_fn.kernels.inductor import WORTH_COMPILING, compile_once
from npuamp_fn.tracing import transform_is_active

__all__ = ["all_finite", "finite_and_norm", "global_norm"]

_STREAMS = 8  # one stream of loads does not fill the memory bus: eight are 1.5 times faster, and more accurate
_TINY = 2.0**-96  # squares of (x * _TINY) cannot overflow for finite x
_HUGE = 2.0**40  # where squares overflow, smaller elements do not count


def all_finite(tree: Any, factor: Tensor | None = None) -> Tensor:
    """Tell whether all float leaves, times ``factor``, are finite: as :func:`npuamp_fn.all_finite`, in one read."""
    return finite_and_norm(tree, factor)[0]


def global_norm(tree: Any) -> Tensor:
    """Return the Euclidean norm of all float leaves together: as :func:`npuamp_fn.global_norm`, in one read."""
    norms = _norms(tree, None)
    return tree_math.global_norm(tree) if norms is None else _total(norms)


def finite_and_norm(tree: Any, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return whether all float leaves, times ``factor``, are finite, and their norm if the same read gave it."""
    norms = _norms(tree, factor)
    if norms is None:
        return tree_math.all_finite(tree, factor), None
    return tree_math.all_true([finite for _, finite in norms]), _total(norms)


def _total(norms: list[tuple[Tensor, Tensor]]) -> Tensor:
    first = norms[0][0]
    if len(norms) == 1:
        return first
    return torch.stack([norm.to(first.device).double() for norm, _ in norms]).square().sum().sqrt().float()


def _norms(tree: Any, factor: Tensor | None) -> list[tuple[Tensor, Tensor]] | None:
    # (norm, finite) per buffer, or None where the general code is right.
    if not isinstance(tree, FlatTree) or transform_is_active():
        return None
    buffers = [buffer for buffer in tree.buffers if buffer is not None]
    if sum(buffer.numel() for buffer in buffers) < WORTH_COMPILING:
        return None
    norms = []
    for buffer in buffers:
        if buffer.device.type not in ("cpu", "cuda") or buffer.dim() != 1 or buffer.dtype == torch.float64:
            return None
        if buffer.requires_grad:
            return None
        streams = buffer.view(_STREAMS, -1)
        if torch.compiler.is_compiling():  # the region takes in the text itself
            norms.append(_norm_and_finite(streams, torch.ones((), device=buffer.device) if factor is None else factor))
            continue
        kernel = _kernel(buffer.dtype, buffer.device)
        if kernel is None:
            return None
        norms.append(tuple(kernel(streams, _one(buffer.device) if factor is None else factor)))
    return norms


@functools.cache
def _kernel(dtype: torch.dtype, device: torch.device) -> Callable[..., Any] | None:
    # The example is large because Inductor takes a small sum for not worth several threads, or care with rounding.
    return compile_once(
        "the norm", _norm_and_finite, [torch.ones(_STREAMS, 2**16, dtype=dtype, device=device), _one(device)]
    )


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _norm_and_finite(streams: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    values = [stream.float() * factor for stream in streams.unbind(0)]
    squares = _sum([value * value for value in values])
    # Huge but finite values overflow the squares, not the tiny squares; inf and NaN reach both. Others are left out
    # of the latter: scaled down they would be subnormal, with which processors take twenty times as long.
    huge = [torch.where(value.abs() < _HUGE, 0.0, value) * _TINY for value in values]
    tiny_squares = _sum([value * value for value in huge])
    norm = torch.where(torch.isfinite(squares), squares.sqrt(), tiny_squares.sqrt() / _TINY)
    return norm, torch.isfinite(tiny_squares)


def _sum(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0].sum()
