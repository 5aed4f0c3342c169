"""``scale_loss``: the context around a backward pass; and what became of the step after it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npuamp_fn import cast
from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.apex.amp.distributed import check_ddp, reduces_later
from npuamp_fn.apex.amp.gradients import has_grads, keep_scaled, prepare, restore
from npuamp_fn.apex.amp.optimizer import AmpOptimizer, unwrap
from npuamp_fn.apex.amp.registry import operation_table
from npuamp_fn.apex.amp.verbose import cast_report
from npuamp_fn.apex.amp.windows import Scaled, Window, open_window, settle, unscale
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

    What a context leaves open (``delay_unscale``, ``delay_overflow_check``) is settled when the next one of the same
    optimizer closes, or by its step: all gradients are unscaled, each loss scale is adapted once, and after an overflow
    every optimizer of the contexts that left it open skips one step. A pass inside ``no_sync()`` of torch's DDP counts
    as ``delay_unscale``, so that the pass which reduces gradients reduces them all.

    Args:
        loss: Any shape.
        optimizers: The optimizer, or a list or tuple of those, whose gradients this backward pass makes.
        loss_id: Which of ``num_losses`` loss scales to use.
        model: Not used; scripts pass it.
        delay_unscale: Leave gradients scaled at exit: more backward passes follow before the step.
        delay_overflow_check: Unscale, but leave the decision about skipping to the next context, or to the step.

    Yields:
        The scaled loss; call ``.backward()`` on it.

    Raises:
        RuntimeError: ``amp.initialize`` was not called, or not with this optimizer; or another context of it is open.
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
    checked = properties.opt_level != "O0" or scaler.dynamic
    if not checked and scaler.loss_scale() == 1.0 and not properties.combine_grad:
        yield cast(loss, torch.float32)
        return
    loss = loss if loss.dtype == torch.float32 else cast(loss, torch.float32)
    stashes = [optimizer._amp_stash for optimizer in ours]
    state = _scale_for(stashes, scaler)
    unreduced = reduces_later(ours)
    check_ddp(ours)
    fresh = [optimizer for optimizer in ours if _begin(optimizer, scaler, state)]
    scaled_loss = state.scale(loss)
    watched = scaled_loss is not loss and scaled_loss.requires_grad and not all(s.through_scaled for s in stashes)
    if watched:
        scaled_loss.retain_grad()  # it tells whether the backward pass came through here
    for stash in stashes:
        stash.open = stash.master_weights or scaled_loss is not loss
    try:
        with _casts_in_backward(properties):
            yield scaled_loss
    except BaseException:
        for optimizer in reversed(fresh):
            restore(optimizer)
        raise
    finally:
        for stash in stashes:
            stash.open = False
    if watched:
        through = scaled_loss.grad is not None
        if not through and any(has_grads(optimizer) for optimizer in fresh):
            _warn_of_unscaled_backward()
        for stash in stashes:
            stash.through_scaled = through
    if delay_unscale or unreduced:
        open_window(stashes, scaler, loss_id)
        for stash in stashes:
            keep_scaled(stash, state)
            stash.scaled_by = Scaled(scaler, state, unreduced)
        return
    flags = unscale(stashes, state)
    if not delay_overflow_check and not any(stash.windows for stash in stashes):  # the usual case
        Window(scaler, loss_id, stashes, flags).decide()
        return
    open_window(stashes, scaler, loss_id).flags += flags
    if not delay_overflow_check:
        settle(stashes)


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


def _scale_for(stashes: list[Any], scaler: Any) -> Any:
    """Return the scale to use: the scaler's, or that of gradients which only this backward pass will reduce."""
    for stash in stashes:
        if stash.open:
            raise RuntimeError(
                "scale_loss: a `with amp.scale_loss(...)` block of the same optimizer is open; gradients of two loss "
                "scales cannot be told apart. Put one block after the other (their gradients add up), or add the "
                "losses: `with amp.scale_loss(loss_a + loss_b, optimizer) as scaled_loss: scaled_loss.backward()`."
            )
    waiting = [s.scaled_by.state for s in stashes if s.scaled_by is not None and s.scaled_by.unreduced]
    if not waiting:
        return scaler.state
    if any(float(state.value) != float(waiting[0].value) for state in waiting):
        raise RuntimeError(
            "scale_loss: these optimizers hold gradients of no_sync() passes with different loss scales "
            f"{[float(state.value) for state in waiting]}; use one loss_id for them, or a static loss scale"
        )
    return waiting[0]


def _begin(optimizer: Any, scaler: Any, state: Any) -> bool:
    """Make way for a backward pass; False if earlier gradients, scaled alike, wait for it to add to them."""
    stash = optimizer._amp_stash
    stash.used = True
    scaled = stash.scaled_by
    if scaled is not None:
        if scaled.unreduced or (scaled.scaler is scaler and float(scaled.state.value) == float(state.value)):
            return False
        unscale([stash])
    prepare(optimizer)
    return True


def _warn_of_unscaled_backward() -> None:
    warnings.warn(
        "scale_loss: the backward pass did not start from the scaled loss, so these gradients were divided by the loss "
        "scale without having been multiplied. Write `with amp.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()`, not loss.backward().",
        stacklevel=4,
    )


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
