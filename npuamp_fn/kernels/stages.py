"""Cutting the traced update of a rule with per-tensor norms into two stages, each of which is one pass over memory.

LAMB scales a tensor's step by a norm of that step, so every element is needed twice: for the norm, and to be moved. As
one graph, both passes read gradient, parameter and slots and repeat all the arithmetic, and nothing is written before
the second. But LAMB's moments do not depend on the norms. So the graph is cut at the sums over tensors:

- the **first stage** has all that comes before. A slot that is finished there gets a barrier right where its new value
  is computed, and all later uses read that value. This is what lets the compiler store the slot and add up the row in
  one loop; otherwise it would hold the new slot in a temporary of full size;
- the **second stage** has the rest. Where it needs a finished slot it reads the slot, which is new by then; where it
  needs the step, it computes it again from slots and parameter. The gradient is not read again.

On a skipped step a finished slot keeps its old value, and sums and step are then computed from that. Nobody sees them,
because the flag that keeps the slot keeps all that the second stage would write; that is checked. Likewise padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from npuamp_fn.kernels import realize

__all__ = ["cut"]

_aten = torch.ops.aten


class _NeedsOldValue(Exception):
    """The second stage would need what the first has overwritten."""


@dataclass(frozen=True)
class _Write:
    """One ``copy_`` of a traced update into an argument."""

    node: fx.Node
    target: fx.Node  # the argument
    value: fx.Node  # what is written where nothing is skipped or padding
    selects: tuple[fx.Node, ...]  # what stands between `value` and `node`, innermost first
    keeps: frozenset[fx.Node]  # boolean arguments: where one is False, the argument keeps its value
    masks: frozenset[fx.Node]  # boolean arguments: where one is False, a constant is written instead


def cut(module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Cut a traced update in place into two graphs, if slots are finished before sums over tensors are needed.

    Args:
        module: A graph of tensors with ``copy_`` into its arguments, as an update of donated rows has; every node has
            its value's shape and dtype in ``meta["val"]``. It is left as it is.

    Returns:
        ``(first, second)``: ``first`` takes the module's arguments and returns the sums over tensors; ``second`` takes
        the arguments and those sums, and returns what the module did. ``None`` where one graph is right: there are no
        sums over tensors, or they depend on each other; no slot is finished before them; not everything is skipped by
        the same flags; or the rest needs the old value of a finished slot.
    """
    nodes = list(module.graph.nodes)
    sums = [node for node in nodes if node.target == _aten.segment_reduce.default]
    late = _dependents(nodes, sums)
    if not sums or any(total in late for total in sums):
        return None
    writes = [_write(node) for node in nodes if node.target == _aten.copy_.default]
    finished = [write for write in writes if write.node not in late]
    if not finished or not all(map(_can_be_read_back, finished)) or not _agree(writes):
        return None
    if len({write.value for write in finished}) != len(finished):  # masters and their half copy
        return None
    try:
        second = _second(module, sums, finished, [write for write in writes if write.node in late])
    except _NeedsOldValue:
        return None
    return _first(module, sums, finished), second


def _dependents(nodes: Iterable[fx.Node], roots: Iterable[fx.Node]) -> set[fx.Node]:
    sources, found = set(roots), set()
    for node in nodes:  # in topological order
        if not sources.isdisjoint(node.all_input_nodes):
            sources.add(node)
            found.add(node)
    return found


def _write(node: fx.Node) -> _Write:
    target, value = cast(fx.Node, node.args[0]), cast(fx.Node, node.args[1])
    selects, keeps, masks = [], set(), set()
    while True:
        flags = _flags(cast(fx.Node, value.args[0])) if value.target == _aten.where.self else set()
        if not flags and value.target != _aten.copy_.default:  # a half copy is made from what masters were given
            return _Write(node, target, value, tuple(reversed(selects)), frozenset(keeps), frozenset(masks))
        if flags:
            (keeps if cast(fx.Node, value.args[2]).op == "placeholder" else masks).update(flags)
        selects.append(value)
        value = cast(fx.Node, value.args[1])


