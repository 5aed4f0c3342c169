"""Flat storage: a parameter tree in one contiguous buffer per device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

from npuamp_fn.placement import (
    CASTABLE,
    ROW,
    Bucket,
    Place,
    Segment,
    address,
    concatenate,
    lay_out,
    memory_order,
    view_of,
)
from npuamp_fn.tree import (
    check_dtype,
    check_patterns,
    check_same_structure,
    describe,
    is_float,
    matches,
    struct,
    tree_flatten,
    tree_paths,
    tree_structure,
)

__all__ = ["ROW", "Bucket", "FlatTree", "Layout", "Segment", "flatten"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every leaf of a tree lies in the buffers: static, hashable, the same for parameters and moments.

    Compiled regions treat a layout as a constant, guarded by equality.

    >>> layout = flatten({"w": torch.ones(2, 3), "b": torch.ones(3)}).layout
    >>> layout.size, [(s.path, s.offset) for s in layout.segments]
    (9, [('w', 0), ('b', 256)])
    >>> layout.pack({"w": torch.zeros(2, 3), "b": torch.ones(3)}).segments()["b"]
    tensor([1., 1., 1.])
    """

    treedef: torch_pytree.TreeSpec
    places: tuple[int, ...]  # per tree leaf: index of its segment, or -1 - index into FlatTree.rest
    segments: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]
    _hash: list[int] = field(default_factory=list, init=False, repr=False)  # filled at first use

    def _key(self) -> tuple[Any, ...]:
        return (self.treedef, self.places, self.segments, self.buckets)

    def __reduce__(self) -> Any:
        # Without the hash, as those of strings differ between processes; torch's TreeSpec warns when it is unpickled.
        return _rebuild_layout, (self._skeleton(), self.places, self.segments, self.buckets)

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
            ValueError: structure or shape differs, or tied leaves do; the message names the first differing path.
        """
        leaves, rest = self._match(tree)
        buffers = tuple(concatenate(self.segments, bucket, leaves, dtype) for bucket in self.buckets)
        return FlatTree(buffers, rest, self)

    def difference(self, other: Layout) -> str:
        """Say where another layout first differs from this one."""
        for own, foreign in zip(self.segments, other.segments, strict=False):
            if own != foreign:
                return f"layouts differ, first at `{own.path}`: expected {own}, found {foreign}"
        count, other_count = len(self.segments), len(other.segments)
        if count != other_count:
            extra = (self if count > other_count else other).paths[min(count, other_count)]
            return f"layouts differ, first at `{extra}`: expected {count} tensors, found {other_count}"
        return "layouts differ in leaves that are no float tensors"

    def _match(self, tree: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
        leaves = tree_flatten(tree)[0]
        if tree_structure(tree) != self.treedef:
            check_same_structure(self._skeleton(), tree, "layout")
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
                    f"{describe(leaf)}"
                )
            if chosen[place] is not None and address(chosen[place]) != address(leaf):
                raise ValueError(
                    f"layout: leaf `{segment.path}` is stored once for several tied leaves, and the tree has different "
                    "tensors for them; add gradients of tied weights up first"
                )
            chosen[place] = leaf
        return chosen, tuple(rest)

    def _skeleton(self) -> Any:
        return torch_pytree.tree_unflatten(list(range(len(self.places))), self.treedef)


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
        if isinstance(dtype, str) and dtype != "original":
            raise TypeError(f'unflatten: expected a torch.dtype, "original" or None, found {dtype!r}')
        if not isinstance(dtype, str):
            check_dtype(dtype, "unflatten")
        tensors = (self.cast(dtype) if isinstance(dtype, torch.dtype) else self).tensors()
        if dtype == "original":
            segments = self.layout.segments
            tensors = [None if t is None else t.to(s.dtype) for t, s in zip(tensors, segments, strict=True)]
        leaves = [tensors[place] if place >= 0 else self.rest[-1 - place] for place in self.layout.places]
        return torch_pytree.tree_unflatten(leaves, self.layout.treedef)

    def tensors(self) -> list[Any]:
        """Return each tensor as a view of its buffer, in the layout's order; ``None`` where there is no buffer."""
        segments = self.layout.segments
        tensors: list[Any] = [None] * len(segments)
        for bucket, buffer in zip(self.layout.buckets, self.buffers, strict=True):
            if buffer is not None:
                pieces = buffer.split(bucket.pieces, dim=-1)
                for index, piece in zip(bucket.segments, bucket.real, strict=True):
                    tensors[index] = segments[index].unpack(pieces[piece])
        return tensors

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
        A pattern that matches nothing is ignored here; policies check theirs over all arguments.
        """
        check_dtype(dtype, "FlatTree.cast")
        if dtype is None:
            return self
        kept = [any(matches(segment.path, pattern) for pattern in keep) for segment in self.layout.segments]
        source = self
        if any(len({kept[i] for i in bucket.segments}) > 1 for bucket in self.layout.buckets):
            source = self._separate(kept)
        buffers = []
        for bucket, buffer in zip(source.layout.buckets, source.buffers, strict=True):
            if buffer is not None and buffer.dtype in CASTABLE:
                buffer = buffer.to(torch.float32 if kept[bucket.segments[0]] else dtype)
            buffers.append(buffer)
        return FlatTree(tuple(buffers), source.rest, source.layout)

    def _separate(self, kept: Sequence[bool]) -> FlatTree:
        # The same tensors in the same order, those to keep in buffers of their own, which come last.
        old = self.layout
        places = [
            Place(s.path, s.shape, s.order, s.dtype, s.size, (s.bucket, own))
            for s, own in zip(old.segments, kept, strict=True)
        ]
        buckets = [(bucket.device, bucket.dtype) for bucket in old.buckets]
        layout = Layout(old.treedef, old.places, *lay_out(places, lambda key: (*buckets[key[0]], key[1])))
        chunks: list[Any] = [None] * len(old.segments)
        for bucket, buffer in zip(old.buckets, self.buffers, strict=True):
            if buffer is not None:
                padded = [rows * ROW for rows in bucket.rows]
                for index, chunk in zip(bucket.segments, buffer.split(padded, dim=-1), strict=True):
                    chunks[index] = chunk
        buffers = []
        for bucket in layout.buckets:
            parts = [chunks[index] for index in bucket.segments]
            buffers.append(None if parts[0] is None else torch.cat(parts, dim=-1))
        return FlatTree(tuple(buffers), self.rest, layout)

    def map(self, fn: Callable[..., Tensor], *others: FlatTree) -> FlatTree:
        """Apply ``fn`` to the buffers, together with those of other FlatTrees of the same layout.

        Raises:
            ValueError: another layout; the message names the first differing path.
        """
        for other in others:
            if other.layout != self.layout:
                raise ValueError(f"FlatTree.map: {self.layout.difference(other.layout)}")
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
        TypeError: ``dtype`` is no floating-point dtype, or a leaf is a module or a generator instead of a tree.
        ValueError: two leaves are the same tensor and ``tie`` is False, or are different views of the same memory
            (a weight and its transpose), or a pattern matches nothing.

    >>> flatten({"w": torch.ones(3)}, torch.bfloat16).buffers[0].shape
    torch.Size([256])
    """
    check_dtype(dtype, "flatten")
    leaves = tree_flatten(tree)[0]
    paths = tree_paths(tree)
    if keep:
        check_patterns(keep, paths, "flatten(keep=...)")
    places: list[int] = []
    chosen: list[Tensor] = []
    described: list[Place] = []
    rest: list[Any] = []
    seen: dict[Any, int] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_float(leaf):
            if isinstance(leaf, (nn.Module, Iterator)):
                raise TypeError(f"flatten: `{path}`: {_tree_advice(leaf)}")
            rest.append(leaf)
            places.append(-len(rest))
            continue
        where = address(leaf)
        twin = seen.get(where)
        if twin is not None and view_of(leaf) != view_of(chosen[twin]):
            raise ValueError(
                f"flatten: `{described[twin].path}` and `{path}` are different views of the same memory; flattening "
                "would untie them. Make one from the other inside the function, or .clone() one."
            )
        if twin is not None and not tie:
            raise ValueError(
                f"flatten: `{described[twin].path}` and `{path}` are the same tensor; flattening would untie them. "
                "Drop one of the two names (`functionalize` does), pass flatten(..., tie=True), or .clone() one."
            )
        if twin is None:
            kept = any(matches(path, pattern) for pattern in keep)
            stored = leaf.dtype if kept or dtype is None or leaf.dtype not in CASTABLE else dtype
            twin = seen[where] = len(chosen)
            chosen.append(leaf)
            key = (leaf.device, stored, kept)
            described.append(Place(path, tuple(leaf.shape), memory_order(leaf), leaf.dtype, leaf.numel(), key))
        places.append(twin)
    layout = Layout(tree_structure(tree), tuple(places), *lay_out(described, lambda key: key))
    buffers = tuple(concatenate(layout.segments, bucket, chosen, bucket.dtype) for bucket in layout.buckets)
    return FlatTree(buffers, tuple(rest), layout)


def _tree_advice(leaf: Any) -> str:
    if isinstance(leaf, nn.Module):
        what, advice = f"the module {type(leaf).__name__}", "apply, params, buffers = functionalize(module)"
    else:
        what, advice = f"a {type(leaf).__name__}", "list(...), or dict(module.named_parameters()) to keep the names"
    return f"expected a tree of tensors, found {what}; write {advice}"


def _rebuild_layout(skeleton: Any, *rest: Any) -> Layout:
    return Layout(tree_structure(skeleton), *rest)
