"""``verbosity=2``: a line for every tensor that is cast at O1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.transforms.op_cast import Report

__all__ = ["cast_report", "print_casts"]

_WORDS = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


def cast_report() -> Report | None:
    """Return what a scope of casts shall report to: ``print_casts`` where ``verbosity=2`` was asked for."""
    return print_casts if _amp_state.verbosity >= 2 else None


def print_casts(name: str, before: Any, after: Any) -> None:
    """Print a line for each tensor that a call got in another dtype than it was given.

    Compiled regions print nothing.

    >>> print_casts("linear", ([torch.ones(1)], {}), ([torch.ones(1).half()], {}))
    Float->Half (linear)
    """
    if is_dynamo_compiling():
        return
    if isinstance(before, Tensor):
        if before.dtype is not after.dtype:
            print(f"{_WORDS[before.dtype]}->{_WORDS[after.dtype]} ({name})")
    elif isinstance(before, dict):
        for key, value in before.items():
            print_casts(name, value, after[key])
    elif isinstance(before, (list, tuple)):
        for old, new in zip(before, after, strict=True):
            print_casts(name, old, new)
