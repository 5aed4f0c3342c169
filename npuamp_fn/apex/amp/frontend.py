"""``amp.initialize``."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import nn

from npuamp_fn.apex.amp._amp_state import _amp_state, maybe_print
from npuamp_fn.apex.amp.amp import cast_in_models, process_wide
from npuamp_fn.apex.amp.distributed import agree, broadcast_models
from npuamp_fn.apex.amp.models import check_models, convert_model
from npuamp_fn.apex.amp.optimizer import adopt, refuse_inner_optimizer, release, unwrap
from npuamp_fn.apex.amp.properties import BRIEFS, Properties, properties_for
from npuamp_fn.apex.amp.registry import operation_table
from npuamp_fn.apex.amp.scaler import LossScaler
from npuamp_fn.apex.optimizers.fused import FusedOptimizer

__all__ = ["initialize"]


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
        TypeError: models, optimizers or options of another kind.
        ValueError: a number is out of its range.
    """
    if isinstance(enabled, str):
        raise TypeError(
            f"enabled: expected a bool, found {enabled!r}: it is the third argument, before opt_level; write "
            f"amp.initialize(model, optimizer, opt_level={enabled!r})"
        )
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity: expected 0, 1 or 2, found {verbosity!r} of type {type(verbosity).__name__}")
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
    if properties.master_weights:
        for optimizer in inner:
            refuse_inner_optimizer(optimizer)
    check_models(model_list, properties)
    _check_outputs(cast_model_outputs)
    scale_options = {
        "dynamic_init_scale": dynamic_init_scale,
        "scale_growth_factor": scale_growth_factor,
        "scale_backoff_factor": scale_backoff_factor,
        "scale_window": scale_window,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
    }
    scalers = _new_scalers(properties.loss_scale, num_losses, scale_options)

    if properties.combine_ddp:
        properties.options["combine_grad"] = True
        agree(model_list, inner)

    _amp_state.verbosity = verbosity
    _announce(opt_level, preset, properties, inner)
    _amp_state.opt_properties = properties
    for name, value in scale_options.items():
        setattr(_amp_state, name, value)
    _amp_state.replace_scalers(scalers)
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
            cast_in_models(model_list, properties.loss_scale, verbose=verbosity >= 2)
    for optimizer in inner:
        adopt(optimizer, properties, scalers)
    return models if optimizers is None else (models, optimizers)


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


def _check_outputs(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"cast_model_outputs: expected a floating-point dtype such as torch.float32, or None, found {dtype!r} of "
            f"type {type(dtype).__name__}"
        )


def _new_scalers(loss_scale: float | str, number: Any, options: dict[str, Any]) -> list[LossScaler]:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"num_losses: expected an int of at least 1, found {number!r}")
    for name, value in options.items():
        if not isinstance(value, Real) and not (name == "min_loss_scale" and value is None):
            raise TypeError(f"{name}: expected a number, found {value!r} of type {type(value).__name__}")
    return [LossScaler(loss_scale, *options.values()) for _ in range(number)]


def _announce(opt_level: str, preset: dict[str, Any], properties: Properties, optimizers: list[Any]) -> None:
    maybe_print(f"Selected optimization level {BRIEFS[opt_level]}", True)
    maybe_print("Defaults for this optimization level are:", True)
    for name, value in preset.items():
        maybe_print(f"{name:22} : {value}", True)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    maybe_print("After processing overrides, optimization options are:", True)
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)
    fused = any(isinstance(optimizer, FusedOptimizer) for optimizer in optimizers)
    if fused:
        maybe_print("Use npu fused optimizer", True)
    if properties.check_combined_tensors and not (fused or properties.combine_grad):
        maybe_print(
            "check_combined_tensors=True has no effect: nothing is combined without combine_grad=True or an optimizer "
            "of apex.optimizers (NpuFused...).",
            True,
        )
