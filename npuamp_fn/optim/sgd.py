"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, present, scaled
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_not_negative

__all__ = ["sgd"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if hyper.maximize:
        grad = -grad
    decays = present(hyper.weight_decay)
    if decays and not hyper.decoupled_decay:
        grad = add_scaled(grad, param, hyper.weight_decay)
    step, new = _momentum(grad, slots, count, hyper) if slots else (grad, {})
    if decays and hyper.decoupled_decay:
        step = add_scaled(step, param, hyper.weight_decay)
    return add_scaled(param, step, -hyper.lr), new


def _momentum(grad: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any) -> tuple[Tensor, dict[str, Tensor]]:
    buffer = slots["momentum_buffer"]
    moved = add_scaled(scaled(buffer, hyper.momentum), grad, 1 - hyper.dampening)
    if present(hyper.dampening):
        moved = torch.where(count == 1, grad, moved)  # the first gradient is not dampened
    step = add_scaled(grad, moved, hyper.momentum) if hyper.nesterov else moved
    return step, {"momentum_buffer": moved}


def sgd(
    lr: float | Tensor | Schedule = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    decoupled_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    r"""Make stochastic gradient descent, with torch.optim.SGD's numbers.

    .. math:: g = g + \lambda p; \quad b = \mu b + (1 - \tau) g; \quad p = p - \gamma b

    The first ``b`` is ``g``; with ``nesterov`` the step is :math:`g + \mu b`.

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        momentum: :math:`\mu`; 0 keeps no state.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda`, an L2 penalty.
        nesterov: Whether to look ahead; needs momentum and no dampening.
        decoupled_decay: Whether :math:`\lambda p` is added to the finished step instead of the gradient, as in AdamW.
        maximize: Whether to ascend.

    Raises:
        ValueError: a number is out of its range.

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.

    >>> opt = sgd(0.5)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.ones(1)}, opt.init(params), params)[0]
    {'w': tensor([0.5000])}
    """
    check_not_negative("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (not present(momentum) or present(dampening)):
        raise ValueError("sgd: nesterov needs a momentum and zero dampening")
    slots = (Slot("momentum_buffer"),) if present(momentum) else ()
    hyper = Hyper(
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        decoupled_decay=decoupled_decay,
        maximize=maximize,
    )
    return Optimizer(Rule("sgd", _update, slots), hyper)
