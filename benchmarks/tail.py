"""What follows the backward pass: unscale, finite test, clipping, update; and the reductions alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Bar, Finding, Run, Setup, compare, evict
from benchmarks.update import ADAMW
from benchmarks.work import OurState, gradients, parameters
from npuamp_fn import DynamicLossScale, flatten, optim, with_loss_scaling
from npuamp_fn.kernels import reduce

__all__ = ["functional_tail", "norm_and_finite", "tail"]

MAX_NORM = 1.0


def tail(setup: Setup) -> list[Finding]:
    """The whole tail: unscale, finite test, clip, AdamW, against GradScaler, clip_grad_norm_ and AdamW(fused)."""
    dtypes = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
    runs = [Run(f"ours, {name}", _our_tail(setup, half)) for name, half in dtypes.items()]
    theirs = "GradScaler, clip_grad_norm_, AdamW(fused)"
    bars = [Bar(run.name, (theirs,), 0.48) for run in runs]
    return compare([*runs, Run(theirs, _torch_tail(setup))], bars, setup)


def norm_and_finite(setup: Setup) -> list[Finding]:
    """Finite test and global norm of half gradients, against eager vector_norm, with other data in the caches."""
    findings, clear = [], evict(setup)
    for half in (torch.float16, torch.bfloat16):
        flat = flatten(gradients(setup)).cast(half)
        buffer = torch.cat([buffer for buffer in flat.buffers if buffer is not None])
        name = f"ours, {str(half).removeprefix('torch.')}"
        runs = [
            Run(name, lambda flat=flat: reduce.finite_and_norm(flat), prepare=clear),
            Run("vector_norm", lambda b=buffer: torch.linalg.vector_norm(b, dtype=torch.float32), prepare=clear),
        ]
        findings += compare(runs, [Bar(name, ("vector_norm",), 0.12)], setup)
        exact = buffer.double().square().sum().sqrt()
        for who, norm in (
            (name, reduce.global_norm(flat)),
            ("vector_norm", torch.linalg.vector_norm(buffer, dtype=torch.float32)),
        ):
            error = float((norm.double() - exact).abs() / exact)
            limit = 1e-6 if who == name else None
            findings.append(Finding(f"{who}: error against float64", "", "relative", error, limit))
    return findings


class _Given:
    """A gradient function that has its gradients already: only what comes after them is timed."""

    def __init__(self, grads: Any) -> None:
        self._grads, self._loss = grads, torch.zeros(())

    def __loss_scaling__(self, scale: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self._grads, self._loss, ()


def _our_tail(setup: Setup, half: torch.dtype | None) -> Any:
    ours = OurState(setup, optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(**ADAMW)), half)
    return functional_tail(ours, DynamicLossScale.create(1.0, growth_interval=10**6), defer_unscale=True)


def functional_tail(ours: OurState, loss_scale: DynamicLossScale, defer_unscale: bool) -> Callable[[], None]:
    """Return what follows a backward pass in functional code: finite test, loss scale, update."""
    grad_fn = with_loss_scaling(_Given(ours.grads), defer_unscale=defer_unscale)

    def step() -> None:
        nonlocal loss_scale
        out = grad_fn(loss_scale)
        ours.step(out)
        loss_scale = out.loss_scale

    return step


def _torch_tail(setup: Setup) -> Any:
    params = parameters(setup)
    optimizer = torch.optim.AdamW(params, fused=True, **ADAMW)
    # Gradients are unscaled in place: with a scale of 1, the same ones can be used again.
    scaler, loss = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6), torch.zeros(())

    def step() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step
