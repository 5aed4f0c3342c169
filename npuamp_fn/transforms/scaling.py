"""Loss scaling as a transform of gradient functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from npuamp_fn.kernels.reduce import finite_and_norm
from npuamp_fn.loss_scale import DynamicLossScale, NoOpLossScale, ScaledGrads, StaticLossScale
from npuamp_fn.transforms.grad import GradFn, RawGrads
from npuamp_fn.tree_math import multiply, to_float32

__all__ = ["LossScaledFn", "ScaledGradFn", "SupportsLossScaling", "as_grad_fn", "scaled_grad", "with_loss_scaling"]


@runtime_checkable
class SupportsLossScaling(Protocol):
    """A gradient function that can differentiate ``loss * scale`` instead of the loss.

    :func:`with_loss_scaling` takes any object whose type defines this method.

    >>> class SquareGrad:  # the gradient of x**2, written out
    ...     def __loss_scaling__(self, scale, x):
    ...         return 2 * x * scale, x * x, ()
    >>> with_loss_scaling(SquareGrad())(StaticLossScale.create(8.0), torch.tensor(3.0)).grads
    tensor(6.)
    """

    def __loss_scaling__(self, scale: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return a tuple: gradients of ``loss.float() * scale``, the unscaled loss, and aux, () if there is none."""
        ...


@dataclass(frozen=True)
class _Partial:
    """A gradient function with some arguments filled in."""

    inner: SupportsLossScaling
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __loss_scaling__(self, scale: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.inner.__loss_scaling__(scale, *self.args, *args, **{**self.keywords, **kwargs})


@dataclass(frozen=True)
class LossScaledFn:
    """A gradient function under loss scaling; see :func:`with_loss_scaling`."""

    grad_fn: SupportsLossScaling
    reduce: Callable[[Any], Any] | None = None
    defer_unscale: bool = False

    @property
    def __name__(self) -> str:
        """What vmap calls the function in its messages."""
        return "with_loss_scaling"

    def __call__(self, loss_scale: Any, /, *args: Any, **kwargs: Any) -> ScaledGrads:
        """Differentiate the scaled loss at these arguments; unscale, test and adjust the scale."""
        if not isinstance(loss_scale, (NoOpLossScale, StaticLossScale, DynamicLossScale)):
            raise TypeError(
                f"with_loss_scaling: expected a loss scale as first argument, found {type(loss_scale).__name__}; write "
                "grad_fn(DynamicLossScale.create(), params, ...)"
            )
        raw = RawGrads(*self.grad_fn.__loss_scaling__(loss_scale.value, *args, **kwargs))
        out = _finish(raw, loss_scale.value, self.reduce, self.defer_unscale)
        return out._replace(loss_scale=loss_scale.adjust(out.finite))


@dataclass(frozen=True)
class ScaledGradFn:
    """A stateless scaled gradient; see :func:`scaled_grad`."""

    grad_fn: GradFn

    @property
    def __name__(self) -> str:
        """What vmap calls the function in its messages."""
        return "scaled_grad"

    def __call__(self, scale: float | Tensor, /, *args: Any, **kwargs: Any) -> ScaledGrads:
        """Differentiate ``loss * scale`` at these arguments and unscale the gradients."""
        if not isinstance(scale, Tensor):
            scale = torch.tensor(_positive(scale), dtype=torch.float32)
        elif scale.dim() != 0 or not scale.is_floating_point():
            raise TypeError(
                f"scaled_grad: scale: expected a float tensor of shape (), found {scale.dtype} of shape "
                f"{tuple(scale.shape)}; for one scale per member write vmap(scaled_grad(loss_fn), in_dims=(0, ...))"
            )
        value = scale.float()
        out = _finish(self.grad_fn.__loss_scaling__(value, *args, **kwargs), value, None, False)
        return out._replace(loss_scale=scale)


def with_loss_scaling(
    grad_fn: Callable[..., Any] | SupportsLossScaling,
    *,
    reduce: Callable[[Any], Any] | None = None,
    defer_unscale: bool = False,
) -> LossScaledFn:
    """Scale the loss inside a gradient function: ``f(loss_scale, *args, **kwargs) -> ScaledGrads``.

    One step is ``loss.float() * scale``, gradient, float32, ``reduce`` over ranks, times 1 / the old scale,
    finite test, ``loss_scale.adjust``. The results are constants, so at top level in eager mode no graph for
    higher derivatives is built.

    Args:
        grad_fn: Our ``grad`` or ``grad_and_value``, those of ``torch.func``, a ``functools.partial`` of these, or
            an object whose type defines ``__loss_scaling__``. Its argnums count the arguments after ``loss_scale``.
        reduce: Applied to the gradients before the finite test, so that all ranks decide alike.
        defer_unscale: Leave the gradients scaled and in their own dtype; the optimizer multiplies by
            ``inv_scale`` on the way. One pass over memory instead of three.

    Raises:
        TypeError: ``grad_fn`` is not a gradient function (the message shows what to write), or, at the call, the
            loss is float16.

    Source: Micikevicius et al., Mixed Precision Training, 2018.

    >>> grads = with_loss_scaling(grad(lambda x: x * x))
    >>> out = grads(DynamicLossScale.create(), torch.tensor(3.0))
    >>> out.grads, out.finite
    (tensor(6.), tensor(True))
    """
    return LossScaledFn(as_grad_fn(grad_fn), reduce, defer_unscale)


def scaled_grad(fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> ScaledGradFn:
    """Return ``f(scale, *args, **kwargs) -> ScaledGrads`` for a loss function; made for vmap and ensembles.

    Args:
        fun: Returns a scalar loss, or ``(loss, aux)``.
        argnums: Which arguments after ``scale`` to differentiate.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.

    Returns:
        A function of ``scale`` (a number or 0-dim tensor), which it hands back as ``ScaledGrads.loss_scale``, a
        tensor.

    Raises:
        TypeError: at the call: ``scale`` is neither a number nor a 0-dim float tensor, or the loss is float16.
        ValueError: at the call: ``scale`` is a number that is not positive and finite.

    >>> scaled_grad(lambda x: x * x)(2.0**10, torch.tensor(3.0)).grads
    tensor(6.)
    """
    return ScaledGradFn(GradFn(fun, argnums, has_aux, with_value=True))


def as_grad_fn(fn: Any) -> SupportsLossScaling:
    """Recognise a gradient function and return it as one that can scale its loss.

    Raises:
        TypeError: it is none; the message shows what to write instead.

    >>> as_grad_fn(torch.func.grad(torch.sum)).argnums
    0
    """
    if hasattr(type(fn), "__loss_scaling__"):
        return fn
    if isinstance(fn, functools.partial):
        return _Partial(as_grad_fn(fn.func), fn.args, fn.keywords)
    with_value = _TORCH_GRADS.get(getattr(fn, "__code__", None))
    if with_value is not None:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))
        fun, argnums, has_aux = (cells[name].cell_contents for name in ("func", "argnums", "has_aux"))
        return GradFn(fun, argnums, has_aux, with_value)
    raise TypeError(_advice(fn))


