"""What all function transforms share: they are values that look like the function they wrap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["FunctionTransform"]


class FunctionTransform:
    """Give a callable dataclass the name and signature of its field ``fun``, and binding as a method."""

    fun: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The wrapped function; ``inspect.signature`` follows it."""
        return self.fun

    @property
    def __name__(self) -> str:
        """The wrapped function's name."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind like a function, so that methods can be decorated."""
        return self if instance is None else functools.partial(self, instance)  # type: ignore[arg-type]
