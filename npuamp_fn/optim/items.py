"""From trees to the items a kernel runs on, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuamp_fn.flat import ROW, Bucket, FlatTree
from npuamp_fn.kernels.rule import Item, LeafSegments, Result, RowSegments, Rule, present
from npuamp_fn.tracing import under_transform
from npuamp_fn.tree import is_float, tree_flatten, tree_leaves, tree_paths, tree_unflatten

__all__ = [
    "PerTensor",
    "check_donation",
    "flat_items",
    "float_paths",
    "leaf_items",
    "numbered",
    "put_flat",
    "put_leaves",
]


class PerTensor(NamedTuple):
    """A hyper-parameter with a value of its own for each float leaf: numbers or 0-dim tensors."""

    values: tuple[Any, ...]

    def column(self, indices: Sequence[int], device: torch.device) -> Tensor:
        """Return the values of some leaves as one tensor: float64."""
        chosen = [self.values[index] for index in indices]
        if any(isinstance(value, Tensor) for value in chosen):
            return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in chosen])
        return torch.tensor(chosen, dtype=torch.float64, device=device)


def float_paths(params: Any) -> list[str]:
    """Return the paths of the float leaves, in the order in which vectors of counts and hyper-parameters have them."""
    if isinstance(params, FlatTree):
        return list(params.layout.paths)
    return [path for path, leaf in zip(tree_paths(params), tree_leaves(params), strict=True) if is_float(leaf)]


def leaf_items(
    rule: Rule, hyper: dict[str, Any], count: Tensor, finite: Tensor | None, grads: Any, params: Any, state: Any
) -> list[Item]:
    """Return one item per float leaf of a plain tree."""
    leaves = tree_leaves(params)
    paths = tree_paths(params)
    slots = {slot.name: tree_leaves(state.slots[slot.name]) for slot in rule.slots}
    masters = tree_leaves(state.master) if state.master != () else [None] * len(leaves)
    floats = [index for index, leaf in enumerate(leaves) if is_float(leaf)]
    gradients = tree_leaves(grads)
    shared = not any(map(_is_per_tensor, hyper.values()))
    return [
        Item(
            path=paths[i],
            grad=gradients[i],
            param=leaves[i],
            slots={name: values[i] for name, values in slots.items()},
            master=masters[i],
            count=_entry(count, order),
            hyper=hyper if shared else {name: _entry(value, order) for name, value in hyper.items()},
            finite=_entry(finite, order),
            segments=LeafSegments(order),
            real=None,
        )
        for order, i in enumerate(floats)
    ]


def put_leaves(rule: Rule, results: Sequence[Result], params: Any, state: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return params, slots and masters with the results at the float leaves."""
    leaves, treedef = tree_flatten(params)
    floats = [index for index, leaf in enumerate(leaves) if is_float(leaf)]

    def put(values: Sequence[Any], others: Sequence[Any]) -> Any:
        filled = list(others)
        for index, value in zip(floats, values, strict=True):
            filled[index] = value
        return tree_unflatten(treedef, filled)

    blank = [None] * len(leaves)
    slots = {slot.name: put([r.slots[slot.name] for r in results], blank) for slot in rule.slots}
    master = () if state.master == () else put([r.master for r in results], blank)
    return put([r.param for r in results], leaves), slots, master


def flat_items(
    rule: Rule, hyper: dict[str, Any], count: Tensor, finite: Tensor | None, grads: Any, params: FlatTree, state: Any
) -> list[Item]:
    """Return one item per buffer, seen as rows of ROW elements; one per tensor for a rule of whole leaves."""
    buffers = [buffer for buffer in params.buffers if buffer is not None]
    if len(buffers) != len(params.buffers):
        raise ValueError("update: expected parameters with all their buffers, found a FlatTree that lacks some")
    for buffer in buffers:
        if buffer.dim() != 1:
            raise ValueError(
                f"update: the parameters have {buffer.dim() - 1} leading batch dimensions; write vmap(optimizer.update)"
            )
    if rule.whole_leaves:
        return _whole_leaf_items(rule, hyper, count, finite, grads, params, state)
    items = []
    for index, (bucket, buffer) in enumerate(zip(params.layout.buckets, buffers, strict=True)):

        def rows(tree: Any, index: int = index) -> Tensor:
            return tree.buffers[index].view(-1, ROW)

        def own(value: Any, bucket: Bucket = bucket, device: torch.device = buffer.device) -> Any:
            if isinstance(value, PerTensor):
                return value.column(bucket.segments, device)
            if not isinstance(value, Tensor) or value.dim() == 0 or len(params.layout.buckets) == 1:
                return value
            return value.index_select(0, torch.tensor(bucket.segments, device=value.device))

        slots = {
            slot.name: state.slots[slot.name][index] if slot.per == "tensor" else rows(state.slots[slot.name])
            for slot in rule.slots
        }
        eps = hyper.get("eps", 1)
        safe = all(map(present, eps.values)) if isinstance(eps, PerTensor) else present(eps)
        real = None if safe else _real_elements(bucket, buffer.device)
        items.append(
            Item(
                path=", ".join(params.layout.segments[i].path for i in bucket.segments[:3]),
                grad=rows(grads),
                param=rows(params),
                slots=slots,
                master=rows(state.master) if state.master != () and state.master.buffers[index] is not None else None,
                count=own(count),
                hyper={name: own(value) for name, value in hyper.items()},
                finite=own(finite),
                segments=RowSegments(bucket.rows, buffer.device, real, bucket.segments),
                real=real,
            )
        )
    return items


