"""Names of torch's operations: one name for all the functions, methods and operators that mean the same."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_testing_overrides

__all__ = ["functions_of", "name_of"]

_C: Any = torch._C

# Where an operation with a plain name may live; a name of these is the same operation in each.
_PLACES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.Tensor", Tensor),
    ("torch.nn.functional", F),
    ("torch.special", torch.special),
    ("torch._C._VariableFunctions", _C._VariableFunctions),
    ("torch._C._nn", _C._nn),
)
_GROUPS = ("linalg", "fft", "special")  # names that keep their prefix

# torch.compile and eager see the methods, strict export sees the functions of the operator module.
_OPERATORS: dict[str, tuple[Any, ...]] = {
    "add": (Tensor.__add__, Tensor.__radd__, operator.add),
    "sub": (Tensor.__sub__, Tensor.__rsub__, operator.sub),
    "mul": (Tensor.__mul__, Tensor.__rmul__, operator.mul),
    "div": (Tensor.__truediv__, Tensor.__div__, operator.truediv),
    "matmul": (Tensor.__matmul__, Tensor.__rmatmul__, operator.matmul),
    "pow": (Tensor.__pow__, Tensor.__rpow__, Tensor.__ipow__, operator.pow, operator.ipow),
    "eq": (Tensor.__eq__, operator.eq),
    "ne": (Tensor.__ne__, operator.ne),
    "lt": (Tensor.__lt__, operator.lt),
    "le": (Tensor.__le__, operator.le),
    "gt": (Tensor.__gt__, operator.gt),
    "ge": (Tensor.__ge__, operator.ge),
    "__rtruediv__": (Tensor.__rtruediv__,),  # 2 / x computes x.reciprocal() * 2; its __name__ is __rdiv__
}


def name_of(op: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Return what stands for an operation in a table: its short name, or a user's function itself.

    Raises:
        ValueError: a name that no operation of torch has; the message gives the nearest ones.
        TypeError: not an operation: a function that nothing makes visible.

    >>> from npuamp_fn.op_names import name_of
    >>> name_of("torch.nn.functional.linear"), name_of(torch.Tensor.__matmul__), name_of("torch.linalg.norm")
    ('linear', 'matmul', 'linalg.norm')
    """
    if isinstance(op, str):
        known = _known_names()
        if op in known:
            return known[op]
        nearest = difflib.get_close_matches(op if "." in op else f"torch.{op}", _public_names(), n=3, cutoff=0.0)
        raise ValueError(f"unknown operation {op!r}; nearest: {sorted(nearest)}")
    key = getattr(op, "__cast_key__", None)  # what half_function and its siblings made
    if key is not None:
        return key
    op = getattr(op, "_opoverload", op)  # torch.library.custom_op
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op
    for candidate, name in _visible_functions().get(getattr(op, "__name__", None), ()):
        if candidate is op:
            return name
    raise TypeError(
        f"OpTable: expected the name of an operation or a function that torch lets others override, found {op!r}. "
        "A Python function of your own is not seen from outside: decorate it with half_function, float_function or "
        "promote_function; its rule can then be changed here"
    )


@cache  # asked again for every edited table
def functions_of(key: str | Callable[..., Any]) -> tuple[Any, ...]:
    """Return every function that a table's key stands for.

    >>> from npuamp_fn.op_names import functions_of
    >>> torch.bmm in functions_of("bmm") and torch.Tensor.bmm in functions_of("bmm")
    True
    """
    if not isinstance(key, str):
        overloads = key.overloads() if isinstance(key, torch._ops.OpOverloadPacket) else ()
        return (key, *(getattr(key, name) for name in overloads))
    if "." in key:
        group, _, name = key.partition(".")
        candidates = [getattr(getattr(torch, group), name, None)]
    else:
        candidates = [getattr(place, key, None) for _, place in _PLACES]
    found: list[Any] = []
    for function in (*candidates, *_OPERATORS.get(key, ())):
        if callable(function) and not any(function is other for other in found):
            found.append(function)
    return tuple(found)


@cache
def _known_names() -> dict[str, str]:
    """Every way to write an operation, and its short name."""
    overridable = get_testing_overrides()
    names: dict[str, str] = {}
    places = [*_PLACES, *((f"torch.{group}", getattr(torch, group)) for group in _GROUPS)]
    for prefix, place in places:
        for attribute in dir(place):
            function = getattr(place, attribute)
            try:
                visible = function in overridable
            except TypeError:  # not hashable: not a function
                continue
            if visible and callable(function):
                names.setdefault(f"{prefix}.{attribute}", _short(prefix, attribute))
    for name, functions in _OPERATORS.items():
        for function in functions:
            if function.__name__.startswith("__") and function.__name__ != "__ipow__":
                names[f"torch.Tensor.{function.__name__}"] = name
    return {**{short: short for short in names.values()}, **names}


def _short(prefix: str, attribute: str) -> str:
    group = prefix.removeprefix("torch.")
    if group not in _GROUPS or (group == "special" and hasattr(torch, attribute)):
        return attribute
    return f"{group}.{attribute}"


@cache
def _public_names() -> list[str]:
    return [name for name in _known_names() if name.startswith("torch.") and "._" not in name]


@cache
def _visible_functions() -> dict[str | None, list[tuple[Any, str]]]:
    """The visible functions by their ``__name__``, each with the operation's short name."""
    found: dict[str | None, list[tuple[Any, str]]] = {}
    for short in dict.fromkeys(_known_names().values()):
        for function in functions_of(short):
            found.setdefault(getattr(function, "__name__", None), []).append((function, short))
    return found
