"""Loss scales: what the loss is multiplied by, and how that adapts to overflow."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from npuamp_fn.tree import describe, struct
from npuamp_fn.tree_math import check_flag, multiply, to_float32

__all__ = ["DynamicLossScale", "LossScale", "NoOpLossScale", "ScaledGrads", "StaticLossScale"]


@struct
class NoOpLossScale:
    """Do not scale: for float32 and bfloat16.

    >>> NoOpLossScale.create().scale(torch.tensor(3.0))
    tensor(3.)
    """

    @classmethod
    def create(cls) -> NoOpLossScale:
        """Return the loss scale that changes nothing."""
        return cls()

    @property
    def value(self) -> Tensor:
        """The scale, 1: shape [], float32."""
        return torch.ones((), dtype=torch.float32)

    def scale(self, x: Any) -> Any:
        """Return the tree as it is."""
        return x

    def unscale(self, tree: Any) -> Any:
        """Return the float leaves of a tree as float32 (float64 stays)."""
        return to_float32(tree)

    def adjust(self, finite: Tensor) -> NoOpLossScale:
        """Return this loss scale."""
        del finite
        return self


@struct
class StaticLossScale:
    """Multiply the loss by a constant.

    >>> StaticLossScale.create(128.0).scale(torch.tensor(2.0))
    tensor(256.)
    """

    value: Tensor  # shape=[], dtype=float32

    @classmethod
    def create(cls, value: float, *, device: torch.device | str | None = None) -> StaticLossScale:
        """Make a constant loss scale; powers of two scale and unscale exactly.

        Raises:
            ValueError: ``value`` is not positive, or float32 cannot hold it and its reciprocal.
        """
        _check_scale("StaticLossScale", "value", value)
        return cls(torch.tensor(float(value), dtype=torch.float32, device=device))

    def scale(self, x: Any) -> Any:
        """Multiply the float leaves of a tree by the scale, in float32."""
        return multiply(x, self.value)

    def unscale(self, tree: Any) -> Any:
        """Divide the float leaves of a tree by the scale; they become float32."""
        return multiply(tree, 1.0 / self.value)

    def adjust(self, finite: Tensor) -> StaticLossScale:
        """Return this loss scale: a constant does not react to overflow."""
        del finite
        return self


def _use_create() -> Any:
    raise TypeError(
        "DynamicLossScale: every field is part of the state; to make one write DynamicLossScale.create(2.0**15)"
    )


@struct(static=("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale"))
class DynamicLossScale:
    """Multiply the loss by a scale that falls on overflow and grows after ``growth_interval`` clean steps.

    On overflow: ``value = max(value * backoff_factor, min_scale)``, once the countdown of ``hysteresis``
    overflows has reached 0. After ``growth_interval`` clean steps in a row:
    ``value = min(value * growth_factor, max_scale)``, and the countdown is refilled.

    Everything that changes is a tensor, so nothing synchronises and nothing recompiles; ``vmap`` over it gives
    an ensemble with one scale per member. A loop that reads the flag on the host anyway may hold the three as Python
    numbers, see :meth:`on_host`.

    Source: Micikevicius et al., Mixed Precision Training, 2018; hysteresis as in Megatron-LM, 2019.

    >>> DynamicLossScale.create(4.0).adjust(torch.tensor(False)).value
    tensor(2.)
    """

    value: Tensor = field(default_factory=_use_create)  # shape=[], dtype=float32
    good_steps: Tensor = field(default_factory=_use_create)  # shape=[], dtype=int32: clean steps since the last change
    bad_steps_left: Tensor = field(
        default_factory=_use_create
    )  # shape=[], dtype=int32: overflows left before the scale backs off
    growth_factor: float = field(default_factory=_use_create)
    backoff_factor: float = field(default_factory=_use_create)
    growth_interval: int = field(default_factory=_use_create)
    hysteresis: int = field(default_factory=_use_create)
    min_scale: float = field(default_factory=_use_create)
    max_scale: float = field(default_factory=_use_create)

    @classmethod
    def create(
        cls,
        init_scale: float = 2.0**15,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        device: torch.device | str | None = None,
    ) -> DynamicLossScale:
        """Make a dynamic loss scale.

        Args:
            init_scale: First value; 2**15 is the largest that a float16 loss survives.
            growth_factor: Multiplies the scale on growth; more than 1.
            backoff_factor: Multiplies the scale on overflow; between 0 and 1.
            growth_interval: Clean steps in a row before the scale grows.
            hysteresis: Overflows tolerated, counting this one, before the scale falls.
            min_scale: Floor of the scale.
            max_scale: Ceiling of the scale.
            device: Where the three tensors live; the parameters' device.

        Raises:
            TypeError: an interval is not an int.
            ValueError: a number is out of its range.
        """
        name = "DynamicLossScale"
        _check_scale(name, "min_scale", min_scale)
        _check_scale(name, "max_scale", max_scale)
        _check_scale(name, "init_scale", init_scale)
        _check_number(name, "growth_factor", growth_factor, low=1.0)
        _check_number(name, "backoff_factor", backoff_factor, low=0.0, high=1.0)
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"{name}: expected min_scale <= init_scale <= max_scale, found {min_scale}, {init_scale}, {max_scale}"
            )
        for option, value in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: {option}: expected an int, found {value!r} of type {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: {option}: expected at least 1, found {value}")
        return cls(
            value=torch.tensor(float(init_scale), dtype=torch.float32, device=device),
            good_steps=torch.zeros((), dtype=torch.int32, device=device),
            bad_steps_left=torch.full((), hysteresis, dtype=torch.int32, device=device),
            growth_factor=float(growth_factor),
            backoff_factor=float(backoff_factor),
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=float(min_scale),
            max_scale=float(max_scale),
        )

    def on_host(self) -> DynamicLossScale:
        """Return the same scale as Python numbers, which :meth:`adjust` adapts without any tensor; synchronises.

        >>> DynamicLossScale.create(4.0).on_host().adjust(False).value
        2.0
        """
        value, good, bad_left = float(self.value), int(self.good_steps), int(self.bad_steps_left)
        return replace(self, value=value, good_steps=good, bad_steps_left=bad_left)

    def scale(self, x: Any) -> Any:
        """Multiply the float leaves of a tree by the scale, in float32."""
        return multiply(x, self.value)

    def unscale(self, tree: Any) -> Any:
        """Divide the float leaves of a tree by the scale; they become float32."""
        return multiply(tree, 1.0 / self.value)

    def adjust(self, finite: Tensor | bool) -> DynamicLossScale:
        """Return the next loss scale.

        Args:
            finite: shape [], bool: whether all gradients of this step were finite. A Python bool :meth:`on_host`.

        Raises:
            TypeError: ``finite`` is something else.
        """
        if isinstance(self.value, Tensor):
            check_flag("adjust(finite)", finite)
        elif not isinstance(finite, bool):
            raise TypeError(
                f"adjust(finite): expected a Python bool, as the scale is on the host, found {describe(finite)}"
            )
        # Sums instead of selects where they do: this runs in every step, and each operation costs microseconds.
        good = (self.good_steps + 1) * finite
        bad_left = _clamp(self.bad_steps_left + finite - 1, low=0)
        grow = good >= self.growth_interval
        back_off = finite + bad_left == 0
        grown = _clamp(self.value * self.growth_factor, high=self.max_scale)
        backed = _clamp(self.value * self.backoff_factor, low=self.min_scale)
        return DynamicLossScale(
            value=_select(grow, grown, _select(back_off, backed, self.value)),
            good_steps=_select(grow, 0, good),
            bad_steps_left=_select(grow, self.hysteresis, bad_left),
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )


def _select(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _clamp(value: Any, low: float | None = None, high: float | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.clamp(low, high)
    return max(value, low) if low is not None else min(value, high)


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale


class ScaledGrads(NamedTuple):
    """Gradients and what loss scaling knows about them; the true gradient is ``grads * inv_scale``.

    >>> out = with_loss_scaling(grad(lambda x: x * x), defer_unscale=True)(
    ...     StaticLossScale.create(4.0), torch.tensor(3.0)
    ... )
    >>> out.grads, out.inv_scale, out.value
    (tensor(24.), tensor(0.2500), tensor(9.))
    """

    grads: Any  # like the differentiated argument; float32 unless deferred; None at non-float leaves
    inv_scale: Tensor  # shape=[], dtype=float32: 1 unless `defer_unscale=True`
    value: Tensor  # shape=[]: the loss, never scaled
    aux: Any  # what the loss function returned beside the loss; () if nothing
    finite: Tensor  # shape=[], dtype=bool: whether every gradient is finite
    loss_scale: Any  # for the next step
    norm: Any = ()  # shape=[], dtype=float32: norm of the true gradients, if the finite test's read gave it; else ()


def _check_scale(owner: str, name: str, value: Any) -> None:
    _check_number(owner, name, value, low=0.0)
    if not 2.0**-126 <= value <= 2.0**126:
        raise ValueError(
            f"{owner}: {name}: expected a number from 2**-126 to 2**126, so that it and its reciprocal fit float32, "
            f"found {value!r}"
        )


def _check_number(owner: str, name: str, value: Any, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name}: expected a number, found {value!r} of type {type(value).__name__}")
    if not low < value < high:
        upper = "" if math.isinf(high) else f" and less than {high:g}"
        raise ValueError(f"{owner}: {name}: expected a finite number greater than {low:g}{upper}, found {value!r}")
