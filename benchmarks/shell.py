"""The apex.amp interface: what ``scale_loss`` and ``step`` cost beside the gradients and the update themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.tail import functional_tail
from benchmarks.timing import Bar, Finding, Run, Setup, compare
from benchmarks.update import ADAMW
from benchmarks.work import OurState, gradients, weights
from npuamp_fn import DynamicLossScale, optim
from npuamp_fn.apex import amp
from npuamp_fn.apex.optimizers import NpuFusedAdamW

__all__ = ["shell_large", "shell_small"]


def shell_small(setup: Setup) -> list[Finding]:
    """Backward pass in scale_loss, and step, on ten parameters of at most 64 elements, against GradScaler's."""
    theirs = "GradScaler, AdamW"
    runs = [_grad_scaler(theirs)]
    for level in ("O1", "O2"):
        runs += [_scale_loss(f"{level}, {cls.__name__}", level, cls) for cls in (torch.optim.AdamW, NpuFusedAdamW)]
    return compare(runs, [Bar(run.name, (theirs,), 1.2) for run in runs[1:]], setup)


def shell_large(setup: Setup) -> list[Finding]:
    """From half gradients to half parameters at O2, fused AdamW: the shell against the functional update."""
    ours, theirs = "amp, NpuFusedAdamW", "functional, unscaled first"
    runs = [Run(ours, _shell_tail(setup)), Run(theirs, _functional_tail(setup))]
    return compare(runs, [Bar(ours, (theirs,), 1.1)], setup)


class _Small:
    """A small model with its optimizer; ``prepare`` runs it forward, which is not timed."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        self.optimizer: Any = optimizer(self.model.parameters(), lr=1e-3)  # pyright: ignore[reportCallIssue]
        self.inputs = torch.randn(4, 8)
        self.loss = torch.zeros(())

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.model(self.inputs).float().square().mean()


def _grad_scaler(name: str) -> Run:
    small, scaler = _Small(torch.optim.AdamW), torch.amp.GradScaler("cpu")

    def forward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            small.forward()

    def step() -> None:
        scaler.scale(small.loss).backward()
        scaler.step(small.optimizer)
        scaler.update()

    return Run(name, step, prepare=forward)


def _scale_loss(name: str, level: str, optimizer: type[torch.optim.Optimizer]) -> Run:
    small = _Small(optimizer)
    options: dict[str, Any] = {"cast_model_type": torch.bfloat16, "loss_scale": "dynamic", "verbosity": 0}
    small.model, small.optimizer = amp.initialize(small.model, small.optimizer, opt_level=level, **options)

    def step() -> None:
        with amp.scale_loss(small.loss, small.optimizer) as scaled_loss:
            scaled_loss.backward()
        small.optimizer.step()

    return Run(name, step, prepare=small.forward)


def _shell_tail(setup: Setup) -> Callable[[], None]:
    model: Any = nn.ParameterList(weights(setup))
    model, optimizer = amp.initialize(model, NpuFusedAdamW(model.parameters(), **ADAMW), opt_level="O2", verbosity=0)
    halves = [gradient.half() for gradient in gradients(setup)]
    loss = torch.zeros(())

    def step() -> None:
        with amp.scale_loss(loss, optimizer):
            for parameter, half in zip(model.parameters(), halves, strict=True):
                parameter.grad = half
        optimizer.step()

    return step


def _functional_tail(setup: Setup) -> Callable[[], None]:
    ours = OurState(setup, optim.adamw(**ADAMW), torch.float16)
    return functional_tail(ours, DynamicLossScale.create(), defer_unscale=False)
