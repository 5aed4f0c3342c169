"""The older interface: ``amp.init``, its handle, and operation casts for the whole process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from npuamp_fn import APEX_OPS
from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.apex.amp.opt import OptimWrapper
from npuamp_fn.apex.amp.registry import operation_table
from npuamp_fn.apex.amp.switch import unscope
from npuamp_fn.apex.amp.verbose import print_casts
from npuamp_fn.transforms import op_cast

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "init"]


@contextmanager
def disable_casts() -> Iterator[None]:
    """Cast no operation inside this block; works everywhere, nested, and is undone by exceptions."""
    with op_cast.disable_casts():
        yield


class AmpHandle:
    """Says whether operation casts are on, and switches them off.

    Args:
        loss_scale: Kept for scripts that read it.
        verbose: Whether casts are printed; kept for scripts that read it.
        models: Initialized models whose casts end with this handle.
        mode: The scope of process-wide casts, entered.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        models: Iterable[nn.Module] = (),
        mode: Any = None,
    ) -> None:
        self._loss_scale = loss_scale
        self._models = weakref.WeakSet(models)
        self._mode = mode
        self.has_cache = enable_caching
        self.cache: dict[Any, Any] = {}  # always empty: no cast outlives the weights it was made from
        self.verbose = verbose

    def is_active(self) -> bool:
        """Tell whether operations are cast."""
        return self._mode is not None or len(self._models) > 0

    def remove_cache(self, param: Any) -> None:
        """Do nothing: there is no cache."""

    def _clear_cache(self) -> None:
        """Do nothing: there is no cache."""

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        with disable_casts():
            yield

    def _deactivate(self) -> None:
        """End the casts: of the models of this handle, or of the process."""
        for model in list(self._models):
            unscope(model)
        self._models = weakref.WeakSet()
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Give an optimizer its own loss scales, one for each loss of a step, as the older interface has them."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: the old Amp API is no longer supported."""
        raise RuntimeError(
            "The old Amp API is no longer supported.  Please move to the new API: "
            "model, optimizer = amp.initialize(model, optimizer, ...) and `with amp.scale_loss(loss, optimizer)`."
        )


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return a wrapper that scales nothing and never skips."""
        return OptimWrapper(optimizer, self, num_loss)

    def remove_cache(self, param: Any) -> None:
        """Do nothing."""

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    user_cast_preferred: bool | None = None,
) -> AmpHandle | NoOpHandle:
    """Cast operations in the whole process (this thread and the backward passes it starts).

    Args:
        enabled: False casts nothing.
        loss_scale: Kept on the handle.
        enable_caching: Kept on the handle; nothing is cached.
        verbose: Print a line for each tensor that is cast.
        allow_banned: Compute ``binary_cross_entropy`` in float32 instead of refusing it.
        user_cast_preferred: Accepted; registered casts always win.

    Returns:
        The handle, also ``_amp_state.handle``; ``handle._deactivate()`` ends the casts.
    """
    if not enabled:
        return NoOpHandle()
    table = operation_table()
    if allow_banned:
        table = table.full("torch.nn.functional.binary_cross_entropy")
    return process_wide(table, torch.float16, loss_scale, enable_caching, verbose)


def process_wide(
    table: Any = APEX_OPS,
    dtype: torch.dtype = torch.float16,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
) -> AmpHandle:
    """Enter a scope of operation casts that lasts until its handle is deactivated."""
    earlier = getattr(_amp_state, "handle", None)
    if earlier is not None:
        earlier._deactivate()  # casts do not stack
    mode = op_cast.OpCasts(table, dtype, report=print_casts if verbose else None)
    mode.__enter__()
    _amp_state.handle = AmpHandle(loss_scale, enable_caching, verbose, mode=mode)
    return _amp_state.handle


def cast_in_models(models: Iterable[nn.Module], loss_scale: float | str, verbose: bool) -> None:
    """Make ``_amp_state.handle`` the one that ends the casts of these models, and those of the process if there are."""
    handle = getattr(_amp_state, "handle", None)
    if handle is None or handle._mode is None:
        _amp_state.handle = AmpHandle(loss_scale, verbose=verbose, models=models)
    else:
        handle._models.update(models)
