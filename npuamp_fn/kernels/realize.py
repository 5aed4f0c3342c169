"""A barrier in a traced graph: what it is put on is computed once and kept, not recomputed wherever it is used."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["insert", "is_elements", "is_small", "materialize_scalars", "register_lowering"]

_library = torch.library.Library("npuamp_fn", "FRAGMENT")
_library.define("realize(Tensor x) -> Tensor")
_library.impl("realize", torch.clone, "CompositeExplicitAutograd")
_library.impl("realize", torch.empty_like, "Meta")


@functools.cache
def register_lowering() -> None:
    """Tell Inductor what the barrier means; call it before compiling."""
    import torch._inductor
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.npuamp_fn.realize.default, type_promotion_kind=None)
    def _(x: Any) -> Any:
        x.realize()
        return x


def insert(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a barrier on a node of the graph, at the graph's place of insertion."""
    barrier = graph.call_function(torch.ops.npuamp_fn.realize.default, (node,))
    barrier.meta = dict(node.meta)
    return barrier


def is_small(value: Any) -> bool:
    """Tell whether a traced value is a scalar, or a column with one entry per row."""
    return isinstance(value, Tensor) and (value.dim() == 0 or (value.dim() == 2 and value.shape[1] == 1))


def is_elements(value: Any, rank: int = 2) -> bool:
    """Tell whether a traced value has many entries per row; of ``rank`` 1, whether it is a vector."""
    return isinstance(value, Tensor) and value.dim() == rank > 0 and (rank == 1 or value.shape[1] != 1)


def materialize_scalars(module: fx.GraphModule) -> None:
    """Compute per-step and per-tensor values once, not once per element.

    Inductor inlines arithmetic on 0-dim tensors into the loop over elements, where the compiler cannot hoist it: the
    bias corrections of Adam would call pow twice per vector. A barrier goes wherever a small value meets elements.
    """
    graph = module.graph
    values = [node.meta.get("val") for node in graph.nodes]
    rank = max((value.dim() for value in values if isinstance(value, Tensor)), default=0)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not is_small(value):
            continue
        users = [user for user in node.users if is_elements(user.meta.get("val"), rank)]
        if not users or (node.op == "placeholder" and value.dtype != torch.float64):
            continue
        source = node
        if node.op == "placeholder":
            dtype = users[0].meta["val"].dtype
            with graph.inserting_after(node):
                source = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
            source.meta = {"val": value.to(dtype)}
        with graph.inserting_after(source):
            barrier = insert(graph, source)
        for user in users:
            user.replace_input_with(node, barrier)
    graph.lint()
    module.recompile()
