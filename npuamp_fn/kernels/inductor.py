"""Compiling a traced function once for all sizes, and calling it without guards.

``torch.compile`` would look at guards at every call and keep at most eight versions of one code object. Here a function
is traced with symbolic sizes, compiled by Inductor, and kept; a call costs what its arguments cost. The caller's key
must therefore say everything that the compiled code depends on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from npuamp_fn.kernels import realize
from npuamp_fn.kernels.stages import cut

__all__ = ["WORTH_COMPILING", "compile_once", "unavailable"]

WORTH_COMPILING = 2**20
"""Elements from which compiling pays: the first kernel of a process costs seconds, a small call microseconds."""

_OPTIONS = {
    # Inductor would keep full-size intermediate results of rules with norms: recomputing them is cheaper than memory.
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
    # Without guards nothing else notices another number of threads: loops ask for it when they run.
    "cpp.dynamic_threads": True,
    "cpp.threads": 2,  # with one thread, or by the sizes of the example, some loops over rows would not be parallel
}
_failure: list[str] = []  # why this process cannot compile, once that is known


def unavailable() -> str | None:
    """Say why nothing can be compiled in this process, or return ``None``."""
    return _failure[0] if _failure else None


def compile_once(
    what: str, fun: Callable[..., Sequence[Tensor]], example: Sequence[Tensor]
) -> Callable[..., Any] | None:
    """Compile a function of tensors for all sizes of their first dimension.

    Args:
        what: What the function does, for messages.
        fun: Positional tensors in, a sequence of tensors out; ``copy_`` into arguments is kept.
        example: Arguments of the dtypes, ranks and devices that will come; sizes of 0 and 1 are not general.

    Returns:
        The compiled function, or ``None``: where the function cannot be traced, or nothing can be compiled; a warning
        says why, in the latter case the first time only.
    """
    if _failure:
        return None
    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own affairs: a user with -W error must not lose the kernel
            # A bare lambda: annotations of `fun` would end up in the graph's code and spoil Inductor's cache key.
            module = make_fx(lambda *tensors: fun(*tensors), tracing_mode="symbolic")(*example)
    except Exception as error:  # whatever tracing raises; other functions are not concerned
        warnings.warn(
            f"npuamp_fn: {what} cannot be traced ({_first_line(error)}); it runs uncompiled, with the same numbers but "
            "slower. A rule must not decide in Python what depends on tensors, and numbers arrive as tensors here.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compile(module, example)
    except Exception as error:  # whatever the compiler raises, the update itself was not touched
        _failure.append(_first_line(getattr(error, "inner_exception", error)))
        warnings.warn(
            f"npuamp_fn: kernels cannot be compiled here ({_failure[0]}); updates run uncompiled, with the same "
            "numbers but slower. A C++ compiler is needed (set CXX), on CUDA also triton.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compile(module: fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
    stages = cut(module)
    if stages is None:
        return _compile_graph(module, example)
    first = _compile_graph(stages[0], example)
    second = _compile_graph(stages[1], [*example, *first(*example)])
    return lambda *tensors: second(*tensors, *first(*tensors))


def _compile_graph(module: fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
    realize.register_lowering()
    realize.materialize_scalars(module)
    return torch._inductor.standalone_compile(
        module, list(example), dynamic_shapes="from_graph", options={"config_patches": _OPTIONS}
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
