"""Train a small character-level GPT in float32, bfloat16 and float16, and compare.

The text is the Python standard library's own source. All runs start from the same weights and see the same
batches; they advance together, one step each in turn, so that whatever else the machine does slows all of them.

    python examples/train_gpt.py    # about two minutes on two cores; writes runs/demo.json and runs/demo.png
"""

import copy
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import demo_report
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from npuamp_fn import (
    DynamicLossScale,
    NoOpLossScale,
    flatten,
    full_precision,
    functionalize,
    fused_update,
    grad,
    optim,
    state_dict,
    with_loss_scaling,
)
from npuamp_fn.apex import amp, optimizers


@dataclass(frozen=True)
class Config:
    """The size of the model and of its training."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 8
    steps: int = 200
    short: int = 12  # steps in a dtype that this machine can only emulate
    warmup: int = 20
    lr: float = 2e-3
    eval_every: int = 20
    eval_batches: int = 6
    init_scale: float = 2.0**24  # far too high: float16's first steps overflow
    growth_interval: int = 50


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Map [batch, time, width] to the same."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = biased_softmax((q * q.shape[-1] ** -0.5) @ k.mT, bias).type_as(v)
        x = x + self.project((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


@full_precision  # float32, whatever the scores come in
def biased_softmax(scores: Tensor, bias: Tensor) -> Tensor:
    """Turn attention scores into weights."""
    return (scores + bias).softmax(-1)


class GPT(nn.Module):
    """ASCII codes of shape [batch, time] to logits of shape [batch, time, 128]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.slopes = 2.0 ** -torch.arange(config.heads)[:, None, None]
        self.embedding = nn.Embedding(128, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, 128)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict each next character; a head's attention fades with distance (ALiBi, Press et al., 2022)."""
        position = torch.arange(ids.shape[1])
        distance = position[:, None] - position
        bias = torch.where(distance >= 0, -self.slopes * distance, -math.inf)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


class Run(NamedTuple):
    """One way to train: its step, the model as it stands, and the tensors that live from step to step."""

    name: str
    dtype: torch.dtype
    step: Callable[[Tensor, Tensor], tuple[Any, Any, Any]]  # ids, targets -> loss, loss scale, whether applied
    logits: Callable[[Tensor], Tensor]
    persistent: Callable[[], list[Tensor]]


def functional(name: str, model: nn.Module, dtype: torch.dtype, loss_scale: Any, rate: Callable[[Tensor], Any]) -> Run:
    """Train by pure functions: parameters in `dtype` in one flat buffer, float32 masters beside the moments."""
    apply, params, buffers = functionalize(model)
    master = flatten(params)
    params = master.cast(dtype)
    opt = fused_update(optim.with_master_weights(optim.adamw(rate, weight_decay=0.1)), donate=True)
    opt_state = opt.init(params, master=master)

    def logits(params: Any, ids: Tensor) -> Tensor:
        return apply(params.unflatten(), buffers, ids)[0].float()

    def loss_fn(params: Any, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits(params, ids).flatten(0, 1), targets.flatten())

    grad_fn = with_loss_scaling(grad(loss_fn), defer_unscale=True)

    def step(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal params, opt_state, loss_scale
        scale, out = loss_scale.value, grad_fn(loss_scale, params, ids, targets)
        params, opt_state = opt.update(out, opt_state, params)  # changes nothing if a gradient is not finite
        loss_scale = out.loss_scale
        return out.value, scale, out.finite

    return Run(name, dtype, step, lambda ids: logits(params, ids), lambda: [*state_dict((params, opt_state)).values()])


def legacy(name: str, model: nn.Module, dtype: torch.dtype, rate: Callable[[Tensor], Any]) -> Run:
    """Train as scripts written for apex do."""
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", cast_model_type=dtype, combine_grad=True, verbosity=0
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: float(rate(torch.tensor(count))))

    def step(ids: Tensor, targets: Tensor) -> tuple[Tensor, float, bool]:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach(), amp.state_dict()["loss_scaler0"]["loss_scale"], not amp.last_step_skipped(optimizer)

    def persistent() -> list[Tensor]:
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return [*model.parameters(), *amp.master_params(optimizer), *moments]

    return Run(name, dtype, step, model, persistent)


def make_runs(config: Config) -> list[Run]:
    """Return the runs, all from the same weights."""
    torch.manual_seed(0)
    model = GPT(config)
    rate = optim.schedules.warmup_cosine(config.lr, config.warmup, config.steps, end=config.lr / 10)
    unscaled, half = NoOpLossScale.create(), torch.bfloat16
    dynamic = DynamicLossScale.create(config.init_scale, growth_interval=config.growth_interval)
    return [
        functional("O0 float32", model, torch.float32, unscaled, rate),
        functional("O2 bfloat16", model, half, unscaled, rate),
        legacy("O2 bfloat16, apex.amp", copy.deepcopy(model), half, rate),  # initialize changes the model
        functional("O2 float16", model, torch.float16, dynamic, rate),
    ]


def source_text() -> tuple[Tensor, Tensor]:
    """Return the standard library's top-level modules as ASCII codes, every tenth module held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8").encode("ascii", "ignore") for file in files]
    parts = b"".join(text for i, text in enumerate(texts) if i % 10), b"".join(texts[::10])
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def batches(text: Tensor, count: int, config: Config, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows of the text and the characters that follow, each of shape [batch, context]."""
    windows = text.unfold(0, config.context + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        rows = windows[torch.randint(len(windows), (config.batch,), generator=generator)].long()
        yield rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(run: Run, held_out: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss on held-out text, in nats per character."""
    losses = [F.cross_entropy(run.logits(ids).flatten(0, 1), targets.flatten()) for ids, targets in held_out]
    return float(torch.stack(losses).mean())


def train(runs: list[Run], config: Config) -> list[demo_report.Record]:
    """Train all runs side by side on the same batches and return what they did."""
    text, held_out_text = source_text()
    held_out = list(batches(held_out_text, config.eval_batches, config, seed=1))
    records = [demo_report.Record(run.name) for run in runs]
    steps = [config.steps if demo_report.has_arithmetic(run.dtype) else config.short for run in runs]
    bar = tqdm(batches(text, config.steps, config, seed=0), total=config.steps, unit="step", desc="compiling")
    for count, (ids, targets) in enumerate(bar, start=1):
        for run, record, last in zip(runs, records, steps, strict=True):
            if count <= last:
                start = time.perf_counter()
                loss, scale, applied = run.step(ids, targets)
                record.add(float(loss), time.perf_counter() - start, float(scale), bool(applied))
            if count <= last and (count % config.eval_every == 0 or count in steps):
                record.held_out[count] = evaluate(run, held_out)
        bar.set_description("training", refresh=False)
        bar.set_postfix_str("loss " + ", ".join(f"{record.losses[-1]:.3f}" for record in records))
    for run, record in zip(runs, records, strict=True):
        record.persistent_bytes = sum(tensor.nbytes for tensor in run.persistent())
    return records


def main(config: Config, folder: Path) -> list[demo_report.Record]:
    """Make the runs, train them, and write the report."""
    records = train(make_runs(config), config)
    demo_report.write(records, sum(p.numel() for p in GPT(config).parameters()), folder)
    return records


if __name__ == "__main__":
    main(Config(), Path("runs"))
