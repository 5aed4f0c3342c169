"""What ``amp.initialize`` does to models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from npuamp_fn import cast
from npuamp_fn.apex.amp._amp_state import _amp_state, warn_or_err
from npuamp_fn.apex.amp.properties import Properties
from npuamp_fn.apex.amp.switch import Scope, is_initialized, switch, unscope
from npuamp_fn.apex.masters import HALVES, release_low, store_low

__all__ = ["check_models", "convert_model"]


def check_models(models: Sequence[nn.Module], properties: Properties) -> None:
    """Refuse models that cannot be initialized, before anything is changed.

    Raises:
        RuntimeError: a model is wrapped or sharded already, or holds half-precision parameters.
        TypeError: a parameter is lazy or complex where it would have to be cast.
    """
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise RuntimeError(
                f"Incoming model is an instance of {type(model).__name__}. Wrap models AFTER amp.initialize: "
                "model, optimizer = amp.initialize(model, optimizer, ...), then model = DistributedDataParallel(model)."
            )
        sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
        if sharded and properties.opt_level != "O0":
            raise RuntimeError(
                f"amp.initialize: `{sharded[0]}` is a DTensor: the model is sharded already (fully_shard, "
                "parallelize_module), and its masters and flat buffers would cut across the shards. torch shards in "
                "mixed precision itself: fully_shard(module, mp_policy=MixedPrecisionPolicy("
                "param_dtype=torch.bfloat16)), without amp. Or keep whole parameters on every rank: amp.initialize("
                "..., combine_ddp=True)."
            )
        scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if "" in scripted or (scripted and properties.cast_model_type in HALVES and properties.opt_level != "O1"):
            raise RuntimeError(
                f"amp.initialize: `{scripted[0] or type(model).__name__}` is a ScriptModule, whose compiled code "
                "cannot be cast. Initialize the Python module, and trace it afterwards: torch.jit.trace(model.eval(), "
                "example)."
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        amp_modules = [module for module in model.modules() if is_initialized(module)]
        ours = {id(t) for module in amp_modules for t in (*module._parameters.values(), *module._buffers.values())}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if properties.cast_model_type in HALVES and nn.parameter.is_lazy(tensor):
                raise TypeError(
                    f"amp.initialize: `{name}` has no shape yet (a lazy module); run the model on one batch before "
                    "amp.initialize"
                )
            if tensor.dtype in HALVES and id(tensor) not in ours:
                warn_or_err(
                    f"Found param/buffer {name} with type {tensor.type()}, expected {torch.float32}. amp.initialize "
                    "casts the model itself and keeps float32 masters: do not call .half() or .bfloat16() on it before "
                    "(for a model that must be half already set _amp_state.allow_incoming_model_not_fp32 = True)."
                )


def convert_model(
    model: nn.Module, properties: Properties, output: torch.dtype | None, keep_masters: bool
) -> nn.Module:
    """Cast a model in place as the options say, and switch its modules into initialized classes."""
    dtype = properties.cast_model_type
    _release(model, dtype if properties.opt_level != "O1" else None, bool(properties.master_weights))
    if dtype in HALVES and properties.opt_level != "O1":
        for module in model.modules():
            if properties.keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dtype == torch.float32:
                    store_low(parameter, dtype, keep_masters and parameter.requires_grad)
            statistics = isinstance(module, nn.modules.batchnorm._NormBase)
            if not statistics or (module.affine and isinstance(module, nn.modules.batchnorm._BatchNorm)):
                # running statistics stay float32, except beside half batch-norm weights, where torch refuses the mix
                module._buffers.update({name: _cast_buffer(buffer, dtype) for name, buffer in module._buffers.items()})
    switch(model)
    if properties.opt_level == "O1":
        low = (dtype if dtype in HALVES else torch.float16) if properties.patch_torch_functions else None
        for module in model.modules():
            if low is not None:
                module.__dict__["_amp_scope"] = Scope(None, output or torch.float32, None, low)
        wide = torch.float32 if dtype == torch.float32 else None
        if low is None or wide is not None:
            model.__dict__["_amp_scope"] = Scope(None, output or wide, wide, low)
        return model
    scope: Any = Scope(dtype, output or torch.float32, dtype) if dtype else Scope(None, output)
    if dtype in HALVES and _has_wide_buffer(model):
        for module in model.modules():  # each by itself, because checkpoints recompute them by themselves
            # Instance norm takes float32 statistics beside half weights: a rule for the operation would widen inputs.
            instance_norm = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.affine
            module.__dict__["_amp_scope"] = Scope(compute=dtype if instance_norm else None, low=dtype, mixed=True)
        scope = replace(scope, low=dtype, mixed=True)
    model.__dict__["_amp_scope"] = scope
    return model


def _has_wide_buffer(model: nn.Module) -> bool:
    return any(
        buffer is not None and buffer.dtype == torch.float32 and buffer.dim() > 0  # 0-dim tensors widen nothing
        for module in model.modules()
        if not isinstance(module, nn.modules.batchnorm._NormBase)
        for buffer in module._buffers.values()
    )


def _release(model: nn.Module, dtype: Any, keep_masters: bool) -> None:
    """Undo what an earlier call did to a model, as far as the new options differ."""
    unscope(model)
    for module in model.modules():
        if not is_initialized(module):
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in HALVES:
                release_low(parameter, widen=parameter.dtype != dtype, keep_master=keep_masters)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in HALVES and buffer.dtype != dtype:
                module._buffers[name] = buffer.float()


def _cast_buffer(buffer: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if buffer is None or buffer.dtype != torch.float32:
        return buffer
    # Masks of -1e9 would be inf, positions beyond 2048 would be rounded. What such buffers meet is cast as it needs
    # (MIXED_OPS).
    low = cast(buffer, dtype)
    finite = torch.isfinite(buffer)
    whole = finite & (buffer == buffer.round())
    fits = torch.isfinite(low) | ~finite  # no overflow
    exact = (low.float() == buffer) | ~whole  # positions, counts and codes survive
    return low if bool((fits & exact).all()) else buffer
