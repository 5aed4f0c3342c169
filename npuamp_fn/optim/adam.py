"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, addcmul, coefficient, lerp, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_fraction, check_not_negative

__all__ = ["adam", "adamw"]


def _adam(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if hyper.maximize:
        grad = -grad
    if present(hyper.weight_decay):
        grad = add_scaled(grad, param, hyper.weight_decay)
    return _move(grad, param, slots, count, hyper)


def _adamw(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if hyper.maximize:
        grad = -grad
    if present(hyper.weight_decay):
        param = scaled(param, 1 - hyper.lr * hyper.weight_decay)
    return _move(grad, param, slots, count, hyper)


def _move(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any) -> Any:
    steps = count.double()  # corrections in float64, rounded once: torch's Python numbers
    size = coefficient(hyper.lr / (1 - hyper.beta1**steps), param)
    root = coefficient((1 - hyper.beta2**steps).sqrt(), param)
    mean = lerp(slots["exp_avg"], grad, 1 - hyper.beta1)
    square = addcmul(scaled(slots["exp_avg_sq"], hyper.beta2), grad, grad, 1 - hyper.beta2)
    new = {"exp_avg": mean, "exp_avg_sq": square}
    if hyper.amsgrad:
        new["max_exp_avg_sq"] = square = torch.maximum(slots["max_exp_avg_sq"], square)
    return param - size * mean / shifted(square.sqrt() / root, hyper.eps), new


def _make(name: str, update: Any, lr: Any, betas: tuple[float, float], **options: Any) -> Optimizer:
    check_not_negative(name, lr=lr, eps=options["eps"], weight_decay=options["weight_decay"])
    check_fraction(name, beta1=betas[0], beta2=betas[1])
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options["amsgrad"] else ("exp_avg", "exp_avg_sq")
    rule = Rule(name, update, tuple(Slot(slot) for slot in names), aten=name)
    return Optimizer(rule, Hyper(lr=lr, beta1=betas[0], beta2=betas[1], **options))


def adam(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    r"""Make Adam, with torch.optim.Adam's numbers: weight decay is an L2 penalty inside the gradient.

    .. math:: g = g + \lambda p; \quad m = \beta_1 m + (1 - \beta_1) g; \quad v = \beta_2 v + (1 - \beta_2) g^2
    .. math:: p = p - \gamma \frac{m}{1 - \beta_1^t} / (\sqrt{v / (1 - \beta_2^t)} + \epsilon)

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root.
        weight_decay: :math:`\lambda`.
        amsgrad: Whether to divide by the running maximum of ``v`` (Reddi et al., 2018).
        maximize: Whether to ascend.

    Raises:
        ValueError: a number is out of its range.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015.

    >>> opt = adam(0.5)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 3.0)}, opt.init(params), params)[0]
    {'w': tensor([0.5000])}
    """
    options = {"eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
    return _make("adam", _adam, lr, betas, **options)


def adamw(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    r"""Make AdamW, with torch.optim.AdamW's numbers: Adam whose weight decay does not pass the moments.

    .. math:: p = (1 - \gamma \lambda) p, \text{ then Adam's step without decay}

    Arguments and errors are those of :func:`adam`.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    >>> opt = adamw(0.5, weight_decay=0.1)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 3.0)}, opt.init(params), params)[0]
    {'w': tensor([0.4500])}
    """
    options = {"eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
    return _make("adamw", _adamw, lr, betas, **options)
