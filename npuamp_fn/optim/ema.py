"""An exponential moving average of the parameters, kept by the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.flat import FlatTree
from npuamp_fn.kernels.rule import Rule, Slot, coefficient, lerp
from npuamp_fn.optim.base import Hyper, Optimizer, OptimizerState, Schedule
from npuamp_fn.optim.checks import check_closed_fraction
from npuamp_fn.optim.compose import extend
from npuamp_fn.tree import is_float, tree_map

__all__ = ["ema", "ema_params"]


@dataclass(frozen=True)
class _Averaged:
    """The update of a rule that also averages its parameters."""

    rule: Rule

    def __call__(
        self, grad: Tensor, param: Tensor, slots: dict[str, Tensor], count: Tensor, hyper: Any, seg: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the rule, then move the average towards the new parameters; the first step starts it there."""
        own = {slot.name: slots[slot.name] for slot in self.rule.slots}
        param, new = self.rule.update(grad, param, own, count, hyper, seg)
        average = lerp(slots["ema"], param, coefficient(1 - hyper.ema_decay, param))
        return param, {**new, "ema": torch.where(count == 1, param, average)}


def ema(optimizer: Optimizer, decay: float | Tensor | Schedule = 0.999) -> Optimizer:
    r"""Let an optimizer keep an exponential moving average of the parameters, in the same pass.

    .. math:: a_1 = p_1; \quad a_t = d a_{t - 1} + (1 - d) p_t

    The averages are in ``state.slots["ema"]``, float32 and, with master weights, of the masters;
    :func:`ema_params` gives them as parameters for evaluation. A skipped step leaves them alone.

    Args:
        optimizer: Any optimizer.
        decay: :math:`d`, in [0, 1]: a number, 0-dim tensor, or schedule ``count -> decay``.

    Raises:
        TypeError: not an optimizer.
        ValueError: ``decay`` is out of its range, or the optimizer keeps an average already.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; numbers as in
    ``torch.optim.swa_utils.AveragedModel``.

    >>> opt = optim.ema(optim.sgd(1.0), decay=0.75)
    >>> params = {"w": torch.zeros(1)}
    >>> state = opt.init(params)
    >>> for _ in range(2):
    ...     params, state = opt.update({"w": torch.full((1,), -4.0)}, state, params)
    >>> params, optim.ema_params(state, params)
    ({'w': tensor([8.])}, {'w': tensor([5.])})
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"ema: expected an optimizer, found {type(optimizer).__name__}; write ema(adamw(1e-3))")
    check_closed_fraction("ema", decay=decay)
    return extend(optimizer, "ema", _Averaged(optimizer.rule), Hyper(ema_decay=decay), (Slot("ema", "param"),))


def ema_params(state: OptimizerState, params: Any) -> Any:
    """Return the averages as parameters: structure, dtypes and non-float leaves of ``params``.

    Args:
        state: Of an optimizer made by :func:`ema`. Before the first step the averages are the first parameters.
        params: The current parameters.

    Raises:
        TypeError: the state has no averages.
    """
    if not isinstance(state, OptimizerState) or "ema" not in state.slots:
        raise TypeError("ema_params: expected the state of an optimizer made by ema(optimizer)")
    averages = state.slots["ema"]
    if isinstance(params, FlatTree):
        return params.map(lambda param, average: average.to(param.dtype), averages)
    return tree_map(lambda param, average: average.to(param.dtype) if is_float(param) else param, params, averages)
