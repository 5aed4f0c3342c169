"""Findings as a table in the terminal, as runs/bench.json, and as the figures of docs/benchmarks.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import QUIET, Finding, Setup

__all__ = ["entry", "load", "machine", "save", "show", "write_page"]

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def machine(bandwidth: dict[str, float]) -> dict[str, Any]:
    """Describe where the figures come from."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bandwidth": bandwidth,
    }


def entry(name: str, benchmark: Callable[..., Any], findings: list[Finding], setup: Setup) -> dict[str, Any]:
    """Return one row of the results as JSON has it."""
    return {
        "row": name,
        "work": _work(benchmark),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "setup": asdict(setup),
        "findings": [{**asdict(finding), "met": finding.met} for finding in findings],
    }


def load(path: Path) -> dict[str, Any]:
    """Return the results written before, or none."""
    return json.loads(path.read_text()) if path.exists() else {"machine": {}, "rows": {}}


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the results."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    for row in rows:
        table = Table("ours", "theirs", "ms", "measured", "min-max", "bar", "", title=f"{row['row']}: {row['work']}")
        for finding in row["findings"]:
            *cells, verdict = _cells(finding)
            colour = {"met": "green", "not met": "red"}.get(verdict.split(",")[0], "yellow")
            table.add_row(*cells, f"[{colour}]{verdict}[/{colour}]")
        console.print(table)


def write_page(path: Path, results: dict[str, Any]) -> None:
    """Replace the figures of the page by these results.

    Raises:
        ValueError: the page has no place for figures.
    """
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path}: expected the lines {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{_figures(results)}\n{END}{after}", encoding="utf-8")


def _figures(results: dict[str, Any]) -> str:
    where = results["machine"]
    speed = where["bandwidth"]
    lines = [
        f"{where['processor']}, {where['cores']} cores, torch {where['torch']}, Python {where['python']}.",
        f"Memory, measured in the same run: copy {speed['copy']:.0f} GB/s (bytes read and written), read "
        f"{speed['read']:.0f} GB/s.",
    ]
    findings = [finding for row in results["rows"].values() for finding in row["findings"]]
    if any((finding["others"] or 0.0) >= QUIET for finding in findings):
        lines += [
            "",
            "The machine was shared and not quiet (last column): these figures show that the rows work and about where",
            "they stand; they do not decide about the bars.",
        ]
    for name, row in results["rows"].items():
        sizes = row["setup"]
        lines += [
            "",
            f"### {name}",
            "",
            row["work"],
            f"({row['date']}; {sizes['elements']:,} elements, {sizes['rounds']} rounds, threads: {sizes['threads']}.)",
            "",
            "| ours | theirs | ms | measured | min-max | bar | |",
            "|---|---|---|---|---|---|---|",
            *(f"| {' | '.join(_cells(finding))} |" for finding in row["findings"]),
        ]
    return "\n".join(lines) + "\n"


def _cells(finding: dict[str, Any]) -> list[str]:
    unit, value, limit = finding["unit"], finding["value"], finding["limit"]
    is_ratio = unit in ("time", "rate")
    number = (lambda x: f"{x:.3f}") if is_ratio else (lambda x: f"{x:.2g} {unit}" if x < 0.01 else f"{x:.2f} {unit}")
    times = "" if finding["milliseconds"] is None else " / ".join(f"{ms:.3g}" for ms in finding["milliseconds"])
    spread = "" if finding["low"] is None else f"{finding['low']:.3g}-{finding['high']:.3g}"
    bar = "" if limit is None else f"{'>=' if unit == 'rate' else '<='} {limit:g}"
    verdict = {True: "met", False: "not met", None: ""}[finding["met"]]
    if value is None:
        return [finding["ours"], finding["theirs"], "", "", "", bar, f"not measured: {finding['note']}"]
    if (finding["others"] or 0.0) >= QUIET:
        verdict = ", ".join(filter(None, [verdict, f"others {finding['others']:.1f} cores"]))
    measured = number(value) + (" of the bytes/s" if unit == "rate" else "")
    return [finding["ours"], finding["theirs"], times, measured, spread, bar, verdict]


def _work(benchmark: Callable[..., Any]) -> str:
    return (benchmark.__doc__ or "").strip().splitlines()[0].replace("``", "`")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
