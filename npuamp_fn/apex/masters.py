"""Half parameters and their float32 masters: which belongs to which, and how edits of either side reach the other.

The master is the truth. A half parameter that was touched (in place, through ``.data``, or by a new ``.data``) wins
over its master, element by element, where it differs from the rounded master.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from npuamp_fn import cast
from npuamp_fn.tree import HALVES

__all__ = [
    "LowParameter",
    "MasterParameter",
    "Slot",
    "as_master",
    "grad_of",
    "half_of",
    "link",
    "low_of",
    "mark_synchronised",
    "master_of",
    "release_low",
    "set_bucket",
    "set_data",
    "set_grad",
    "slot_of",
    "store_low",
    "synchronise",
]


_torch: Any = torch._C
_data: Any = torch.Tensor.data  # the descriptors that the classes below override
_grad: Any = torch.Tensor.grad


class LowParameter(nn.Parameter):
    """A model parameter stored in half precision, whose master lives elsewhere; ``.data`` is watched."""

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its graph; whoever asks for it may write to it."""
        _touch(self, low=True)
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _touch(self, low=True)
        _data.__set__(self, value)


class MasterParameter(nn.Parameter):
    """The float32 master of a half parameter; ``.data`` is watched."""

    _amp_low: Any
    _amp_half: torch.dtype

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its graph; whoever asks for it may write to it."""
        _touch(low_of(self), low=False)
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _touch(low_of(self), low=False)
        _data.__set__(self, value)


class DeferredMaster(MasterParameter):
    """A master whose gradient may wait, half and scaled, in the bucket of its optimizer."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The unscaled float32 gradient; it is computed when somebody asks for it."""
        _reveal(self)
        return _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _reveal(self)
        _grad.__set__(self, value)


class Slot:
    """What a half parameter knows about its master."""

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.touched_low = self.touched_master = False
        self.seen_low = self.seen_master = -1

    def __reduce__(self) -> Any:
        return (_nothing, ())  # masters travel with the module, not with the parameter


class _Reference(weakref.ref):
    """A weak reference that pickles as nothing."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_nothing, ())


def _nothing() -> None:
    return None


def slot_of(parameter: Any) -> Slot | None:
    """Return the slot of a half parameter, if it has a master."""
    return parameter.__dict__.get("_amp_slot")


def master_of(parameter: Any) -> Tensor | None:
    """Return the float32 master of a half parameter, if it has one."""
    slot = slot_of(parameter)
    return None if slot is None else slot.master


def low_of(weight: Any) -> Tensor | None:
    """Return the half parameter of a master; ``None`` if it is no master, or the parameter is gone."""
    reference = weight.__dict__.get("_amp_low")
    low = None if reference is None else reference()
    if low is not None:
        low._fix_weakref()  # torch asks for this where a tensor comes out of a weak reference
    return low


def half_of(weight: Any) -> torch.dtype | None:
    """Return the dtype that the half parameter of a master is stored in; ``None`` if it is no master."""
    return weight.__dict__.get("_amp_half")


def set_bucket(weight: Any, bucket: Any) -> None:
    """Tell a master which bucket holds its gradient; two optimizers may share it."""
    reference = weight.__dict__.get("_amp_bucket")
    if reference is None or reference() is not bucket:
        weight._amp_bucket = _Reference(bucket)
        weight.__class__ = DeferredMaster


def grad_of(weight: Tensor) -> Tensor | None:
    """Return a gradient, but not the one that waits."""
    return _grad.__get__(weight)


def set_grad(weight: Tensor, value: Tensor | None) -> None:
    """Set a gradient without computing the one that waits."""
    _grad.__set__(weight, value)


def _reveal(master: Any) -> None:
    reference = master.__dict__.get("_amp_bucket")
    bucket = None if reference is None else reference()
    if bucket is not None and bucket.waiting is not None:
        bucket.reveal()


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Point a parameter to other memory without counting as an edit."""
    _data.__set__(tensor, value)


def store_low(parameter: nn.Parameter, dtype: torch.dtype, keep_master: bool) -> None:
    """Store a float32 parameter in half precision, in place, keeping its exact value as a master if asked."""
    exact, grad = _data.__get__(parameter), parameter.grad
    parameter.grad = None
    set_data(parameter, cast(exact, dtype))
    if keep_master:
        attach(parameter, exact.clone())
    if grad is not None:
        parameter.grad = cast(grad, dtype)


def release_low(parameter: Any, widen: bool, keep_master: bool) -> None:
    """Take the master from a half parameter, or make it float32 again, with the exact value."""
    if not widen and keep_master:
        return
    synchronise(parameter)
    slot = slot_of(parameter)
    if widen:
        exact = parameter.detach().float() if slot is None else slot.master.detach().clone()
        parameter.grad = None
        set_data(parameter, exact)
    if slot is not None:
        del parameter._amp_slot
        parameter.__class__ = nn.Parameter


def attach(parameter: Any, master: Tensor) -> None:
    """Make a float32 tensor the master of a half parameter."""
    if not isinstance(parameter, LowParameter):
        parameter.__class__ = LowParameter
    setattr(parameter, "_amp_slot", Slot(master))  # noqa: B010
    _mark(parameter)


def as_master(parameter: Any) -> Any:
    """Return the master of a half parameter as a Parameter for an optimizer, making one if there is none."""
    slot = slot_of(parameter)
    if slot is None:
        attach(parameter, parameter.detach().float())
        slot = parameter._amp_slot
    if not isinstance(slot.master, MasterParameter):
        link(parameter, nn.Parameter(slot.master.detach(), requires_grad=True))
    return slot_of(parameter).master  # type: ignore[union-attr]


def link(parameter: Any, master: Any) -> None:
    """Make a Parameter of an optimizer the master of a half parameter."""
    if slot_of(parameter) is None:
        attach(parameter, master)
    if not isinstance(master, MasterParameter):
        master.__class__ = MasterParameter
    master._amp_low, master._amp_half = _Reference(parameter), parameter.dtype
    parameter._amp_slot.master = master
    _mark(parameter)


def synchronise(parameter: Any) -> None:
    """Make a half parameter and its master agree; costs nothing when neither was edited."""
    slot = slot_of(parameter)
    if slot is None:
        return
    master = slot.master
    low_edited = slot.touched_low or parameter._version != slot.seen_low
    if not low_edited and not slot.touched_master and master._version == slot.seen_master:
        return
    with torch.inference_mode(False), torch.no_grad(), _untraced():
        low = parameter.detach()
        if low.dtype in HALVES:
            if low_edited:
                same = cast(master.detach(), low.dtype) == low.to(master.device)
                master.copy_(torch.where(same, master, low.to(master.device, torch.float32)))
            low.copy_(master)
    slot.touched_low = slot.touched_master = False
    _mark(parameter)


@contextmanager
def _untraced() -> Iterator[None]:
    # What torch.jit.trace records would be done again in every call of what it traces.
    state = _torch._get_tracing_state()
    _torch._set_tracing_state(None)
    try:
        yield
    finally:
        _torch._set_tracing_state(state)


def mark_synchronised(lows: Iterable[Tensor]) -> None:
    """Note that half parameters and their masters agree as they are now."""
    for low in lows:
        _mark(low)


def _mark(parameter: Any) -> None:
    slot = parameter._amp_slot
    slot.seen_low, slot.seen_master = parameter._version, slot.master._version


def _touch(parameter: Any, low: bool) -> None:
    slot = None if parameter is None else slot_of(parameter)
    if slot is None:
        return
    synchronise(parameter)
    if low:
        slot.touched_low = True
    else:
        slot.touched_master = True