def _flags(condition: fx.Node) -> set[fx.Node]:
    # The boolean arguments that a condition is made of; none if it depends on values.
    flags, waiting = set(), [condition]
    while waiting:
        node = waiting.pop()
        if node.op != "placeholder":
            waiting += node.all_input_nodes
        elif node.meta["val"].dtype == torch.bool:
            flags.add(node)
        elif node.meta["val"].dtype != torch.int64:  # which tensor a row belongs to
            return set()
    return flags


def _can_be_read_back(write: _Write) -> bool:
    value, target = write.value.meta["val"], write.target.meta["val"]
    return realize.is_elements(target) and value.dtype == target.dtype


def _agree(writes: Sequence[_Write]) -> bool:
    masks = {write.masks for write in writes if realize.is_elements(write.target.meta["val"])}
    return len({write.keeps for write in writes}) == 1 and len(masks) == 1


class _Stage:
    """A new graph of the same arguments, to which nodes are copied with all they need."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, fx.Graph()
        self.copies = {node: self.graph.node_copy(node) for node in module.graph.nodes if node.op == "placeholder"}

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            if node.op == "placeholder":
                raise _NeedsOldValue
            for source in node.all_input_nodes:
                self.copy(source)
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        return self.copies[node]

    def replace(self, nodes: Iterable[fx.Node], by: fx.Node) -> None:
        self.copies.update(dict.fromkeys(nodes, by))

    def finish(self, writes: Iterable[_Write], outputs: Iterable[fx.Node]) -> fx.GraphModule:
        results = [self.copy(node) for node in outputs]
        values = []
        for write in writes:  # all are computed before the first is written
            values.append((write, self.copy(cast(fx.Node, write.node.args[1]))))
            self.replace([write.node], values[-1][1])
        for write, value in values:
            copy = self.graph.call_function(_aten.copy_.default, (self.copies[write.target], value))
            copy.meta = dict(write.node.meta)
        self.graph.output(results)
        return fx.GraphModule(self.module, self.graph)


def _first(module: fx.GraphModule, sums: list[fx.Node], finished: list[_Write]) -> fx.GraphModule:
    stage = _Stage(module)
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for write in sorted(finished, key=lambda write: order[write.value]):  # a slot may be made from another one
        written = stage.copy(write.selects[-1] if write.selects else write.value)
        stage.replace((write.value, *write.selects), realize.insert(stage.graph, written))
    first = stage.finish(finished, sums)
    _add_column(first.graph)
    return first


def _second(
    module: fx.GraphModule, sums: list[fx.Node], finished: list[_Write], writes: list[_Write]
) -> fx.GraphModule:
    stage = _Stage(module)
    for number, total in enumerate(sums):
        argument = stage.graph.placeholder(f"total_{number}")
        argument.meta = dict(total.meta)
        stage.replace([total], argument)
    for write in finished:
        stage.replace((write.value, *write.selects, write.node), stage.copies.pop(write.target))
    return stage.finish(writes, cast("list[fx.Node]", module.graph.output_node().args[0]))


def _add_column(graph: fx.Graph) -> None:
    # Where elements meet scalars only, Inductor makes one loop of rows and elements, and does not fuse that with the
    # sums over rows. So one scalar becomes a column with an entry per row.
    meetings: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        users = [user for user in node.users if realize.is_elements(user.meta.get("val"))]
        if users and realize.is_small(node.meta.get("val")):
            meetings[node] = users
    if not meetings or any(node.meta["val"].dim() == 2 for node in meetings):
        return
    scalar, users = next(iter(meetings.items()))
    elements = next(node for node in graph.nodes if node.op == "placeholder" and realize.is_elements(node.meta["val"]))
    value = scalar.meta["val"].expand(elements.meta["val"].shape[0], 1)
    with graph.inserting_before(users[0]):
        rows = graph.call_function(_aten.sym_size.int, (elements, 0))
        rows.meta = {"val": value.shape[0]}
        once = realize.insert(graph, scalar)
        view = graph.call_function(_aten.expand.default, (once, [rows, 1]))
        column = graph.call_function(_aten.clone.default, (view,), {"memory_format": torch.contiguous_format})
        view.meta, column.meta = {"val": value}, {"val": value.clone()}
    for user in users:
        user.replace_input_with(scalar, column)
