"""Rematerialisation: memory for time, in a form that ``torch.func`` can differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import DefaultDeviceType, get_device_states, set_device_states

from npuamp_fn.tracing import needs_outer_gradient, under_transform
from npuamp_fn.transforms.function import FunctionTransform
from npuamp_fn.transforms.op_cast import with_current_casts
from npuamp_fn.tree import take_leaves, tree_leaves

__all__ = ["RematFn", "remat"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class RematFn(FunctionTransform):
    """A function whose intermediate results are computed again in the backward pass; see :func:`remat`."""

    fun: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, keeping only its tensor arguments for the backward pass."""
        if torch.compiler.is_compiling():
            return self.fun(*args, **kwargs)
        tensors, frame = take_leaves((args, kwargs), torch.is_tensor)
        call = _Call(with_current_casts(self.fun), frame)
        outputs = _Recompute.apply(call, *tensors)
        return call.output_frame.put(outputs)


def remat(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function forget its intermediate results and compute them again in the backward pass.

    Works under grad, vmap, vmap(grad) and higher derivatives, with dropout drawing the same mask and operations
    being cast (O1) the same way both times.
    Inside a compiled region it is the function itself: the compiler would merge the two computations again.

    Args:
        fun: Takes and returns any pytrees. Tensors that need gradients must be its arguments: parameters it
            closes over would get none.

    Raises:
        TypeError: at the call, ``fun`` uses a tensor from outside that needs gradients.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.

    >>> block = remat(lambda w, x: torch.tanh(w * x))
    >>> grad(lambda w: block(w, torch.tensor(0.0)))(torch.tensor(2.0))
    tensor(0.)
    """
    return RematFn(fun)


class _Call:
    """One call of a function: what its forward and its recomputation share."""

    def __init__(self, fun: Callable[..., Any], frame: Any) -> None:
        self.fun, self.frame = fun, frame
        self.output_frame: Any = None
        self.differentiable: list[bool] = []
        self.random_state: Any = None

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = self.frame.put(tensors)
        outputs, self.output_frame = take_leaves(self.fun(*args, **kwargs), torch.is_tensor)
        return tuple(outputs)

    def first_run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.random_state = (torch.get_rng_state(), get_device_states(*tensors))
        arguments = [tensor.detach() for tensor in tensors]
        try:
            with _RefuseCaptured():
                outputs = self.run(arguments)
        except _CapturedError:
            raise TypeError(_CAPTURED) from None
        self.differentiable = [output.is_floating_point() or output.is_complex() for output in outputs]
        return outputs

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        cpu_state, (devices, device_states) = self.random_state
        kind = DefaultDeviceType.get_device_type()
        with torch.random.fork_rng(devices=devices, device_type=kind):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, device_states, device_type=kind)
            yield


class _CapturedError(Exception):
    """Raised instead of TypeError, which Python's operators would take for "not implemented"."""


class _RefuseCaptured(TorchFunctionMode):
    """Refuse tensors that need gradients but are no arguments: their gradient would silently be zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():  # a function that turns it on differentiates something of its own
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and needs_outer_gradient(leaf):
                    raise _CapturedError
        return func(*args, **kwargs)


_CAPTURED = (
    "remat: the function uses a tensor from outside that needs gradients; it would get none. Pass it as an argument: "
    "remat(lambda params, x: ...)(params, x), with a module remat(apply)(params, buffers, x) from functionalize"
)


class _Recompute(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.first_run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        call, tensors = ctx.call, list(ctx.saved_tensors)
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        chosen = [index for index, output in enumerate(call.differentiable) if output]

        def outputs(*leaves: Tensor) -> tuple[Tensor, ...]:
            inputs = list(tensors)
            for index, leaf in zip(wanted, leaves, strict=True):
                inputs[index] = leaf
            results = call.run(inputs)
            return tuple(results[index] for index in chosen)

        leaves = [tensors[index] for index in wanted]
        with call.same_random_numbers():
            grads = _pull_back(outputs, leaves, [cotangents[index] for index in chosen])
        result: list[Tensor | None] = [None] * len(tensors)
        for index, gradient in zip(wanted, grads, strict=True):
            result[index] = gradient
        return (None, *result)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> tuple[Tensor | None, ...]:
        call, tensors, tangents = ctx.call, list(ctx.saved_tensors), grad_inputs[1:]
        wanted = [index for index, tangent in enumerate(tangents) if tangent is not None]

        def outputs(*leaves: Tensor) -> tuple[Tensor, ...]:
            inputs = list(tensors)
            for index, leaf in zip(wanted, leaves, strict=True):
                inputs[index] = leaf
            return call.run(inputs)

        with call.same_random_numbers():
            primals, directions = tuple(tensors[i] for i in wanted), tuple(tangents[i] for i in wanted)
            pushed = torch.func.jvp(outputs, primals, directions)[1]
        return tuple(out if keep else None for out, keep in zip(pushed, call.differentiable, strict=True))


def _pull_back(fun: Callable[..., Any], leaves: list[Tensor], cotangents: list[Tensor]) -> Sequence[Tensor]:
    if torch.is_grad_enabled() or under_transform():  # the result will be differentiated again
        pull = torch.func.vjp(fun, *leaves)[1]
        return pull(tuple(cotangents))
    inputs = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        outputs = fun(*inputs)
    pairs = [(output, c) for output, c in zip(outputs, cotangents, strict=True) if output.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad([o for o, _ in pairs], inputs, [c for _, c in pairs], materialize_grads=True)
