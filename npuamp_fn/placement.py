"""Where tensors lie in flat buffers: segments, buckets, padding and memory order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuamp_fn.tracing import is_wrapped

__all__ = [
    "CASTABLE",
    "ROW",
    "Bucket",
    "Place",
    "Segment",
    "address",
    "concatenate",
    "lay_out",
    "memory_order",
    "view_of",
]

ROW = 256
"""Every tensor starts on a row of this many elements, so that per-tensor work is row work (see kernels)."""

CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Segment:
    """The place of one tensor: ``size`` elements at ``offset`` of buffer ``bucket``."""

    path: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # dimensions from outermost to innermost in memory; None: contiguous
    dtype: torch.dtype  # of the leaf that was flattened
    bucket: int
    offset: int
    size: int

    def pack(self, leaf: Tensor) -> Tensor:
        """Return the leaf's elements in memory order, as one dimension."""
        return (leaf if self.order is None else leaf.permute(self.order)).reshape(-1)

    def unpack(self, piece: Tensor) -> Tensor:
        """View elements in memory order as the leaf; leading dimensions of the piece are kept."""
        if self.order is None and piece.dim() == 1:
            return piece if len(self.shape) == 1 else piece.view(self.shape)
        batch = piece.shape[:-1]
        if self.order is None:
            return piece.view((*batch, *self.shape))
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        view = piece.view((*batch, *(self.shape[d] for d in self.order)))
        return view.permute((*range(len(batch)), *(len(batch) + d for d in inverse)))


@dataclass(frozen=True)
class Bucket:
    """One buffer of a layout: its pieces are tensors and the padding between them."""

    device: torch.device
    dtype: torch.dtype
    size: int  # elements, padding included; a multiple of ROW
    segments: tuple[int, ...]  # indices into Layout.segments, in storage order
    pieces: tuple[int, ...]  # what the buffer splits into
    real: tuple[int, ...]  # which of the pieces are tensors, in the order of `segments`
    rows: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each tensor; every update asks for them

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(-(-self.pieces[index] // ROW) for index in self.real))


class Place(NamedTuple):
    """A tensor that a layout is to place; tensors of equal key share a bucket."""

    path: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    dtype: torch.dtype
    size: int
    key: tuple[Any, ...]


def lay_out(
    described: Sequence[Place], meaning: Callable[[tuple[Any, ...]], tuple[torch.device, torch.dtype, bool]]
) -> tuple[tuple[Segment, ...], tuple[Bucket, ...]]:
    """Place tensors one after another in the bucket of their key, each at the start of a row.

    Args:
        described: The tensors.
        meaning: Key -> device and dtype of its bucket, and whether it is kept in full precision (such come last).
    """
    segments: list[Any] = [None] * len(described)
    buckets: list[Bucket] = []
    keys = list(dict.fromkeys(place.key for place in described))
    for key in sorted(keys, key=lambda k: meaning(k)[2]):  # leaves kept in full precision come last
        device, dtype, _ = meaning(key)
        members, pieces, real, offset = [], [], [], 0
        for index, place in enumerate(described):
            if place.key != key:
                continue
            size, padding = place.size, _padding(place.size)
            segments[index] = Segment(place.path, place.shape, place.order, place.dtype, len(buckets), offset, size)
            members.append(index)
            real.append(len(pieces))
            pieces += [size, padding] if padding else [size]
            offset += size + padding
        buckets.append(Bucket(device, dtype, offset, tuple(members), tuple(pieces), tuple(real)))
    return tuple(segments), tuple(buckets)


def concatenate(
    segments: Sequence[Segment], bucket: Bucket, leaves: Sequence[Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Return the buffer of a bucket: its tensors in memory order, with zeros between; float32 and halves cast."""
    parts: list[Tensor] = []
    for index in bucket.segments:
        segment = segments[index]
        leaf = leaves[index]
        if dtype is not None and leaf.dtype in CASTABLE:
            leaf = leaf.to(dtype)
        parts.append(segment.pack(leaf))
        padding = _padding(segment.size)
        if padding:
            parts.append(parts[-1].new_zeros(padding))
    return torch.cat(parts)


def _padding(size: int) -> int:
    return -size % ROW


def memory_order(leaf: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a dense tensor from outermost to innermost in memory; ``None`` if that is their order.

    >>> memory_order(torch.ones(2, 3).T)
    (1, 0)
    """
    if leaf.is_contiguous():
        return None
    order = tuple(sorted(range(leaf.dim()), key=lambda d: -leaf.stride(d)))
    return order if leaf.permute(order).is_contiguous() else None


def address(leaf: Tensor) -> Any:
    """Return what is equal for two tensors whose elements begin at the same place."""
    # Some have no address that could be asked for (traced, fake and distributed tensors), or one that says nothing
    # (empty, expanded): then it is the object itself.
    if torch.compiler.is_compiling() or type(leaf) not in (Tensor, torch.nn.Parameter) or is_wrapped(leaf):
        return id(leaf)
    expanded = any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))
    if expanded or leaf.numel() == 0 or leaf.device.type == "meta":
        return id(leaf)
    return (leaf.device, leaf.data_ptr())


def view_of(leaf: Tensor) -> tuple[Any, ...]:
    """Return what else two tensors over the same elements have in common."""
    return (leaf.dtype, tuple(leaf.shape), leaf.stride())
