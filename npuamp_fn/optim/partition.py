"""Different optimizers, or hyper-parameters, for different parameters: ``partition`` and ``masked``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.flat import FlatTree
from npuamp_fn.loss_scale import ScaledGrads
from npuamp_fn.optim.base import ByPath, Hyper, Optimizer, check_gradients, total_factor
from npuamp_fn.optim.items import float_paths
from npuamp_fn.optim.parts import gather, part_of, scatter
from npuamp_fn.tree import check_patterns, is_float, matches, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Partition", "masked", "partition"]

_ALONE = -1


@dataclass(frozen=True)
class Partition:
    """Optimizers for parts of a tree, chosen by path; see :func:`partition`.

    It has the methods of :class:`Optimizer`; its state is a tuple with the state of each of its ``groups``.
    """

    choices: tuple[tuple[str, int], ...]  # pattern -> index of a group, first match wins
    groups: tuple[Optimizer, ...]
    rest_alone: bool = False  # whether leaves that no pattern matches are left as they are; else they are an error
    transforms: tuple[Any, ...] = ()  # of all gradients together, before the groups

    def replace(self, **changes: Any) -> Partition:
        """Return a copy with some fields changed; ``donate`` and ``kernel`` go to every group."""
        own = {name: changes.pop(name) for name in ("choices", "groups", "rest_alone", "transforms") if name in changes}
        changed = replace(self, **own)
        return changed.map(lambda group: group.replace(**changes)) if changes else changed

    def map(self, fn: Callable[[Optimizer], Optimizer]) -> Partition:
        """Return a copy with ``fn`` applied to every group."""
        return replace(self, groups=tuple(map(fn, self.groups)))

    def parts(self, params: Any) -> list[tuple[Optimizer, Any]]:
        """Return each group with its part of a tree.

        Raises:
            ValueError: a pattern chooses nothing, or a leaf is chosen by none.
        """
        owners = self._owners(params)
        return [(group, _take(params, params, owners, index)) for index, group in enumerate(self.groups)]

    def init(self, params: Any, master: Any = None, *, count_per_tensor: bool = False) -> tuple[Any, ...]:
        """Return the state before the first step: one OptimizerState per group; see :meth:`Optimizer.init`.

        Raises:
            ValueError: a pattern chooses nothing, or a leaf is chosen by none; the message names the nearest paths.
        """
        owners = self._owners(params)
        if master is not None:
            check_gradients(master, params, "init(master=...)")
        masters = [None if master is None else _take(master, params, owners, i) for i in range(len(self.groups))]
        return tuple(
            group.init(part, own, count_per_tensor=count_per_tensor)
            for (group, part), own in zip(self.parts(params), masters, strict=True)
        )

    def update(self, grads: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, tuple[Any, ...]]:
        """Apply one step of every group to its part; see :meth:`Optimizer.update`."""
        factor, finite, norm = None, None, ()
        if isinstance(grads, ScaledGrads):
            grads, factor, finite, norm = grads.grads, grads.inv_scale, grads.finite, grads.norm
        if not isinstance(state, tuple) or len(state) != len(self.groups):
            raise TypeError(
                f"update: expected the state of this partition, a tuple of {len(self.groups)} optimizer states, found "
                f"{type(state).__name__}; the order is update(grads, state, params)"
            )
        check_gradients(grads, params)
        factor = total_factor(self.transforms, grads, factor, norm)
        owners = self._owners(params)
        parts, states = [], []
        for index, (group, own) in enumerate(zip(self.groups, state, strict=True)):
            chosen = finite
            if finite is not None and finite.dim() == 1:
                chosen = finite[[i for i, owner in enumerate(owners) if owner == index]]
            part, new = group.apply(
                _take(grads, params, owners, index), own, _take(params, params, owners, index), factor, chosen
            )
            parts.append(part)
            states.append(new)
        return _put(params, parts, owners, any(group.donate for group in self.groups)), tuple(states)

    def _owners(self, params: Any) -> tuple[int, ...]:
        # The group of every float leaf.
        paths = tuple(float_paths(params))
        find = _find_owners.__wrapped__ if torch.compiler.is_compiling() else _find_owners
        return find(paths, self.choices, self.rest_alone)


def partition(choices: Mapping[str, Optimizer]) -> Partition:
    """Use another optimizer, or other hyper-parameters, for some of the parameters.

    The first pattern that matches a leaf's dotted path decides, so write special cases first and ``"*"`` last.
    Optimizers that differ in numbers only (``lr``, ``weight_decay``, ...) stay one: on a FlatTree one call updates all
    tensors, with one entry per tensor. Others each get a part of the buffers, which costs a copy of it unless it is
    contiguous. Gradient transforms inside an optimizer see its own part; ``chain(clip_by_global_norm(1.0),
    partition(...))`` clips by the norm of all.

    Args:
        choices: Pattern -> optimizer. ``*`` stands for any text.

    Raises:
        TypeError: a value is not an optimizer.
        ValueError: ``choices`` is empty; at ``init``, a pattern chooses nothing or a leaf is chosen by none.

    >>> opt = optim.partition({"*.bias": optim.sgd(1.0), "*": optim.sgd(1.0, weight_decay=0.5)})
    >>> params = {"head": {"weight": torch.ones(1), "bias": torch.ones(1)}}
    >>> grads = {"head": {"weight": torch.zeros(1), "bias": torch.zeros(1)}}
    >>> opt.update(grads, opt.init(params), params)[0], len(opt.groups)
    ({'head': {'weight': tensor([0.5000]), 'bias': tensor([1.])}}, 1)
    """
    if not choices:
        raise ValueError('partition: expected at least one pattern; write partition({"*": optimizer})')
    for pattern, optimizer in choices.items():
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"partition: pattern {pattern!r}: expected an optimizer, found {type(optimizer).__name__}; to leave "
                "parameters alone write masked(optimizer, patterns)"
            )
    alike: list[list[tuple[str, Optimizer]]] = []
    owners: list[tuple[str, int]] = []
    for pattern, optimizer in choices.items():
        index = next((i for i, group in enumerate(alike) if _differ_in_numbers(group[0][1], optimizer)), len(alike))
        if index == len(alike):
            alike.append([])
        alike[index].append((pattern, optimizer))
        owners.append((pattern, index))
    return Partition(tuple(owners), tuple(map(_join, alike)))


def masked(optimizer: Optimizer, patterns: str | Sequence[str]) -> Partition:
    """Update some of the parameters and leave the others alone, bit for bit.

    Args:
        optimizer: For the parameters whose path matches; its gradient transforms see their gradients only.
        patterns: Dotted-path patterns; ``*`` stands for any text.

    Raises:
        TypeError: not an optimizer.
        ValueError: at ``init``, a pattern matches no leaf.

    >>> opt = optim.masked(optim.sgd(1.0), "head.*")
    >>> params = {"body": {"w": torch.ones(1)}, "head": {"w": torch.ones(1)}}
    >>> opt.update(params, opt.init(params), params)[0]
    {'body': {'w': tensor([1.])}, 'head': {'w': tensor([0.])}}
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"masked: expected an optimizer, found {type(optimizer).__name__}")
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    return Partition(tuple((pattern, 0) for pattern in patterns), (optimizer,), rest_alone=True)


