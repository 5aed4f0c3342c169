"""``amp.initialize`` and the loss scales' state."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from npuamp_fn.apex.amp._amp_state import _amp_state, maybe_print
from npuamp_fn.apex.amp.amp import AmpHandle, process_wide
from npuamp_fn.apex.amp.distributed import agree, broadcast_models
from npuamp_fn.apex.amp.models import check_models, convert_model
from npuamp_fn.apex.amp.optimizer import adopt, release, unwrap
from npuamp_fn.apex.amp.properties import BRIEFS, Properties, properties_for
from npuamp_fn.apex.amp.registry import operation_table
from npuamp_fn.apex.amp.scaler import LossScaler

__all__ = ["initialize", "load_state_dict", "state_dict"]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    dynamic_init_scale: float = 2.0**16,
    scale_growth_factor: float = 2.0,
    scale_backoff_factor: float = 0.5,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    combine_grad: bool | None = None,
    combine_ddp: bool | None = None,
    ddp_replica_count: int = 4,
    user_cast_preferred: bool | None = None,
    check_combined_tensors: bool | None = None,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place.

    Args:
        models: A module, or a list or tuple of modules; in float32.
        optimizers: A torch optimizer (or LARC), a list or tuple of those, or ``None``.
        enabled: False changes nothing, and makes ``scale_loss`` transparent.
        opt_level: "O0" float32; "O1" casts single operations; "O2" half model, float32 batch norm and masters;
            "O3" half model.
        cast_model_type: The dtype of the model: ``torch.float16`` (preset of O2 and O3) or ``torch.bfloat16``;
            ``False`` casts nothing. With bfloat16 the loss is not scaled unless ``loss_scale`` says so.
        patch_torch_functions: ``False`` leaves O1 without operation casts; ``True`` casts in the whole process, not
            only in these models, until ``_amp_state.handle._deactivate()``.
        keep_batchnorm_fp32: Whether batch norm stays float32.
        master_weights: Whether optimizers update float32 masters.
        loss_scale: A number, or "dynamic"; ``None`` is the level's preset.
        cast_model_outputs: Dtype of what models return; float32 by default.
        num_losses: How many loss scales there are.
        verbosity: 0 prints nothing; 2 also a line for each tensor that is cast at O1.
        dynamic_init_scale: First value of a dynamic scale.
        scale_growth_factor: Multiplies it after ``scale_window`` clean steps.
        scale_backoff_factor: Multiplies it on overflow.
        scale_window: Clean steps in a row before it grows.
        min_loss_scale: Its floor; 2**-14 by default.
        max_loss_scale: Its ceiling.
        combine_grad: Keep gradients in flat buffers.
        combine_ddp: Average gradients over the default process group, one reduction per flat buffer.
        ddp_replica_count: Accepted for compatibility: reductions are whole buffers.
        user_cast_preferred: Accepted for compatibility: registered casts always win.
        check_combined_tensors: Accepted for compatibility: flat buffers are always checked.

    Returns:
        What was given: models alone without optimizers, else ``(models, optimizers)``.

    Raises:
        RuntimeError: unknown level, contradicting options, a model in half precision or wrapped already.
        TypeError: models or optimizers of another kind.
        ValueError: a number is out of its range.
    """
    if not enabled:
        _amp_state.opt_properties = Properties()
        _amp_state.verbosity = verbosity
        return models if optimizers is None else (models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "combine_grad": combine_grad,
        "combine_ddp": combine_ddp,
        "ddp_replica_count": ddp_replica_count,
        "user_cast_preferred": user_cast_preferred,
        "check_combined_tensors": check_combined_tensors,
    }
    # Everything that can be refused is refused before anything changes.
    properties = properties_for(opt_level)
    preset = dict(properties.options)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    if properties.cast_model_type == torch.bfloat16 and loss_scale is None:
        properties.options["loss_scale"] = 1.0
    model_list = _listed(models, nn.Module, "models", "torch.nn.Module")
    optimizer_list = [] if optimizers is None else _listed(optimizers, object, "optimizers", "torch.optim.Optimizer")
    inner = [_checked_optimizer(optimizer) for optimizer in optimizer_list]
    check_models(model_list, properties)
    scale_options = (dynamic_init_scale, scale_growth_factor, scale_backoff_factor, scale_window)
    scalers = [
        LossScaler(properties.loss_scale, *scale_options, min_loss_scale, max_loss_scale) for _ in range(num_losses)
    ]

    if properties.combine_ddp:
        properties.options["combine_grad"] = True
        agree(model_list, inner)

    _amp_state.verbosity = verbosity
    _announce(opt_level, preset, properties)
    _amp_state.opt_properties = properties
    _amp_state.dynamic_init_scale = dynamic_init_scale
    _amp_state.scale_growth_factor = scale_growth_factor
    _amp_state.scale_backoff_factor = scale_backoff_factor
    _amp_state.scale_window = scale_window
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    _amp_state.loss_scalers = scalers
    for optimizer in inner:
        release(optimizer)
    if properties.combine_ddp:
        broadcast_models(model_list)
    keep_masters = bool(properties.master_weights) and bool(optimizer_list)
    for model in model_list:
        convert_model(model, properties, cast_model_outputs, keep_masters)
    if properties.opt_level == "O1" and properties.patch_torch_functions:
        if patch_torch_functions:  # asked for by name: apex's casts in the whole process
            half = properties.cast_model_type == torch.bfloat16
            low = torch.bfloat16 if half else torch.float16
            process_wide(operation_table(), low, properties.loss_scale, verbose=verbosity >= 2)
        else:
            _amp_state.handle = AmpHandle(properties.loss_scale, verbose=verbosity >= 2, models=model_list)
    for optimizer in inner:
        adopt(optimizer, properties, scalers)
    return models if optimizers is None else (models, optimizers)


