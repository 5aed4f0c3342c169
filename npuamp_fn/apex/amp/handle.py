"""``scale_loss``: the context around a backward pass; and what became of the step after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npuamp_fn import cast
from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.apex.amp.gradients import collect, prepare, restore
from npuamp_fn.apex.amp.optimizer import AmpOptimizer, unwrap
from npuamp_fn.apex.amp.registry import operation_table
from npuamp_fn.apex.amp.verbose import cast_report
from npuamp_fn.transforms.op_cast import OpCasts

__all__ = ["last_step_skipped", "scale_loss"]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss for its backward pass, and unscale and check the gradients afterwards.

    Args:
        loss: Any shape.
        optimizers: The optimizer, or a list or tuple of those, whose gradients this backward pass makes.
        loss_id: Which of ``num_losses`` loss scales to use.
        model: Not used; scripts pass it.
        delay_unscale: Leave gradients scaled at exit: more backward passes follow before the step.
        delay_overflow_check: Unscale, but leave the decision about skipping to the next context.

    Yields:
        The scaled loss; call ``.backward()`` on it.

    Raises:
        RuntimeError: ``amp.initialize`` was not called, or not with this optimizer.
        TypeError: the loss is no tensor.
        ValueError: no optimizer was given.
        IndexError: there is no loss scale of this number.
    """
    listed = [unwrap(o) for o in (optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])]
    ours: list[Any] = list(dict.fromkeys(listed))  # the same optimizer twice is one
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  Call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) before `with amp.scale_loss`."
        )
    properties, scalers = _settings(ours)
    if not properties.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"scale_loss: expected the loss as a tensor, found {loss!r} of type {type(loss).__name__}; write "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )
    if not ours:
        raise ValueError(
            "scale_loss: expected the optimizers whose gradients this backward pass makes, found none: nobody would "
            "unscale the gradients"
        )
    if loss_id >= len(scalers):  # numbers beyond the optimizer's own are those of the latest call, as in apex
        scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"scale_loss: loss_id={loss_id}, but there are {len(scalers)} loss scales; pass num_losses to "
            "amp.initialize"
        )
    scaler = scalers[loss_id]
    state = scaler.state
    checked = properties.opt_level != "O0"
    if not checked and scaler.loss_scale() == 1.0 and not properties.combine_grad:
        yield cast(loss, torch.float32)
        return
    loss = loss if loss.dtype == torch.float32 else cast(loss, torch.float32)
    fresh = [optimizer for optimizer in ours if _begin(optimizer, state)]
    try:
        with _casts_in_backward(properties):
            yield state.scale(loss)
    except BaseException:
        for optimizer in fresh:
            restore(optimizer)
        raise
    if delay_unscale:
        for optimizer in ours:
            optimizer._amp_stash.scaled_by = (scaler, loss_id, state)
        return
    flags = [collect(optimizer, state) for optimizer in ours]
    present = [flag for flag in flags if flag is not None]
    if not checked or delay_overflow_check or not (present or scaler._has_overflow):
        if checked:
            _record(scaler, present)
        return
    _record(scaler, present)
    if scaler.update_scale():
        for optimizer in ours:
            if optimizer._amp_stash.skip is None:
                optimizer._amp_stash.skip = (loss_id, scaler)


def last_step_skipped(optimizer: Any) -> bool:
    """Tell whether the last ``optimizer.step()`` was skipped because gradients overflowed.

    Args:
        optimizer: Initialized, or what ``handle.wrap_optimizer`` returned.

    Returns:
        False before the first step too, and always after ``amp.initialize(..., enabled=False)``.

    Raises:
        RuntimeError: amp is on, but the optimizer did not go through ``amp.initialize``; or it never was called.

    >>> from npuamp_fn.apex import amp
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> with amp.scale_loss(model(torch.ones(1, 1)).sum() * torch.inf, optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> amp.last_step_skipped(optimizer)
    True
    """
    inner = unwrap(optimizer)
    stash = getattr(inner, "_amp_stash", None)
    if stash is not None:
        return stash.last_step_skipped
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is not None and not properties.enabled:
        return False
    raise RuntimeError(
        f"last_step_skipped: this {type(inner).__name__} did not go through amp.initialize; pass it there together "
        "with its model: model, optimizer = amp.initialize(model, optimizer, ...)"
    )


def _casts_in_backward(properties: Any) -> Any:
    # Reentrant checkpoints recompute inside the backward pass what was cast in the forward pass.
    if not properties.patch_torch_functions:
        return contextlib.nullcontext()
    low = properties.cast_model_type if properties.cast_model_type == torch.bfloat16 else torch.float16
    return OpCasts(operation_table(), low, backward_only=True, report=cast_report())


def _begin(optimizer: Any, state: Any) -> bool:
    """Make way for a backward pass; False if earlier gradients, scaled alike, wait for it to add to them."""
    optimizer._amp_stash.used = True
    pending = optimizer._amp_stash.scaled_by
    if pending is not None:
        if float(pending[2].value) == float(state.value):
            return False
        pending[0].record(collect(optimizer, pending[2]))
    prepare(optimizer)
    return True


def _record(scaler: Any, flags: list[Tensor]) -> None:
    if len(flags) > 1:
        flags = [torch.stack([flag.to(flags[0].device) for flag in flags]).all()]
    for flag in flags:
        scaler.record(flag)


def _settings(optimizers: list[Any]) -> tuple[Any, Any]:
    stashes = [o._amp_stash for o in optimizers if isinstance(o, AmpOptimizer)]
    properties = stashes[0].properties if stashes else _amp_state.opt_properties
    if properties.enabled:
        for optimizer in optimizers:
            if not isinstance(optimizer, AmpOptimizer):
                raise RuntimeError(
                    f"scale_loss: this {type(optimizer).__name__} did not go through amp.initialize; pass it there "
                    "together with its model: model, optimizer = amp.initialize(model, optimizer, ...)"
                )
    return properties, stashes[0].scalers if stashes else getattr(_amp_state, "loss_scalers", [])
