"""Optimizers made of optimizers: ``chain``, ``with_master_weights``."""

from __future__ import annotations

from typing import Any, Literal

from npuamp_fn.kernels.rounding import ROUNDINGS
from npuamp_fn.optim.base import Optimizer
from npuamp_fn.optim.compose import GradientRule, put_before
from npuamp_fn.optim.partition import Partition

__all__ = ["chain", "with_master_weights"]


def chain(*parts: Any) -> Any:
    """Put gradient transforms, applied from left to right, before an optimizer.

    Transforms that need all gradients at once (:func:`clip_by_global_norm`) come before those that look at one tensor
    (:func:`clip_by_value`, :func:`adaptive_clip`): the former become one factor, the latter part of the rule, and the
    update stays one pass over memory.

    Args:
        parts: Any number of gradient transforms, then one optimizer.

    Returns:
        An optimizer of the kind of the last part.

    Raises:
        TypeError: the last part is not an optimizer, or another one is not a gradient transform.
        ValueError: the order cannot run in one pass, or a transform appears twice.

    >>> optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)).rule.name
    'adamw'
    >>> optim.chain(optim.clip_by_global_norm(1.0), optim.clip_by_value(0.1), optim.adamw(1e-3)).rule.name
    'clip_by_value, adamw'
    """
    *transforms, optimizer = parts or (None,)
    if not isinstance(optimizer, (Optimizer, Partition)):
        raise TypeError(
            f"chain: expected an optimizer as last part, found {type(optimizer).__name__}; write "
            "chain(clip_by_global_norm(1.0), adamw(1e-3))"
        )
    for transform in transforms:
        if not isinstance(transform, GradientRule) and not hasattr(transform, "factor"):
            raise TypeError(
                f"chain: expected a gradient transform before the optimizer, found {type(transform).__name__}"
            )
    for transform in reversed(transforms):
        if not isinstance(transform, GradientRule):
            optimizer = optimizer.replace(transforms=(transform, *optimizer.transforms))
        elif isinstance(optimizer, Partition):
            _check_order(transform, optimizer.transforms)
            optimizer = optimizer.map(lambda part, transform=transform: _put_before(transform, part))
        else:
            optimizer = _put_before(transform, optimizer)
    return optimizer


def _put_before(transform: GradientRule, optimizer: Optimizer) -> Optimizer:
    _check_order(transform, optimizer.transforms)
    return put_before(transform, optimizer)


def _check_order(transform: GradientRule, later: tuple[Any, ...]) -> None:
    if later:
        raise ValueError(
            f"chain: {transform.name} comes before {later[0]}, which needs all gradients at once and would not see its "
            f"result; put {transform.name} after it"
        )


def with_master_weights(optimizer: Any, rounding: Literal["nearest", "stochastic"] = "nearest") -> Any:
    """Keep float32 masters of half parameters in the optimizer's state (O2, form b).

    The parameters are stored in float16 or bfloat16 and gradients arrive so; the update reads and writes the
    masters and rounds them into the parameters in the same pass. Parameters that are float32 already have none.
    Pass ``init(params, master=full_precision_params)`` to start from unrounded weights. The masters are the truth:
    an update never reads the half parameters, so editing those alone has no effect.

    Args:
        optimizer: Any optimizer.
        rounding: How masters become halves. "stochastic" picks one of the two nearest halves with the probability that
            makes the mean exact; the choice is a hash of the step count and the element, so it is reproducible.

    Raises:
        TypeError: not an optimizer.
        ValueError: unknown rounding.

    Source: Micikevicius et al., Mixed Precision Training, 2018; stochastic rounding: Gupta et al., Deep Learning with
    Limited Numerical Precision, 2015.

    >>> opt = optim.with_master_weights(optim.sgd(1e-4))
    >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> params, state = opt.update({"w": torch.ones(1).bfloat16()}, opt.init(params), params)
    >>> params["w"], state.master["w"]
    (tensor([1.], dtype=torch.bfloat16), tensor([0.9999]))
    """
    if not isinstance(optimizer, (Optimizer, Partition)):
        raise TypeError(f"with_master_weights: expected an optimizer, found {type(optimizer).__name__}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"with_master_weights: unknown rounding {rounding!r}; known: {ROUNDINGS}")
    if isinstance(optimizer, Partition):
        return optimizer.map(lambda part: with_master_weights(part, rounding))
    return optimizer.replace(master_weights=True, rounding=rounding)