def _positive(scale: Any) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(
            f"scaled_grad: scale: expected a number or a 0-dim tensor as first argument, found {type(scale).__name__}; "
            "write scaled_grad(loss_fn)(2.0**15, params, ...)"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scaled_grad: scale: expected a positive finite number, found {scale!r}")
    return float(scale)


def _torch_grads() -> dict[Any, bool]:
    # torch.func.grad(f) is a closure whose code object is always the same one: recognition is exact. Should a
    # future torch change the closure, this stays empty and its results are refused with advice.
    found = {}
    for transform, with_value in ((torch.func.grad, False), (torch.func.grad_and_value, True)):
        code = transform(torch.sum).__code__
        if {"func", "argnums", "has_aux"} <= set(code.co_freevars):
            found[code] = with_value
    return found


_TORCH_GRADS = _torch_grads()


def _advice(fn: Any) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return (
        f"with_loss_scaling: `{name}` is not a gradient function. The loss must be scaled before the backward pass, so "
        "only a gradient function whose loss can be reached will do. Write instead:\n"
        "    with_loss_scaling(grad(loss_fn))              for a loss function\n"
        "    vmap(with_loss_scaling(grad(loss_fn)), ...)   for vmap(grad(loss_fn))\n"
        "    torch.compile(with_loss_scaling(grad(loss_fn)))   for a compiled gradient function\n"
        "    scaled_grad(loss_fn)                          for a constant scale\n"
        "or give the object's type a `__loss_scaling__` method (see SupportsLossScaling)."
    )


def _finish(raw: RawGrads, scale: Tensor, reduce: Callable[[Any], Any] | None, defer: bool) -> ScaledGrads:
    inv_scale = (scale * raw.summed).reciprocal()
    grads = raw.grads
    if reduce is not None:
        grads = reduce(to_float32(grads))
    if defer:
        finite, norm = finite_and_norm(grads, inv_scale)
    else:
        grads = multiply(grads, inv_scale)
        finite, norm = finite_and_norm(grads)
        inv_scale = torch.ones_like(inv_scale)
    return ScaledGrads(grads, inv_scale, raw.value, raw.aux, finite, (), () if norm is None else norm)
