"""Initialized optimizers: a subclass made for each optimizer class, into which live optimizers are switched."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npuamp_fn import cast
from npuamp_fn.apex.amp._amp_state import _amp_state, maybe_print
from npuamp_fn.apex.amp.combined import CombinedTensors
from npuamp_fn.apex.amp.gradients import clear_low_grads, drop
from npuamp_fn.apex.amp.stash import Stash
from npuamp_fn.apex.amp.switch import original_class, reduce_as_original
from npuamp_fn.apex.amp.windows import settle
from npuamp_fn.apex.masters import HALVES, LowParameter, as_master, link, low_of, synchronise
from npuamp_fn.apex.optimizers.fused import FusedOptimizer, load_keeping_groups
from npuamp_fn.apex.storage import Bucket
from npuamp_fn.transforms import op_cast

__all__ = ["AmpOptimizer", "adopt", "refuse_inner_optimizer", "release", "unwrap"]


class AmpOptimizer(CombinedTensors, torch.optim.Optimizer):
    """The part of an initialized optimizer that amp adds to its own class."""

    _amp_stash: Stash

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Do the optimizer's own step, unless gradients overflowed: then say so and change nothing.

        Args:
            closure: Evaluates the model again (with its own ``scale_loss``) and returns the loss.
            args: Passed on to the optimizer's step.
            kwargs: Passed on to the optimizer's step.

        Returns:
            What the optimizer's step returned; after a skip the closure's loss, or ``None``.
        """
        stash = self._amp_stash
        if stash.open:
            raise RuntimeError(
                f"{type(self).__name__}.step was called inside `with amp.scale_loss(...)`, where gradients are scaled "
                "still; dedent it: `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`, and "
                "optimizer.step() after the block"
            )
        self._opt_called = True  # what schedulers look for
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        else:
            loss = None
        if stash.windows:
            settle([stash])
        if stash.shared:
            for weight, grad in stash.shared.items():
                if weight.grad is None:
                    weight.grad = grad
            stash.shared = {}
        if stash.skip is not None:
            _skip(self)
            return loss
        stash.last_step_skipped = False
        fused = isinstance(self, FusedOptimizer)  # it follows edits, and publishes what it wrote, by itself
        if fused and stash.used:
            stash.adopt_unfrozen()
            buckets = _live_buckets(self)
        else:
            buckets = stash.buckets()
        if stash.master_weights and not stash.used:
            _warn_of_bare_backward(buckets)
        if not fused:
            for bucket in buckets:
                bucket.follow_edits(to_train=True)
        if closure is not None:
            args = (_Again(closure, loss, self, buckets), *args)
        if op_cast.current() is None:
            result = super().step(*args, **kwargs)
        else:
            with op_cast.disable_casts():
                result = super().step(*args, **kwargs)
        for bucket in _live_buckets(self):
            if not fused:
                _push(bucket)
            if bucket.half is not None:
                bucket.clear_grads()
        stash.used = False
        return result

    step.hooked = True  # type: ignore[attr-defined]  (the optimizer's own step runs the step hooks)
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  (it sets _opt_called itself)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients of the model's parameters and of their masters; takes what the optimizer's own takes."""
        stash = self._amp_stash
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        for bucket in _live_buckets(self):
            if bucket.waiting is not None:
                bucket.clear_grads()
        super().zero_grad(*args, **kwargs)
        clear_low_grads(self, set_to_none)
        stash.scaled_by, stash.kept, stash.shared = None, [], {}
        if set_to_none:
            for bucket in _live_buckets(self):
                bucket.grads, bucket.grad_views = None, []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; half ones of an initialized model get their masters."""
        if isinstance(param_group, dict) and self._amp_stash.master_weights:
            given = param_group["params"]
            if not isinstance(given, set):
                listed = [given] if isinstance(given, Tensor) else list(given)
                param_group = {**param_group, "params": [_with_master(item) for item in listed]}
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of its torch.optim twin."""
        if isinstance(self, FusedOptimizer):
            super().load_state_dict(state_dict)
        else:
            load_keeping_groups(self, super().load_state_dict, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state and what amp keeps: options, loss scales, and whose master each weight is."""
        stash = self._amp_stash
        for bucket in stash.buckets():
            bucket.follow_edits()
        weights = [weight for _, weights in stash.groups() for weight in weights]
        pairs = [(low_of(weight), weight) for weight in weights if low_of(weight) is not None]
        amp = {"properties": stash.properties, "scalers": stash.scalers, "pairs": pairs}
        return {**super().__getstate__(), "_amp": amp}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; masters and their half parameters find each other again."""
        state = dict(state)
        amp = state.pop("_amp", None)
        super().__setstate__(state)
        if amp is not None:
            for low, master in amp["pairs"]:
                link(low, master)
            self.__dict__["_amp_stash"] = Stash(self, amp["properties"], amp["scalers"])
            if not hasattr(_amp_state, "opt_properties"):  # a new process goes on where the old one was
                _amp_state.opt_properties, _amp_state.loss_scalers = amp["properties"], amp["scalers"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as_original(self, super().__reduce_ex__(protocol), amp_optimizer_class)


class _Again:
    """A closure whose first call returns the loss that is known already."""

    def __init__(self, closure: Callable[[], Any], loss: Any, optimizer: AmpOptimizer, buckets: list[Bucket]) -> None:
        self._closure, self._loss, self._optimizer, self._buckets = closure, loss, optimizer, buckets
        self._first = True

    def __call__(self) -> Any:
        if self._first:
            self._first = False
            return self._loss
        for bucket in self._buckets:
            _push(bucket)
        loss = self._closure()
        settle([self._optimizer._amp_stash])
        if self._optimizer._amp_stash.skip is not None:
            raise RuntimeError(
                "amp: gradients overflowed in a repeated evaluation of the closure, in the middle of "
                f"{type(self._optimizer).__name__}.step, which cannot be taken back. Use a static loss scale that does "
                "not overflow, or cast_model_type=torch.bfloat16."
            )
        return loss


def unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer inside a wrapper such as LARC."""
    inner = getattr(optimizer, "optim", None)
    return inner if not isinstance(optimizer, torch.optim.Optimizer) and inner is not None else optimizer


