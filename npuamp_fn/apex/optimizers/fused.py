"""What all NpuFused optimizers share: a torch optimizer that updates flat buffers through ``fused_update``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from npuamp_fn import FlatTree, Optimizer, fused_update
from npuamp_fn.apex.grads import clip_grads
from npuamp_fn.apex.masters import half_of
from npuamp_fn.apex.storage import Bucket, Storage, alias
from npuamp_fn.optim.base import Hyper, OptimizerState

__all__ = ["FusedOptimizer"]


class FusedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters lie in flat buffers, one update call for each.

    Subclasses say in :meth:`rule_of` which core optimizer a parameter group stands for. Groups are read anew at each
    step; groups that differ in numbers only share a buffer, and every parameter has its own step count. Parameters,
    gradients and states may be replaced, moved, added or missing at any time: the buffers follow.
    """

    is_npu_fused_optimizer = True
    counted: ClassVar[bool] = True  # whether `state` shows the step count, as torch's class does
    sparse: ClassVar[bool] = False  # whether sparse gradients are taken, as torch's class does

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if isinstance(defaults["lr"], Tensor) and defaults["lr"].numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, found shape {tuple(defaults['lr'].shape)}")
        self.rule_of(defaults)  # refuse bad values before anything is kept
        super().__init__(params, defaults)

    @staticmethod
    def rule_of(group: dict[str, Any]) -> Optimizer:
        """Return the core optimizer with the numbers of a parameter group."""
        raise NotImplementedError

    @property
    def storage(self) -> Storage:
        """The flat buffers."""
        storage = self.__dict__.get("_storage")
        if storage is None:
            storage = self.__dict__["_storage"] = Storage()
        return storage

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have gradients.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: a gradient is sparse and this algorithm has no sparse form.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._read_groups()
        rules = [group.rule for group in groups]
        self._refuse_sparse()
        buckets = self._refresh(groups)
        for bucket in buckets:
            bucket.follow_edits(to_train=True)
        if any(rule.transforms for rule in rules):
            for bucket in buckets:
                bucket.reveal()
        found = [_gradients(bucket) for bucket in buckets]
        for bucket, (grads, active, factor) in zip(buckets, found, strict=True):
            if any(active):
                self._update(bucket, rules, grads, active, factor, [flat for flat, _, _ in found])
        return loss

    @torch.no_grad()
    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all parameters, on the flat buffers.

        With amp they are the unscaled ones that ``step`` uses.

        Args:
            max_norm: Gradients are scaled down to this norm.
            norm_type: The p of the norm; ``inf`` for the largest element.

        Returns:
            shape []: the norm before clipping, as ``torch.nn.utils.clip_grad_norm_`` gives it.

        >>> from npuamp_fn.apex.optimizers import NpuFusedSGD
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> NpuFusedSGD([weight]).clip_grad_norm_fused_(1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
        """
        buckets = [bucket for bucket in self.buckets() if any(weight.grad is not None for weight in bucket.weights)]
        return clip_grads([bucket.settled_grads() for bucket in buckets], max_norm, norm_type)

    def buckets(self) -> list[Bucket]:
        """Return the flat buffers as they must be now."""
        return self._refresh(self._read_groups())

    def _refresh(self, groups: Sequence[_Group]) -> list[Bucket]:
        weights = (group["params"] for group in self.param_groups)
        return self.storage.refresh(zip(weights, (group.key for group in groups), strict=True))

    def _read_groups(self) -> list[_Group]:
        """Return what every group stands for, worked out anew where a number changed."""
        known: list[_Group] = self.__dict__.setdefault("_known_groups", [])
        del known[len(self.param_groups) :]
        for index, group in enumerate(self.param_groups):
            options = {name: value for name, value in group.items() if name != "params"}
            if index == len(known):
                known.append(_Group.of(options, self.rule_of(group)))
            elif known[index].options != options:
                known[index] = _Group.of(options, self.rule_of(group))
        return known

    def _update(
        self,
        bucket: Bucket,
        rules: Sequence[Optimizer],
        grads: FlatTree,
        active: list[bool],
        factor: Tensor | None,
        all_grads: list[FlatTree],
    ) -> None:
        rule = rules[bucket.members[active.index(True)].group]
        self._adopt_state(bucket, rule, active)
        for transform in rule.transforms:  # over the gradients of all groups
            factor = transform.factor(all_grads, factor)
        options = {
            "hyper": _merged_hyper(bucket, rules, active),
            "master_weights": bucket.low is not None,
            "transforms": (),
        }
        core = fused_update(rule.replace(**options), donate=True)
        master: Any = () if bucket.low is None else bucket.flat
        state = OptimizerState(_merged_count(bucket, active), bucket.slots, master)
        on = None if all(active) else torch.tensor(active, device=bucket.device)
        factor = None if factor is None else factor.to(bucket.device)
        core.apply(grads, state, bucket.flat if bucket.low is None else bucket.low, factor, on)
        bucket.counts.add_(1 if on is None else torch.tensor(active, dtype=torch.float32))
        bucket.publish()

    def _adopt_state(self, bucket: Bucket, rule: Optimizer, active: Sequence[bool]) -> None:
        """Make ``state`` and the buffers agree; what was loaded, replaced or cleared in ``state`` counts."""
        if not bucket.slots and rule.rule.slots:
            bucket.slots = dict(rule.init(bucket.flat).slots)
        views: dict[str, Any] = {}
        for i, weight in enumerate(bucket.weights):
            entry, own = self.state.get(weight), bucket.states[i]
            if own is None and entry is None and not active[i]:
                continue
            if own is not None and entry is not None and all(entry.get(name) is value for name, value in own.items()):
                continue
            if not views:
                views = {name: _slot_views(slot) for name, slot in bucket.slots.items()}
            own = {name: alias(view[i]) for name, view in views.items()}
            for slot in rule.rule.slots:
                value = None if entry is None else entry.get(slot.name)
                if value is None:
                    own[slot.name].copy_(weight) if slot.start == "param" else own[slot.name].fill_(slot.start)
                else:
                    own[slot.name].copy_(torch.as_tensor(value))  # in older checkpoints a number, too
            bucket.counts[i] = self._count_in(entry, own)
            if self.counted:
                own["step"] = alias(bucket.counts[i])
            self.state[weight].update(own)
            bucket.states[i] = own

    def _count_in(self, entry: dict[str, Any] | None, slots: dict[str, Tensor]) -> float:
        if entry is None:
            return 0.0
        if self.counted:
            return float(entry.get("step", 0))
        return float(any(entry.get(name) is not None for name in slots))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of its torch.optim twin.

        Moments keep their float32 precision whatever the parameters' dtype, options that the dict lacks keep their
        defaults, and the group dictionaries stay the same objects.
        """
        load_keeping_groups(self, super().load_state_dict, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; missing options take their defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _refuse_sparse(self) -> None:
        if self.sparse:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if half_of(parameter) is None and parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients: parameter of shape "
                        f"{tuple(parameter.shape)}; use Embedding(sparse=False), or torch.optim.SparseAdam for it"
                    )


def load_keeping_groups(optimizer: torch.optim.Optimizer, load: Callable[[Any], None], state_dict: Any) -> None:
    """Load a state dict so that group dictionaries keep their identity and states their precision."""
    groups, holder = list(optimizer.param_groups), optimizer.param_groups
    load(state_dict)
    new_groups, new_holder = list(optimizer.param_groups), optimizer.param_groups
    for group, new in zip(groups, new_groups, strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    holder[:] = new_holder[:] = groups  # a wrapped optimizer may hold either list
    optimizer.param_groups = holder
    if not {"state", "param_groups"} <= set(state_dict):
        return  # a layout of its own, whose states it loaded itself
    saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    weights = [weight for group in groups for weight in group["params"]]
    for saved_id, weight in zip(saved_ids, weights, strict=True):
        for name, value in state_dict["state"].get(saved_id, {}).items():
            own = optimizer.state[weight].get(name)
            if isinstance(own, Tensor) and isinstance(value, Tensor) and own.dtype != value.dtype and name != "step":
                optimizer.state[weight][name] = value.detach().to(weight.device, copy=True)


class _Group(NamedTuple):
    options: dict[str, Any]
    rule: Optimizer
    key: Hashable  # groups of equal key share buffers

    @classmethod
    def of(cls, options: dict[str, Any], rule: Optimizer) -> _Group:
        fixed = tuple((name, value) for name, value in rule.hyper.items() if not _is_number(value))
        return cls(options, rule, (rule.rule, fixed, rule.transforms))


def _gradients(bucket: Bucket) -> tuple[FlatTree, list[bool], Tensor | None]:
    """Return flat gradients, which weights have one, and what the gradients must be multiplied by."""
    if bucket.waiting is None:
        return *bucket.current_grads(), None
    grads, scale, active = bucket.waiting
    return grads, active, scale.unscale(torch.ones((), device=bucket.device))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _merged_hyper(bucket: Bucket, rules: Sequence[Optimizer], active: Sequence[bool]) -> Hyper:
    """Return hyper-parameters: a number where all groups agree, else one entry per tensor."""
    groups = list(dict.fromkeys(member.group for member, on in zip(bucket.members, active, strict=True) if on))
    if len(groups) == 1:
        return rules[groups[0]].hyper
    merged = {}
    for name, value in rules[groups[0]].hyper.items():
        values = {group: rules[group].hyper[name] for group in groups}
        if all(
            v is value or (not isinstance(v, Tensor) and not isinstance(value, Tensor) and v == value)
            for v in values.values()
        ):
            merged[name] = value
            continue
        entries = [values.get(member.group, value) for member in bucket.members]
        if any(isinstance(entry, Tensor) for entry in entries):
            parts = [torch.as_tensor(entry, dtype=torch.float64, device=bucket.device).reshape(()) for entry in entries]
            merged[name] = torch.stack(parts)
        else:
            merged[name] = torch.tensor(entries, dtype=torch.float64, device=bucket.device)
    return Hyper(**merged)


def _merged_count(bucket: Bucket, active: Sequence[bool]) -> Tensor:
    counts = bucket.counts.tolist()
    value = counts[0] if all(active) and len(set(counts)) == 1 else counts
    return torch.tensor(value, dtype=torch.int32, device=bucket.device)


def _slot_views(slot: Any) -> Sequence[Tensor]:
    return slot.unflatten() if isinstance(slot, FlatTree) else slot[0]
