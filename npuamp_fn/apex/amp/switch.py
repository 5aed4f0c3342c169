"""Initialized modules: a subclass made for each module class, into which live modules are switched."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npuamp_fn.apex.amp.inputs import cast_values
from npuamp_fn.apex.masters import HALVES, attach, master_of, slot_of, synchronise
from npuamp_fn.apex.storage import alias

__all__ = ["AmpModule", "Scope", "amp_class", "is_initialized", "original_class", "switch"]


@dataclass(frozen=True)
class Scope:
    """What calls of one initialized module do."""

    compute: torch.dtype | None = None  # inputs are cast to it
    output: torch.dtype | None = None


class AmpModule(nn.Module):
    """The part of an initialized module that amp adds to its own class.

    It holds no tensors. What it does depends on the instance: ``_amp_scope`` (modules given to ``initialize``) and
    on which of its parameters have masters.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing: registries of the user's classes must not see the switched ones."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; an instance that replaces ``forward`` is cast here."""
        if "forward" in self.__dict__:
            return scoped(self, super().__call__, args, kwargs)
        return super().__call__(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those of masters too."""
        super().zero_grad(set_to_none)
        for parameter in self.parameters():
            master = master_of(parameter)
            if master is not None:
                master.grad = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name, parameter in self._parameters.items():
            if parameter is not None and prefix + name in destination:
                destination[prefix + name] = exact_value(parameter)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype in HALVES and prefix + name in destination:
                destination[prefix + name] = destination[prefix + name].float()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:  # type: ignore[override]
        local_metadata = {key: value for key, value in local_metadata.items() if key != "assign_to_params_buffers"}
        for parameter in self._parameters.values():
            if parameter is not None:
                synchronise(parameter)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            slot = None if parameter is None else slot_of(parameter)
            if parameter is None or slot is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            with torch.no_grad():
                slot.master.copy_(value)
            slot.touched_low, slot.seen_low = False, parameter._version
            synchronise(parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or len(reduced) < 3:
            return reduced
        make, arguments, state, *rest = reduced
        arguments = tuple(original_class(a) if a is type(self) else a for a in arguments)
        exact = {n: exact_value(p) for n, p in self._parameters.items() if p is not None and slot_of(p) is not None}
        if exact and isinstance(state, dict):
            state = {**state, "_amp_exact": {name: value.detach().clone() for name, value in exact.items()}}
        return (_rebuild, (make, arguments), state, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the module; exact weights become masters again, unless its optimizer brought them already."""
        state = dict(state)
        exact = state.pop("_amp_exact", {})
        super().__setstate__(state)
        for name, value in exact.items():
            parameter = self._parameters.get(name)
            if parameter is not None and slot_of(parameter) is None and parameter.dtype in HALVES:
                attach(parameter, value)


def exact_value(parameter: Tensor) -> Tensor:
    """Return the float32 value of a parameter: its master where it has one, sharing memory with it."""
    synchronise(parameter)
    master = master_of(parameter)
    if master is None:
        return parameter.detach().float() if parameter.dtype in HALVES else parameter.detach()
    if master.device != parameter.device:
        return master.detach().to(parameter.device)
    return alias(master.detach())


def scoped(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """Call a module's function inside its scope."""
    scope = module.__dict__.get("_amp_scope")
    if scope is None:
        return call(*args, **kwargs)
    args, kwargs = cast_values(args, scope.compute), cast_values(kwargs, scope.compute)
    return cast_values(call(*args, **kwargs), scope.output)


_classes: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()


def amp_class(cls: type) -> type:
    """Return the initialized counterpart of a module class; the same one each time."""
    if issubclass(cls, AmpModule):
        return cls
    known = _classes.get(cls)
    made = None if known is None else known()
    if made is None:
        forward = cls.forward  # type: ignore[attr-defined]

        @functools.wraps(forward)
        def scoped_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return scoped(self, functools.partial(forward, self), args, kwargs)

        body = {
            "forward": scoped_forward,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        metaclass: Any = type(cls)
        made = metaclass(cls.__name__, (AmpModule, cls), body)
        _classes[cls] = weakref.ref(made)
    return made


def original_class(cls: type) -> type:
    """Return the class an initialized module had before."""
    return cls.__mro__[2] if issubclass(cls, AmpModule) and cls is not AmpModule else cls


def switch(module: nn.Module) -> None:
    """Switch a module and its sub-modules into their initialized classes."""
    for child in module.modules():
        if not isinstance(child, (AmpModule, torch.jit.ScriptModule)):
            child.__class__ = amp_class(type(child))


def is_initialized(module: nn.Module) -> bool:
    """Tell whether a module went through ``amp.initialize``."""
    return isinstance(module, AmpModule)


def _rebuild(make: Any, arguments: Any) -> Any:
    made = make(*arguments)
    made.__class__ = amp_class(type(made))
    return made
