"""``optimizer._amp_stash``: what amp keeps for one optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.apex.amp.combined import flat_grads
from npuamp_fn.apex.masters import MasterParameter, as_master, grad_of, low_of
from npuamp_fn.apex.optimizers.fused import FusedOptimizer
from npuamp_fn.apex.storage import Bucket, Storage
from npuamp_fn.tree import HALVES

__all__ = ["Stash"]


def _combined(read: Any, of_masters: bool, doc: str) -> Any:
    """Return a property: the flat buffer of masters, or of other parameters; ``None`` where nothing is combined."""

    def get(stash: Stash) -> Tensor | None:
        if stash.already_combined:
            for bucket in stash.buckets():
                if (bucket.low is not None) is of_masters:
                    return read(bucket)
        return None

    return property(get, doc=doc)


class Stash:
    """What amp keeps for one optimizer; the public names are those scripts read from ``optimizer._amp_stash``."""

    lazy_init_called = True
    main_fp16_param_combine = None  # half parameters are no part of what the optimizer updates
    main_fp16_grad_combine = _combined(lambda bucket: bucket.low_grads, True, "The flat half gradients, scaled.")
    main_fp32_from_fp16_grad_combine = _combined(flat_grads, True, "The flat gradients of masters.")
    main_fp32_from_fp32_grad_combine = _combined(flat_grads, False, "The flat gradients of other parameters.")
    main_fp32_grad_combine = main_fp32_from_fp32_grad_combine
    main_fp32_from_fp16_param_combine = _combined(lambda bucket: bucket.flat.buffers[0], True, "The flat masters.")
    main_fp32_from_fp32_param_combine = _combined(
        lambda bucket: bucket.flat.buffers[0], False, "The flat parameters that are no masters."
    )
    main_fp32_param_combine = main_fp32_from_fp32_param_combine

    def __init__(self, optimizer: torch.optim.Optimizer, properties: Any, scalers: list[Any]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.properties = properties
        self.scalers = scalers
        self.scaled_by: Any = None  # the loss scale that model gradients still carry (delay_unscale, no_sync)
        self.windows: list[Any] = []  # decisions about skipping that are still open
        self.through_scaled = False  # whether a backward pass was seen to start from the scaled loss
        self.open = False  # whether a scale_loss block of this optimizer is open
        self.kept: list[tuple[Tensor, Tensor]] = []  # gradients of earlier contexts, out of the way of backward
        self.shared: dict[Tensor, Tensor | None] = {}  # gradients of masters that other optimizers hold too
        self.skip: tuple[int, Any] | None = None  # loss id and scaler of the overflow that the next step skips
        self.last_step_skipped = False
        self.used = False  # whether a backward pass ran inside scale_loss since the last step
        self.storage = Storage()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients were left scaled by ``delay_unscale``."""
        return self.scaled_by is not None

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped."""
        return self.skip is not None

    @property
    def already_combined(self) -> bool:
        """Whether gradients lie in flat buffers."""
        return bool(self.properties.combine_grad) or isinstance(self.optimizer(), FusedOptimizer)

    @property
    def process_zero_grad(self) -> bool:
        """Whether no gradient waits for the next step."""
        waiting = any(bucket.has_grads() for bucket in self.buckets())
        return not waiting and all(grad_of(weight) is None for _, weights in self.groups() for weight in weights)

    @property
    def master_weights(self) -> bool:
        """Whether half parameters have float32 masters."""
        return bool(self.properties.master_weights)

    def groups(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Return the weights of every group."""
        optimizer: Any = self.optimizer()
        return ((index, group["params"]) for index, group in enumerate(optimizer.param_groups))

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half parameters of every group that have masters; without master weights all half ones."""
        return [
            [low for w in weights if (low := _half(w, self.master_weights)) is not None] for _, weights in self.groups()
        ]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of every group."""
        return [[w for w in weights if low_of(w) is not None] for _, weights in self.groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The float32 parameters of every group that are no masters."""
        return [[w for w in weights if low_of(w) is None and w.dtype == torch.float32] for _, weights in self.groups()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """All of ``fp16_groups``."""
        return [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """All masters."""
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """All float32 parameters that are no masters."""
        return [p for group in self.fp32_from_fp32_groups for p in group]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """All float32 parameters, without master weights."""
        return self.all_fp32_from_fp32_params

    def buckets(self) -> list[Bucket]:
        """Return the flat buffers: of masters always, of all weights where gradients are combined."""
        self.adopt_unfrozen()
        optimizer = self.optimizer()
        if isinstance(optimizer, FusedOptimizer):
            return optimizer.buckets()
        weights = (weights for _, weights in self.groups())
        if not self.properties.combine_grad:
            if not self.master_weights:
                return []
            weights = ([w for w in group if isinstance(w, MasterParameter)] for group in weights)
        return self.storage.refresh((group, "amp") for group in weights)

    def adopt_unfrozen(self) -> None:
        """Put masters in the places of half parameters that came into the optimizer, or became trainable, since."""
        if not self.master_weights:
            return
        optimizer: Any = self.optimizer()
        for _, weights in self.groups():
            for i, weight in enumerate(weights):
                if not isinstance(weight, MasterParameter) and weight.requires_grad and weight.dtype in HALVES:
                    master = weights[i] = as_master(weight)
                    if weight in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(weight)


def _half(weight: Tensor, masters: bool) -> Tensor | None:
    return low_of(weight) if masters else (weight if weight.dtype in HALVES else None)
