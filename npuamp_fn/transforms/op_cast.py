"""Casting single operations as a transform of functions: ``cast_ops(APEX_OPS, torch.float16)(fn)``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode, redispatch_function
from torch.utils.checkpoint import CheckpointFunction

from npuamp_fn.op_tables import OpTable
from npuamp_fn.transforms.function import FunctionTransform
from npuamp_fn.transforms.op_rules import APPLY

__all__ = [
    "CastOpsFn",
    "OpCasts",
    "Report",
    "cast_ops",
    "current",
    "disable_casts",
    "in_backward",
    "with_current_casts",
]

Report: TypeAlias = Callable[[str, Any, Any], None]
"""Told the name of a cast operation and its arguments (positional, keyword), before and after."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What starts a backward pass: the engine must find the mode on the stack, to recompute checkpoints under it.
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_STARTERS = ("backward", "grad")
_DTYPE: Any = Tensor.dtype
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009
_current_node: Any = getattr(torch._C, "_current_autograd_node")  # noqa: B009
_RNN_CHECK = nn.RNNBase.check_input.__code__
_REQUIRES_GRAD: Any = Tensor.requires_grad
_CHECKPOINT_FORWARD: Any = CheckpointFunction.forward.__code__


class OpCasts(TorchFunctionMode):
    """The scope in which operations are cast: make one per scope and enter it at once.

    torch's stack of function modes is the only state: it belongs to one thread, and the threads of a backward pass
    inherit it. The innermost scope alone decides; the ones around it let its calls pass.

    Args:
        table: Which operations to cast how, or ``None`` to cast nothing.
        dtype: The low dtype.
        backward_only: Cast only what runs inside a backward pass, for the recomputation of reentrant checkpoints; not
            in those that ran without casts before.
        report: Told of every call whose arguments were cast; by default that of the scope around this one.

    >>> from npuamp_fn.transforms.op_cast import OpCasts
    >>> with OpCasts(APEX_OPS, torch.bfloat16):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    def __init__(
        self, table: OpTable | None, dtype: torch.dtype, backward_only: bool = False, report: Report | None = None
    ) -> None:
        self.table = table
        self.dtype = dtype
        self.backward_only = backward_only
        self.lookup = {} if table is None else table.lookup
        self.outer = current()
        self.report = self.outer.report if report is None and self.outer is not None else report
        self.passing: set[int] = set()  # threads in which a scope inside this one is calling through it
        # A checkpoint around this scope enters it again when it recomputes; those inside must be told of it.
        self.around = None if is_dynamo_compiling() else _checkpoint_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast the arguments as the table says, and call."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", None)
        if name in _STARTERS and func in _BACKWARD:
            with self:
                return redispatch_function(func, types, args, kwargs)
        if self.backward_only and not _casts_in_backward():
            return func(*args, **kwargs)
        rules = self.lookup.get(name)
        if rules is not None and not (self.passing and _thread() in self.passing):
            for candidate, rule in rules:
                if candidate is func:
                    if not kwargs or kwargs.get("out") is None:
                        fitting = APPLY[rule](func.__name__, args, kwargs, self.dtype)
                        if self.report is not None:
                            self.report(func.__name__, (args, kwargs), fitting)
                        args, kwargs = fitting
                    break
        elif name == "__get__" and self.lookup and not (self.passing and _thread() in self.passing):
            if func.__self__ is _REQUIRES_GRAD:
                _mark_checkpoint()
            elif _reads_dtype_in_rnn(func):
                return torch.float32 if (dtype := func(*args)) is self.dtype else dtype
        if self.outer is None and (is_dynamo_compiling() or _checkpoint_hooks() is None):
            return func(*args, **kwargs)
        return self._call_through(func, args, kwargs)

    def _call_through(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call with the scopes around this one passing, and checkpoints told to recompute under this one."""
        outer, thread = self.outer, _thread()
        passing = set() if outer is None else outer.passing
        first = thread not in passing
        passing.add(thread)
        try:
            hooks = None if is_dynamo_compiling() else _checkpoint_hooks()
            if hooks is None or hooks == self.around:
                return func(*args, **kwargs)
            pack, unpack = hooks
            with saved_tensors_hooks(pack, _Recompute(unpack, self)):
                return func(*args, **kwargs)
        finally:
            if first:
                passing.discard(thread)


def current() -> OpCasts | None:
    """Return the innermost scope that casts here, or ``None``; its ``table`` is ``None`` where casts are disabled.

    >>> from npuamp_fn.transforms.op_cast import current
    >>> current() is None
    True
    """
    for index in range(_len_torch_function_stack() - 1, -1, -1):
        mode = _get_function_stack_at(index)
        if type(mode) is OpCasts and not (mode.backward_only and not _casts_in_backward()):
            return mode
    return None


