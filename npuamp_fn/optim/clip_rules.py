"""Gradient clipping that looks at one tensor only, and so runs inside the optimizer's pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import coefficient, scaled
from npuamp_fn.optim.base import Hyper
from npuamp_fn.optim.compose import GradientRule

__all__ = ["adaptive_clip", "clip_by_value"]


def _clip_by_value(
    grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    bound = coefficient(hyper.clip_value, grad)
    return grad.clamp(-bound, bound), {}


def _adaptive_clip(
    grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    weight = seg.sum(param * param, per="row").sqrt()
    norm = seg.sum(grad * grad, per="row").sqrt()
    bound = scaled(torch.maximum(weight, scaled(weight.new_ones(()), hyper.clip_eps)), hyper.clipping)
    return torch.where(norm > bound, grad * (bound / norm.clamp(min=1e-6)), grad), {}


def clip_by_value(max_value: float) -> GradientRule:
    r"""Clip every element of the gradients to [-max_value, max_value]; for ``chain``.

    .. math:: g = \min(\max(g, -c), c)

    Scaled gradients are clipped as what they stand for: the true ones.

    Raises:
        ValueError: ``max_value`` is not positive.

    Source: Pascanu et al., On the difficulty of training recurrent neural networks, 2013; numbers as in
    ``torch.nn.utils.clip_grad_value_``.

    >>> opt = optim.chain(optim.clip_by_value(1.0), optim.sgd(0.5))
    >>> params = {"w": torch.zeros(3)}
    >>> opt.update({"w": torch.tensor([-9.0, 0.5, 9.0])}, opt.init(params), params)[0]
    {'w': tensor([ 0.5000, -0.2500, -0.5000])}
    """
    _check_positive("clip_by_value", max_value=max_value)
    return GradientRule("clip_by_value", _clip_by_value, Hyper(clip_value=max_value))


def adaptive_clip(clipping: float = 0.01, eps: float = 1e-3) -> GradientRule:
    r"""Scale down each row of a gradient that is long compared with the same row of the weights; for ``chain``.

    .. math:: G_i = \lambda \frac{\max(\lVert W_i \rVert, \epsilon)}{\lVert G_i \rVert} G_i
        \quad \text{if } \lVert G_i \rVert > \lambda \max(\lVert W_i \rVert, \epsilon)

    A row is an index of the first dimension: an output feature or channel. Vectors and scalars are one row.

    Args:
        clipping: :math:`\lambda`.
        eps: :math:`\epsilon`, so that rows of zeros can move.

    Raises:
        ValueError: a number is not positive.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021.

    >>> opt = optim.chain(optim.adaptive_clip(0.1), optim.sgd(1.0))
    >>> params = {"w": torch.tensor([[3.0, 4.0], [3.0, 4.0]])}
    >>> opt.update({"w": torch.tensor([[1.0, 0.0], [0.1, 0.0]])}, opt.init(params), params)[0]
    {'w': tensor([[2.5000, 4.0000],
            [2.9000, 4.0000]])}
    """
    _check_positive("adaptive_clip", clipping=clipping, eps=eps)
    return GradientRule("adaptive_clip", _adaptive_clip, Hyper(clipping=clipping, clip_eps=eps), whole_leaves=True)


def _check_positive(transform: str, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) and not callable(value) and not value > 0:
            raise ValueError(f"{transform}: {name}: expected a positive number, found {value!r}")