def refuse_inner_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``TypeError`` where the step is done by an inner optimizer, which would never see the masters."""
    own = {id(group["params"]) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else []
        if any(id(group["params"]) not in own for group in groups):
            raise TypeError(
                f"amp.initialize: {type(optimizer).__name__} steps its own {type(value).__name__} (attribute "
                f"{name!r}), whose parameter lists are not those in its param_groups: that one would go on updating "
                f"the half parameters instead of their float32 masters. Use opt_level='O1' (no masters), or the plain "
                f"{type(value).__name__}."
            )


def adopt(optimizer: torch.optim.Optimizer, properties: Any, scalers: list[Any]) -> None:
    """Switch an optimizer into its initialized class and give it the masters of its half parameters."""
    stash = Stash(optimizer, properties, scalers)
    own_step = optimizer.__dict__.get("step")
    if getattr(own_step, "_wrapped_by_lr_sched", False):
        del optimizer.__dict__["step"]  # a scheduler's wrapper around the step of the class we leave
    optimizer.__dict__["_amp_stash"] = stash
    optimizer.__class__ = amp_optimizer_class(type(optimizer))
    if properties.master_weights:
        stash.adopt_unfrozen()
    elif not isinstance(optimizer, FusedOptimizer):
        _state_like_weights(optimizer)
    stash.buckets()


def _state_like_weights(optimizer: torch.optim.Optimizer) -> None:
    # torch's optimizers keep their state in the dtype of the parameters, which were cast just now.
    for weight, entry in optimizer.state.items():
        if isinstance(weight, Tensor) and weight.dtype in HALVES:
            for name, value in entry.items():
                if name != "step" and isinstance(value, Tensor):
                    entry[name] = cast(value, weight.dtype)


def release(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its own class and the model's parameters back, so that it can be initialized anew."""
    if not isinstance(optimizer, AmpOptimizer):
        return
    optimizer.zero_grad()
    for _, weights in optimizer._amp_stash.groups():
        for i, weight in enumerate(weights):
            low = low_of(weight)
            if low is not None:
                synchronise(low)
                weights[i] = low
                if weight in optimizer.state:
                    optimizer.state[low] = optimizer.state.pop(weight)
    del optimizer.__dict__["_amp_stash"]
    optimizer.__class__ = original_class(type(optimizer))


def amp_optimizer_class(cls: type) -> type:
    """Return the initialized counterpart of an optimizer class; the same one each time."""
    if issubclass(cls, AmpOptimizer):
        return cls
    known = _classes.get(cls)
    made = None if known is None else known()
    if made is None:
        body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        body["_amp_original"] = cls
        body["is_npu_fused_optimizer"] = getattr(cls, "is_npu_fused_optimizer", False)
        metaclass: Any = type(cls)
        made = metaclass(cls.__name__, (AmpOptimizer, cls), body)
        _classes[cls] = weakref.ref(made)
    return made


_classes: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()


def _with_master(item: Any) -> Any:
    if isinstance(item, tuple):
        return (item[0], _with_master(item[1]))
    return as_master(item) if isinstance(item, LowParameter) and item.requires_grad else item


def _skip(optimizer: AmpOptimizer) -> None:
    stash = optimizer._amp_stash
    loss_id, scaler = stash.skip  # type: ignore[misc]
    change = "reducing loss scale to" if scaler.dynamic else "keeping static loss scale"
    maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change} {scaler.loss_scale()}")
    stash.skip, stash.last_step_skipped, stash.used = None, True, False
    drop(optimizer, _live_buckets(optimizer))


def _live_buckets(optimizer: AmpOptimizer) -> list[Bucket]:
    return optimizer.storage.buckets if isinstance(optimizer, FusedOptimizer) else optimizer._amp_stash.storage.buckets


def _push(bucket: Bucket) -> None:
    bucket.settle()
    bucket.write_low()


def _warn_of_bare_backward(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        lows = [] if bucket.low is None or bucket.has_grads() else bucket.lows()
        if any(low is not None and low.dtype == bucket.half and low.grad is not None for low in lows):
            warnings.warn(
                "optimizer.step: the half parameters have gradients, but since the last step no backward pass ran "
                "inside amp.scale_loss, so their masters have none and nothing is updated. Write `with "
                "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`.",
                stacklevel=4,
            )
            return
