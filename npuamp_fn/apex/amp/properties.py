"""Options of ``amp.initialize``: presets of the levels, overrides, and what contradicts what."""

from __future__ import annotations

from typing import Any

import torch

from npuamp_fn.apex.amp._amp_state import warn_or_err
from npuamp_fn.tree import HALVES

__all__ = ["Properties", "properties_for"]

_DEFAULTS: dict[str, Any] = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
    "combine_grad": None,
    "combine_ddp": None,
    "ddp_replica_count": 4,
    "check_combined_tensors": None,
    "user_cast_preferred": None,
}

_PRESETS: dict[str, dict[str, Any]] = {
    "O0": {
        "cast_model_type": torch.float32,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": False,
        "loss_scale": 1.0,
    },
    "O1": {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": "dynamic",
    },
    "O2": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "O3": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
}

BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Operations of the initialized models are cast one by one.",
    "O2": "O2:  Half-precision model with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure half-precision training.",
}


class Properties:
    """The options in force, as attributes and as the ordered dictionary ``options``."""

    def __init__(self) -> None:
        self.__dict__.update(_DEFAULTS)

    @property
    def options(self) -> dict[str, Any]:
        """All options; writing into it checks nothing."""
        return self.__dict__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'Properties' object has no attribute {name!r}; its options are {list(self.__dict__)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option after checking it; unknown names are dropped, as scripts expect."""
        if name in self.options:
            check = _CHECKS.get(name)
            self.options[name] = value if check is None else check(self, value)


def properties_for(opt_level: str) -> Properties:
    """Return the options of a level.

    Raises:
        RuntimeError: there is no such level.
    """
    if opt_level not in _PRESETS:
        hint = ""
        if isinstance(opt_level, str) and opt_level.replace("0", "O", 1) in _PRESETS:
            hint = f" The first character is the letter O, not the number zero: {opt_level.replace('0', 'O', 1)!r}."
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3' (letter O).{hint}"
        )
    properties = Properties()
    properties.options.update(_PRESETS[opt_level], enabled=True, opt_level=opt_level)
    return properties


def _cast_model_type(p: Properties, value: Any) -> Any:
    if value is None or value is False:
        return value
    if not isinstance(value, torch.dtype) or value not in (torch.float32, *HALVES):
        raise TypeError(
            f"cast_model_type: expected torch.float16, torch.bfloat16, torch.float32 or False, found {value!r} of type "
            f"{type(value).__name__}"
        )
    if p.opt_level == "O1" and value == torch.float16:
        warn_or_err(
            "O1 casts operations to float16 and leaves the weights alone: cast_model_type must be None, False, "
            "torch.float32, or torch.bfloat16 to cast operations to that."
        )
    return value


def _patch_torch_functions(p: Properties, value: Any) -> Any:
    if value and p.opt_level != "O1":
        warn_or_err(
            "patch_torch_functions=True casts single operations and belongs to opt_level='O1'; currently opt_level is "
            f"{p.opt_level!r}. Leave it out, or use opt_level='O1'."
        )
    return value


def _keep_batchnorm_fp32(p: Properties, value: Any) -> Any:
    if p.opt_level == "O1" and value is not None:
        warn_or_err(
            "With opt_level O1, batchnorm functions run in FP32 anyway: keep_batchnorm_fp32 must be None, found "
            f"{value!r}."
        )
    if isinstance(value, str):
        value = {"True": True, "False": False}.get(value, value)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"keep_batchnorm_fp32: expected a bool or the string 'True' or 'False', found {value!r}")
    return value


def _master_weights(p: Properties, value: Any) -> Any:
    if p.opt_level == "O1" and value is not None:
        warn_or_err("It doesn't make sense to use master_weights with O1: the model weights are FP32 already.")
    return value


def _loss_scale(p: Properties, value: Any) -> Any:
    if value == "dynamic":
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        found = f"{value!r} of type {type(value).__name__}"
        raise type(error)(f"loss_scale: expected a number or 'dynamic', found {found}") from None


def _combined(name: str) -> Any:
    def check(p: Properties, value: Any) -> Any:
        return None if value is None else bool(value)

    return check


def _ddp_replica_count(p: Properties, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"ddp_replica_count: expected an int of at least 1, found {value!r}")
    return value


def _user_cast_preferred(p: Properties, value: Any) -> Any:
    if value and p.opt_level != "O1":
        warn_or_err(
            "user_cast_preferred=True decides between operation casts and belongs to opt_level='O1'; currently "
            f"opt_level is {p.opt_level!r}."
        )
    return value


_CHECKS = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
    "combine_grad": _combined("combine_grad"),
    "combine_ddp": _combined("combine_ddp"),
    "ddp_replica_count": _ddp_replica_count,
    "check_combined_tensors": _combined("check_combined_tensors"),
    "user_cast_preferred": _user_cast_preferred,
}