def state_dict(destination: Any = None) -> Any:
    """Return the loss scales as plain data: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    Args:
        destination: A dictionary to fill; a new one by default.
    """
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_scalers("state_dict")):
        destination[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Any) -> None:
    """Restore the loss scales from :func:`state_dict`, each by its key.

    Raises:
        RuntimeError: an entry is not that of a loss scale; nothing was loaded then.
    """
    scalers = _scalers("load_state_dict")
    numbers = {key: _number(key) for key in state_dict}
    unexpected = [repr(key) for key, number in numbers.items() if number is None]
    if unexpected:
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {', '.join(unexpected)}. "
            "Nothing was loaded."
        )
    if len(state_dict) != len(scalers):
        print(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for key, number in numbers.items():
        if number is None or number >= len(scalers):
            print(f"Skipping loss_scaler[{number}], since num_losses was set to {len(scalers)}")
            continue
        scalers[number]._loss_scale = state_dict[key]["loss_scale"]
        scalers[number]._unskipped = state_dict[key]["unskipped"]


def _scalers(name: str) -> list[LossScaler]:
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(f"amp.{name}: call amp.initialize first")
    return getattr(_amp_state, "loss_scalers", []) if _amp_state.opt_properties.enabled else []


def _number(key: Any) -> int | None:
    tail = key.removeprefix("loss_scaler") if isinstance(key, str) and key.startswith("loss_scaler") else ""
    return int(tail) if tail.isdigit() else None


def _listed(value: Any, kind: type, name: str, what: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        listed = list(value)
    elif isinstance(value, (nn.Module, torch.optim.Optimizer)) or isinstance(unwrap(value), torch.optim.Optimizer):
        listed = [value]
    else:
        raise TypeError(
            f"{name} must be either a single {what} or a list or tuple of them, found {type(value).__name__}"
        )
    for item in listed:
        if not isinstance(item, kind):
            raise TypeError(f"{name}: expected {what}, found {type(item).__name__}")
    return listed


def _checked_optimizer(optimizer: Any) -> Any:
    inner = unwrap(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            "optimizers must be either a single torch.optim.Optimizer or a list or tuple of them, found "
            f"{type(optimizer).__name__}"
        )
    return inner


def _announce(opt_level: str, preset: dict[str, Any], properties: Properties) -> None:
    maybe_print(f"Selected optimization level {BRIEFS[opt_level]}", True)
    maybe_print("Defaults for this optimization level are:", True)
    for name, value in preset.items():
        maybe_print(f"{name:22} : {value}", True)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    maybe_print("After processing overrides, optimization options are:", True)
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)
