"""The loss scaler object of the shell: a value of ``npuamp_fn.loss_scale`` that can be looked at and assigned."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from torch import Tensor

from npuamp_fn import DynamicLossScale, NoOpLossScale, StaticLossScale

__all__ = ["FLOOR", "LossScaler"]

FLOOR = 2.0**-14
"""The least dynamic scale unless ``min_loss_scale`` says otherwise: its reciprocal is a normal number everywhere."""


class LossScaler:
    """One loss's scale, static or dynamic, and what became of its last backward pass.

    >>> scaler = LossScaler("dynamic", init_scale=2.0**10)
    >>> scaler.record(torch.tensor(False)), scaler.update_scale(), scaler.loss_scale()
    (False, True, 512.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_growth_factor: float = 2.0,
        scale_backoff_factor: float = 0.5,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._has_overflow = False
        self._warned = False
        self._static_steps = 0
        if self.dynamic:
            self.state: Any = DynamicLossScale.create(
                min(max_loss_scale, init_scale),
                growth_factor=scale_growth_factor,
                backoff_factor=scale_backoff_factor,
                growth_interval=scale_window,
                min_scale=min_loss_scale or FLOOR,
                max_scale=max_loss_scale,
            ).on_host()
        else:
            self.state = _static(float(loss_scale))

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return float(self.state.value)

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        if self.dynamic:
            self.state = dataclasses.replace(self.state, value=float(value))
        else:
            self.state = _static(float(value))

    @property
    def _unskipped(self) -> int:
        return int(self.state.good_steps) if self.dynamic else self._static_steps

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        if self.dynamic:
            self.state = dataclasses.replace(self.state, good_steps=int(value))
        else:
            self._static_steps = int(value)

    def clear_overflow_state(self) -> None:
        """Forget overflows."""
        self._has_overflow = False

    def record(self, finite: Tensor | None) -> bool:
        """Note whether gradients were finite: the shell's one host read. Returns whether they were."""
        good = True if finite is None else bool(finite)
        self._has_overflow = self._has_overflow or not good
        return good

    def update_scale(self) -> bool:
        """Adapt the scale to what was recorded since the last update; return whether to skip the step."""
        overflow = self._has_overflow
        before = self.state
        self.state = before.adjust(not overflow)
        if not self.dynamic:
            self._static_steps = self._static_steps if overflow else self._static_steps + 1
        elif overflow and before.value <= before.min_scale:
            self._warn_at_floor()
        self.clear_overflow_state()
        return overflow

    def _warn_at_floor(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"amp: gradients are not finite although the loss scale is at its floor of {self._loss_scale:g}: the "
                "loss or the model itself produces inf or nan, which no scale can cure. Steps are skipped until it "
                "stops; look for inf in the loss and in the model's outputs.",
                stacklevel=4,
            )


def _static(value: float) -> StaticLossScale | NoOpLossScale:
    return NoOpLossScale.create() if value == 1.0 else StaticLossScale.create(value)
