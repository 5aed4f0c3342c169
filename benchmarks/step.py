"""Whole training steps of a small GPT in bfloat16: four layers, explicit attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import Bar, Finding, Run, Setup, compare
from npuamp_fn import NoOpLossScale, flatten, functionalize, fused_update, grad, optim, with_loss_scaling

__all__ = ["Shape", "problem", "step_compiled", "step_eager"]

HALF = torch.bfloat16
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Shape:
    """The size of the model and of its batch."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 128
    context: int = 128
    batch: int = 16


class Block(nn.Module):
    """Attention written out, and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [batch, time, width] to the same."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        attended = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token numbers of shape [batch, time] to logits of shape [batch, time, vocabulary]."""

    mask: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary)
        self.register_buffer("mask", torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        """Predict each next token."""
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def step_eager(setup: Setup, shape: Shape = Shape()) -> list[Finding]:
    """Whole training step, functional O2 eager, against autocast and float32, both with AdamW(fused)."""
    model, batch = problem(shape)
    runs = [
        Run("functional O2", _functional(model, batch)),
        Run("autocast, AdamW(fused)", _module(model, batch, autocast=True)),
        Run("float32, AdamW(fused)", _module(model, batch, autocast=False)),
    ]
    bars = [
        Bar("functional O2", ("autocast, AdamW(fused)",), 0.95),
        Bar("functional O2", ("float32, AdamW(fused)",), 0.45),
    ]
    return compare(runs, bars, setup)


def step_compiled(setup: Setup, shape: Shape = Shape(), backend: str = "inductor") -> list[Finding]:
    """The same, functional step compiled, against the eager autocast step, its compiled model, and float32."""

    def compile(fun: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fun, backend=backend)

    model, batch = problem(shape)
    runs = [
        Run("whole step compiled", _functional(model, batch, compile_step=compile)),
        Run("gradient compiled, update fused", _functional(model, batch, compile_grad=compile)),
        Run("autocast, AdamW(fused)", _module(model, batch, autocast=True)),
        Run("model compiled, autocast, AdamW(fused)", _module(model, batch, autocast=True, compile=compile)),
        Run("float32, AdamW(fused)", _module(model, batch, autocast=False)),
    ]
    limits = ((runs[2].name, 0.85), (runs[3].name, 0.95), (runs[4].name, 0.40))
    bars = [Bar(ours.name, (theirs,), limit) for ours in runs[:2] for theirs, limit in limits]
    return compare(runs, bars, setup)


def problem(shape: Shape) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return the model and a batch of inputs and targets."""
    torch.manual_seed(0)
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1))
    return GPT(shape), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _same(fun: Callable[..., Any]) -> Callable[..., Any]:
    return fun


def _functional(
    model: GPT,
    batch: tuple[Tensor, Tensor],
    compile_step: Callable[..., Any] = _same,
    compile_grad: Callable[..., Any] = _same,
) -> Callable[[], Tensor]:
    apply, params, buffers = functionalize(copy.deepcopy(model))
    master = flatten(params)
    params = master.cast(HALF)
    opt = fused_update(optim.with_master_weights(optim.adamw(**ADAMW)), donate=True)
    opt_state, loss_scale = opt.init(params, master=master), NoOpLossScale.create()

    def loss_fn(params: Any, ids: Tensor, targets: Tensor) -> Tensor:
        logits = apply(params.unflatten(), buffers, ids)[0].float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    grad_fn = compile_grad(with_loss_scaling(grad(loss_fn), defer_unscale=True))

    def step(loss_scale: Any, params: Any, opt_state: Any, ids: Tensor, targets: Tensor) -> Any:
        out = grad_fn(loss_scale, params, ids, targets)
        return out.value, out.loss_scale, *opt.update(out, opt_state, params)

    run = compile_step(step)

    def call() -> Tensor:
        nonlocal loss_scale, params, opt_state
        loss, loss_scale, params, opt_state = run(loss_scale, params, opt_state, *batch)
        return loss

    return call


def _module(
    model: GPT, batch: tuple[Tensor, Tensor], autocast: bool, compile: Callable[..., Any] = _same
) -> Callable[[], Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    forward, (ids, targets) = compile(model), batch

    def call() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF, enabled=autocast):
            logits = forward(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return call
