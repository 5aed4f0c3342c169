"""Which precision each operation runs in at O1: the built-in table with what scripts registered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from npuamp_fn import APEX_OPS, OpTable, float_function, half_function, promote_function
from npuamp_fn.op_names import name_of

__all__ = [
    "MIXED_OPS",
    "follow",
    "operation_table",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

_BY_WEIGHTS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu "
    "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell "
    "scaled_dot_product_attention multi_head_attention_forward"
).split()
MIXED_OPS = OpTable(
    "mixed",
    tuple(
        (key, "narrow" if key in _BY_WEIGHTS else "match" if rule == "match" else "promote")
        for key, rule in APEX_OPS.rules
        if rule not in ("refuse", "banned")
    ),
)
"""For half models some of whose tensors are float32: what multiplies by weights stays half, what mixes otherwise is as
exact as its widest argument, and calls of one dtype are left alone."""

_DECORATORS = {"low": half_function, "full": float_function, "promote": promote_function}
_tables = [APEX_OPS]  # the table in force; edited by registrations


def operation_table() -> OpTable:
    """Return the table that calls made now follow."""
    return _tables[0]


def register_half_function(module: Any, name: str) -> None:
    """Run a function in half precision at O1, from the next call on; the last registration of a function counts.

    Args:
        module: Where the function is found: ``torch``, ``torch.nn.functional``, ``torch.Tensor``, a module of yours.
        name: Its name there.

    Raises:
        ValueError: the module has no such function.
    """
    _register(module, name, "low")


def register_float_function(module: Any, name: str) -> None:
    """Run a function in float32 at O1; see :func:`register_half_function`."""
    _register(module, name, "full")


def register_promote_function(module: Any, name: str) -> None:
    """Run a function on the widest dtype of its inputs at O1; see :func:`register_half_function`."""
    _register(module, name, "promote")


def follow(module: Any, rule: str, added: Iterable[str], removed: Iterable[str]) -> None:
    """Give functions of a namespace a rule, and leave others alone that still have it, from the next call on.

    Raises:
        ValueError: the module has no such function; nothing was changed then.
    """
    added = list(added)
    for name in added:
        if not hasattr(module, name):
            raise ValueError(f"No function named {name} in module {module}.")
    for name in added:
        _register(module, name, rule)
    for name in removed:
        function = getattr(module, name)
        if _tables[0].get(function) == rule:
            _tables[0] = _tables[0].without(function)


def _register(module: Any, name: str, rule: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    function = getattr(module, name)
    if _known(function):
        _tables[0] = getattr(_tables[0], rule)(function)
    else:  # a function that torch's dispatch does not show: it carries its rule itself
        setattr(module, name, _DECORATORS[rule](function))


def _known(function: Any) -> bool:
    try:
        return isinstance(name_of(function), str)
    except TypeError:
        return False
