"""RMSprop as in torch, and as in TensorFlow."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from npuamp_fn.kernels.rule import Rule, Slot, add_scaled, addcdiv, addcmul, lerp, present, scaled, shifted
from npuamp_fn.optim.base import Hyper, Optimizer, Schedule
from npuamp_fn.optim.checks import check_closed_fraction, check_not_negative

__all__ = ["rmsprop", "rmsprop_tf"]


def _rmsprop(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if hyper.maximize:
        grad = -grad
    if present(hyper.weight_decay):
        grad = add_scaled(grad, param, hyper.weight_decay)
    square = addcmul(scaled(slots["square_avg"], hyper.alpha), grad, grad, 1 - hyper.alpha)
    new = {"square_avg": square}
    if hyper.centered:
        new["grad_avg"] = mean = lerp(slots["grad_avg"], grad, 1 - hyper.alpha)
        square = addcmul(square, mean, mean, -1)
    root = shifted(square.sqrt(), hyper.eps)
    if "momentum_buffer" not in slots:
        return addcdiv(param, grad, root, -hyper.lr), new
    new["momentum_buffer"] = moved = addcdiv(scaled(slots["momentum_buffer"], hyper.momentum), grad, root)
    return add_scaled(param, moved, -hyper.lr), new


def _rmsprop_tf(grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any) -> Any:
    if present(hyper.weight_decay):
        if hyper.decoupled_decay:
            param = add_scaled(param, param, -hyper.weight_decay)
        else:
            grad = add_scaled(grad, param, hyper.weight_decay)
    square = add_scaled(slots["square_avg"], grad * grad - slots["square_avg"], 1 - hyper.alpha)
    new = {"square_avg": square}
    if hyper.centered:
        new["grad_avg"] = mean = add_scaled(slots["grad_avg"], grad - slots["grad_avg"], 1 - hyper.alpha)
        square = addcmul(square, mean, mean, -1)
    root = shifted(square, hyper.eps).sqrt()
    if "momentum_buffer" not in slots:
        return addcdiv(param, grad, root, -hyper.lr), new
    slowed = scaled(slots["momentum_buffer"], hyper.momentum)
    if hyper.lr_in_momentum:
        new["momentum_buffer"] = moved = addcdiv(slowed, grad, root, hyper.lr)
        return param - moved, new
    new["momentum_buffer"] = moved = addcdiv(slowed, grad, root)
    return add_scaled(param, moved, -hyper.lr), new


def _slots(start: float, momentum: Any, centered: bool) -> tuple[Slot, ...]:
    slots = [Slot("square_avg", start)]
    if present(momentum):
        slots.append(Slot("momentum_buffer"))
    if centered:
        slots.append(Slot("grad_avg"))
    return tuple(slots)


def rmsprop(
    lr: float | Tensor | Schedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    r"""Make RMSprop, with torch.optim.RMSprop's numbers: the square average starts at 0, eps is outside the root.

    .. math:: g = g + \lambda p; \quad v = \alpha v + (1 - \alpha) g^2; \quad a = \alpha a + (1 - \alpha) g
    .. math:: b = \mu b + g / (\sqrt{v} + \epsilon); \quad p = p - \gamma b

    With ``centered`` the root is :math:`\sqrt{v - a^2}`.

    Args:
        lr: :math:`\gamma`, a number, 0-dim tensor, or schedule ``count -> lr``.
        alpha: Decay rate :math:`\alpha` of the averages, in [0, 1].
        eps: :math:`\epsilon`, added to the root.
        weight_decay: :math:`\lambda`, an L2 penalty.
        momentum: :math:`\mu`; 0 keeps no buffer.
        centered: Whether to divide by the standard deviation instead of the root mean square.
        maximize: Whether to ascend.

    Raises:
        ValueError: a number is out of its range.

    Source: Hinton, Neural Networks for Machine Learning, lecture 6, 2012; centered: Graves, Generating Sequences
    With Recurrent Neural Networks, 2013.

    >>> opt = optim.rmsprop(0.5, alpha=0.75)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 3.0)}, opt.init(params), params)[0]
    {'w': tensor([0.])}
    """
    check_not_negative("rmsprop", lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_closed_fraction("rmsprop", alpha=alpha)
    hyper = Hyper(
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        centered=centered,
        maximize=maximize,
    )
    return Optimizer(Rule("rmsprop", _rmsprop, _slots(0.0, momentum, centered)), hyper)


def rmsprop_tf(
    lr: float | Tensor | Schedule = 1e-2,
    alpha: float = 0.9,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    *,
    decoupled_decay: bool = False,
    lr_in_momentum: bool = True,
    start: float = 0.0,
) -> Optimizer:
    r"""Make RMSprop as TensorFlow computes it: eps inside the root, the learning rate inside the momentum.

    .. math:: v = v + (1 - \alpha) (g^2 - v); \quad a = a + (1 - \alpha) (g - a)
    .. math:: b = \mu b + \gamma g / \sqrt{v + \epsilon}; \quad p = p - b

    With ``centered`` the root is :math:`\sqrt{v - a^2 + \epsilon}`.

    Args:
        lr: :math:`\gamma`, a number, 0-dim tensor, or schedule ``count -> lr``.
        alpha: Decay rate :math:`\alpha` of the averages, in [0, 1].
        eps: :math:`\epsilon`, added under the root.
        weight_decay: An L2 penalty; with ``decoupled_decay`` each step starts with ``p = p - weight_decay * p``.
        momentum: :math:`\mu`; 0 keeps no buffer.
        centered: Whether to divide by the standard deviation instead of the root mean square.
        decoupled_decay: Whether decay acts on the parameters themselves; it is not multiplied by ``lr``.
        lr_in_momentum: Whether the buffer sums steps; otherwise it sums directions and ``p = p - lr * b``, as in torch.
        start: First value of ``v``; TensorFlow starts at 1, which damps the first steps.

    Raises:
        ValueError: a number is out of its range.

    Source: Hinton, Neural Networks for Machine Learning, lecture 6, 2012; variations as in TensorFlow, 2015.

    >>> opt = optim.rmsprop_tf(0.5, alpha=0.75, start=1.0, eps=0.25)
    >>> params = {"w": torch.ones(1)}
    >>> opt.update({"w": torch.full((1,), 0.0)}, opt.init(params), params)[1].slots
    {'square_avg': {'w': tensor([0.7500])}}
    """
    check_not_negative("rmsprop_tf", lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum, start=start)
    check_closed_fraction("rmsprop_tf", alpha=alpha)
    hyper = Hyper(
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        centered=centered,
        decoupled_decay=decoupled_decay,
        lr_in_momentum=lr_in_momentum,
    )
    return Optimizer(Rule("rmsprop_tf", _rmsprop_tf, _slots(start, momentum, centered)), hyper)
