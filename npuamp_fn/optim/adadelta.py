"""Adadelta."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, addcmul, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_closed_fraction, check_not_negative

__all__ = ["adadelta"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if hyper.maximize:
        grad = -grad
    if present(hyper.weight_decay):
        grad = add_scaled(grad, param, hyper.weight_decay)
    square = addcmul(scaled(slots["square_avg"], hyper.rho), grad, grad, 1 - hyper.rho)
    step = shifted(slots["acc_delta"], hyper.eps).sqrt() / shifted(square, hyper.eps).sqrt() * grad
    travelled = addcmul(scaled(slots["acc_delta"], hyper.rho), step, step, 1 - hyper.rho)
    return add_scaled(param, step, -hyper.lr), {"square_avg": square, "acc_delta": travelled}


def adadelta(
    lr: float | Tensor | Schedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    r"""Make Adadelta, with torch.optim.Adadelta's numbers.

    .. math:: g = g + \lambda p; \quad v = \rho v + (1 - \rho) g^2
    .. math:: d = g \sqrt{u + \epsilon} / \sqrt{v + \epsilon}; \quad u = \rho u + (1 - \rho) d^2; \quad p = p - \gamma d

    Args:
        lr: :math:`\gamma`, a number, 0-dim tensor, or schedule ``count -> lr``.
        rho: Decay rate :math:`\rho` of both averages, in [0, 1].
        eps: :math:`\epsilon`, inside both roots.
        weight_decay: :math:`\lambda`, an L2 penalty.
        maximize: Whether to ascend.

    Raises:
        ValueError: a number is out of its range.

    Source: Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012.

    >>> opt = optim.adadelta(eps=1.0, rho=0.0)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 3.0**0.5)}, opt.init(params), params)[0]
    {'w': tensor([0.1340])}
    """
    check_not_negative("adadelta", lr=lr, eps=eps, weight_decay=weight_decay)
    check_closed_fraction("adadelta", rho=rho)
    hyper = Hyper(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize)
    return Optimizer(Rule("adadelta", _update, (Slot("square_avg"), Slot("acc_delta"))), hyper)