def put_flat(rule: Rule, results: Sequence[Result], params: FlatTree, state: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return params, slots and masters with the results as their buffers."""
    join = _join_leaves if rule.whole_leaves else _join_rows
    slots = {}
    for slot in rule.slots:
        values = [result.slots[slot.name] for result in results]
        if slot.per == "element":
            slots[slot.name] = join(values, state.slots[slot.name])
        elif rule.whole_leaves:
            buckets = params.layout.buckets
            slots[slot.name] = tuple(torch.stack([values[i] for i in bucket.segments]) for bucket in buckets)
        else:
            slots[slot.name] = tuple(values)
    master = () if state.master == () else join([result.master for result in results], state.master)
    return join([result.param for result in results], params), slots, master


def _join_rows(values: Sequence[Tensor | None], like: FlatTree) -> FlatTree:
    buffers = tuple(None if rows is None else rows.view(-1) for rows in values)
    return FlatTree(buffers, like.rest, like.layout)


def _whole_leaf_items(
    rule: Rule, hyper: dict[str, Any], count: Tensor, finite: Tensor | None, grads: Any, params: FlatTree, state: Any
) -> list[Item]:
    layout = params.layout

    def views(flat: FlatTree) -> list[Any]:
        pieces: list[Any] = [None] * len(layout.segments)
        for bucket, buffer in zip(layout.buckets, flat.buffers, strict=True):
            split = () if buffer is None else buffer.split(bucket.pieces)
            for i, piece in zip(bucket.segments, bucket.real if split else (), strict=bool(split)):
                segment, elements = layout.segments[i], split[piece]
                pieces[i] = elements.view(segment.shape) if segment.order is None else segment.unpack(elements)
        return pieces

    def entries(values: tuple[Tensor, ...]) -> list[Any]:
        pieces: list[Any] = [None] * len(layout.segments)
        for bucket, vector in zip(layout.buckets, values, strict=True):
            for i, entry in zip(bucket.segments, vector.unbind(0), strict=True):
                pieces[i] = entry
        return pieces

    slots = {slot.name: (entries if slot.per == "tensor" else views)(state.slots[slot.name]) for slot in rule.slots}
    gradients, weights = views(grads), views(params)
    masters = views(state.master) if state.master != () else [None] * len(weights)
    shared = not any(map(_is_per_tensor, hyper.values()))
    return [
        Item(
            path=segment.path,
            grad=gradients[i],
            param=weights[i],
            slots={name: values[i] for name, values in slots.items()},
            master=masters[i],
            count=_entry(count, i),
            hyper=hyper if shared else {name: _entry(value, i) for name, value in hyper.items()},
            finite=_entry(finite, i),
            segments=LeafSegments(i),
            real=None,
        )
        for i, segment in enumerate(layout.segments)
    ]


def _join_leaves(values: Sequence[Tensor | None], like: FlatTree) -> FlatTree:
    buffers = []
    for bucket, old in zip(like.layout.buckets, like.buffers, strict=True):
        if old is None:
            buffers.append(None)
            continue
        parts = [old.new_zeros(size) for size in bucket.pieces]
        for i, piece in zip(bucket.segments, bucket.real, strict=True):
            value = values[i]
            if value is not None:
                parts[piece] = like.layout.segments[i].pack(value)
        buffers.append(torch.cat(parts))
    return FlatTree(tuple(buffers), like.rest, like.layout)


def numbered(item: Item) -> Item:
    """Return the item with numbers for its elements, so that its half copy is rounded stochastically."""
    segments = item.segments
    return replace(item, index=segments.index) if isinstance(segments, (LeafSegments, RowSegments)) else item


def check_donation(params: Any, state: Any) -> None:
    """Raise ``TypeError`` if a tensor that would be updated in place must not be.

    Refused: under functorch transforms, tensors that need gradients, expanded or shared storage.
    """
    if torch.compiler.is_compiling():
        return
    advice = "use fused_update(optimizer, donate=False) here"
    if under_transform():
        raise TypeError(f"update: donated tensors cannot be updated in place under vmap, grad or jvp; {advice}")
    owners: dict[int, tuple[str, Any, int]] = {}

    def path(name: str, tree: Any, index: int) -> str:
        return f"{name}.{tree_paths(tree)[index]}"

    slots = ((f"slots.{name}", slot) for name, slot in state.slots.items())
    for name, tree in (("params", params), *slots, ("master", state.master)):
        leaves = tree.buffers if isinstance(tree, FlatTree) else tree_leaves(tree)
        for index, leaf in enumerate(leaves):
            if not is_float(leaf) or leaf.numel() == 0:
                continue
            problem, address = None, leaf.data_ptr()
            if leaf.requires_grad:
                problem = "needs gradients: detach it first (`functionalize` does)"
            elif not leaf.is_contiguous() and any(
                stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)
            ):
                problem = "is expanded, so that elements share memory: call .contiguous() first"
            elif address in owners:
                problem = f"shares memory with `{path(*owners[address])}`: clone one of them"
            if problem:
                raise TypeError(f"update: donated tensor `{path(name, tree, index)}` {problem}; or {advice}")
            owners[address] = (name, tree, index)


def _is_per_tensor(value: Any) -> bool:
    return isinstance(value, PerTensor) or (isinstance(value, Tensor) and value.dim() == 1)


def _entry(value: Any, index: int) -> Any:
    if isinstance(value, PerTensor):
        return value.values[index]
    return value[index] if isinstance(value, Tensor) and value.dim() == 1 else value


def _real_elements(bucket: Bucket, device: torch.device) -> Tensor:
    real = set(bucket.real)
    parts = [torch.full((size,), i in real, dtype=torch.bool, device=device) for i, size in enumerate(bucket.pieces)]
    return torch.cat(parts).view(-1, ROW)
