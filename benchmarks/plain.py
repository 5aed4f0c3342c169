"""LAMB, AdamP, BertAdam and NovoGrad as one usually writes them: a loop over the tensors, operators in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PLAIN"]

Step = Callable[[], Any]


def lamb(params: Sequence[Tensor], grads: Sequence[Tensor], lr: float = 1e-3, decay: float = 0.01) -> Step:
    """Return a step of LAMB (You et al., 2020)."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    means, squares = _zeros(params), _zeros(params)
    steps = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps
        steps += 1
        for p, g, m, v in zip(params, grads, means, squares, strict=True):
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = (v / (1 - beta2**steps)).sqrt_().add_(eps)
            u = (m / (1 - beta1**steps)).div_(root).add_(p, alpha=decay)
            size, length = p.norm(), u.norm()
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
            p.sub_(u.mul_(ratio * lr))

    return step


def bert_adam(params: Sequence[Tensor], grads: Sequence[Tensor], lr: float = 1e-3, decay: float = 0.01) -> Step:
    """Return a step of BertAdam (Devlin et al., 2019), without its clipping."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    means, squares = _zeros(params), _zeros(params)

    @torch.no_grad()
    def step() -> None:
        for p, g, m, v in zip(params, grads, means, squares, strict=True):
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            u = m / (v.sqrt() + eps)
            u.add_(p, alpha=decay)
            p.add_(u, alpha=-lr)

    return step


def novograd(params: Sequence[Tensor], grads: Sequence[Tensor], lr: float = 1e-3, decay: float = 0.01) -> Step:
    """Return a step of NovoGrad (Ginsburg et al., 2019)."""
    beta1, beta2, eps = 0.95, 0.98, 1e-8
    means, squares = _zeros(params), [torch.zeros(()) for _ in params]
    steps = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps
        steps += 1
        for p, g, m, v in zip(params, grads, means, squares, strict=True):
            power = g.pow(2).sum()
            if steps == 1:
                v.copy_(power)
            else:
                v.mul_(beta2).add_(power, alpha=1 - beta2)
            u = g / (v.sqrt() + eps)
            u.add_(p, alpha=decay)
            m.mul_(beta1).add_(u)
            p.add_(m, alpha=-lr)

    return step


def adamp(params: Sequence[Tensor], grads: Sequence[Tensor], lr: float = 1e-3, decay: float = 0.01) -> Step:
    """Return a step of AdamP (Heo et al., 2021)."""
    beta1, beta2, eps, delta, wd_ratio = 0.9, 0.999, 1e-8, 0.1, 0.1
    means, squares = _zeros(params), _zeros(params)
    steps = 0

    def project(p: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, float]:
        for rows in (p.shape[0], 1):  # per output channel, then as a whole
            flat_p, flat_g = p.view(rows, -1), g.view(rows, -1)
            norm = flat_p.norm(dim=1).add_(eps)
            cosine = (flat_g * flat_p).sum(dim=1).abs_() / (flat_g.norm(dim=1).add_(eps)) / norm
            if cosine.max() < delta / math.sqrt(flat_p.shape[1]):
                unit = flat_p / norm[:, None]
                return (u.view(rows, -1) - unit * (unit * u.view(rows, -1)).sum(dim=1, keepdim=True)).view_as(
                    p
                ), wd_ratio
        return u, 1.0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps
        steps += 1
        for p, g, m, v in zip(params, grads, means, squares, strict=True):
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = (v.sqrt() / math.sqrt(1 - beta2**steps)).add_(eps)
            u, ratio = m / root, 1.0
            if p.dim() > 1:
                u, ratio = project(p, g, u)
            p.mul_(1 - lr * decay * ratio)
            p.add_(u, alpha=-lr / (1 - beta1**steps))

    return step


def _zeros(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) for p in params]


PLAIN = {"lamb": lamb, "adamp": adamp, "bert_adam": bert_adam, "novograd": novograd}
"""By the name of our optimizer; with the same default hyper-parameters, weight decay 0.01 and lr 1e-3."""
