"""The optimizer of the older interface: a wrapper with loss scales, ``scale_loss`` and ``step`` of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from npuamp_fn import cast
from npuamp_fn.apex.amp._amp_state import maybe_print
from npuamp_fn.apex.amp.gradients import collect, drop, prepare, restore
from npuamp_fn.apex.amp.optimizer import AmpOptimizer, unwrap
from npuamp_fn.apex.amp.properties import Properties
from npuamp_fn.apex.amp.scaler import LossScaler
from npuamp_fn.apex.amp.stash import Stash

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer with one dynamic loss scale for each loss of a step; ``handle.wrap_optimizer`` makes it.

    The n-th ``scale_loss`` since the last ``step`` uses the n-th scale; gradients add up, unscaled. If those of any
    loss overflowed, the step is skipped. Everything else is the optimizer's own: ``wrapper.param_groups``,
    ``wrapper.zero_grad()``. Once the handle is inactive, the wrapper does nothing of its own.

    Args:
        optimizer: Any torch optimizer that did not go through ``amp.initialize``.
        handle: Says whether casts are on.
        num_loss: How many losses there are in a step.

    Raises:
        TypeError: not an optimizer.
        RuntimeError: an optimizer that ``amp.initialize`` prepared already.
        ValueError: ``num_loss`` is not a positive int.

    >>> from npuamp_fn.apex import amp
    >>> handle, weight = amp.init(), torch.nn.Parameter(torch.ones(2))
    >>> optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    >>> with optimizer.scale_loss(weight.sum()) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> handle._deactivate()
    >>> weight.data
    tensor([0.5000, 0.5000])
    """

    def __init__(self, optimizer: Any, handle: Any, num_loss: int = 1) -> None:
        inner = unwrap(optimizer)
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(
                f"wrap_optimizer: expected a torch.optim.Optimizer, found {optimizer!r} of type "
                f"{type(optimizer).__name__}"
            )
        if isinstance(inner, AmpOptimizer):
            raise RuntimeError(
                f"wrap_optimizer: this {type(inner).__name__} went through amp.initialize, which scales its losses "
                "already: write `with amp.scale_loss(loss, optimizer)` and optimizer.step()"
            )
        if not isinstance(num_loss, int) or isinstance(num_loss, bool) or num_loss < 1:
            raise ValueError(f"wrap_optimizer: num_loss: expected a positive int, found {num_loss!r}")
        self._optimizer, self._amp_handle = optimizer, handle
        self._amp_stash = Stash(inner, Properties(), [LossScaler("dynamic") for _ in range(num_loss)])
        self._next_loss = 0
        self._skip_next = False

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Scale the next loss of this step for its backward pass; unscale and check its gradients afterwards.

        Yields:
            The scaled loss; call ``.backward()`` on it.

        Raises:
            IndexError: more losses since the last ``step`` than ``num_loss``.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        scalers = self._amp_stash.scalers
        if self._next_loss == len(scalers):
            raise IndexError(
                f"scale_loss: loss number {self._next_loss + 1} since the last step, but there are {len(scalers)} "
                f"loss scales; write handle.wrap_optimizer(optimizer, num_loss={self._next_loss + 1}), or call step "
                "after every loss"
            )
        scaler = scalers[self._next_loss]
        state = scaler.state
        prepare(self)
        try:
            yield state.scale(cast(loss, torch.float32))
        except BaseException:
            restore(self)
            raise
        self._next_loss += 1
        finite = collect(self, state)
        if finite is not None:
            scaler.record(finite)
            self._skip_next = scaler.update_scale() or self._skip_next

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the optimizer's own step, unless gradients overflowed: then say so and change nothing.

        Returns:
            What the optimizer's step returned; ``None`` after a skip.

        Raises:
            NotImplementedError: a closure was given while casts are on.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step() if closure is None else self._optimizer.step(closure)
        if closure is not None:
            raise NotImplementedError(
                "OptimWrapper.step takes no closure; amp.initialize and amp.scale_loss do: "
                "model, optimizer = amp.initialize(model, optimizer, opt_level='O1')"
            )
        self._amp_stash.last_step_skipped, self._skip_next = self._skip_next, False
        self._next_loss = 0
        if self._amp_stash.last_step_skipped:
            unwrap(self._optimizer)._opt_called = True  # what schedulers look for
            maybe_print("Gradient overflow, skipping update")
            drop(self)
            return None
        with self._amp_handle._disable_casts():
            return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "OptimWrapper belongs to the casts of this process and cannot be copied or pickled; save "
            "wrapper.state_dict(), which is the optimizer's"
        )
