"""What surrounds a call: functorch transforms or a compiled region."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# functorch's interpreter stack has no public name; these three questions are all that is asked of it.
_torch: Any = torch._C
_functorch = _torch._functorch

__all__ = [
    "is_wrapped",
    "materialized",
    "needs_outer_gradient",
    "transform_is_active",
    "under_transform",
    "under_vmap",
]


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


def transform_is_active() -> bool:
    """Tell whether a functorch transform is running, in a compiled region too.

    >>> transform_is_active(), torch.func.vmap(lambda x: x * transform_is_active())(torch.ones(1))
    (False, tensor([1.]))
    """
    return _torch._are_functorch_transforms_active()


def materialized(value: Tensor) -> Tensor:
    """Return a small tensor so that a compiled region computes it once, not once for every element that it meets.

    Inductor inlines arithmetic on small tensors into the loop over elements: the bias corrections of Adam would call
    pow there. What a strided view is taken of, it stores first.

    >>> materialized(torch.tensor(2.0))
    tensor(2.)
    """
    if not torch.compiler.is_compiling() or transform_is_active():
        return value
    return value.as_strided(value.shape, value.stride())


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
