"""BertAdam: Adam without bias correction, with decoupled decay and a schedule of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, addcmul, lerp, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_fraction, check_not_negative

__all__ = ["BERT_SCHEDULES", "bert_adam", "schedule_factor"]

BERT_SCHEDULES = {
    "warmup_cosine": lambda x, warmup: 0.5 * (1 + torch.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: torch.ones_like(x),
    "warmup_linear": lambda x, warmup: (1 - x) / (1 - warmup),
    "warmup_poly": lambda x, warmup: (1 - x).sqrt(),
}
"""What the learning rate is multiplied by after the warm-up, as a function of the share ``x`` of all steps."""


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    mean = lerp(slots["exp_avg"], grad, 1 - hyper.beta1)
    square = addcmul(scaled(slots["exp_avg_sq"], hyper.beta2), grad, grad, 1 - hyper.beta2)
    step = mean / shifted(square.sqrt(), hyper.eps)
    if present(hyper.weight_decay):
        step = add_scaled(step, param, hyper.weight_decay)
    return add_scaled(param, step, -_rate(count, hyper)), {"exp_avg": mean, "exp_avg_sq": square}


def schedule_factor(schedule: str, x: Tensor, warmup: Any) -> Tensor:
    """Return what the learning rate is multiplied by at the share ``x`` of all steps, warm-up included.

    >>> schedule_factor("warmup_linear", torch.tensor([0.1, 0.6]), 0.2)
    tensor([0.5000, 0.5000])
    """
    warmup = warmup.clamp(min=0.0) if isinstance(warmup, Tensor) else max(warmup, 0.0)
    x = x.clamp(0.0, 1.0)  # beyond the last step the end value stays
    factor = BERT_SCHEDULES[schedule](x, warmup)
    return torch.where(x < warmup, x / warmup, factor) if present(warmup) else factor


def _rate(count: Tensor, hyper: Any) -> Any:
    total = hyper.t_total
    if not isinstance(total, Tensor) and total == -1:
        return hyper.lr
    factor = schedule_factor(hyper.schedule, (count.double() - 1) / total, hyper.warmup)
    return hyper.lr * (torch.where(total == -1, 1.0, factor) if isinstance(total, Tensor) else factor)


def bert_adam(
    lr: float | Tensor | Schedule = 1e-3,
    warmup: float = -1,
    t_total: float = -1,
    schedule: str = "warmup_linear",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    r"""Make BertAdam, the optimizer BERT was trained with: no bias correction, decoupled weight decay.

    .. math:: m = \beta_1 m + (1 - \beta_1) g; \quad v = \beta_2 v + (1 - \beta_2) g^2
    .. math:: p = p - \gamma s(x) (m / (\sqrt{v} + \epsilon) + \lambda p); \quad x = (t - 1) / T

    During the warm-up, :math:`s(x) = x / w`. After it: ``warmup_linear`` :math:`(1 - x) / (1 - w)`, ``warmup_cosine``
    :math:`(1 + \cos \pi x) / 2`, ``warmup_poly`` :math:`\sqrt{1 - x}`, ``warmup_constant`` 1. ``x`` stops at 1, so that
    the rate never becomes negative or grows again. It follows the step count, which is part of the state: training
    resumes where it was. Clip gradients with ``chain(clip_by_global_norm(1.0), bert_adam(...))``.

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        warmup: :math:`w`, the share of all steps that warms up, in [0, 1); -1 for none.
        t_total: :math:`T`, the number of all steps; -1 for a constant rate.
        schedule: "warmup_cosine", "warmup_constant", "warmup_linear" or "warmup_poly".
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root.
        weight_decay: :math:`\lambda`.

    Raises:
        ValueError: a number is out of its range, or the schedule is unknown.

    Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding, 2019.

    >>> opt = optim.bert_adam(0.5, betas=(0.0, 0.0), weight_decay=0.0)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 3.0)}, opt.init(params), params)[0]
    {'w': tensor([0.5000])}
    """
    check_not_negative("bert_adam", lr=lr, eps=eps, weight_decay=weight_decay)
    check_fraction("bert_adam", beta1=betas[0], beta2=betas[1])
    if isinstance(warmup, (int, float)) and warmup != -1:
        check_fraction("bert_adam", warmup=warmup)
    if isinstance(t_total, (int, float)) and t_total != -1 and not t_total > 0:
        raise ValueError(f"bert_adam: t_total: expected a positive number, or -1 for none, found {t_total!r}")
    if schedule not in BERT_SCHEDULES:
        raise ValueError(f"bert_adam: unknown schedule {schedule!r}; known: {list(BERT_SCHEDULES)}")
    hyper = Hyper(
        lr=lr,
        warmup=warmup,
        t_total=t_total,
        schedule=schedule,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
    )
    return Optimizer(Rule("bert_adam", _update, (Slot("exp_avg"), Slot("exp_avg_sq"))), hyper)
