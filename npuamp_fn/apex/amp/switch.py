"""Initialized modules: a subclass made for each module class, into which live modules are switched."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from npuamp_fn.apex.amp.distributed import enter_ddp
from npuamp_fn.apex.amp.inputs import cast_values
from npuamp_fn.apex.amp.registry import MIXED_OPS, operation_table
from npuamp_fn.apex.amp.verbose import cast_report
from npuamp_fn.apex.masters import attach, master_of, set_data, slot_of, synchronise
from npuamp_fn.transforms import op_cast
from npuamp_fn.tree import HALVES

__all__ = ["AmpModule", "Scope", "amp_class", "is_initialized", "original_class", "switch", "unscope"]


@dataclass(frozen=True)
class Scope:
    """What calls of one initialized module do."""

    wanted: torch.dtype | None = None  # dtype of the model
    output: torch.dtype | None = None
    compute: torch.dtype | None = None  # inputs are cast to it: `wanted`, unless the model was converted since
    low: torch.dtype | None = None  # operations are cast one by one, with this as the low dtype
    mixed: bool = False  # only operations that mix half and float32 are: a half model has float32 buffers


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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict, in float32: masters stand for their half parameters."""
        _switch_newcomers(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict; masters and half parameters both follow."""
        _switch_newcomers(self)
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        exact = {n: exact_value(p) for n, p in self._parameters.items() if p is not None and slot_of(p) is not None}
        result = super()._apply(fn, recurse)
        for name, value in exact.items():
            parameter: Any = self._parameters[name]
            slot = slot_of(parameter)
            if slot is None or parameter.is_meta:
                continue
            if parameter.dtype not in HALVES:  # model.float(): the exact weights
                parameter.detach().copy_(value)
            if slot.master.device != parameter.device:
                set_data(slot.master, slot.master.detach().to(parameter.device))
        scope = self.__dict__.get("_amp_scope")
        if scope is not None and scope.wanted in HALVES:
            half = any(parameter.dtype == scope.wanted for parameter in self.parameters())
            self.__dict__["_amp_scope"] = replace(scope, compute=scope.wanted if half else None)
        return result

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
        _switch_newcomers(self)
        reduced = reduce_as_original(self, super().__reduce_ex__(protocol), amp_class)
        exact = {n: exact_value(p) for n, p in self._parameters.items() if p is not None and slot_of(p) is not None}
        if exact and len(reduced) > 2 and isinstance(reduced[2], dict):
            state = {**reduced[2], "_amp_exact": {name: value.detach().clone() for name, value in exact.items()}}
            return (*reduced[:2], state, *reduced[3:])
        return reduced

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
    if master is None or parameter.dtype not in HALVES:
        return parameter.detach().float() if parameter.dtype in HALVES else parameter.detach()
    if master.device != parameter.device:
        return master.detach().to(parameter.device)
    return master.detach()  # shares its version counter: writes into it are seen


def scoped(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """Call a module's function inside its scope."""
    scope = module.__dict__.get("_amp_scope")
    if not torch.compiler.is_compiling():
        enter_ddp()
        for parameter in module._parameters.values():
            if parameter is not None:
                synchronise(parameter)
    if scope is None:
        return call(*args, **kwargs)
    if scope.low is None:
        args, kwargs = cast_values(args, scope.compute), cast_values(kwargs, scope.compute)
        return cast_values(call(*args, **kwargs), scope.output)
    nested = op_cast.current() is not None and scope.wanted is None  # the outermost call's scope rules
    if scope.compute is not None and (scope.mixed or not nested):
        args, kwargs = cast_values(args, scope.compute), cast_values(kwargs, scope.compute)
    if nested:
        return call(*args, **kwargs)
    with op_cast.OpCasts(MIXED_OPS if scope.mixed else operation_table(), scope.low, report=cast_report()):
        output = call(*args, **kwargs)
    return cast_values(output, scope.output)


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
            "_amp_original": cls,
        }
        metaclass: Any = type(cls)
        made = metaclass(cls.__name__, (AmpModule, cls), body)
        _classes[cls] = weakref.ref(made)
    return made


def original_class(cls: type) -> type:
    """Return the class an initialized module or optimizer had before."""
    return cls.__dict__.get("_amp_original", cls)


def switch(module: nn.Module) -> None:
    """Switch a module and its sub-modules into their initialized classes."""
    for child in module.modules():
        if not isinstance(child, (AmpModule, torch.jit.ScriptModule)):
            child.__class__ = _switched_class(child)
            becomes = getattr(child, "cls_to_become", None)  # lazy modules change their class at the first call
            if isinstance(becomes, type):
                child.__dict__["cls_to_become"] = amp_class(becomes)


def _switched_class(module: nn.Module) -> type:
    cls = type(module)
    if not parametrize.is_parametrized(module):
        return amp_class(cls)
    # A parametrized module has a class of its own, and remove_parametrizations returns to that class's first base.
    body = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (amp_class(cls.__bases__[0]),), body)


def unscope(model: nn.Module) -> None:
    """Let a model compute as its own class does; what its parameters are stored in stays."""
    for module in model.modules():
        module.__dict__.pop("_amp_scope", None)


def is_initialized(module: nn.Module) -> bool:
    """Tell whether a module went through ``amp.initialize``."""
    return isinstance(module, AmpModule)


def reduce_as_original(value: Any, reduced: Any, switched: Callable[[type], type]) -> Any:
    """Turn what ``__reduce_ex__`` returned into something that names the original class and switches on rebuilding."""
    if isinstance(reduced, str):
        return reduced
    make, arguments, *rest = reduced
    arguments = tuple(original_class(a) if a is type(value) else a for a in arguments)
    return (_rebuild, (switched, make, arguments), *rest)


def _rebuild(switched: Callable[[type], type], make: Any, arguments: Any) -> Any:
    made = make(*arguments)
    made.__class__ = switched(type(made))
    return made


def _switch_newcomers(root: nn.Module) -> None:
    """Switch modules registered after initialization that hold parameters with masters."""
    scope = root.__dict__.get("_amp_scope")
    if scope is None or (scope.low is not None and not scope.mixed):
        return
    for child in root.modules():
        if not isinstance(child, (AmpModule, torch.jit.ScriptModule)) and any(
            parameter is not None and slot_of(parameter) is not None for parameter in child._parameters.values()
        ):
            child.__class__ = amp_class(type(child))
