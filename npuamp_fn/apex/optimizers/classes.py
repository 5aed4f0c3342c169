"""The vendor's fused optimizers: names, arguments and defaults of theirs, algorithms of ``npuamp_fn.optim``."""

from __future__ import annotations

from typing import Any

from npuamp_fn import Optimizer, optim
from npuamp_fn.apex.optimizers.fused import FusedOptimizer

__all__ = [
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]


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


class NpuFusedAdamP(FusedOptimizer):
    """AdamP: where weights are scale-invariant, the step's component along them is removed."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "delta": delta, "wd_ratio": wd_ratio}
        super().__init__(params, {"lr": lr, **options, "nesterov": nesterov})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.adamp`` with the numbers of a group."""
        names = ("lr", "betas", "eps", "weight_decay", "delta", "wd_ratio", "nesterov")
        return optim.adamp(**{name: group[name] for name in names})


class NpuFusedAdadelta(FusedOptimizer):
    """Adadelta: torch.optim.Adadelta's numbers, one call per buffer."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.adadelta`` with the numbers of a group."""
        return optim.adadelta(**{name: group[name] for name in ("lr", "rho", "eps", "weight_decay", "maximize")})


class NpuFusedRMSprop(FusedOptimizer):
    """RMSprop: torch.optim.RMSprop's numbers, one call per buffer."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {"lr": lr, **options, "centered": centered, "maximize": maximize})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.rmsprop`` with the numbers of a group."""
        names = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
        return optim.rmsprop(**{name: group[name] for name in names})


class NpuFusedRMSpropTF(FusedOptimizer):
    """RMSprop as TensorFlow has it: eps inside the root, the learning rate inside the momentum.

    The square average starts at zero, as in the vendor's code; ``start=1.0`` is TensorFlow's own.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        *,
        start: float = 0.0,
    ) -> None:
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "start": start}
        flags = {"centered": centered, "decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum}
        super().__init__(params, {"lr": lr, **options, **flags})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.rmsprop_tf`` with the numbers of a group."""
        names = ("lr", "alpha", "eps", "weight_decay", "momentum", "start")
        flags = ("centered", "decoupled_decay", "lr_in_momentum")
        return optim.rmsprop_tf(**{name: group[name] for name in (*names, *flags)})
