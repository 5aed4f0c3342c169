"""LAMB: Adam whose step is scaled per tensor by a trust ratio."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, addcmul, lerp, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_fraction, check_not_negative

__all__ = ["lamb"]


def _update(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    decays = present(hyper.weight_decay)
    if decays and not hyper.decoupled_decay:
        grad = add_scaled(grad, param, hyper.weight_decay)
    if hyper.grad_averaging:
        mean = lerp(slots["exp_avg"], grad, 1 - hyper.beta1)
    else:
        mean = scaled(slots["exp_avg"], hyper.beta1) + grad
    square = addcmul(scaled(slots["exp_avg_sq"], hyper.beta2), grad, grad, 1 - hyper.beta2)
    new = {"exp_avg": mean, "exp_avg_sq": square}
    eps = hyper.eps
    if hyper.bias_correction:  # both corrections in scalars: one division per element, not three
        steps = count.double()
        root_correction = (1 - hyper.beta2**steps).sqrt()
        mean, eps = scaled(mean, root_correction / (1 - hyper.beta1**steps)), eps * root_correction
    step = mean / shifted(square.sqrt(), eps)
    if decays and hyper.decoupled_decay:
        step = add_scaled(step, param, hyper.weight_decay)
    scales = hyper.trust_ratio and (decays or hyper.nvlamb)
    if not scales and not hyper.record_norms:
        return add_scaled(param, step, -hyper.lr), new
    size, length = seg.sum(param * param).sqrt(), seg.sum(step * step).sqrt()
    if hyper.norm_clamp is not None:
        size = size.clamp(*hyper.norm_clamp)
    ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
    if hyper.record_norms:
        new = {**new, "weight_norm": size, "adam_norm": length, "trust_ratio": ratio}
    if not scales:
        return add_scaled(param, step, -hyper.lr), new
    ratio = seg.expand(ratio)
    if decays and not hyper.nvlamb and isinstance(hyper.weight_decay, Tensor):
        ratio = torch.where(hyper.weight_decay == 0, 1.0, ratio)
    return param - ratio * scaled(step, hyper.lr), new


def lamb(
    lr: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    bias_correction: bool = True,
    norm_clamp: tuple[float, float] | None = None,
    grad_averaging: bool = True,
    decoupled_decay: bool = True,
    nvlamb: bool = True,
    trust_ratio: bool = True,
    record_norms: bool = False,
) -> Optimizer:
    r"""Make LAMB: Adam's direction, scaled in each tensor to the length of its weights.

    .. math:: m = \beta_1 m + (1 - \beta_1) g; \quad v = \beta_2 v + (1 - \beta_2) g^2
    .. math:: u = \frac{m}{1 - \beta_1^t} / (\sqrt{v / (1 - \beta_2^t)} + \epsilon) + \lambda p
    .. math:: p = p - \gamma \frac{\lVert p \rVert}{\lVert u \rVert} u

    The ratio is 1 where either norm is 0, so that zero weights move. To clip gradients by their global norm first,
    write ``chain(clip_by_global_norm(1.0), lamb(...))``.

    Args:
        lr: Learning rate :math:`\gamma`: a number, 0-dim tensor, or schedule ``count -> lr``.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the root.
        weight_decay: :math:`\lambda`.
        bias_correction: Whether the moments are divided by :math:`1 - \beta^t`; Ascend's LAMB does not.
        norm_clamp: Bounds of :math:`\lVert p \rVert` in the ratio; Ascend's LAMB has (0, 10).
        grad_averaging: Whether ``g`` enters ``m`` with the factor :math:`1 - \beta_1`, or with 1.
        decoupled_decay: Whether :math:`\lambda p` is added to the step, or to the gradient (an L2 penalty).
        nvlamb: Whether tensors without weight decay are scaled too, as in the paper; otherwise their ratio is 1.
        trust_ratio: Whether to scale at all; without it this is Adam with ``eps`` and decay placed as above.
        record_norms: Whether the state also holds, per tensor, what the ratio was made of in the last step:
            ``weight_norm`` :math:`\lVert p \rVert` (clamped), ``adam_norm`` :math:`\lVert u \rVert` and their
            quotient ``trust_ratio``, which is recorded also where it is not applied.

    Raises:
        ValueError: a number is out of its range.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020.

    >>> opt = optim.lamb(0.5)
    >>> params = {"w": torch.full((4,), 3.0)}
    >>> opt.update({"w": torch.ones(4)}, opt.init(params), params)[0]
    {'w': tensor([1.5000, 1.5000, 1.5000, 1.5000])}
    """
    check_not_negative("lamb", lr=lr, eps=eps, weight_decay=weight_decay)
    check_fraction("lamb", beta1=betas[0], beta2=betas[1])
    if norm_clamp is not None and not 0 <= norm_clamp[0] < norm_clamp[1]:
        raise ValueError(f"lamb: norm_clamp: expected 0 <= low < high, found {norm_clamp!r}")
    hyper = Hyper(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=bias_correction,
        norm_clamp=norm_clamp,
        grad_averaging=grad_averaging,
        decoupled_decay=decoupled_decay,
        nvlamb=nvlamb,
        trust_ratio=trust_ratio,
        record_norms=record_norms,
    )
    norms = tuple(Slot(name, per="tensor") for name in ("weight_norm", "adam_norm", "trust_ratio"))
    slots = (Slot("exp_avg"), Slot("exp_avg_sq"), *(norms if record_norms else ()))
    return Optimizer(Rule("lamb", _update, slots), hyper)
