"""Flat storage: a parameter tree in one contiguous buffer per device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from npuamp_fn.tracing import is_wrapped
from npuamp_fn.tree import check_patterns, is_float, matches, struct, tree_flatten, tree_paths, tree_structure

__all__ = ["ROW", "Bucket", "FlatTree", "Layout", "Segment", "flatten"]

ROW = 256
"""Every tensor starts on a row of this many elements, so that per-tensor work is row work (see kernels)."""

_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


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


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every leaf of a tree lies in the buffers: static, hashable, the same for parameters and moments.

    Compiled regions treat a layout as a constant, guarded by equality.
    """

    treedef: torch_pytree.TreeSpec
    places: tuple[int, ...]  # per tree leaf: index of its segment, or -1 - index into FlatTree.rest
    segments: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]
    _hash: list[int] = field(default_factory=list, init=False, repr=False)  # filled at first use

    def _key(self) -> tuple[Any, ...]:
        return (self.treedef, self.places, self.segments, self.buckets)

    def __hash__(self) -> int:
        if not self._hash:
            self._hash.append(hash(self._key()))
        return self._hash[0]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Layout) and self._key() == other._key()

    @property
    def paths(self) -> tuple[str, ...]:
        """The dotted path of every segment."""
        return tuple(segment.path for segment in self.segments)

    @property
    def size(self) -> int:
        """The number of real elements, padding excluded."""
        return sum(segment.size for segment in self.segments)

    def pack(self, tree: Any, dtype: torch.dtype | None = None) -> FlatTree:
        """Lay a tree of the same structure and shapes (gradients, say) out in this layout.

        Args:
            tree: Leaves of the shapes this layout was made for; other dtypes are fine.
            dtype: Cast float32 and half leaves to this dtype on the way.

        Raises:
            ValueError: structure or shape differs; the message names the first differing path.
        """
        leaves, rest = self._match(tree)
        buffers = tuple(_concatenate(self, bucket, leaves, dtype) for bucket in self.buckets)
        return FlatTree(buffers, rest, self)

    def _match(self, tree: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
        leaves = tree_flatten(tree)[0]
        if tree_structure(tree) != self.treedef:
            paths, found = self._all_paths(), tree_paths(tree)
            differing = next((p for p, q in zip(paths, found, strict=False) if p != q), None)
            raise ValueError(
                f"layout: the tree has another structure: first differing leaf `{differing or (paths + found)[-1]}` "
                f"(expected {len(paths)} leaves, found {len(found)})"
            )
        chosen: list[Any] = [None] * len(self.segments)
        rest: list[Any] = []
        for leaf, place in zip(leaves, self.places, strict=True):
            if place < 0:
                rest.append(leaf)
                continue
            segment = self.segments[place]
            if not is_float(leaf) or tuple(leaf.shape) != segment.shape:
                raise ValueError(
                    f"layout: leaf `{segment.path}`: expected a float tensor of shape {segment.shape}, found "
                    f"{_describe(leaf)}"
                )
            chosen[place] = leaf
        return chosen, tuple(rest)

    def _all_paths(self) -> list[str]:
        return tree_paths(torch_pytree.tree_unflatten(list(range(len(self.places))), self.treedef))


torch_pytree.register_constant(Layout)


@struct(static=("layout",))
class FlatTree:
    """A tree whose float leaves lie in one contiguous buffer per (device, dtype).

    It is a pytree of its buffers, so differentiating with respect to it gives a FlatTree of gradients, and
    moments, masters and gradients share one layout. Each tensor is padded to whole rows of 256 elements; the
    padding is zero. ``None`` in place of a buffer means that the tree has nothing there.

    >>> flat = flatten({"w": torch.ones(2, 3), "b": torch.zeros(3), "steps": 7})
    >>> flat.unflatten()["w"].shape, flat.unflatten()["steps"], flat.layout.paths
    (torch.Size([2, 3]), 7, ('w', 'b'))
    """

    buffers: tuple[Tensor | None, ...]  # each: shape [..., size], one per bucket of the layout
    rest: tuple[Any, ...]  # leaves that are not float tensors, in tree order
    layout: Layout

    def unflatten(self, dtype: torch.dtype | str | None = None) -> Any:
        """Return the tree, its leaves views of the buffers.

        Leading (batch) dimensions of the buffers are kept. Writing into the views writes into the buffers.

        Args:
            dtype: ``None`` keeps the buffers' dtype; ``"original"`` gives each leaf the dtype it was flattened
                with; a dtype casts the buffers first (float32 and half ones).

        Raises:
            TypeError: ``dtype`` is something else.
        """
        if not (dtype is None or dtype == "original" or isinstance(dtype, torch.dtype)):
            raise TypeError(f'unflatten: expected a torch.dtype, "original" or None, found {dtype!r}')
        source = self.cast(dtype) if isinstance(dtype, torch.dtype) else self
        tensors: list[Any] = [None] * len(self.layout.segments)
        for bucket, buffer in zip(self.layout.buckets, source.buffers, strict=True):
            if buffer is None:
                continue
            pieces = buffer.split(bucket.pieces, dim=-1)
            for index, piece in zip(bucket.segments, bucket.real, strict=True):
                segment = self.layout.segments[index]
                tensor = segment.unpack(pieces[piece])
                tensors[index] = tensor.to(segment.dtype) if dtype == "original" else tensor
        leaves = [tensors[place] if place >= 0 else self.rest[-1 - place] for place in self.layout.places]
        return torch_pytree.tree_unflatten(leaves, self.layout.treedef)

    def segments(self) -> dict[str, Tensor]:
        """Return each tensor's elements as a view of its buffer: path -> shape [..., size], padding excluded."""
        views = {}
        for segment in self.layout.segments:
            buffer = self.buffers[segment.bucket]
            if buffer is not None:
                views[segment.path] = buffer.narrow(-1, segment.offset, segment.size)
        return views

    def cast(self, dtype: torch.dtype | None, keep: Sequence[str] = ()) -> FlatTree:
        """Cast the float32 and half buffers; tensors whose path matches ``keep`` become float32.

        Buffers that already fit are returned as they are. A buffer of which only a part is kept is laid out
        anew (one copy); ``flatten(tree, keep=...)`` gives kept tensors a buffer of their own, which avoids that.
        """
        if dtype is None:
            return self
        kept = [any(matches(segment.path, pattern) for pattern in keep) for segment in self.layout.segments]
        source = self
        if any(len({kept[i] for i in bucket.segments}) > 1 for bucket in self.layout.buckets):
            source = flatten(self.unflatten(), keep=keep)
            kept = [any(matches(segment.path, pattern) for pattern in keep) for segment in source.layout.segments]
        buffers = []
        for bucket, buffer in zip(source.layout.buckets, source.buffers, strict=True):
            if buffer is not None and buffer.dtype in _CASTABLE:
                buffer = buffer.to(torch.float32 if kept[bucket.segments[0]] else dtype)
            buffers.append(buffer)
        return FlatTree(tuple(buffers), source.rest, source.layout)

    def map(self, fn: Callable[..., Tensor], *others: FlatTree) -> FlatTree:
        """Apply ``fn`` to the buffers, together with those of other FlatTrees of the same layout."""
        buffers = tuple(
            None if any(b is None for b in group) else fn(*group)
            for group in zip(self.buffers, *(other.buffers for other in others), strict=True)
        )
        return FlatTree(buffers, self.rest, self.layout)


def flatten(tree: Any, dtype: torch.dtype | None = None, *, keep: Sequence[str] = (), tie: bool = False) -> FlatTree:
    """Copy a tree into one contiguous buffer per (device, dtype).

    Float leaves of any memory format go into buffers; other leaves (ints, bools, complex, ``None``, Python
    values) are carried along in ``FlatTree.rest``. The operation is differentiable.

    Args:
        tree: Any pytree.
        dtype: Cast float32 and half leaves to this dtype on the way; float64 leaves stay.
        keep: Dotted-path patterns of leaves that stay as they are and get a buffer of their own.
        tie: Store leaves that are the same tensor once (tied weights). Without it they are an error, because
            flattening would silently untie them.

    Raises:
        ValueError: two leaves are the same tensor and ``tie`` is False, or a pattern matches nothing.

    >>> flatten({"w": torch.ones(3)}, torch.bfloat16).buffers[0].shape
    torch.Size([256])
    """
    leaves = tree_flatten(tree)[0]
    paths = tree_paths(tree)
    if keep:
        check_patterns(keep, paths, "flatten(keep=...)")
    places: list[int] = []
    chosen: list[Tensor] = []
    described: list[tuple[str, tuple[Any, ...]]] = []  # path and bucket key, per segment
    rest: list[Any] = []
    seen: dict[Any, int] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_float(leaf):
            rest.append(leaf)
            places.append(-len(rest))
            continue
        identity = _identity(leaf)
        twin = seen.get(identity)
        if twin is not None and not tie:
            raise ValueError(
                f"flatten: `{described[twin][0]}` and `{path}` are the same tensor; flattening would untie them. "
                "Drop one of the two names (`functionalize` does), pass flatten(..., tie=True), or .clone() one."
            )
        if twin is None:
            kept = any(matches(path, pattern) for pattern in keep)
            stored = leaf.dtype if kept or dtype is None or leaf.dtype not in _CASTABLE else dtype
            twin = seen[identity] = len(chosen)
            chosen.append(leaf)
            described.append((path, (leaf.device, stored, kept)))
        places.append(twin)
    layout = _lay_out(tree_structure(tree), places, chosen, described)
    buffers = tuple(_concatenate(layout, bucket, chosen, bucket.dtype) for bucket in layout.buckets)
    return FlatTree(buffers, tuple(rest), layout)


def _lay_out(
    treedef: torch_pytree.TreeSpec,
    places: Iterable[int],
    leaves: Sequence[Tensor],
    described: Sequence[tuple[str, tuple[Any, ...]]],
) -> Layout:
    segments: list[Any] = [None] * len(leaves)
    buckets: list[Bucket] = []
    keys = list(dict.fromkeys(key for _, key in described))
    for key in sorted(keys, key=lambda k: k[2]):  # leaves kept in full precision come last
        device, dtype, _ = key
        members, pieces, real, offset = [], [], [], 0
        for index, (path, own) in enumerate(described):
            if own != key:
                continue
            leaf = leaves[index]
            size = leaf.numel()
            padding = -size % ROW
            shape = tuple(leaf.shape)
            segments[index] = Segment(path, shape, _memory_order(leaf), leaf.dtype, len(buckets), offset, size)
            members.append(index)
            real.append(len(pieces))
            pieces += [size, padding] if padding else [size]
            offset += size + padding
        buckets.append(Bucket(device, dtype, offset, tuple(members), tuple(pieces), tuple(real)))
    return Layout(treedef, tuple(places), tuple(segments), tuple(buckets))


def _concatenate(layout: Layout, bucket: Bucket, leaves: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    parts: list[Tensor] = []
    for index, piece in zip(bucket.segments, bucket.real, strict=True):
        segment = layout.segments[index]
        leaf = leaves[index]
        if dtype is not None and leaf.dtype in _CASTABLE:
            leaf = leaf.to(dtype)
        parts.append(segment.pack(leaf))
        if piece + 1 < len(bucket.pieces) and piece + 1 not in bucket.real:
            parts.append(parts[-1].new_zeros(bucket.pieces[piece + 1]))
    return torch.cat(parts)


def _memory_order(leaf: Tensor) -> tuple[int, ...] | None:
    if leaf.is_contiguous():
        return None
    order = tuple(sorted(range(leaf.dim()), key=lambda d: -leaf.stride(d)))
    return order if leaf.permute(order).is_contiguous() else None


def _identity(leaf: Tensor) -> Any:
    # Equal for two tensor objects over the same elements, as far as that can be known.
    if torch.compiler.is_compiling() or leaf.numel() == 0 or leaf.device.type == "meta" or is_wrapped(leaf):
        return id(leaf)
    return (leaf.device, leaf.dtype, leaf.data_ptr(), tuple(leaf.shape), leaf.stride())


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a {leaf.dtype} tensor of shape {tuple(leaf.shape)}"
    return f"{leaf!r} of type {type(leaf).__name__}"
