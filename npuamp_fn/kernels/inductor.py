"""Compiling a traced function once for all sizes, and calling it without guards.

``torch.compile`` would look at guards at every call and keep at most eight versions of one code object. Here a function
is traced with symbolic sizes, compiled by Inductor, and kept; a call costs what its arguments cost. The caller's key
must therefore say everything that the compiled code depends on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
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
    # Inductor would decide by the sizes of the example, and by the number of threads while it compiles, which loops run
    # in parallel: one thread then, or many threads and a small example, would mean serial code for good. This way every
    # loop is parallel, on as many threads as torch.set_num_threads says when it is called.
    "cpp.dynamic_threads": True,
    "cpp.threads": 2,
    # A vector that is not full is loaded and stored through memory: slower than its elements one by one.
    "cpp.enable_loop_tail_vec": False,
}
_RECOMPUTE = {
    # Inductor would keep full-size intermediate results of rules with norms: recomputing them is cheaper than memory.
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
}
_failure: list[str] = []  # why this process cannot compile, once that is known


def unavailable() -> str | None:
    """Say why nothing can be compiled in this process, or return ``None``."""
    return _failure[0] if _failure else None


def compile_once(
    what: str,
    fun: Callable[..., Sequence[Tensor]],
    example: Sequence[Tensor],
    *,
    keep: bool = False,
    checked: bool = False,
) -> Callable[..., Any] | None:
    """Compile a function of tensors for all sizes of their first dimension.

    Args:
        what: What the function does, for messages.
        fun: Positional tensors in, a sequence of tensors out; ``copy_`` into arguments is kept.
        example: Arguments of the dtypes, ranks and devices that will come; sizes of 0 and 1 are not general.
        keep: Whether intermediate results may be kept in memory, instead of being computed wherever they are needed:
            right only where they stay in the caches.
        checked: Whether the caller makes sure of shapes and strides, so that calls, if they are many, need not.

    Returns:
        The compiled function, or ``None``: where the function cannot be traced, or nothing can be compiled; a warning
        says why, in the latter case the first time only.
    """
    if _failure:
        return None
    if all(tensor.device.type == "cpu" for tensor in example):
        _start_probing()
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
            _finish_probing()
            return _compile(module, example, {**_OPTIONS, **({} if keep else _RECOMPUTE), "size_asserts": not checked})
    except Exception as error:  # whatever the compiler raises, the update itself was not touched
        _failure.append(_first_line(getattr(error, "inner_exception", error)))
        warnings.warn(
            f"npuamp_fn: kernels cannot be compiled here ({_failure[0]}); updates run uncompiled, with the same "
            "numbers but slower. A C++ compiler is needed (set CXX), on CUDA also triton.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compile(module: fx.GraphModule, example: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    stages = cut(module)
    if stages is None:
        return _compile_graph(module, example, options)
    first = _compile_graph(stages[0], example, options)
    second = _compile_graph(stages[1], [*example, *first(*example)], options)
    return lambda *tensors: second(*tensors, *first(*tensors))


def _compile_graph(module: fx.GraphModule, example: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    realize.register_lowering()
    realize.materialize_scalars(module)
    return torch._inductor.standalone_compile(
        module, list(example), dynamic_shapes="from_graph", options={"config_patches": options}
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_probe: list[threading.Thread] = []


@functools.cache
def _start_probing() -> None:
    """Begin to find out what vectors this machine has, which Inductor does once per process, in processes of its own.

    Waiting for those is a third of what the first kernel costs if it is cached, and need not be done while nothing
    else happens. Where that is not possible here, for whatever reason, Inductor does it, or says what is wrong.
    """
    with contextlib.suppress(Exception):
        # What the thread needs of the compiler is imported before: it must not import that together with this thread.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

        def probe() -> None:
            with contextlib.suppress(Exception):
                cpu_vec_isa.valid_vec_isa_list()

        thread = threading.Thread(target=probe, name="npuamp_fn: vector instructions", daemon=True)
        thread.start()
        _probe.append(thread)


def _finish_probing() -> None:
    while _probe:
        _probe.pop().join()
