"""Optimizer states from and to torch.optim's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.flat import FlatTree
from npuamp_fn.optim.base import Optimizer, OptimizerState
from npuamp_fn.optim.items import float_paths
from npuamp_fn.tree import is_float, tree_leaves

__all__ = ["from_torch_state", "to_torch_state"]


def to_torch_state(optimizer: Optimizer, state: OptimizerState, params: Any) -> dict[int, dict[str, Any]]:
    """Return the entries that torch.optim would have in ``state_dict()["state"]``.

    Reads step counts on the host, as saving does.

    Args:
        optimizer: The one the state belongs to.
        state: From ``init`` or ``update``.
        params: What it updates.

    Returns:
        For each float leaf, in tree order from 0: ``"step"`` (float32, shape []) and copies of the slots by torch's
        names. A momentum buffer that no step has filled yet is ``None``, as in torch.

    >>> opt = optim.sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.zeros(2)}
    >>> params, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
    >>> optim.to_torch_state(opt, state, params)
    {0: {'step': tensor(1.), 'momentum_buffer': tensor([1., 1.])}}
    """
    tensors = len(float_paths(params))
    counts = state.count.expand(tensors).tolist()
    slots = {slot.name: _entries(state.slots[slot.name], params) for slot in optimizer.rule.slots}
    entries: dict[int, dict[str, Any]] = {}
    for index, count in enumerate(counts):
        entry: dict[str, Any] = {"step": torch.tensor(float(count))}
        for name, values in slots.items():
            unfilled = name == "momentum_buffer" and count == 0
            entry[name] = None if unfilled else values[index].detach().clone()
        entries[index] = entry
    return entries


def from_torch_state(
    optimizer: Optimizer, entries: Mapping[Any, Mapping[str, Any]], params: Any, master: Any = None
) -> OptimizerState:
    """Make an optimizer state from torch.optim's ``state_dict()["state"]``.

    Args:
        optimizer: Of the same algorithm; its slots have torch.optim's names.
        entries: By position among the float leaves, or by path. Missing entries, and missing or ``None`` values, stay
            as ``init`` makes them; names that the optimizer does not use are ignored. ``"step"`` may be a number or a
            tensor; without it, an entry with tensors counts as one step taken (torch's SGD saves none).
        params: What it will update.
        master: As for :meth:`Optimizer.init`.

    Returns:
        A state with one count for all, or one per tensor where steps differ.

    Raises:
        ValueError: an entry belongs to no parameter, or a tensor has another shape; nothing is changed.

    >>> opt = optim.adam()
    >>> entries = {0: {"step": 3, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    >>> optim.from_torch_state(opt, entries, {"w": torch.zeros(2)}).count
    tensor(3, dtype=torch.int32)
    """
    paths = float_paths(params)
    unknown = [key for key in entries if key not in paths and not (isinstance(key, int) and 0 <= key < len(paths))]
    if unknown:
        raise ValueError(
            f"from_torch_state: entries {unknown} belong to no parameter: expected positions 0 to {len(paths) - 1} or "
            f"paths like {paths[:3]}"
        )
    state = optimizer.init(params, master)
    own = {slot.name: _entries(state.slots[slot.name], params) for slot in optimizer.rule.slots}
    counts = []
    for index, path in enumerate(paths):
        entry = entries.get(index, entries.get(path, {}))
        given = {name: entry[name] for name in own if isinstance(entry.get(name), Tensor)}
        for name, value in given.items():
            target = own[name][index]
            if value.shape != target.shape:
                raise ValueError(
                    f"from_torch_state: `{path}`: {name}: expected shape {tuple(target.shape)}, found "
                    f"{tuple(value.shape)}"
                )
            target.copy_(value)  # the state is new, nobody else has it
        counts.append(int(entry.get("step", 1 if given else 0)))
    same = len(set(counts)) <= 1
    count = torch.tensor((counts or [0])[0] if same else counts, dtype=torch.int32, device=state.count.device)
    return state._replace(count=count)


def _entries(slot: Any, params: Any) -> list[Tensor]:
    # Views of a slot's values, one per float leaf of the parameters.
    if isinstance(slot, FlatTree):
        return [leaf for leaf in tree_leaves(slot.unflatten()) if is_float(leaf)]
    if isinstance(params, FlatTree):
        values: list[Any] = [None] * len(params.layout.segments)
        for bucket, vector in zip(params.layout.buckets, slot, strict=True):
            for index, value in zip(bucket.segments, vector.unbind(0), strict=True):
                values[index] = value
        return values
    return [leaf for leaf in tree_leaves(slot) if is_float(leaf)]
