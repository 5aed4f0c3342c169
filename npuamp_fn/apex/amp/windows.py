"""What ``scale_loss`` contexts leave open: gradients that are scaled still, and decisions about skipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from npuamp_fn.apex.amp.gradients import collect
from npuamp_fn.tree_math import all_true

__all__ = ["Scaled", "Window", "open_window", "settle", "unscale"]


class Scaled(NamedTuple):
    """The loss scale that gradients still carry."""

    scaler: Any
    state: Any  # the value of the scaler at the time
    unreduced: bool  # torch's DDP has not averaged them: passes that follow must add to them


class Window:
    """One decision to come: a loss scale, the optimizers it concerns, and whether their gradients were finite."""

    def __init__(self, scaler: Any, loss_id: int, stashes: list[Any], flags: list[Tensor]) -> None:
        self.scaler, self.loss_id, self.stashes, self.flags = scaler, loss_id, stashes, flags

    def decide(self) -> None:
        """Adapt the loss scale, once, and have all optimizers skip their next step after an overflow."""
        flags = self.flags
        if not flags or (not self.scaler.dynamic and self.stashes[0].properties.opt_level == "O0"):
            return
        self.scaler.record(all_true(flags))
        if self.scaler.update_scale():
            for stash in self.stashes:
                if stash.skip is None:
                    stash.skip = (self.loss_id, self.scaler)


def open_window(stashes: list[Any], scaler: Any, loss_id: int) -> Window:
    """Return the window of these optimizers for a loss scale; what earlier contexts left open for it goes in."""
    window = Window(scaler, loss_id, list(stashes), [])
    for earlier in {w: None for stash in stashes for w in stash.windows if w.scaler is scaler}:
        window.flags += earlier.flags
        for stash in earlier.stashes:
            stash.windows.remove(earlier)
            if stash not in window.stashes:
                window.stashes.append(stash)
    for stash in window.stashes:
        stash.windows.append(window)
    return window


def unscale(stashes: Sequence[Any], state: Any = None) -> list[Tensor]:
    """Unscale the gradients of optimizers, and let the windows that wait for them know whether they are finite.

    Args:
        stashes: Of one context; a tensor that several of their optimizers hold is unscaled once.
        state: The loss scale they carry; by default what contexts left.

    Returns:
        Flags of shape [], bool.
    """
    flags = []
    taken: set[int] | None = set() if len(stashes) > 1 else None
    for stash in stashes:
        optimizer, scaled = stash.optimizer(), stash.scaled_by
        if optimizer is None or (state is None and scaled is None):
            continue
        flag = collect(optimizer, scaled.state if state is None else state, taken)
        if flag is None:
            continue
        flags.append(flag)
        if scaled is not None:
            for window in stash.windows:
                if window.scaler is scaled.scaler:
                    window.flags.append(flag)
    if len(stashes) > 1 and stashes[0].master_weights:
        _share_grads(stashes)
    return flags


def _share_grads(stashes: Sequence[Any]) -> None:
    # A step clears the gradients of its masters. Another optimizer that holds the same master steps with them too.
    holders: dict[Tensor, list[Any]] = {}
    for stash in stashes:
        for _, weights in stash.groups():
            for weight in weights:
                holders.setdefault(weight, []).append(stash)
    for weight, sharing in holders.items():
        if len(sharing) > 1:
            for stash in sharing:
                stash.shared[weight] = weight.grad


def settle(stashes: Iterable[Any]) -> None:
    """Decide everything that contexts left open about these optimizers."""
    for window in {w: None for stash in stashes for w in stash.windows}:
        unscale([s for s in window.stashes if s.scaled_by is not None and s.scaled_by.scaler is window.scaler])
        for stash in window.stashes:
            stash.windows.remove(window)
        window.decide()
