"""The flat storage of one optimizer: weights, half copies, gradients and slots, one buffer each per kind of weight."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from npuamp_fn import FlatTree, flatten
from npuamp_fn.apex.grads import dense, gather
from npuamp_fn.apex.masters import (
    grad_of,
    half_of,
    low_of,
    mark_synchronised,
    set_bucket,
    set_data,
    set_grad,
    synchronise,
)

__all__ = ["Bucket", "Member", "Storage", "Waiting", "alias"]


class Member(NamedTuple):
    """One weight of an optimizer, and what decides which buffer it lies in."""

    weight: Tensor  # in the optimizer's groups: a master, or a model parameter
    group: int
    key: Hashable


def alias(view: Tensor) -> Tensor:
    """Return the elements of a dense view as a tensor that is no view and has a storage of its own.

    It saves and pickles by itself, has its own version counter, and keeps the buffer alive.
    """
    if view.numel() == 0 or view.device.type not in ("cpu", "cuda"):
        return view.detach().data
    size = view.element_size()
    start = view.storage_offset() * size
    storage = view.untyped_storage()[start : start + view.numel() * size]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


class Waiting(NamedTuple):
    """Gradients of a backward pass that nobody has looked at yet: half, and scaled still."""

    grads: FlatTree
    scale: Any  # the loss scale they carry
    active: list[bool]


class Bucket:
    """Weights of one kind in one flat buffer, with everything that belongs to them in the same layout."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.key = members[0].key
        self.members = list(members)
        self.weights = [member.weight for member in members]
        self.half = half_of(self.weights[0])
        for low in self.lows():
            if low is not None:
                synchronise(low)
        self.flat = flatten([weight.detach() for weight in self.weights])
        self.layout = self.flat.layout
        self._buffer: Any = self.flat.buffers[0]
        self.low = None if self.half is None else self.flat.cast(self.half)
        self.slots: dict[str, Any] = {}
        self.counts = torch.zeros(len(members), dtype=torch.float32)  # on the host, as torch's optimizers keep theirs
        self.states: list[dict[str, Any] | None] = [None] * len(members)  # what optimizer.state holds, by identity
        self.grads: FlatTree | None = None
        self.grad_views: list[Tensor] = []
        self.waiting: Waiting | None = None
        self.low_grads: Tensor | None = None  # the model's half gradients, where they are combined
        self._homes = [0] * len(members)
        self._low_homes = [0] * len(members)
        self.settle(self.lows())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._buffer.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._buffer.device

    def lows(self) -> list[Tensor | None]:
        """Return the model's half parameters; ``None`` where one is gone, nothing if there never were any."""
        return [] if self.half is None else [low_of(weight) for weight in self.weights]

    def sources(self) -> list[Tensor | None]:
        """Return the parameters whose ``grad`` autograd fills: the half ones, or the weights themselves."""
        return list(self.weights) if self.half is None else self.lows()

    def settle(self, lows: Sequence[Tensor | None] = ()) -> None:
        """Bring weights, and half parameters if given, that were moved back into the buffers; their values count."""
        views: Any = None
        for i, (weight, home) in enumerate(zip(self.weights, self._homes, strict=True)):
            if weight.data_ptr() != home:
                views = self.flat.tensors() if views is None else views
                self._homes[i] = _move_in(weight, views[i])
        half: Any = self.low
        views = None
        for i, low in enumerate(lows):
            if low is None or low.data_ptr() == self._low_homes[i]:
                continue
            if low.dtype == self.half and low.device == self.device and low.shape == self.weights[i].shape:
                views = half.tensors() if views is None else views
                self._low_homes[i] = _move_in(low, views[i])

    def moved(self) -> bool:
        """Tell whether a weight changed its kind: device, dtype or shape."""
        for weight, home, segment in zip(self.weights, self._homes, self.layout.segments, strict=True):
            if weight.data_ptr() != home and (
                weight.device != self.device or weight.dtype != self.dtype or tuple(weight.shape) != segment.shape
            ):
                return True
        return False

    def follow_edits(self, to_train: bool = False) -> None:
        """Make masters and half copies agree after edits of either side, and bring moved tensors back.

        Args:
            to_train: An update follows: half parameters must still be half.

        Raises:
            RuntimeError: they were converted after they got masters.
        """
        lows = self.lows()
        for index, low in enumerate(lows):
            if low is None:
                continue
            if to_train and low.dtype != self.half:
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(low.shape)} is {low.dtype}, but amp.initialize keeps it in "
                    f"{self.half}: the model was converted afterwards (model.float(), model.to(dtype) or p.data = "
                    "...). Inference and state_dict() still work; to train on, build the optimizer and call "
                    "amp.initialize again."
                )
            synchronise(low)
        self.settle(lows)

    def publish(self) -> None:
        """Tell torch that the weights, and their half copies, were written through the buffers."""
        increment_version(self.weights)
        self._publish_low()

    def write_low(self) -> None:
        """Round the weights into their half copies: one flat copy."""
        if self.low is not None:
            half: Any = self.low.buffers[0]
            half.copy_(self._buffer)
            self._publish_low()

    def _publish_low(self) -> None:
        lows = [low for low in self.lows() if low is not None]
        increment_version(lows)
        mark_synchronised(lows)

    def set_grads(self, grads: FlatTree, active: Sequence[bool]) -> None:
        """Make views of a flat gradient the ``grad`` of the weights, of the active ones."""
        self.waiting, self.grads = None, grads
        self.grad_views = [view.data for view in grads.tensors()]
        for weight, view, on in zip(self.weights, self.grad_views, active, strict=True):
            set_grad(weight, view if on else None)

    def clear_grads(self) -> None:
        """Leave the weights without gradients."""
        self.waiting = self.grads = self.low_grads = None
        self.grad_views = []
        for weight in self.weights:
            set_grad(weight, None)

    def wait(self, waiting: Waiting) -> None:
        """Keep gradients for the step, or for whoever asks a master for its gradient."""
        self.waiting, self.grads, self.grad_views = waiting, None, []
        for weight in self.weights:
            set_bucket(weight, self)

    def has_grads(self) -> bool:
        """Tell whether a weight has a gradient, or one waits."""
        return self.waiting is not None or any(grad_of(weight) is not None for weight in self.weights)

    def reveal(self) -> None:
        """Compute the unscaled gradients that wait, and give them to the masters."""
        if self.waiting is not None:
            grads, scale, active = self.waiting
            with torch.no_grad():
                self.set_grads(scale.unscale(grads), active)

    def settled_grads(self) -> Tensor:
        """Return the weights' gradients as one buffer that they are views of."""
        flat, active = self.current_grads()
        self.set_grads(flat, active)
        buffer: Any = flat.buffers[0]
        return buffer

    def current_grads(self) -> tuple[FlatTree, list[bool]]:
        """Return the weights' gradients as one buffer, whoever put them there, and which weights have one."""
        found = [weight.grad for weight in self.weights]
        active = [grad is not None for grad in found]
        if self.grads is None:
            return gather(self.layout, found, self.dtype, self.device), active
        for view, grad in zip(self.grad_views, found, strict=True):
            if grad is None:
                view.zero_()
            elif grad is not view and not _same_place(grad, view):
                view.copy_(dense(grad))
        return self.grads, active


