"""What casting operation by operation costs: O1 against torch.autocast and float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.step import HALF, Shape, problem
from benchmarks.timing import Bar, Finding, Run, Setup, compare
from npuamp_fn import APEX_OPS, OpTable, cast_ops

__all__ = ["operation_casts"]

_SHAPE = Shape()


def operation_casts(setup: Setup, shape: Shape = _SHAPE) -> list[Finding]:
    """Forward and backward of a small GPT under O1, against torch.autocast; once without what only O1 widens."""
    model, (ids, targets) = problem(shape)

    def loss() -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())

    def autocast() -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            return loss()

    def o1(table: OpTable) -> Callable[[], Tensor]:
        return cast_ops(table, HALF)(loss)

    def trained(fn: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            model.zero_grad()
            fn().backward()

        return call

    runs = [
        Run("O1", trained(o1(APEX_OPS))),
        Run("O1, GELU left alone as in autocast", trained(o1(APEX_OPS.without("gelu")))),
        Run("autocast", trained(autocast)),
        Run("float32", trained(loss)),
    ]
    bars = [
        Bar("O1", ("autocast",), None),
        Bar("O1, GELU left alone as in autocast", ("autocast",), 1.10),
        Bar("O1", ("float32",), None),
    ]
    return compare(runs, bars, setup)
