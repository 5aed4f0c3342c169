"""Compiling a traced function once for all sizes, and calling it without guards.

``torch.compile`` would look at guards at every call (60 us and more) and keep at most eight versions of one code
object. Here a function is traced with symbolic sizes, compiled by Inductor, and kept: 16 us per call. The caller's
key must therefore say everything that the compiled code depends on.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["compile_once", "unavailable"]

_library = torch.library.Library("npuamp_fn", "FRAGMENT")
_library.define("realize(Tensor x) -> Tensor")
_library.impl("realize", torch.clone, "CompositeExplicitAutograd")
_library.impl("realize", torch.empty_like, "Meta")

_OPTIONS = {
    # Inductor would keep full-size intermediate results of rules with norms: recomputing them is cheaper than memory.
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 1000,
}
_failure: list[str] = []  # why this process cannot compile, once that is known


def unavailable() -> str | None:
    """Say why nothing can be compiled in this process, or return ``None``."""
    return _failure[0] if _failure else None


def compile_once(fun: Callable[..., Sequence[Tensor]], example: Sequence[Tensor]) -> Callable[..., Any] | None:
    """Compile a function of tensors for all sizes of their first dimension.

    Args:
        fun: Positional tensors in, a sequence of tensors out; ``copy_`` into arguments is kept.
        example: Arguments of the dtypes, ranks and devices that will come; sizes of 0 and 1 are not general.

    Returns:
        The compiled function, or ``None`` where compilation is impossible; the first time a warning says why.
    """
    if _failure:
        return None
    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own affairs: a user with -W error must not lose the kernel
            _register_lowering()
            # A bare lambda: annotations of `fun` would end up in the graph's code and spoil Inductor's cache key.
            module = make_fx(lambda *tensors: fun(*tensors), tracing_mode="symbolic")(*example)
            _materialize_scalars(module)
            return torch._inductor.standalone_compile(
                module, list(example), dynamic_shapes="from_graph", options={"config_patches": _OPTIONS}
            )
    except Exception as error:  # whatever the compiler raises, the update itself was not touched
        cause = getattr(error, "inner_exception", error)
        _failure.append(f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}")
        warnings.warn(
            f"npuamp_fn: kernels cannot be compiled here ({_failure[0]}); updates run uncompiled, with the same "
            "numbers but slower. A C++ compiler is needed (set CXX), on CUDA also triton.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


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
