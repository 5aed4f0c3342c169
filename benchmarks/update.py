"""AdamW updates alone: large tensors, many small ones, half parameters with masters, functional libraries."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import Any

import torch

from benchmarks.timing import Bar, Finding, Run, Setup, absent, compare
from benchmarks.work import OurState, count, flat_adamw, gradients, parameters, torch_step, weights
from npuamp_fn import ScaledGrads, optim

__all__ = ["adamw_fp32", "functional_libraries", "o2_rate", "o2_separate", "small_tensors"]

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def adamw_fp32(setup: Setup) -> list[Finding]:
    """AdamW update, float32, flat, against torch.optim.AdamW on the same tensors."""
    runs = [
        Run("ours", OurState(setup, optim.adamw(**ADAMW)).step),
        Run("AdamW(fused)", torch_step(setup, torch.optim.AdamW, fused=True, **ADAMW)),
        Run("AdamW(single)", torch_step(setup, torch.optim.AdamW, foreach=False, **ADAMW)),
        Run("AdamW(foreach)", torch_step(setup, torch.optim.AdamW, foreach=True, **ADAMW)),
    ]
    bars = [
        Bar("ours", ("AdamW(fused)",), 1.00),
        Bar("ours", ("AdamW(single)",), 0.32),
        Bar("ours", ("AdamW(foreach)",), 0.22),
    ]
    return compare(runs, bars, setup)


def small_tensors(setup: Setup) -> list[Finding]:
    """400 tensors of 500 elements, AdamW, everything in Python included."""
    small = replace(setup, elements=min(200_000, setup.elements), tensors=400)
    runs = [
        Run("ours", OurState(small, optim.adamw(**ADAMW)).step),
        Run("ours, compiled", OurState(small, optim.adamw(**ADAMW), kernel="compiled").step),
        Run("AdamW(fused)", torch_step(small, torch.optim.AdamW, fused=True, **ADAMW)),
        Run("AdamW(foreach)", torch_step(small, torch.optim.AdamW, foreach=True, **ADAMW)),
    ]
    bars = [
        Bar(ours, (theirs,), limit)
        for ours in ("ours", "ours, compiled")
        for theirs, limit in (("AdamW(fused)", 0.10), ("AdamW(foreach)", 0.04))
    ]
    return compare(runs, bars, small)


def o2_rate(setup: Setup) -> list[Finding]:
    """O2 (half gradients in, float32 masters and moments, half parameters out: 28 bytes per parameter), bytes/s."""
    runs = [
        *_half_runs(setup),
        Run("flat _fused_adamw_", flat_adamw(setup), 28 * count(setup)),
    ]
    return compare(runs, [Bar(run.name, ("flat _fused_adamw_",), 0.85, "rate") for run in runs[:-1]], setup)


def o2_separate(setup: Setup) -> list[Finding]:
    """The same against separate passes: unscale to master gradients, AdamW, copy back."""
    runs = [
        *_half_runs(setup)[1:],
        Run("separate passes, AdamW(fused)", _separate_passes(setup, fused=True)),
        Run("separate passes, AdamW(foreach)", _separate_passes(setup, foreach=True)),
    ]
    limits = (("separate passes, AdamW(fused)", 0.45), ("separate passes, AdamW(foreach)", 0.16))
    return compare(runs, [Bar(runs[0].name, (theirs,), limit) for theirs, limit in limits], setup)


def functional_libraries(setup: Setup) -> list[Finding]:
    """AdamW donated, against torchopt in place and optax under jit with donation."""
    runs = [Run("ours", OurState(setup, optim.adamw(**ADAMW)).step)]
    bars, missing = [], []
    for make, modules, limit in ((_torchopt, ("torchopt",), 0.20), (_optax, ("jax", "optax"), 0.72)):
        lacking = [name for name in modules if importlib.util.find_spec(name) is None]
        if lacking:
            missing.append(absent("ours", modules[-1], limit, f"{', '.join(lacking)} not installed"))
            continue
        run = make(setup)
        runs.append(run)
        bars.append(Bar("ours", (run.name,), limit))
    return [*compare(runs, bars, setup), *missing]


def _half_runs(setup: Setup) -> list[Run]:
    runs = []
    for half in (torch.float16, torch.bfloat16):
        ours = OurState(setup, optim.adamw(**ADAMW), half)
        out = ScaledGrads(ours.grads, torch.ones(()), torch.zeros(()), (), torch.tensor(True), ())
        name = f"ours, {str(half).removeprefix('torch.')}"
        runs.append(Run(name, functools.partial(ours.step, out), 28 * count(setup)))
    return runs


def _separate_passes(setup: Setup, **options: Any) -> Any:
    masters = parameters(setup)
    halves = [master.detach().to(torch.bfloat16) for master in masters]
    half_grads = [gradient.to(torch.bfloat16) for gradient in gradients(setup)]
    master_grads = [master.grad for master in masters]
    foreach: Any = torch.ops.aten
    optimizer, inv_scale = torch.optim.AdamW(masters, **ADAMW, **options), torch.ones(())

    @torch.no_grad()
    def step() -> None:
        foreach._foreach_copy_(master_grads, half_grads)
        foreach._foreach_mul_.Tensor(master_grads, inv_scale)
        optimizer.step()
        foreach._foreach_copy_(halves, masters)

    return step


def _torchopt(setup: Setup) -> Run:
    import torchopt

    params = {str(i): tensor for i, tensor in enumerate(weights(setup))}
    kept = {str(i): tensor for i, tensor in enumerate(gradients(setup))}
    grads = {name: gradient.clone() for name, gradient in kept.items()}
    optimizer = torchopt.adamw(**ADAMW)
    state = optimizer.init(params)

    def refill() -> None:  # the update writes into the gradients
        for name, gradient in grads.items():
            gradient.copy_(kept[name])

    def step() -> None:
        nonlocal state
        updates, state = optimizer.update(grads, state, params=params, inplace=True)
        torchopt.apply_updates(params, updates, inplace=True)

    return Run("torchopt, in place", step, prepare=refill)


def _optax(setup: Setup) -> Run:
    import jax
    import optax

    params = {str(i): jax.numpy.array(tensor.numpy()) for i, tensor in enumerate(weights(setup))}
    grads = {str(i): jax.numpy.array(tensor.numpy()) for i, tensor in enumerate(gradients(setup))}
    optimizer = optax.adamw(ADAMW["lr"], weight_decay=ADAMW["weight_decay"])
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step() -> None:
        nonlocal params, state
        params, state = update(grads, state, params)
        jax.block_until_ready((params, state))

    return Run("optax, jit, donated", step)
