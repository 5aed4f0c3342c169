"""Optimizers made of optimizers: ``chain``, ``with_master_weights``."""

from __future__ import annotations

from typing import Any

from npuamp_fn.optim.base import Optimizer

__all__ = ["chain", "with_master_weights"]


def chain(*parts: Any) -> Optimizer:
    """Put gradient transforms, applied from left to right, before an optimizer.

    Args:
        parts: Any number of gradient transforms, then one optimizer.

    Raises:
        TypeError: the last part is not an optimizer, or another one is not a gradient transform.

    >>> optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)).rule.name
    'adamw'
    """
    *transforms, optimizer = parts or (None,)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"chain: expected an optimizer as last part, found {type(optimizer).__name__}; write "
            "chain(clip_by_global_norm(1.0), adamw(1e-3))"
        )
    for transform in transforms:
        if not hasattr(transform, "factor"):
            raise TypeError(
                f"chain: expected a gradient transform before the optimizer, found {type(transform).__name__}"
            )
    return optimizer.replace(transforms=(*transforms, *optimizer.transforms))


def with_master_weights(optimizer: Optimizer) -> Optimizer:
    """Keep float32 masters of half parameters in the optimizer's state (O2, form b).

    The parameters are stored in float16 or bfloat16 and gradients arrive so; the update reads and writes the
    masters and rounds them into the parameters in the same pass. Parameters that are float32 already have none.
    Pass ``init(params, master=full_precision_params)`` to start from unrounded weights.

    Source: Micikevicius et al., Mixed Precision Training, 2018.

    >>> opt = with_master_weights(optim.sgd(1e-4))
    >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> params, state = opt.update({"w": torch.ones(1).bfloat16()}, opt.init(params), params)
    >>> params["w"], state.master["w"]
    (tensor([1.], dtype=torch.bfloat16), tensor([0.9999]))
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"with_master_weights: expected an optimizer, found {type(optimizer).__name__}")
    return optimizer.replace(master_weights=True)
