"""The fused optimizers under the names that NVIDIA's apex gave them, with its arguments, defaults and refusals.

``set_grad_none`` is taken and not needed: ``zero_grad()`` clears gradients to ``None``, and
``zero_grad(set_to_none=False)`` to zeros.
"""

from __future__ import annotations

from typing import Any

from npuamp_fn import Optimizer, optim
from npuamp_fn.apex.optimizers.fused import FusedOptimizer

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


class _NvidiaOptimizer(FusedOptimizer):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of NVIDIA's, where a group has one step count for its parameters.

        Raises:
            ValueError: it is of NVIDIA's FusedNovoGrad, whose norms are not told apart by parameter.
        """
        super().load_state_dict(_with_steps(state_dict))


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent with momentum; with ``wd_after_momentum`` decay does not pass the momentum.

    ``materialize_master_grads`` is taken and not needed: gradients are never unscaled in a pass of their own.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = FusedSGD([weight], lr=0.5)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000])
    """

    counted = False

    def __init__(
        self,
        params: Any,
        lr: Any,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        del materialize_master_grads, set_grad_none
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, **options, "wd_after_momentum": wd_after_momentum})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.sgd`` with the numbers of a group."""
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return optim.sgd(**{name: group[name] for name in names}, decoupled_decay=group["wd_after_momentum"])


class FusedAdam(_NvidiaOptimizer):
    """Adam, with decoupled weight decay (AdamW) unless ``adam_w_mode`` is off."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        del set_grad_none
        _refuse_amsgrad("FusedAdam", amsgrad)
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode}
        super().__init__(params, {"lr": lr, **options, **flags})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.adamw`` or ``optim.adam``, or LAMB without its trust ratio: Adam without bias correction."""
        numbers = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if group["bias_correction"]:
            return (optim.adamw if group["adam_w_mode"] else optim.adam)(*numbers)
        return optim.lamb(*numbers, bias_correction=False, decoupled_decay=group["adam_w_mode"], trust_ratio=False)


class FusedLAMB(_NvidiaOptimizer):
    """LAMB with bias correction, behind clipping by the global norm over all groups.

    Without ``use_nvlamb``, parameters without weight decay take Adam's step. ``max_grad_norm`` of 0 does not clip.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        del set_grad_none
        _refuse_amsgrad("FusedLAMB", amsgrad)
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        flags = {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging}
        super().__init__(params, {"lr": lr, **options, **flags, "use_nvlamb": use_nvlamb})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.lamb`` with the numbers of a group, behind its clipping."""
        rule = optim.lamb(
            group["lr"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
            bias_correction=group["bias_correction"],
            grad_averaging=group["grad_averaging"],
            decoupled_decay=group["adam_w_mode"],
            nvlamb=group["use_nvlamb"],
        )
        limit = group["max_grad_norm"]
        return rule if limit == 0 else optim.chain(optim.clip_by_global_norm(limit), rule)


class FusedNovoGrad(_NvidiaOptimizer):
    """NovoGrad with bias correction; the norm is the Euclidean one, ``norm_type`` 2."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        del set_grad_none
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type != 2:
            raise RuntimeError(
                f"FusedNovoGrad: norm_type: only 2, the Euclidean norm, is supported, found {norm_type!r}"
            )
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"bias_correction": bias_correction, "grad_averaging": grad_averaging, "init_zero": init_zero}
        super().__init__(params, {"lr": lr, **options, **flags, "reg_inside_moment": reg_inside_moment})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.novograd`` with the numbers of a group."""
        numbers = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        flags = ("bias_correction", "grad_averaging", "reg_inside_moment", "init_zero")
        return optim.novograd(*numbers, **{name: group[name] for name in flags})


class FusedAdagrad(FusedOptimizer):
    """Adagrad; with ``adagrad_w_mode`` weight decay is decoupled."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        del set_grad_none
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "adagrad_w_mode": adagrad_w_mode})

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return ``optim.adagrad`` with the numbers of a group."""
        names = ("lr", "eps", "weight_decay")
        return optim.adagrad(**{name: group[name] for name in names}, decoupled_decay=group["adagrad_w_mode"])


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant; use NpuFusedAdam(..., amsgrad=True)")


def _with_steps(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which parameters have the step counts that groups have in NVIDIA's."""
    state, groups = dict(state_dict["state"]), []
    for group in state_dict["param_groups"]:
        group = dict(group)
        if "exp_avg_sq" in group:
            raise ValueError(
                "load_state_dict: this is a state dict of NVIDIA's FusedNovoGrad: its norms lie in param_groups, in an "
                "order that depends on the dtypes at that time. Nothing was loaded; start the optimizer anew."
            )
        step = group.pop("step", None)
        if step is not None:
            state.update((key, {"step": step, **state[key]}) for key in group["params"] if key in state)
        groups.append(group)
    return {**state_dict, "state": state, "param_groups": groups}
