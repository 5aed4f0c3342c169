"""Adagrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, addcdiv, addcmul, present, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_not_negative

__all__ = ["adagrad"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if hyper.maximize:
        grad = -grad
    decays = present(hyper.weight_decay)
    if decays and not hyper.decoupled_decay:
        grad = add_scaled(grad, param, hyper.weight_decay)
    lr = hyper.lr / (1 + (count.double() - 1) * hyper.lr_decay) if present(hyper.lr_decay) else hyper.lr
    total = addcmul(slots["sum"], grad, grad, 1)
    if decays and hyper.decoupled_decay:
        step = add_scaled(grad / shifted(total.sqrt(), hyper.eps), param, hyper.weight_decay)
        return add_scaled(param, step, -lr), {"sum": total}
    return addcdiv(param, grad, shifted(total.sqrt(), hyper.eps), -lr), {"sum": total}


def adagrad(
    lr: float | Tensor | Schedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    *,
    decoupled_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    r"""Make Adagrad, with torch.optim.Adagrad's numbers.

    .. math:: g = g + \lambda p; \quad s = s + g^2
    .. math:: p = p - \frac{\gamma}{1 + (t - 1) \eta} g / (\sqrt{s} + \epsilon)

    Args:
        lr: :math:`\gamma`, a number, 0-dim tensor, or schedule ``count -> lr``.
        lr_decay: :math:`\eta`.
        weight_decay: :math:`\lambda`, an L2 penalty.
        initial_accumulator_value: Where :math:`s` starts.
        eps: :math:`\epsilon`, outside the root.
        decoupled_decay: Whether :math:`\lambda p` is added to the finished step instead of the gradient, as in AdamW.
        maximize: Whether to ascend.

    Raises:
        ValueError: a number is out of its range.

    Source: Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011.

    >>> opt = optim.adagrad(0.5)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 3.0)}, opt.init(params), params)[0]
    {'w': tensor([0.5000])}
    """
    check_not_negative("adagrad", lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    check_not_negative("adagrad", initial_accumulator_value=initial_accumulator_value)
    hyper = Hyper(
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        decoupled_decay=decoupled_decay,
        maximize=maximize,
    )
    return Optimizer(Rule("adagrad", _update, (Slot("sum", initial_accumulator_value),)), hyper)
