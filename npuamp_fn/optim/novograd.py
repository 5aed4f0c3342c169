"""NovoGrad: momentum of gradients normalized per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, coefficient, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_fraction, check_not_negative

__all__ = ["novograd"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    steps, beta2 = seg.per_tensor(count).double(), seg.per_tensor(hyper.beta2)
    power, old = seg.sum(grad * grad), slots["exp_avg_sq"]
    square = add_scaled(scaled(old, beta2), power, 1 - beta2)
    if not hyper.init_zero:
        square = torch.where(steps == 1, power, square)
    root = square.sqrt()
    if hyper.bias_correction:
        root = root / coefficient((1 - beta2**steps).sqrt(), root)
    root = seg.expand(shifted(root, seg.per_tensor(hyper.eps)))
    drive = grad
    if hyper.reg_inside_moment:
        drive = grad / root
        if present(hyper.weight_decay):
            drive = add_scaled(drive, param, hyper.weight_decay)
    share = 1 - hyper.beta1 if hyper.grad_averaging else 1
    mean = add_scaled(scaled(slots["exp_avg"], hyper.beta1), drive, share)
    step = mean / coefficient(1 - hyper.beta1 ** count.double(), mean) if hyper.bias_correction else mean
    if not hyper.reg_inside_moment:
        step = step / root
        if present(hyper.weight_decay):
            step = add_scaled(step, param, hyper.weight_decay)
    return add_scaled(param, step, -hyper.lr), {"exp_avg": mean, "exp_avg_sq": square}


def novograd(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.95, 0.98),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    grad_averaging: bool = False,
    bias_correction: bool = False,
    reg_inside_moment: bool = True,
    init_zero: bool = False,
) -> Optimizer:
    r"""Make NovoGrad: the second moment is one number per tensor, so its state is half of Adam's.

    .. math:: v = \beta_2 v + (1 - \beta_2) \lVert g \rVert^2
    .. math:: m = \beta_1 m + (g / (\sqrt{v} + \epsilon) + \lambda p); \quad p = p - \gamma m

    The first ``v`` is :math:`\lVert g \rVert^2`.

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root.
        weight_decay: :math:`\lambda`.
        grad_averaging: Whether what enters ``m`` is multiplied by :math:`1 - \beta_1`.
        bias_correction: Whether the moments are divided by :math:`1 - \beta^t`.
        reg_inside_moment: Whether ``m`` averages normalized, decayed gradients, as in the paper; otherwise it averages
            plain ones, and root and decay come after it.
        init_zero: Whether ``v`` starts at 0 instead of at the first gradient's square.

    Raises:
        ValueError: a number is out of its range.

    Source: Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
    Networks, 2019.

    >>> opt = optim.novograd(0.5)
    >>> params = {"w": torch.ones(4)}
    >>> opt.update({"w": torch.full((4,), 3.0)}, opt.init(params), params)[0]
    {'w': tensor([0.7500, 0.7500, 0.7500, 0.7500])}
    """
    check_not_negative("novograd", lr=lr, eps=eps, weight_decay=weight_decay)
    check_fraction("novograd", beta1=betas[0], beta2=betas[1])
    hyper = Hyper(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        grad_averaging=grad_averaging,
        bias_correction=bias_correction,
        reg_inside_moment=reg_inside_moment,
        init_zero=init_zero,
    )
    return Optimizer(Rule("novograd", _update, (Slot("exp_avg"), Slot("exp_avg_sq", per="tensor"))), hyper)
