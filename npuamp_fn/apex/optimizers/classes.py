"""The vendor's fused optimizers: names, arguments and defaults of theirs, algorithms of ``npuamp_fn.optim``."""

from __future__ import annotations

from typing import Any

from npuamp_fn import Optimizer, optim
from npuamp_fn.apex.optimizers.fused import FusedOptimizer

__all__ = ["NpuFusedAdam", "NpuFusedAdamW", "NpuFusedSGD"]


class NpuFusedSGD(FusedOptimizer):
    """Stochastic gradient descent with momentum: torch.optim.SGD's numbers, one call per buffer.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = NpuFusedSGD([weight], lr=0.5)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000])
    """

    counted = False
    sparse = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **options, "nesterov": nesterov, "maximize": maximize})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.sgd`` with the numbers of a group."""
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return optim.sgd(**{name: group[name] for name in names})


class _NpuFusedAdamFamily(FusedOptimizer):
    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options})


_ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class NpuFusedAdam(_NpuFusedAdamFamily):
    """Adam with L2 weight decay: torch.optim.Adam's numbers, one call per buffer."""

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.adam`` with the numbers of a group."""
        return optim.adam(**{name: group[name] for name in _ADAM_OPTIONS})


class NpuFusedAdamW(_NpuFusedAdamFamily):
    """Adam with decoupled weight decay: torch.optim.AdamW's numbers, one call per buffer."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.adamw`` with the numbers of a group."""
        return optim.adamw(**{name: group[name] for name in _ADAM_OPTIONS})
