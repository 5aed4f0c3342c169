"""Casting a user's own functions: ``half_function``, ``float_function``, ``promote_function``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from npuamp_fn.op_names import name_of
from npuamp_fn.transforms.function import FunctionTransform
from npuamp_fn.transforms.op_cast import OpCasts, current
from npuamp_fn.transforms.op_rules import cast_arguments

__all__ = ["RuledFn", "float_function", "half_function", "promote_function"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class RuledFn(FunctionTransform):
    """A user's function with a rule of its own, as an operation of a table has; see :func:`half_function`."""

    fun: Callable[..., Any]
    rule: str
    operation: bool = False  # torch's own, which tables know too

    @property
    def __cast_key__(self) -> Callable[..., Any] | str:
        """What stands for this function in an operation table."""
        return name_of(self.fun) if self.operation else self.fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; where operations are cast, with its arguments cast."""
        scope = current()
        if scope is None or scope.table is None:
            return self.fun(*args, **kwargs)
        if self.operation:  # the user's rule instead of the table's, not on top of it
            rule, table = self.rule, None
        else:  # operations inside follow the table, with float32 where it says low if the function is full
            rule = _rule_in(scope, self.fun) or self.rule
            table = scope.table.widened if rule == "full" else scope.table
        fitting = cast_arguments(rule, args, kwargs, scope.dtype)
        if scope.report is not None:
            scope.report(getattr(self.fun, "__name__", type(self.fun).__name__), (args, kwargs), fitting)
        args, kwargs = fitting
        with OpCasts(table, scope.dtype):
            return self.fun(*args, **kwargs)


def half_function(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function run on low-precision arguments wherever operations are cast.

    Inside ``cast_ops`` or ``cast_policy(O1)`` its float32 tensors, in arguments, keyword arguments and nested
    containers, are cast to the low dtype; gradients come back in the caller's dtype. Elsewhere nothing changes.
    A table can give the function another rule (``table.full(fun)``), which then counts; of several decorators the
    last applied counts. Takes methods, also static and class methods, and ``autograd.Function.apply``.

    Raises:
        TypeError: ``fun`` cannot be called.

    >>> @half_function
    ... def dtype_of(x):
    ...     return x.dtype
    >>> dtype_of(torch.ones(2)), cast_ops(APEX_OPS, torch.bfloat16)(dtype_of)(torch.ones(2))
    (torch.float32, torch.bfloat16)
    """
    return _ruled(fun, "low", "half_function")


def float_function(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function run in float32 wherever operations are cast: its arguments and all operations inside.

    See :func:`half_function`.

    >>> @float_function
    ... def product(x):
    ...     return x @ x
    >>> cast_ops(APEX_OPS, torch.float16)(product)(torch.ones(2, 2).half()).dtype
    torch.float32
    """
    return _ruled(fun, "full", "float_function")


def promote_function(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function run on the widest dtype of its arguments wherever operations are cast.

    See :func:`half_function`.

    >>> @promote_function
    ... def dtypes_of(x, y):
    ...     return x.dtype, y.dtype
    >>> cast_ops(APEX_OPS, torch.float16)(dtypes_of)(torch.ones(2).half(), torch.ones(2))
    (torch.float32, torch.float32)
    """
    return _ruled(fun, "promote", "promote_function")


def _ruled(fun: Any, rule: str, who: str) -> Any:
    if isinstance(fun, (staticmethod, classmethod)):
        return type(fun)(_ruled(fun.__func__, rule, who))
    if isinstance(fun, RuledFn):
        fun = fun.fun
    if not callable(fun):
        raise TypeError(f"{who}: expected a function, found {fun!r} of type {type(fun).__name__}")
    return RuledFn(fun, rule, _is_operation(fun))


def _rule_in(scope: OpCasts, fun: Any) -> str | None:
    for candidate, rule in scope.lookup.get(getattr(fun, "__name__", None), ()):
        if candidate is fun:
            return rule
    return None


def _is_operation(fun: Any) -> bool:
    try:
        return isinstance(name_of(fun), str) or isinstance(fun, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    except TypeError:
        return False
