"""Parts of flat storage: some of the tensors of a FlatTree as a FlatTree of their own, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.flat import Bucket, FlatTree, Layout, Segment

__all__ = ["Part", "gather", "part_of", "scatter"]


@dataclass(frozen=True)
class Part:
    """Some of the tensors of a layout."""

    layout: Layout  # of the part alone; the same tree, with nothing in the other places
    sources: tuple[int, ...]  # per buffer of the part: the buffer of the whole
    runs: tuple[tuple[tuple[int, int], ...], ...]  # per buffer of the part: offset and size in the buffer of the whole


def part_of(layout: Layout, chosen: tuple[bool, ...]) -> Part:
    """Return the part of a layout that has the chosen tensors.

    >>> flat = flatten({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)})
    >>> part_of(flat.layout, (True, False, True)).runs
    (((0, 256), (512, 256)),)
    """
    return (_part_of.__wrapped__ if torch.compiler.is_compiling() else _part_of)(layout, chosen)


@lru_cache(maxsize=64)
def _part_of(layout: Layout, chosen: tuple[bool, ...]) -> Part:
    numbers = {old: new for new, old in enumerate(i for i, own in enumerate(chosen) if own)}
    segments: list[Any] = [None] * len(numbers)
    buckets, sources, runs = [], [], []
    for source, bucket in enumerate(layout.buckets):
        members, pieces, real, own_runs, offset = [], [], [], [], 0
        for old, piece in zip(bucket.segments, bucket.real, strict=True):
            if not chosen[old]:
                continue
            segment = layout.segments[old]
            padded = piece + 1 < len(bucket.pieces) and piece + 1 not in bucket.real
            own = [segment.size, bucket.pieces[piece + 1]] if padded else [segment.size]
            segments[numbers[old]] = Segment(
                segment.path, segment.shape, segment.order, segment.dtype, len(buckets), offset, segment.size
            )
            if own_runs and sum(own_runs[-1]) == segment.offset:
                own_runs[-1] = (own_runs[-1][0], own_runs[-1][1] + sum(own))
            else:
                own_runs.append((segment.offset, sum(own)))
            members.append(numbers[old])
            real.append(len(pieces))
            pieces += own
            offset += sum(own)
        if members:
            buckets.append(Bucket(bucket.device, bucket.dtype, offset, tuple(members), tuple(pieces), tuple(real)))
            sources.append(source)
            runs.append(tuple(own_runs))
    places, left_out = [], 0
    for place in layout.places:
        if place >= 0 and chosen[place]:
            places.append(numbers[place])
        else:
            left_out += 1
            places.append(-left_out)
    return Part(Layout(layout.treedef, tuple(places), tuple(segments), tuple(buckets)), tuple(sources), tuple(runs))


def gather(flat: FlatTree, part: Part) -> FlatTree:
    """Return the tensors of a part: a view where they are contiguous in their buffer, else a copy."""
    buffers = []
    for source, runs in zip(part.sources, part.runs, strict=True):
        whole = flat.buffers[source]
        pieces = [] if whole is None else [whole.narrow(-1, *run) for run in runs]
        buffers.append(None if whole is None else pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1))
    left_out = sum(place < 0 for place in part.layout.places)
    return FlatTree(tuple(buffers), (None,) * left_out, part.layout)


def scatter(flat: FlatTree, results: list[tuple[Part, FlatTree]], donated: bool) -> FlatTree:
    """Return the tree with the results in place of their parts; if donated, written into its buffers."""
    pieces: list[list[tuple[int, int, Tensor]]] = [[] for _ in flat.buffers]
    for part, result in results:
        for source, runs, buffer in zip(part.sources, part.runs, result.buffers, strict=True):
            if buffer is None or (donated and len(runs) == 1):
                continue  # a view of the whole: written already
            for (offset, size), piece in zip(runs, buffer.split([size for _, size in runs], dim=-1), strict=True):
                pieces[source].append((offset, size, piece))
    buffers = []
    for whole, own in zip(flat.buffers, pieces, strict=True):
        if whole is None or not own:
            buffers.append(whole)
        elif donated:
            for offset, size, piece in own:
                whole.narrow(-1, offset, size).copy_(piece)
            buffers.append(whole)
        else:
            buffers.append(_assemble(whole, sorted(own, key=lambda entry: entry[0])))
    return FlatTree(tuple(buffers), flat.rest, flat.layout)


def _assemble(whole: Tensor, pieces: list[tuple[int, int, Tensor]]) -> Tensor:
    filled, end = [], 0
    for offset, size, piece in pieces:
        if offset > end:
            filled.append(whole.narrow(-1, end, offset - end))
        filled.append(piece)
        end = offset + size
    if end < whole.shape[-1]:
        filled.append(whole.narrow(-1, end, whole.shape[-1] - end))
    return filled[0] if len(filled) == 1 else torch.cat(filled, dim=-1)
