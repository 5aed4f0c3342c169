"""Gradients of functions of any pytree: ``grad``, ``grad_and_value`` and the inspectable ``GradFn``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuamp_fn.tracing import under_transform, under_vmap
from npuamp_fn.transforms.function import FunctionTransform
from npuamp_fn.tree import Frame, take_leaves, tree_leaves, tree_map, tree_paths

__all__ = ["GradFn", "RawGrads", "grad", "grad_and_value"]


class RawGrads(NamedTuple):
    """Gradients of ``loss * scale`` as they come out of the backward pass."""

    grads: Any
    value: Tensor  # the loss itself, never scaled
    aux: Any  # () if the loss function returns none
    summed: int = 1  # how many losses the gradients are the sum of


@dataclass(frozen=True)
class GradFn(FunctionTransform):
    """The gradient of a function, as a value that can be called, inspected and rebuilt.

    Made by :func:`grad` and :func:`grad_and_value`.

    >>> grad(lambda x: x * x).argnums
    0
    """

    fun: Callable[..., Any]
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    with_value: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fun):
            raise TypeError(f"grad: expected a function, found {self.fun!r} of type {type(self.fun).__name__}")
        numbers = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            raise TypeError(f"grad: argnums: expected an int or a tuple of ints, found {self.argnums!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Differentiate at these arguments, with the semantics of ``torch.func``."""
        out = self._differentiate(None, args, kwargs, graph_free=False)
        if self.with_value:
            return out.grads, ((out.value, out.aux) if self.has_aux else out.value)
        return (out.grads, out.aux) if self.has_aux else out.grads

    def __loss_scaling__(self, scale: Tensor, /, *args: Any, **kwargs: Any) -> RawGrads:
        """Return the gradients of ``loss.float() * scale``, all of it constant: no graph hangs on it."""
        out = self._differentiate(scale, args, kwargs, graph_free=_at_top_level(args, kwargs))
        return RawGrads(*(tree_map(_detach, part) for part in (out.grads, out.value, out.aux)))

    def _differentiate(self, scale: Tensor | None, args: Sequence[Any], kwargs: Any, graph_free: bool) -> RawGrads:
        inputs = _Inputs(args, self.argnums)
        aux_frame: list[Any] = []  # aux without its tensors: torch.func lets nothing else out

        def objective(leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
            loss, aux = self._loss_and_aux(self.fun(*inputs.join(leaves), **kwargs))
            tensors, frame = take_leaves(aux, torch.is_tensor)
            aux_frame[:] = [frame]
            return (loss if scale is None else _scaled(loss, scale)), (loss, tensors)

        if graph_free:
            grads, (loss, tensors) = _autograd(objective, inputs.leaves)
        else:
            grads, (_, (loss, tensors)) = torch.func.grad_and_value(objective, has_aux=True)(inputs.leaves)
        return RawGrads(inputs.restore(grads), loss, aux_frame[0].put(tensors))

    def _loss_and_aux(self, out: Any) -> tuple[Tensor, Any]:
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"grad(has_aux=True): expected the function to return (loss, aux), found {type(out).__name__}"
            )
        loss, aux = out if self.has_aux else (out, ())
        if not isinstance(loss, Tensor):
            advice = "; to return more than the loss pass has_aux=True" if isinstance(loss, tuple) else ""
            raise TypeError(f"grad: expected a scalar tensor as loss, found {type(loss).__name__}{advice}")
        if loss.dim() != 0 or not loss.is_floating_point():
            raise TypeError(
                f"grad: expected a real floating-point loss of shape (), found {loss.dtype} of shape "
                f"{tuple(loss.shape)}; reduce it first, loss.mean() say"
            )
        return loss, aux


