"""What the runs of train_gpt.py came to, as a table, a picture and a JSON file."""

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

COLOURS = ("#444444", "#0072b2", "#56b4e9", "#d55e00")  # Okabe and Ito's, which every eye can tell apart
STYLES = ("-", "-", (0, (1.5, 2.5)), "-")  # the third run lies on the second


@dataclass
class Record:
    """The course of one run."""

    name: str
    persistent_bytes: int = 0  # parameters, masters and moments: what lives from one step to the next
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)  # after this many steps: nats per character

    def add(self, loss: float, seconds: float, scale: float, applied: bool) -> None:
        """Append one step."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.scales.append(scale)
        self.applied.append(applied)

    def summary(self, baseline: "Record", parameters: int) -> dict[str, float]:
        """Return the figures of the table; held-out losses are compared after equally many steps."""
        last = max(self.held_out)
        return {
            "steps": last,
            "held_out_loss": self.held_out[last],
            "loss_against_float32": self.held_out[last] / baseline.held_out[last] - 1,
            "ms_per_step": 1000 * median(self.seconds),
            "speed": median(baseline.seconds[:last]) / median(self.seconds),
            "bytes_per_parameter": self.persistent_bytes / parameters,
            "skipped_steps": self.applied.count(False),
            "loss_scale": self.scales[-1],
        }


def machine() -> str:
    """Name the processor, the threads in use and the torch version."""
    capabilities = torch.cpu.get_capabilities()
    units = [name for name in ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16") if capabilities.get(name)]
    name = capabilities.get("cpu_name") or platform.machine()
    return f"{name} ({', '.join(units) or 'no 16-bit arithmetic'}), {torch.get_num_threads()} threads, " + (
        f"torch {torch.__version__}"
    )


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Measure whether this machine multiplies matrices of a dtype itself; emulation is up to 40 times slower."""

    def seconds(dtype: torch.dtype) -> float:
        a, times = torch.ones(512, 512, dtype=dtype), []
        for _ in range(5):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(dtype) < 5 * seconds(torch.float32)


def write(records: list[Record], parameters: int, folder: Path) -> None:
    """Print the table; write demo.json and demo.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    summaries = {record.name: record.summary(records[0], parameters) for record in records}
    content = {"machine": machine(), "summary": summaries, "runs": [asdict(record) for record in records]}
    (folder / "demo.json").write_text(json.dumps(content, indent=1))
    figure(records).savefig(folder / "demo.png", dpi=150)
    Console(width=110).print(table(summaries, parameters))
    for record in records:
        if len(record.losses) < len(records[0].losses):
            print(f"{record.name}: this machine only emulates it, so it took {len(record.losses)} steps")
    print(f"{machine()}\n{folder / 'demo.json'}, {folder / 'demo.png'}")


def table(summaries: dict[str, dict[str, float]], parameters: int) -> Table:
    """Return one row of figures per run."""
    out = Table(title=f"{parameters:,} parameters, the same weights and batches in every run")
    out.add_column("run", no_wrap=True)
    titles = (
        "steps|held-out loss|against\nfloat32|ms/step\n(median)|speed|bytes per\nparameter|skipped\nsteps|loss\nscale"
    )
    for title in titles.split("|"):
        out.add_column(title, justify="right")
    for name, row in summaries.items():
        power = torch.tensor(row["loss_scale"]).log2().item()
        out.add_row(
            name,
            f"{row['steps']:.0f}",
            f"{row['held_out_loss']:.4f}",
            f"{row['loss_against_float32']:+.2%}",
            f"{row['ms_per_step']:.0f}",
            f"{row['speed']:.2f}x",
            f"{row['bytes_per_parameter']:.1f}",
            f"{row['skipped_steps']:.0f}",
            f"2^{power:g}" if power else "1",
        )
    return out


def figure(records: list[Record]) -> Figure:
    """Return the picture: loss over steps, loss over time, loss scale over steps."""
    fig = Figure(figsize=(13, 4.3), layout="constrained")
    over_steps, over_time, scale = fig.subplots(1, 3)
    for record, colour, style in zip(records, COLOURS, STYLES, strict=False):
        look = {"color": colour, "linestyle": style, "linewidth": 2.6 if style != "-" else 1.8, "label": record.name}
        steps = list(record.held_out)
        seconds = [step * median(record.seconds) for step in steps]  # the first steps compile: no part of this
        over_steps.plot(range(1, len(record.losses) + 1), record.losses, color=colour, alpha=0.15, linewidth=0.8)
        over_steps.plot(steps, list(record.held_out.values()), **look)
        over_time.plot(seconds, list(record.held_out.values()), **look)
        if len(set(record.scales)) > 1:
            skipped = [step for step, applied in enumerate(record.applied) if not applied]
            scale.step(range(len(record.scales)), record.scales, where="post", **look)
            scale.plot(skipped, [record.scales[step] for step in skipped], "x", color="black", label="skipped step")
    _label(over_steps, "Held-out loss (faint: training batches)", "step", "nats per character")
    _label(over_time, "The same against time", "seconds, at the median time per step", "nats per character")
    _label(scale, "Loss scale", "step", "")
    scale.set_yscale("log", base=2)
    held_out = [loss for record in records for loss in record.held_out.values()]
    over_steps.set_ylim(min(held_out) - 0.4, max(held_out) + 0.4)  # the first training losses are far above
    over_steps.legend(frameon=False)
    if scale.has_data():
        scale.legend(frameon=False)
    return fig


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
