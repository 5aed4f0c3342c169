"""Casting as a transform of functions: ``cast_policy(O2)(fn)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from npuamp_fn.policy import Policy, cast_tree, keep_candidates
from npuamp_fn.transforms.function import FunctionTransform
from npuamp_fn.transforms.op_cast import CastOpsFn, current
from npuamp_fn.tree import check_dtype, check_patterns, tree_map

__all__ = ["PolicyFn", "cast", "cast_like", "cast_policy", "full_precision"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast the float32, float16 and bfloat16 leaves of a tree; everything else passes untouched.

    Args:
        tree: Any pytree; containers keep their type, leaves that already fit are not copied.
        dtype: The dtype wanted, or ``None`` to leave all as it is.

    Raises:
        TypeError: ``dtype`` is no floating-point dtype.

    >>> cast({"w": torch.ones(2), "ids": torch.arange(2)}, torch.float16)["ids"].dtype
    torch.int64
    """
    check_dtype(dtype, "cast")
    return cast_tree(tree, dtype)


def cast_like(tree: Any, like: Any) -> Any:
    """Cast each float32 or half leaf of a tree to the dtype of the same leaf of another tree.

    Raises:
        ValueError: the structures differ; the message names the first differing path.

    >>> cast_like([torch.ones(2)], [torch.ones(1).half()])[0].dtype
    torch.float16
    """
    return tree_map(lambda x, y: cast_tree(x, y.dtype if isinstance(y, Tensor) else None), tree, like)


@dataclass(frozen=True)
class PolicyFn(FunctionTransform):
    """A function whose arguments and results are cast; see :func:`cast_policy`."""

    fun: Callable[..., Any]
    policy: Policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast the arguments to ``policy.compute``, call, and cast the result to ``policy.output``."""
        policy = self.policy
        if policy.keep:
            candidates = [path for arg in (*args, *kwargs.values()) for path in keep_candidates(arg)]
            check_patterns(policy.keep, candidates, "Policy.keep")
        fun = _under_ops(self.fun, policy)
        cast_args = [cast_tree(arg, policy.compute, policy.keep) for arg in args]
        cast_kwargs = {name: cast_tree(arg, policy.compute, policy.keep) for name, arg in kwargs.items()}
        return cast_tree(fun(*cast_args, **cast_kwargs), policy.output)


def cast_policy(policy: Policy) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function compute in the policy's ``compute`` dtype and return its ``output`` dtype.

    With ``policy.ops`` (level O1) its operations are cast one by one, as by ``cast_ops(policy.ops, policy.low)``.
    Inside a function whose operations are cast, a policy with a ``compute`` dtype of its own is not subject to that.
    Gradients flow through the casts, so they arrive in the dtype of what the caller passed in.

    Args:
        policy: Its ``keep`` patterns are paths inside each argument (for a FlatTree, paths of its layout).

    Raises:
        TypeError: ``policy`` is not a Policy.

    >>> @cast_policy(O2)
    ... def forward(weight, x):
    ...     return (x * weight), x.dtype
    >>> out, inner = forward(torch.ones(2), torch.ones(2))
    >>> out.dtype, inner
    (torch.float32, torch.float16)
    >>> cast_policy(O1)(torch.mm)(torch.ones(1, 3), torch.full((3, 1), 1.0001))  # rounded to half inside
    tensor([[3.]])
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            f"cast_policy: expected a Policy, found {type(policy).__name__}; write `@cast_policy(O2)` above the "
            "function, or cast_policy(O2)(fn)"
        )

    def transform(fun: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(fun):
            raise TypeError(f"cast_policy(policy): expected a function, found {fun!r} of type {type(fun).__name__}")
        return PolicyFn(fun, policy)

    return transform


def _under_ops(fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Return the function under the operation casts that a policy asks for."""
    if policy.ops is not None and policy.low is not None:
        return CastOpsFn(fun, policy.ops, policy.low)
    outer = None if policy.compute is None else current()
    if outer is None or outer.table is None:
        return fun
    # What it closes over may be half already: in float32, mixtures are widened rather than refused.
    return CastOpsFn(fun, outer.table.widened if policy.compute is torch.float32 else None, outer.dtype)


def full_precision(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function compute and return float32, whatever policy its caller runs under.

    >>> full_precision(lambda x: x.exp())(torch.ones(1).half()).dtype
    torch.float32
    """
    return cast_policy(Policy(compute=torch.float32, output=torch.float32))(fun)
