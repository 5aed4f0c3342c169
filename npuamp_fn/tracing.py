"""What surrounds a call: functorch transforms or a compiled region."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# functorch's interpreter stack has no public name; these three questions are all that is asked of it.
_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009

__all__ = ["is_wrapped", "needs_outer_gradient", "under_transform", "under_vmap"]


def under_transform() -> bool:
    """Tell whether a compiled region or a functorch transform (grad, vmap, jvp) is running.

    >>> under_transform()
    False
    """
    return torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None


def under_vmap(leaves: list[Any]) -> bool:
    """Tell whether the innermost transform is vmap; while compiling, whether one of the leaves is batched.

    >>> under_vmap([torch.ones(2)])
    False
    """
    if torch.compiler.is_compiling():
        return any(isinstance(leaf, Tensor) and _functorch.is_batchedtensor(leaf) for leaf in leaves)
    top = _functorch.peek_interpreter_stack()
    return top is not None and top.key() == _functorch.TransformType.Vmap


def is_wrapped(tensor: Tensor) -> bool:
    """Tell whether a tensor belongs to a functorch transform, so that its memory cannot be asked about.

    >>> is_wrapped(torch.ones(2))
    False
    """
    return _functorch.is_functorch_wrapped_tensor(tensor)


def needs_outer_gradient(tensor: Tensor) -> bool:
    """Tell whether gradients flow to a tensor that does not come from the innermost running level.

    Asked inside the forward of an ``autograd.Function``, where gradient mode is off and arguments are unwrapped:
    there only a tensor from outside says yes.

    >>> needs_outer_gradient(torch.ones(2))
    False
    """
    if not is_wrapped(tensor):
        return tensor.requires_grad
    current = _functorch.maybe_current_level()
    return _functorch.maybe_get_level(tensor) > (0 if current is None else current)
