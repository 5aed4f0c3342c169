"""Gradient accumulation: one gradient from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from npuamp_fn.tracing import under_transform
from npuamp_fn.transforms.grad import GradFn, RawGrads
from npuamp_fn.transforms.scaling import as_grad_fn
from npuamp_fn.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_unflatten
from npuamp_fn.tree_math import to_float32

__all__ = ["AccumulatedGradFn", "accumulate"]


@dataclass(frozen=True)
class AccumulatedGradFn:
    """A gradient function averaged over micro-batches; see :func:`accumulate`."""

    grad_fn: GradFn
    steps: int
    in_dims: tuple[Any, ...] | None = None

    @property
    def __name__(self) -> str:
        """What vmap calls the function in its messages."""
        return "accumulate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean gradient over the micro-batches (and mean value, stacked aux), as constants."""
        out = self.__loss_scaling__(torch.ones(()), *args, **kwargs)
        share = 1.0 / out.summed
        grads = tree_map(lambda g: g * share if isinstance(g, Tensor) else g, out.grads)
        if self.grad_fn.with_value:
            return grads, ((out.value, out.aux) if self.grad_fn.has_aux else out.value)
        return (grads, out.aux) if self.grad_fn.has_aux else grads

    def __loss_scaling__(self, scale: Tensor, /, *args: Any, **kwargs: Any) -> RawGrads:
        """Return the float32 sum of the scaled gradients of all micro-batches."""
        batches = self._split(args, kwargs)
        total: Any = None
        values, auxes = [], []
        for batch_args, batch_kwargs in batches:
            out = self.grad_fn.__loss_scaling__(scale, *batch_args, **batch_kwargs)
            total = _start(out.grads) if total is None else _add(total, out.grads)
            values.append(out.value)
            auxes.append(out.aux)
        value = torch.stack(to_float32(values)).mean()
        return RawGrads(total, value, _stack(auxes), summed=len(batches))

    def _split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        leaves, treedef = torch_pytree.tree_flatten((list(args), kwargs))
        dims = torch_pytree._broadcast_to_and_flatten((self._dims(args), dict.fromkeys(kwargs, 0)), treedef)
        if dims is None:
            raise ValueError(f"accumulate: in_dims={self.in_dims} does not fit the structure of the arguments")
        paths = tree_paths((list(args), kwargs))
        sizes: dict[int, str] = {}
        for leaf, dim, path in zip(leaves, dims, paths, strict=True):
            if dim is None or not isinstance(leaf, Tensor):
                continue
            where = f"argument {path.removeprefix('0.').removeprefix('1.')}"
            if leaf.dim() == 0:
                raise ValueError(
                    f"accumulate: {where} is a tensor of shape () and has no micro-batch axis; mark what all "
                    "micro-batches share: accumulate(grad_fn, steps, in_dims=(None, 0, ..., None))"
                )
            sizes.setdefault(leaf.shape[dim], where)
        if len(sizes) > 1:
            listed = ", ".join(f"{where} has {size}" for size, where in sizes.items())
            raise ValueError(f"accumulate: arguments differ in their number of micro-batches: {listed}")
        if not sizes:
            raise ValueError("accumulate: no tensor after the differentiated argument carries a micro-batch axis")
        ((count, where),) = sizes.items()
        if not 1 <= count <= self.steps:
            raise ValueError(
                f"accumulate: expected 1 to {self.steps} micro-batches along the leading axis, found {count} in "
                f"{where}; reshape a batch with x.unflatten(0, (steps, -1))"
            )
        batches = []
        for index in range(count):
            chosen = [
                leaf.select(dim, index) if dim is not None and isinstance(leaf, Tensor) else leaf
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            batches.append(tuple(torch_pytree.tree_unflatten(chosen, treedef)))
        return batches

    def _dims(self, args: Sequence[Any]) -> list[Any]:
        numbers = self.grad_fn.argnums if isinstance(self.grad_fn.argnums, tuple) else (self.grad_fn.argnums,)
        differentiated = {number % len(args) for number in numbers}
        if self.in_dims is None:
            return [None if i <= max(differentiated) else 0 for i in range(len(args))]
        if len(self.in_dims) != len(args):
            raise ValueError(
                f"accumulate: in_dims={self.in_dims} has {len(self.in_dims)} entries, the call has {len(args)} "
                "positional arguments (the differentiated one counts, its entry is None)"
            )
        if any(self.in_dims[i] is not None for i in differentiated):
            raise ValueError(f"accumulate: in_dims={self.in_dims}: the entry of a differentiated argument must be None")
        return list(self.in_dims)


def accumulate(grad_fn: Callable[..., Any], steps: int, in_dims: tuple[Any, ...] | None = None) -> AccumulatedGradFn:
    r"""Average a gradient function over micro-batches, one after another: a large batch in little memory.

    .. math:: g = \frac{1}{k} \sum_{i=1}^{k} \nabla f(p, x_i), \quad k \le \text{steps}

    The scaled gradients are summed in float32 (in the FlatTree's buffers, if the parameters are one), so under
    ``with_loss_scaling(accumulate(grad(loss), steps))`` there is one unscale, one finite test and one reduction for
    all micro-batches, and an overflow in any of them skips the whole step.

    Args:
        grad_fn: ``grad`` or ``grad_and_value`` of a loss, ours or that of ``torch.func``.
        steps: The largest number of micro-batches; a call may bring fewer (the last, ragged window).
        in_dims: Per positional argument the axis of the micro-batches, ``None`` for what all share, as in vmap.
            By default arguments up to the differentiated one are shared, and tensors after it and in keyword
            arguments carry a leading axis.

    Returns:
        A gradient function; value is the mean, aux tensors are stacked. Its results are constants.

    Raises:
        TypeError: ``grad_fn`` is not a gradient function.
        ValueError: ``steps`` is not positive; at the call, the micro-batch axes do not fit.

    >>> mean_grad = accumulate(grad(lambda w, x: w * x), steps=4)
    >>> mean_grad(torch.tensor(1.0), torch.tensor([1.0, 2.0, 6.0]))
    tensor(3.)
    """
    inner = as_grad_fn(grad_fn)
    if not isinstance(inner, GradFn):
        raise TypeError(
            f"accumulate: expected grad(loss_fn) or grad_and_value(loss_fn), found {type(grad_fn).__name__}; put what "
            "wraps it outside: functools.partial(accumulate(grad(loss_fn), steps), ...)"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"accumulate: steps: expected a positive int, found {steps!r}")
    return AccumulatedGradFn(inner, steps, in_dims)


def _start(grads: Any) -> Any:
    # Gradients may share memory with each other, and the sum is added to in place.
    def own(g: Any) -> Any:
        if not isinstance(g, Tensor):
            return g
        widened = to_float32(g)
        return g.clone() if widened is g else widened

    return tree_map(own, grads)


def _add(total: Any, grads: Any) -> Any:
    leaves, treedef = tree_flatten(total)
    in_place = not under_transform()
    summed = []
    for old, new in zip(leaves, tree_leaves(grads), strict=True):
        if not isinstance(old, Tensor):
            summed.append(old)
        else:
            summed.append(old.add_(new) if in_place else old + new)
    return tree_unflatten(treedef, summed)


def _stack(auxes: Sequence[Any]) -> Any:
    first, treedef = tree_flatten(auxes[0])
    columns = list(zip(*(tree_leaves(aux) for aux in auxes), strict=True))
    for index, column in enumerate(columns):
        if not isinstance(first[index], Tensor) and any(value != first[index] for value in column):
            raise ValueError(
                f"accumulate: aux leaf `{tree_paths(auxes[0])[index]}` differs between micro-batches "
                f"({column[0]!r}, ...) and is no tensor; return a tensor, which is stacked"
            )
    stacked = [torch.stack(list(column)) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return tree_unflatten(treedef, stacked)