class Storage:
    """All buckets of one optimizer, rebuilt where its groups or parameters changed."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._signature: list[Any] = []

    def refresh(self, groups: Iterable[tuple[Sequence[Tensor], Hashable]]) -> list[Bucket]:
        """Return buckets that hold exactly the weights of these groups that learn, keeping those that still fit.

        Args:
            groups: For every parameter group its weights, and what (beside device and dtype) parts buffers.
        """
        signature: list[Any] = []
        listed = []
        for weights, key in groups:
            learning = [weight for weight in weights if weight.requires_grad or weight.grad is not None]
            listed.append((learning, key))
            signature += (key, len(learning), *map(id, learning))
        if signature == self._signature and not any(bucket.moved() for bucket in self.buckets):
            return self.buckets
        self._signature = signature
        members = [Member(weight, i, key) for i, (weights, key) in enumerate(listed) for weight in weights]
        return self._rebuild(members)

    def _rebuild(self, members: Sequence[Member]) -> list[Bucket]:
        by_key: dict[Hashable, list[Member]] = {}
        for member in {id(member.weight): member for member in members}.values():
            by_key.setdefault((member.key, *_kind(member.weight)), []).append(member)
        old = {bucket.key: bucket for bucket in self.buckets}
        buckets = []
        for key, wanted in by_key.items():
            bucket = old.get(key)
            if bucket is None or not _same_members(bucket.members, wanted) or bucket.moved():
                bucket = Bucket([member._replace(key=key) for member in wanted])
            buckets.append(bucket)
        kept = set(map(id, buckets))
        for bucket in self.buckets:
            if id(bucket) not in kept:
                bucket.reveal()  # what waits in it would go with it
        self.buckets = buckets
        return buckets


def _kind(weight: Tensor) -> tuple[Any, ...]:
    return (weight.device, weight.dtype, half_of(weight))


def _same_members(have: Sequence[Member], want: Sequence[Member]) -> bool:
    return len(have) == len(want) and all(
        a.weight is b.weight and a.group == b.group for a, b in zip(have, want, strict=True)
    )


def _same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def _move_in(tensor: Tensor, view: Tensor) -> int:
    view.copy_(tensor.detach())
    set_data(tensor, alias(view))
    return tensor.data_ptr()
