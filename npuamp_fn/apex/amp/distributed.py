"""``combine_ddp``: data parallelism by one reduction per flat gradient buffer, and masters under torch's DDP."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npuamp_fn import FlatTree, mean_over
from npuamp_fn.apex.masters import slot_of, synchronise

__all__ = ["agree", "broadcast_models", "check_agreement", "reduce_gradients", "share_masters"]


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


def check_agreement(optimizer: Any, device: torch.device) -> None:
    """Refuse an optimizer that was changed on some ranks only since ``amp.initialize``; one small reduction.

    Raises:
        RuntimeError: ranks differ; on all ranks alike, naming the first difference.
    """
    facts = _facts(optimizer)
    mark = zlib.crc32(repr(facts).encode())
    extremes = torch.tensor([mark, -mark], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        _compare(facts)


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


def _compare(facts: list[str]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip([*everyone[0], "nothing more"], [*theirs, "nothing more"], strict=False)
            here, there = next((a, b) for a, b in pairs if a != b)
            raise RuntimeError(
                f"combine_ddp: rank 0 and rank {rank} differ: rank 0 has `{here}`, rank {rank} has `{there}`; make "
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


def share_masters(module: nn.Module) -> None:
    """Give every rank the masters of rank 0, once, when torch's DDP runs the module for the first time.

    DDP itself broadcasts the half parameters only; masters of ranks that started from other weights would differ.
    """
    ddp: Any = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None or getattr(ddp, "_amp_masters_shared", False):
        return
    ddp._amp_masters_shared = True
    group = ddp.process_group
    source = dist.get_global_rank(group, 0)
    for parameter in module.parameters():
        slot = slot_of(parameter)
        if slot is not None:
            synchronise(parameter)
            master: Tensor = slot.master.detach()
            dist.broadcast(master, source, group=group)
            slot.touched_master = True
            synchronise(parameter)
