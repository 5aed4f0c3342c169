"""BERT's optimizers under their legacy names: BertAdam, LAMB."""

from __future__ import annotations

from typing import Any

from npuamp_fn import Optimizer, optim
from npuamp_fn.apex.optimizers.fused import FusedOptimizer

__all__ = ["Lamb", "NpuFusedBertAdam", "NpuFusedLamb"]


class NpuFusedBertAdam(FusedOptimizer):
    """Adam as BERT was trained: no bias correction, decoupled decay, a warm-up schedule of its own.

    With ``max_grad_norm`` above 0 the gradients of a group are clipped by the global norm over all groups. The step
    count is part of the state, so that the schedule resumes where it was.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        warmup: float = -1,
        t_total: float = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.99,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = -1,
    ) -> None:
        options = {"warmup": warmup, "t_total": t_total, "schedule": schedule, "b1": b1, "b2": b2, "e": e}
        super().__init__(params, {"lr": lr, **options, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.bert_adam`` with the numbers of a group, behind its clipping."""
        rule = optim.bert_adam(
            group["lr"],
            group["warmup"],
            group["t_total"],
            group["schedule"],
            (group["b1"], group["b2"]),
            group["e"],
            group["weight_decay"],
        )
        limit = group["max_grad_norm"]
        return optim.chain(optim.clip_by_global_norm(limit), rule) if limit > 0 else rule


class NpuFusedLamb(FusedOptimizer):
    """LAMB as the vendor has it: no bias correction, weight norms clamped to [0, 10].

    With ``use_global_grad_norm`` gradients are divided by their global norm where it is above 1.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam}
        super().__init__(params, {"lr": lr, **options, "use_global_grad_norm": use_global_grad_norm})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.lamb`` with the numbers of a group."""
        rule = _lamb(group)
        return optim.chain(optim.clip_by_global_norm(1.0), rule) if group["use_global_grad_norm"] else rule


class Lamb(FusedOptimizer):
    """LAMB under its older name, with the same numbers.

    ``state`` also has the 0-dim tensors ``weight_norm``, ``adam_norm`` and ``trust_ratio`` of the last step.
    """

    is_npu_fused_optimizer = False

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam}
        super().__init__(params, {"lr": lr, **options})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.lamb`` with the numbers of a group, recording norms."""
        return _lamb(group, record_norms=True)


def _lamb(group: dict[str, Any], record_norms: bool = False) -> Optimizer:
    return optim.lamb(
        group["lr"],
        group["betas"],
        group["eps"],
        group["weight_decay"],
        bias_correction=False,
        norm_clamp=(0.0, 10.0),
        trust_ratio=not group["adam"],
        record_norms=record_norms,
    )
