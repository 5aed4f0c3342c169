"""Compiling a traced function once for all sizes, and calling it without guards.

``torch.compile`` would look at guards at every call and keep at most eight versions of one code object. Here a function
is traced with symbolic sizes, compiled by Inductor, and kept; a call costs what its arguments cost. The caller's key
must therefore say everything that the compiled code depends on.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["WORTH_COMPILING", "compile_once", "unavailable"]

WORTH_COMPILING = 2**20
"""Elements from which compiling pays: the first kernel of a process costs seconds, a small call microseconds."""

_library = torch.library.Library("npuamp_fn", "FRAGMENT")
_library.define("realize(Tensor x) -> Tensor")
_library.impl("realize", torch.clone, "CompositeExplicitAutograd")
_library.impl("realize", torch.empty_like, "Meta")

_OPTIONS = {
    # Inductor would keep full-size intermediate results of rules with norms: recomputing them is cheaper than memory.
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
    # Without guards nothing else notices another number of threads: loops ask for it when they run.
    "cpp.dynamic_threads": True,
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
            _register_lowering()
            _materialize_scalars(module)
            return torch._inductor.standalone_compile(
                module, list(example), dynamic_shapes="from_graph", options={"config_patches": _OPTIONS}
            )
    except Exception as error:  # whatever the compiler raises, the update itself was not touched
        _failure.append(_first_line(getattr(error, "inner_exception", error)))
        warnings.warn(
            f"npuamp_fn: kernels cannot be compiled here ({_failure[0]}); updates run uncompiled, with the same "
            "numbers but slower. A C++ compiler is needed (set CXX), on CUDA also triton.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@functools.cache
def _register_lowering() -> None:
    import torch._inductor
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.npuamp_fn.realize.default, type_promotion_kind=None)
    def _(x: Any) -> Any:
        x.realize()
        return x


def _materialize_scalars(module: fx.GraphModule) -> None:
    """Compute per-step and per-tensor values once, not once per element.

    Inductor inlines arithmetic on 0-dim tensors into the loop over elements, where the compiler cannot hoist it: the
    bias corrections of Adam would call pow twice per vector. A barrier goes wherever a small value meets elements.
    """
    graph = module.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not _is_small(value):
            continue
        users = [user for user in node.users if _is_elements(user.meta.get("val"))]
        if not users or (node.op == "placeholder" and value.dtype != torch.float64):
            continue
        with graph.inserting_after(node):
            source, meta = node, dict(node.meta)
            if node.op == "placeholder":
                elements = users[0].meta["val"]
                source = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": elements.dtype})
                source.meta = meta = {"val": value.to(elements.dtype)}
        with graph.inserting_after(source):
            barrier = graph.call_function(torch.ops.npuamp_fn.realize.default, (source,))
            barrier.meta = meta
        for user in users:
            user.replace_input_with(node, barrier)
    graph.lint()
    module.recompile()


def _is_small(value: Tensor) -> bool:
    return value.dim() == 0 or (value.dim() == 2 and value.shape[1] == 1)


def _is_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] != 1