def in_backward() -> bool:
    """Tell whether the autograd engine is running this code.

    >>> from npuamp_fn.transforms.op_cast import in_backward
    >>> in_backward()
    False
    """
    # Dynamo cannot trace the question, and compiled regions hold no part of a running backward pass.
    return not is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


@contextmanager
def disable_casts() -> Iterator[None]:
    """Cast no operation inside this block.

    >>> from npuamp_fn.transforms.op_cast import OpCasts, disable_casts
    >>> with OpCasts(APEX_OPS, torch.float16), disable_casts():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with OpCasts(None, torch.float32):
        yield


def with_current_casts(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function run later as it would run here: under the casts of the scope this is called in.

    >>> from npuamp_fn.transforms.op_cast import OpCasts, with_current_casts
    >>> with OpCasts(APEX_OPS, torch.float16):
    ...     later = with_current_casts(torch.mm)
    >>> later(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.float16
    """
    mode = current()
    return fun if mode is None else CastOpsFn(fun, mode.table, mode.dtype)  # type: ignore[return-value]


@dataclass(frozen=True)
class CastOpsFn(FunctionTransform):
    """A function whose operations are cast; see :func:`cast_ops`."""

    fun: Callable[..., Any]
    table: OpTable | None
    dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its operations cast."""
        with OpCasts(self.table, self.dtype):
            return self.fun(*args, **kwargs)


def cast_ops(table: OpTable, dtype: torch.dtype = torch.float16) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make the operations of a function run in the precision that a table gives them.

    Only what runs inside the function is cast, and only tensors of float32 and of the low dtype; float64, the other
    half dtype, complex numbers and integers follow torch's own promotion. Parameters keep their dtype and gradients
    arrive in it. Works under grad, vmap, jvp and torch.compile; nested calls: the innermost table rules.

    Args:
        table: Which operations run low, in float32, or in the widest dtype of their inputs.
        dtype: The low dtype, torch.float16 or torch.bfloat16.

    Raises:
        TypeError: ``table`` is not an OpTable, or ``dtype`` not a half dtype.

    Source: the O1 level of apex.amp; Micikevicius et al., Mixed Precision Training, 2018.

    >>> @cast_ops(APEX_OPS, torch.float16)
    ... def attend(q, k):
    ...     scores = q @ k.T
    ...     return scores, scores.softmax(-1)
    >>> [out.dtype for out in attend(torch.ones(2, 2), torch.ones(2, 2))]
    [torch.float16, torch.float32]
    """
    if not isinstance(table, OpTable):
        raise TypeError(
            f"cast_ops: expected an OpTable, found {table!r} of type {type(table).__name__}; write "
            "`@cast_ops(APEX_OPS, torch.float16)` above the function"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"cast_ops: the low dtype: expected torch.float16 or torch.bfloat16, found {dtype!r}")

    def transform(fun: Callable[_P, _R]) -> Callable[_P, _R]:
        return CastOpsFn(fun, table, dtype)

    return transform


class _Recompute:
    """An unpack hook of torch.utils.checkpoint that recomputes under the casts of the forward pass."""

    def __init__(self, unpack: Callable[[Any], Any], mode: OpCasts) -> None:
        self.unpack, self.table, self.dtype, self.report = unpack, mode.table, mode.dtype, mode.report

    def __call__(self, packed: Any) -> Any:
        with OpCasts(self.table, self.dtype, report=self.report):
            return self.unpack(packed)


def _checkpoint_hooks() -> tuple[Any, Any] | None:
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks and getattr(hooks[1], "__module__", None) == "torch.utils.checkpoint" else None


def _casts_in_backward() -> bool:
    """Tell whether what runs now is part of a backward pass and, if a checkpoint recomputes it, was cast before."""
    if not in_backward() or _checkpoint_hooks() is not None:  # others than reentrant ones bring their scope along
        return False
    node = _current_node()
    return getattr(node, "_forward_cls", None) is not CheckpointFunction or hasattr(node, "ran_under_casts")


def _mark_checkpoint() -> None:
    # The first that a reentrant checkpoint does is to look whether an argument requires grad.
    if is_dynamo_compiling() or torch.is_grad_enabled():
        return
    frame = sys._getframe(2)
    for _ in range(6):  # other modes may stand between
        if frame is None:
            return
        if frame.f_code is _CHECKPOINT_FORWARD:
            frame.f_locals["ctx"].ran_under_casts = True
            return
        frame = frame.f_back


def _reads_dtype_in_rnn(func: Any) -> bool:
    # nn.LSTM & co. compare the input's dtype with the weights' before the operation that casts both.
    if is_dynamo_compiling() or func.__self__ is not _DTYPE:
        return False
    frame = sys._getframe(2)
    for _ in range(6):  # other modes may stand between
        if frame is None or frame.f_code is _RNN_CHECK:
            return frame is not None
        frame = frame.f_back
    return False


def _thread() -> int:
    return 0 if is_dynamo_compiling() else get_ident()
