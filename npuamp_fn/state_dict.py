"""Persistence: any tree as a flat dictionary of tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from npuamp_fn.flat import FlatTree
from npuamp_fn.tree import tree_flatten, tree_paths, tree_unflatten

__all__ = ["load_state_dict", "state_dict"]


def state_dict(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree by dotted path; a FlatTree contributes its leaves under their own paths.

    The tensors share memory with the tree. The result can be saved with ``torch.save`` and loaded with
    ``weights_only=True``, or given to ``torch.distributed.checkpoint``.

    Args:
        tree: Parameters, optimizer state, a loss scale, or any container of these. What is not a tensor is
            structure, and comes from the template at loading.

    Raises:
        ValueError: two leaves have the same path; the message names it.

    >>> list(state_dict({"params": flatten({"w": torch.ones(2)}), "epoch": torch.tensor(3)}))
    ['params.w', 'epoch']
    """
    entries: dict[str, Tensor] = {}
    for path, leaf in _named(tree):
        if path in entries:
            raise ValueError(f"state_dict: two leaves have the path `{path}`; rename a key that contains a dot")
        entries[path] = leaf
    return entries


def load_state_dict(template: Any, state_dict: Mapping[str, Tensor]) -> Any:
    """Return a tree like the template with the values of a state dict; the template is not changed.

    Args:
        template: A tree of the structure that was saved; values go to its devices.
        state_dict: From :func:`state_dict`.

    Returns:
        A new tree: structure, static fields, devices and layouts of the template, values of the state dict.

    Raises:
        TypeError: the second argument is not a dictionary.
        ValueError: entries are missing, unexpected, or of another shape or dtype; all are listed.

    >>> load_state_dict({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict: expected a dictionary of tensors as second argument, found {type(state_dict).__name__}; "
            "the order is load_state_dict(template, state_dict)"
        )
    expected = dict(_named(template))
    problems = [f"missing `{path}`" for path in expected if path not in state_dict]
    problems += [f"unexpected `{path}`" for path in state_dict if path not in expected]
    for path, leaf in expected.items():
        if path not in state_dict:
            continue
        value = state_dict[path]
        if not isinstance(value, Tensor):
            problems.append(f"`{path}`: expected a tensor, found {type(value).__name__}")
        elif value.shape != leaf.shape or value.dtype != leaf.dtype:
            problems.append(
                f"`{path}`: expected {leaf.dtype} of shape {tuple(leaf.shape)}, found {value.dtype} of shape "
                f"{tuple(value.shape)}"
            )
    if problems:
        raise ValueError("load_state_dict: nothing was loaded:\n  " + "\n  ".join(problems))
    units, treedef = tree_flatten(template, _is_flat)
    paths = tree_paths(template, _is_flat)
    return tree_unflatten(treedef, [_load(u, p, state_dict) for p, u in zip(paths, units, strict=True)])


def _load(unit: Any, path: str, entries: Mapping[str, Tensor]) -> Any:
    if isinstance(unit, Tensor):
        return entries[path].detach().to(unit.device, copy=True)
    if not isinstance(unit, FlatTree):
        return unit
    copy = unit.map(lambda buffer: buffer.detach().clone())
    inner, treedef = tree_flatten(copy.unflatten())
    names = tree_paths(tree_unflatten(treedef, inner))
    rest = list(copy.rest)
    for name, leaf, place in zip(names, inner, unit.layout.places, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        value = entries[f"{path}.{name}" if path else name]
        if place >= 0:
            leaf.copy_(value)  # a view of its buffer
        else:
            rest[-1 - place] = value.detach().to(leaf.device, copy=True)
    return FlatTree(copy.buffers, tuple(rest), copy.layout)


def _named(tree: Any) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    units = tree_flatten(tree, _is_flat)[0]
    for path, unit in zip(tree_paths(tree, _is_flat), units, strict=True):
        if isinstance(unit, FlatTree):
            prefix = f"{path}." if path else ""
            inner = unit.unflatten()
            leaves = tree_flatten(inner)[0]
            named += [(prefix + p, x) for p, x in zip(tree_paths(inner), leaves, strict=True) if isinstance(x, Tensor)]
        elif isinstance(unit, Tensor):
            named.append((path, unit))
    return named


def _is_flat(node: Any) -> bool:
    return isinstance(node, FlatTree)