def grad(fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> GradFn:
    """Return the gradient function of ``fun``, for arguments of any pytree.

    Semantics of ``torch.func.grad``: it nests, composes with vmap, jvp and compile, and keeps the graph that
    higher derivatives need. Beyond it, leaves that cannot be differentiated (ints, ``None``, strings) are
    allowed; their gradient is ``None`` (under vmap they are a TypeError that names them). Aux may hold anything.

    Args:
        fun: Returns a real scalar loss, or ``(loss, aux)``.
        argnums: Which positional arguments to differentiate; a tuple gives a tuple of gradients.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.

    Returns:
        A callable: gradients like the differentiated argument(s), or ``(grads, aux)``.

    Raises:
        TypeError: at the call: loss is no real scalar, nothing can be differentiated, argnums are out of range.

    >>> grad(lambda p: (p["x"] ** 2).sum())({"x": torch.tensor([3.0]), "n": 1})
    {'x': tensor([6.]), 'n': None}
    """
    return GradFn(fun, argnums, has_aux, with_value=False)


def grad_and_value(fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> GradFn:
    """Return a function giving the gradient and the loss: ``(grads, loss)`` or ``(grads, (loss, aux))``.

    Arguments and errors are those of :func:`grad`.

    >>> grad_and_value(lambda x: x * x)(torch.tensor(3.0))
    (tensor(6.), tensor(9.))
    """
    return GradFn(fun, argnums, has_aux, with_value=True)


class _Inputs:
    """The differentiated arguments of one call, taken apart into differentiable leaves and the rest."""

    def __init__(self, args: Sequence[Any], argnums: int | tuple[int, ...]) -> None:
        self.args = list(args)
        self.single = not isinstance(argnums, tuple)
        self.numbers = argnums if isinstance(argnums, tuple) else (argnums,)
        self.leaves: list[Tensor] = []
        self.frames: list[Frame] = []
        for number in self.numbers:
            if not -len(args) <= number < len(args):
                raise TypeError(
                    f"grad: argnums={number} is out of range: the call has {len(args)} positional arguments"
                )
            if [n % len(args) for n in self.numbers].count(number % len(args)) > 1:
                raise TypeError(f"grad: argnums={argnums} name an argument twice; the call has {len(args)}")
            leaves, frame = take_leaves(args[number], _is_differentiable)
            _refuse_under_vmap(args[number], frame, self.args)
            self.leaves += leaves
            self.frames.append(frame)
        if not self.leaves:
            found = ", ".join(type(args[number]).__name__ for number in self.numbers)
            raise TypeError(
                f"grad: no leaf of argument {argnums} ({found}) is a floating-point tensor; differentiate the argument "
                "that holds the parameters: grad(fun, argnums=...)"
            )

    def join(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Return the positional arguments with these leaves in place of the original ones."""
        args, rest = list(self.args), list(leaves)
        for number, frame in zip(self.numbers, self.frames, strict=True):
            args[number], rest = frame.put(rest[: frame.count]), rest[frame.count :]
        return args

    def restore(self, grads: Sequence[Tensor]) -> Any:
        """Return gradients shaped like the differentiated argument(s), ``None`` at other leaves."""
        trees, rest = [], list(grads)
        for frame in self.frames:
            trees.append(frame.put(rest[: frame.count], blank=True))
            rest = rest[frame.count :]
        return trees[0] if self.single else tuple(trees)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _scaled(loss: Tensor, scale: Tensor) -> Tensor:
    if loss.dtype == torch.float16:
        raise TypeError(
            "loss scaling: the loss is float16, so its own gradient (the scale) overflows at 65536 whatever is done "
            "later. Compute the loss in float32: call loss_fn on logits.float(), or use cast_policy(O2), whose output "
            "is float32. bfloat16 is fine."
        )
    return (loss if loss.dtype == torch.float64 else loss.float()) * scale


def _autograd(objective: Callable[..., Any], leaves: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    # Plain autograd without create_graph: activations are freed during the backward pass.
    inputs = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        target, extra = objective(inputs)
    if not target.requires_grad:  # the loss does not depend on the parameters
        return [torch.zeros_like(leaf) for leaf in leaves], extra
    return list(torch.autograd.grad(target, inputs, materialize_grads=True)), extra


def _at_top_level(args: Sequence[Any], kwargs: Any) -> bool:
    if under_transform() or torch.is_inference_mode_enabled():  # plain autograd records nothing in inference mode
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return not any(tensor.requires_grad or tensor.is_inference() for tensor in tensors)


def _refuse_under_vmap(tree: Any, frame: Frame, args: list[Any]) -> None:
    if all(frame.taken) or not under_vmap(tree_leaves(args)):
        return
    index = frame.taken.index(False)
    raise TypeError(
        f"grad: leaf `{tree_paths(tree)[index]}` ({frame.leaves[index]!r}) cannot be differentiated, and under vmap "
        "every gradient must be a tensor. Take such leaves out of the differentiated argument: close over them or "
        "pass them as another argument."
    )


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
