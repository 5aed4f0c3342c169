"""Casting what goes into and comes out of a model, in containers of every kind."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import ItemsView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from npuamp_fn import cast
from npuamp_fn.tree import HALVES

__all__ = ["cast_values"]


def cast_values(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast float32 and half tensors anywhere in a value, to half float64 ones too; containers keep their type.

    Goes into lists, tuples, named tuples, sets, deques, mappings (values only), their views and dataclasses; other
    objects with a ``to`` method decide themselves (``value.to(dtype)``); everything else passes untouched. What needs
    no cast is returned as it is, so arguments are never changed.

    >>> cast_values({"x": torch.ones(1), "ids": [torch.arange(2), "a", None]}, torch.float16)["x"].dtype
    torch.float16
    """
    if dtype is None or value is None or isinstance(value, (str, bytes, int, float, complex, nn.Module)):
        return value
    if isinstance(value, Tensor):
        # numpy's default; no half model could use it
        return value.to(dtype) if value.dtype is torch.float64 and dtype in HALVES else cast(value, dtype)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, PackedSequence):  # its own `to` would make floats of token ids
        data = cast_values(value.data, dtype)
        return value if data is value.data else type(value)(data, *value[1:])
    if isinstance(value, (list, tuple, set, frozenset, deque, ValuesView, ItemsView)) and not hasattr(value, "to"):
        return _cast_sequence(value, dtype)
    convert = getattr(value, "to", None)
    if callable(convert) and not isinstance(value, type):
        return convert(dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _changed(value, {name: getattr(value, name) for name in names}, dtype)
    return value


def _cast_sequence(value: Any, dtype: torch.dtype) -> Any:
    items = list(value)
    new = [cast_values(item, dtype) for item in items]
    if all(a is b for a, b in zip(items, new, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(new)
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*new)
    if isinstance(value, list) and type(value) is not list:
        rebuilt = copy.copy(value)
        rebuilt[:] = new
        return rebuilt
    if isinstance(value, deque):
        return type(value)(new, value.maxlen)
    if isinstance(value, ValuesView):
        return dict(enumerate(new)).values()
    if isinstance(value, ItemsView):
        return dict(new).items()
    return type(value)(new)


def _cast_mapping(value: Any, dtype: torch.dtype) -> Any:
    new = {key: cast_values(item, dtype) for key, item in value.items()}
    if all(new[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return new
    try:
        rebuilt = copy.copy(value)  # keeps the type and what else it carries: order, default factory, attributes
        for key, item in new.items():
            if item is not value[key]:
                rebuilt[key] = item
    except TypeError:  # an immutable mapping
        return type(value)(new)
    return rebuilt


def _changed(value: Any, fields: dict[str, Any], dtype: torch.dtype) -> Any:
    new = {name: cast_values(item, dtype) for name, item in fields.items()}
    if all(new[name] is item for name, item in fields.items()):
        return value
    rebuilt = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(rebuilt, name, item)
    return rebuilt
