"""LARS: momentum whose learning rate is scaled per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_not_negative

__all__ = ["lars"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    size, slope = seg.sum(param * param).sqrt(), seg.sum(grad * grad).sqrt()
    pull = shifted(add_scaled(slope, size, seg.per_tensor(hyper.weight_decay)), seg.per_tensor(hyper.eps))
    rate = scaled(size / pull, seg.per_tensor(hyper.trust_coefficient))
    rate = torch.where((size > 0) & (slope > 0), rate, 1.0)
    step = scaled(seg.expand(rate) * add_scaled(grad, param, hyper.weight_decay), hyper.lr)
    moved = scaled(slots["momentum_buffer"], hyper.momentum) + step
    return param - (scaled(moved, hyper.momentum) + step if hyper.nesterov else moved), {"momentum_buffer": moved}


def lars(
    lr: float | Tensor | Schedule = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> Optimizer:
    r"""Make LARS: gradient descent with momentum, each tensor's rate proportional to the length of its weights.

    .. math:: \rho = \eta \lVert p \rVert / (\lVert g \rVert + \lambda \lVert p \rVert + \epsilon)
    .. math:: b = \mu b + \gamma \rho (g + \lambda p); \quad p = p - b

    :math:`\rho` is 1 where either norm is 0. With ``nesterov`` the step is :math:`\mu b + \gamma \rho (g + \lambda p)`.

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        momentum: :math:`\mu`.
        weight_decay: :math:`\lambda`.
        trust_coefficient: :math:`\eta`.
        eps: :math:`\epsilon`.
        nesterov: Whether to look ahead.

    Raises:
        ValueError: a number is out of its range.

    Source: You et al., Large Batch Training of Convolutional Networks, 2017.

    >>> opt = optim.lars(1.0, trust_coefficient=0.5)
    >>> params = {"w": torch.full((4,), 3.0)}
    >>> opt.update({"w": torch.ones(4)}, opt.init(params), params)[0]
    {'w': tensor([1.5000, 1.5000, 1.5000, 1.5000])}
    """
    check_not_negative("lars", lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
    check_not_negative("lars", trust_coefficient=trust_coefficient)
    hyper = Hyper(
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        eps=eps,
        nesterov=nesterov,
    )
    return Optimizer(Rule("lars", _update, (Slot("momentum_buffer"),)), hyper)
