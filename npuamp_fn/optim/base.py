"""Optimizers as data: a rule, its hyper-parameters, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from npuamp_fn import kernels
from npuamp_fn.flat import FlatTree
from npuamp_fn.kernels.rule import Item, Rule, Slot, Step, compute_dtype
from npuamp_fn.loss_scale import ScaledGrads
from npuamp_fn.optim.hyper import ByPath, Hyper, Schedule
from npuamp_fn.optim.items import (
    PerTensor,
    check_donation,
    flat_items,
    float_paths,
    leaf_items,
    numbered,
    put_flat,
    put_leaves,
)
from npuamp_fn.tree import HALVES, check_same_structure, describe, is_float, tree_flatten, tree_map, tree_paths

__all__ = ["ByPath", "GradientTransform", "Hyper", "Optimizer", "OptimizerState", "Schedule", "check_gradients"]


class GradientTransform(Protocol):
    """Something done to the gradients before the rule sees them, as one factor for all of them."""

    def factor(self, grads: Any, factor: Tensor | None, norm: Tensor | None = None) -> Tensor:
        """Return what the gradients must be multiplied by, given what they had to be multiplied by already.

        ``norm`` is that of the gradients after ``factor``, if somebody knows it.
        """
        ...


def total_factor(
    transforms: Sequence[GradientTransform], grads: Any, factor: Tensor | None, norm: Any = ()
) -> Tensor | None:
    """Return what gradients must be multiplied by after all transforms; ``norm`` as in ScaledGrads."""
    known = norm if isinstance(norm, Tensor) else None
    for transform in transforms:
        factor, known = transform.factor(grads, factor, known), None
    return factor


class OptimizerState(NamedTuple):
    """What an optimizer remembers between steps; the same structure, shapes and dtypes after every step."""

    # shape=[] (or one per tensor), dtype=int32: steps applied, skipped ones not counted
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  (tuple.count is not missed)
    slots: dict[str, Any]  # name -> like params, float32 (or one value per tensor)
    master: Any  # like params, float32; None where params are full precision already; () without master weights


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, as frozen data with two pure methods.

    Args:
        rule: The algorithm.
        hyper: Its hyper-parameters: numbers, 0-dim tensors, or schedules ``count -> value``. A tensor with one
            entry per float leaf (per tensor of a FlatTree) sets each its own.
        transforms: Gradient transforms, first to last.
        master_weights: Whether the state holds float32 masters of half parameters.
        rounding: How masters are rounded into the half parameters.
        kernel: How the rule is run: "reference", "aten", "compiled", or "auto" to choose.
        donate: Whether ``update`` updates ``params`` and ``state`` in place.

    >>> optim.adamw(1e-3).hyper["eps"]
    1e-08
    """

    rule: Rule
    hyper: Hyper
    transforms: tuple[GradientTransform, ...] = ()
    master_weights: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    kernel: str = "reference"
    donate: bool = False

    def replace(self, **changes: Any) -> Optimizer:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def init(self, params: Any, master: Any = None, *, count_per_tensor: bool = False) -> OptimizerState:
        """Return the state before the first step.

        Args:
            params: A FlatTree or any pytree; leaves that are not floating point get no state.
            master: With master weights: the full-precision parameters, if there are any. Without it the masters
                start from the half ones.
            count_per_tensor: Keep one step count per float leaf (per tensor of a FlatTree) instead of one for all,
                so that bias corrections stay right where some tensors skip steps or join late.

        Raises:
            TypeError: a parameter is complex, or ``master`` was given without master weights.
            ValueError: ``master`` does not have the structure of ``params``.
        """
        _refuse_complex(params)
        if master is not None and not self.master_weights:
            raise TypeError(
                "init: `master` needs an optimizer with master weights; write with_master_weights(optimizer)"
            )
        masters = self._masters(params, master) if self.master_weights else ()
        full = params if master is None else master
        slots = {slot.name: _start(slot, full) for slot in self.rule.slots}
        leaves = [leaf for leaf in tree_flatten(params)[0] if isinstance(leaf, Tensor)]
        tensors = len(params.layout.segments) if isinstance(params, FlatTree) else sum(map(is_float, leaves))
        shape = (tensors,) if count_per_tensor else ()
        count = torch.zeros(shape, dtype=torch.int32, device=leaves[0].device if leaves else None)
        return OptimizerState(count, slots, masters)

    def update(self, grads: Any, state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
        """Apply one step; pure unless ``donate``.

        Args:
            grads: Gradients like ``params`` in any float dtype, applied unconditionally; or ScaledGrads, whose
                ``finite=False`` makes the step change nothing at all, bit for bit.
            state: From ``init`` or the last ``update``.
            params: What to update; its dtypes are kept.

        Returns:
            ``(params, state)``: new ones; with ``donate`` the same ones, updated.

        Raises:
            TypeError: not the state of an optimizer, or a donated tensor needs gradients or is under a transform.
            ValueError: the state is of another optimizer or of parameters stored in another way; or gradients differ
                from the parameters in structure, layout or shape; the message names the first differing path.
        """
        _check_state(state, self.rule, params)
        check_gradients(grads.grads if isinstance(grads, ScaledGrads) else grads, params)
        if isinstance(grads, ScaledGrads):
            return self.apply(grads.grads, state, params, grads.inv_scale, grads.finite, grads.norm)
        return self.apply(grads, state, params, None, None)

    def apply(
        self,
        grads: Any,
        state: OptimizerState,
        params: Any,
        factor: Tensor | None,
        finite: Tensor | None,
        norm: Any = (),
    ) -> tuple[Any, OptimizerState]:
        """Apply one step to gradients that stand for ``grads * factor``, where ``finite``; see :meth:`update`.

        Args:
            grads: Gradients like ``params``.
            state: From ``init`` or the last step.
            params: What to update.
            factor: shape [], float32, or ``None`` for 1.
            finite: shape [], or [tensors] with one step count per tensor, bool; ``None`` applies all.
            norm: shape [], float32: norm of ``grads * factor``, if it is known already; else ``()``.

        Raises:
            TypeError: a donated tensor needs gradients or is under a transform.
            ValueError: ``finite`` has an entry per tensor but the state has one count for all.
        """
        if finite is not None and finite.dim() > state.count.dim():
            raise ValueError(
                f"update: finite has shape {tuple(finite.shape)} but the state has one step count for all tensors; "
                "make it with optimizer.init(params, count_per_tensor=True)"
            )
        if self.donate:
            check_donation(params, state)
        factor = total_factor(self.transforms, grads, factor, norm)
        count = state.count + 1
        items = self._items(grads, state, count, params, finite)
        results = kernels.run(self.kernel, Step(self.rule, factor, self.donate), items)
        if self.donate:  # in place too, so that whoever still holds the old state holds the whole new one
            state.count.add_(1 if finite is None else finite)
            return params, state
        if finite is not None:
            count = torch.where(finite, count, state.count)
        put = put_flat if isinstance(params, FlatTree) else put_leaves
        params, slots, master = put(self.rule, results, params, state)
        return params, OptimizerState(count, slots, master)

    def choice(self, params: Any) -> tuple[str, str, list[Item]]:
        """Return the kernel that will update these parameters, why, and the items it will get."""
        state = self.init(params)
        items = self._items(params, state, state.count + 1, params, None)
        return (*kernels.choose(self.kernel, self.rule, items), items)

    def _items(
        self, grads: Any, state: OptimizerState, count: Tensor, params: Any, finite: Tensor | None
    ) -> list[Item]:
        hyper = {name: self._value(value, state.count, params) for name, value in self.hyper.items()}
        collect = flat_items if isinstance(params, FlatTree) else leaf_items
        items = collect(self.rule, hyper, count, finite, grads, params, state)
        return items if self.rounding == "nearest" else [numbered(item) for item in items]

    def _value(self, value: Any, count: Tensor, params: Any) -> Any:
        if isinstance(value, ByPath):
            values = [self._value(value[path], count, params) for path in float_paths(params)]
            if count.dim() == 1:
                values = [v[i] if isinstance(v, Tensor) and v.dim() == 1 else v for i, v in enumerate(values)]
            return PerTensor(tuple(values))
        return value(count) if callable(value) else value

    def _masters(self, params: Any, master: Any) -> Any:
        source = params if master is None else master
        check_gradients(source, params, "init(master=...)")

        def copy(leaf: Any, own: Any) -> Any:
            return own.detach().to(torch.float32, copy=True) if is_float(leaf) and leaf.dtype in HALVES else None

        if isinstance(params, FlatTree):
            buffers = tuple(copy(p, m) for p, m in zip(params.buffers, source.buffers, strict=True))
            return _without_rest(FlatTree(buffers, params.rest, params.layout))
        return tree_map(copy, params, source)


def _check_state(state: Any, rule: Rule, params: Any) -> None:
    if not isinstance(state, OptimizerState):
        raise TypeError(
            f"update: expected an OptimizerState as second argument, found {type(state).__name__}; the order is "
            "update(grads, state, params)"
        )
    for slot in rule.slots:
        own = state.slots.get(slot.name)
        if own is None:
            problem = f"it has no {slot.name!r}, only {list(state.slots)}"
        elif slot.per == "tensor":
            continue
        elif not isinstance(own, FlatTree) or not isinstance(params, FlatTree):
            if isinstance(own, FlatTree) == isinstance(params, FlatTree):
                continue
            problem = f"{slot.name!r} is a {type(own).__name__}, params are a {type(params).__name__}"
        elif own.layout == params.layout:
            continue
        else:
            problem = params.layout.difference(own.layout)
        raise ValueError(
            f"update: the state was not made for these parameters and {rule.name}: {problem}; write "
            "state = optimizer.init(params)"
        )


def _start(slot: Slot, params: Any) -> Any:
    def full(leaf: Any) -> Any:
        if not is_float(leaf):
            return None
        dtype = compute_dtype(leaf.dtype)
        if slot.start == "param":
            return leaf.detach().to(dtype, copy=True)
        if slot.per == "tensor":
            return torch.full((), slot.start, dtype=dtype, device=leaf.device)
        return torch.full_like(leaf, slot.start, dtype=dtype, requires_grad=False)

    if not isinstance(params, FlatTree):
        return tree_map(full, params)
    if slot.per == "tensor":
        buckets = zip(params.layout.buckets, params.buffers, strict=True)
        pairs = [(len(bucket.segments), full(buffer.new_empty(()))) for bucket, buffer in buckets if buffer is not None]
        return tuple(value.repeat(tensors) for tensors, value in pairs)
    return _without_rest(params.map(full))


def _without_rest(flat: FlatTree) -> FlatTree:
    return FlatTree(flat.buffers, (None,) * len(flat.rest), flat.layout)


def _refuse_complex(params: Any) -> None:
    leaves = tree_flatten(params)[0]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise TypeError(
                f"init: parameter `{tree_paths(params)[index]}` is {leaf.dtype}; optimizers need real parameters: "
                "store torch.view_as_real(parameter) and use torch.view_as_complex inside the model"
            )


def check_gradients(grads: Any, params: Any, what: str = "update: gradients") -> None:
    """Raise ``ValueError`` naming the first path at which gradients differ from parameters in structure or shape."""
    if isinstance(params, FlatTree) != isinstance(grads, FlatTree):
        advice = "; lay them out with params.layout.pack(grads)" if isinstance(params, FlatTree) else ""
        raise ValueError(
            f"{what}: expected a {type(params).__name__} like params, found {type(grads).__name__}{advice}"
        )
    if isinstance(params, FlatTree):
        if grads.layout != params.layout:
            check_same_structure(params.layout.paths, grads.layout.paths, what)
            differing = next(
                a.path for a, b in zip(params.layout.segments, grads.layout.segments, strict=True) if a != b
            )
            raise ValueError(f"{what}: the layout differs from that of params, first at `{differing}`")
        params, grads = params.buffers, grads.buffers
    check_same_structure(params, grads, what)
    leaves, others = tree_flatten(params)[0], tree_flatten(grads)[0]
    for index, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        if is_float(leaf) and not (is_float(other) and other.shape == leaf.shape):
            raise ValueError(
                f"{what}: leaf `{tree_paths(params)[index]}`: expected a float tensor of shape {tuple(leaf.shape)}, "
                f"found {describe(other)}"
            )