def _differ_in_numbers(a: Optimizer, b: Optimizer) -> bool:
    if a.transforms or b.transforms or a.replace(hyper=b.hyper) != b or list(a.hyper) != list(b.hyper):
        return False
    return all(_same(a.hyper[name], b.hyper[name]) or _varies(a.hyper[name], b.hyper[name]) for name in a.hyper)


def _varies(*values: Any) -> bool:
    return all(
        isinstance(v, Tensor) or callable(v) or (isinstance(v, (int, float)) and not isinstance(v, bool))
        for v in values
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and type(a) is type(b) and a == b)


def _join(group: list[tuple[str, Optimizer]]) -> Optimizer:
    first = group[0][1]
    hyper = {}
    for name, value in first.hyper.items():
        same = all(_same(value, optimizer.hyper[name]) for _, optimizer in group)
        hyper[name] = value if same else ByPath(tuple((pattern, o.hyper[name]) for pattern, o in group))
    return first.replace(hyper=Hyper(**hyper))


@lru_cache(maxsize=64)
def _find_owners(paths: tuple[str, ...], choices: tuple[tuple[str, int], ...], rest_alone: bool) -> tuple[int, ...]:
    check_patterns([pattern for pattern, _ in choices], paths, "partition")
    used: set[str] = set()
    owners = []
    for path in paths:
        pattern, owner = next(((p, i) for p, i in choices if matches(path, p)), ("", _ALONE))
        if owner == _ALONE and not rest_alone:
            raise ValueError(
                f"partition: leaf `{path}` is matched by none of {[p for p, _ in choices]}; add a pattern for it, "
                'last perhaps {"*": optimizer}, or write masked(optimizer, patterns) to leave the rest alone'
            )
        used.add(pattern)
        owners.append(owner)
    for pattern, _ in choices:
        if pattern not in used:
            raise ValueError(
                f"partition: pattern {pattern!r} chooses nothing: earlier patterns take all that it matches; the first "
                "match decides, so put it before them"
            )
    return tuple(owners)


def _take(tree: Any, params: Any, owners: tuple[int, ...], index: int) -> Any:
    if isinstance(tree, FlatTree):
        return gather(tree, part_of(tree.layout, tuple(owner == index for owner in owners)))
    leaves, treedef = tree_flatten(tree)
    rest = iter(owners)
    mine = [is_float(leaf) and next(rest) == index for leaf in tree_leaves(params)]
    return tree_unflatten(treedef, [leaf if own else None for leaf, own in zip(leaves, mine, strict=True)])


def _put(params: Any, results: list[Any], owners: tuple[int, ...], donated: bool) -> Any:
    if isinstance(params, FlatTree):
        masks = [tuple(owner == index for owner in owners) for index in range(len(results))]
        parts = [part_of(params.layout, mask) for mask in masks]
        return scatter(params, list(zip(parts, results, strict=True)), donated)
    if donated:
        return params
    leaves, treedef = tree_flatten(params)
    rest = iter(owners)
    updated = [tree_leaves(result) for result in results]
    chosen = [next(rest) if is_float(leaf) else _ALONE for leaf in leaves]
    return tree_unflatten(
        treedef,
        [
            leaf if owner == _ALONE else updated[owner][i]
            for i, (leaf, owner) in enumerate(zip(leaves, chosen, strict=True))
        ],
    )
