"""``combine_ddp``: data parallelism by one reduction per flat gradient buffer; and what torch's DDP needs from us."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npuamp_fn import FlatTree, mean_over
from npuamp_fn.apex.masters import low_of, slot_of, synchronise

__all__ = [
    "agree",
    "broadcast_models",
    "check_agreement",
    "check_ddp",
    "enter_ddp",
    "reduce_gradients",
    "reduces_later",
]

_DDP = nn.parallel.DistributedDataParallel
_unchecked: weakref.WeakSet[Any] = weakref.WeakSet()  # DDP modules whose optimizers were not compared yet
_unreduced: weakref.WeakSet[Any] = weakref.WeakSet()  # DDP modules whose last forward pass ran inside no_sync()


def agree(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Refuse ranks that differ in parameters or hyper-parameters, naming the first difference.

    Raises:
        RuntimeError: there is no process group, or ranks differ; on all ranks alike.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "combine_ddp=True averages gradients over the processes: start them with torchrun and call "
            "torch.distributed.init_process_group before amp.initialize (or leave combine_ddp out)"
        )
    facts: list[str] = []
    for index, model in enumerate(models):
        facts += [f"model {index}: parameter {n}: {tuple(p.shape)}, {p.dtype}" for n, p in model.named_parameters()]
    for index, optimizer in enumerate(optimizers):
        facts += [f"optimizer {index}: {fact}" for fact in _facts(optimizer)]
    _compare(facts)


def check_agreement(optimizer: Any, device: torch.device, group: Any = None) -> None:
    """Refuse an optimizer that was changed on some ranks only since ``amp.initialize``; one small reduction.

    Raises:
        RuntimeError: ranks differ; on all ranks alike, naming the first difference.
    """
    facts = _facts(optimizer)
    mark = zlib.crc32(repr(facts).encode())
    extremes = torch.tensor([mark, -mark], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        _compare(facts, group)


def _facts(optimizer: Any) -> list[str]:
    facts = []
    for number, group in enumerate(optimizer.param_groups):
        facts.append(f"group {number}: parameters {[tuple(p.shape) for p in group['params']]}")
        facts += [
            f"group {number}: {name}={value!r}"
            for name, value in group.items()
            if name not in ("params", "param_names") and isinstance(value, (int, float, str, bool, tuple))
        ]
    return facts


def _compare(facts: list[str], group: Any = None) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip([*everyone[0], "nothing more"], [*theirs, "nothing more"], strict=False)
            here, there = next((a, b) for a, b in pairs if a != b)
            raise RuntimeError(
                f"amp: rank 0 and rank {rank} differ: rank 0 has `{here}`, rank {rank} has `{there}`; make "
                "the same model, optimizer and changes to it on every rank"
            )


def broadcast_models(models: Sequence[nn.Module]) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)


def reduce_gradients(flat: FlatTree, active: Sequence[bool], device: torch.device) -> tuple[FlatTree, list[bool]]:
    """Average flat gradients over all ranks; a parameter is active if any rank has a gradient for it."""
    mask = torch.tensor(active, dtype=torch.int32, device=device)
    dist.all_reduce(mask, op=dist.ReduceOp.MAX)
    return mean_over()(flat), [bool(on) for on in mask.tolist()]


def enter_ddp() -> None:
    """Follow torch's DDP, if an initialized module runs inside it: gradients reduced or not, masters shared."""
    ddp: Any = _DDP._active_ddp_module
    if ddp is None or not torch.is_grad_enabled():
        return
    if ddp.require_backward_grad_sync:
        _unreduced.discard(ddp)
    else:
        _unreduced.add(ddp)
    if not ddp.__dict__.get("_amp_entered", False):
        ddp.__dict__["_amp_entered"] = True
        _unchecked.add(ddp)
        _share_masters(ddp)


def _share_masters(ddp: Any) -> None:
    # DDP itself broadcasts the half parameters only; masters of ranks that started from other weights would differ.
    group = ddp.process_group
    source = dist.get_global_rank(group, 0)
    for parameter in ddp.module.parameters():
        slot = slot_of(parameter)
        if slot is not None:
            synchronise(parameter)
            master: Tensor = slot.master.detach()
            dist.broadcast(master, source, group=group)
            slot.touched_master = True
            synchronise(parameter)


def check_ddp(optimizers: Sequence[Any]) -> None:
    """Refuse optimizers that differ between the ranks of torch's DDP; once, when its gradients are about to be used.

    Raises:
        RuntimeError: ranks differ; on all ranks alike, naming the first difference.
    """
    if not _unchecked:
        return
    for ddp in list(_unchecked):
        for optimizer in optimizers:
            if _trains(optimizer, ddp):
                _unchecked.discard(ddp)
                check_agreement(optimizer, next(ddp.module.parameters()).device, ddp.process_group)


def reduces_later(optimizers: Sequence[Any]) -> bool:
    """Tell whether torch's DDP leaves the gradients of this pass to a later one: it ran inside ``no_sync()``."""
    if not _unreduced:
        return False
    return any(_trains(optimizer, ddp) for ddp in list(_unreduced) for optimizer in optimizers)


def _trains(optimizer: Any, ddp: Any) -> bool:
    held = {id(parameter) for parameter in ddp.module.parameters()}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            low = low_of(weight)
            if id(weight if low is None else low) in held:
                return True
    return False
