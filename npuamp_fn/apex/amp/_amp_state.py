"""The state that legacy scripts look at: one object, ``apex.amp._amp_state``, which shadows this module's name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed
from torch import Tensor

__all__ = ["AmpState", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """What the last ``amp.initialize`` left behind; attributes appear when they are first set."""

    opt_properties: Any
    loss_scalers: list[Any]
    handle: Any
    dynamic_init_scale: float
    scale_growth_factor: float
    scale_backoff_factor: float
    scale_window: int
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self._earlier_scalers: list[weakref.ref[Any]] = []  # of earlier calls: they live as long as their optimizers

    def all_scalers(self) -> list[Any]:
        """Return the loss scalers of the last call, then those of earlier calls that optimizers still use."""
        return [*getattr(self, "loss_scalers", []), *self._live_earlier()]

    def replace_scalers(self, scalers: list[Any]) -> None:
        """Make these the loss scalers of the last call."""
        earlier = [*self._live_earlier(), *getattr(self, "loss_scalers", [])]
        self._earlier_scalers = [weakref.ref(scaler) for scaler in earlier]
        self.loss_scalers = scalers

    def _live_earlier(self) -> list[Any]:
        return [scaler for reference in self._earlier_scalers if (scaler := reference()) is not None]


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise ``RuntimeError``, or print the message as a warning when ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print(f"Warning:  {message}")


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless ``verbosity`` is 0; with ``rank0`` only on the first of several processes."""
    if _amp_state.verbosity == 0:
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not rank0 or not distributed or torch.distributed.get_rank() == 0:
        print(message)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over the parameters an optimizer updates: the float32 masters at O2.

    >>> from npuamp_fn.apex import amp
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [p is weight for p in amp.master_params(torch.optim.SGD([weight], lr=0.1))]
    [True]
    """
    for group in optimizer.param_groups:
        yield from group["params"]
