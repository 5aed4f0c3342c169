"""AdamP: Adam without the part of the step that only grows the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, addcmul, coefficient, lerp, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_fraction, check_not_negative

__all__ = ["adamp"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    steps = count.double()
    size = coefficient(hyper.lr / (1 - hyper.beta1**steps), param)
    correction = coefficient((1 - hyper.beta2**steps).rsqrt(), param)
    mean = lerp(slots["exp_avg"], grad, 1 - hyper.beta1)
    square = addcmul(scaled(slots["exp_avg_sq"], hyper.beta2), grad, grad, 1 - hyper.beta2)
    ahead = lerp(mean, grad, 1 - hyper.beta1) if hyper.nesterov else mean
    step = ahead / shifted(square.sqrt() * correction, hyper.eps)
    ratio: Any = 1.0
    if param.dim() > 1 and param.numel() > 0:
        coef, projected = _projection(grad, param, step, hyper, seg)
        step = step - coef * param
        ratio = torch.where(projected, scaled(param.new_ones(()), hyper.wd_ratio), 1.0)
    if present(hyper.weight_decay):
        param = scaled(param, 1 - hyper.lr * hyper.weight_decay * ratio)
    return param - size * step, {"exp_avg": mean, "exp_avg_sq": square}


def _projection(grad: Tensor, param: Tensor, step: Tensor, hyper: Any, seg: Any) -> tuple[Tensor, Tensor]:
    # How much of the weights to take out of the step, and whether that is anything: where the gradient is nearly
    # orthogonal to the weights, row by row or else as a whole. The sums of the tensor are those of its rows.
    rows = [seg.sum(x, "row") for x in (grad * param, grad * grad, param * param, param * step)]
    by_row = _test(rows, param[0].numel(), hyper)
    whole = _test([seg.sum(x) for x in rows], param.numel(), hyper)
    coef = torch.where(by_row[0], by_row[1], torch.where(whole[0], whole[1], 0.0))
    return coef, by_row[0] | whole[0]


def _test(sums: list[Tensor], length: int, hyper: Any) -> tuple[Tensor, Tensor]:
    product, grad_square, weight_square, along = sums
    weight = shifted(weight_square.sqrt(), hyper.eps)
    cosine = product.abs() / shifted(grad_square.sqrt(), hyper.eps) / weight
    return cosine.amax() < hyper.delta / length**0.5, along / (weight * weight)


def adamp(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    delta: float = 0.1,
    wd_ratio: float = 0.1,
    nesterov: bool = False,
) -> Optimizer:
    r"""Make AdamP: where weights are scale-invariant, the step's component along them is removed.

    .. math:: u = m / (\sqrt{v / (1 - \beta_2^t)} + \epsilon)
    .. math:: \text{if } \max \cos(g, p) < \delta / \sqrt{n}: \quad u = u - \frac{p \cdot u}{\lVert p \rVert^2} p
    .. math:: p = (1 - \gamma \lambda r) p - \frac{\gamma}{1 - \beta_1^t} u

    ``m`` and ``v`` are Adam's. Products, norms and ``n`` are those of each row (index of the first dimension); if that
    test fails, those of the whole tensor. ``r`` is ``wd_ratio`` where the step was projected, else 1. Tensors of less
    than two dimensions are never projected.

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root, and to every norm.
        weight_decay: :math:`\lambda`.
        delta: :math:`\delta`, how nearly orthogonal gradient and weights must be.
        wd_ratio: Factor of the weight decay of projected tensors.
        nesterov: Whether to look ahead: ``m`` is :math:`\beta_1 m + (1 - \beta_1) g` in ``u``.

    Raises:
        ValueError: a number is out of its range.

    Source: Heo et al., AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights, 2021.

    >>> opt = optim.adamp(0.5)
    >>> params = {"w": torch.ones(1, 2)}
    >>> opt.update({"w": torch.tensor([[3.0, -3.0]])}, opt.init(params), params)[0]
    {'w': tensor([[0.5000, 1.5000]])}
    """
    check_not_negative("adamp", lr=lr, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio)
    check_fraction("adamp", beta1=betas[0], beta2=betas[1])
    hyper = Hyper(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        delta=delta,
        wd_ratio=wd_ratio,
        nesterov=nesterov,
    )
    return Optimizer(Rule("adamp", _update, (Slot("exp_avg"), Slot("exp_avg_sq")), whole_leaves=True), hyper)
