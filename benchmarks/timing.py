"""Timing by alternation: every round calls each run in turn, so that what slows the machine slows all of them."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

__all__ = ["Bar", "Finding", "Load", "Round", "Run", "Setup", "absent", "alternate", "bandwidth", "compare", "evict"]

QUIET = 0.06
"""A round is quiet if other processes used less than this share of one core during it."""


@dataclass(frozen=True)
class Setup:
    """How large and how long.

    >>> Setup(elements=1000, tensors=4).shapes
    [(31, 8), (31, 8), (31, 8), (31, 8)]
    """

    elements: int = 25_000_000
    tensors: int = 160
    rounds: int = 7
    threads: int = 2
    patience: int = 3  # how many times as many rounds are made at most, until enough were quiet
    seconds: float = 0.03  # a run's share of a round takes at least this long; short calls are repeated

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of the tensors: matrices of at most 384 rows, of about ``elements`` elements together."""
        each = self.elements // self.tensors
        rows = min(384, max(1, each // 8))
        return [(rows, max(1, each // rows))] * self.tensors


class Run(NamedTuple):
    """Something to time."""

    name: str
    call: Callable[[], Any]
    bytes: float = 0.0  # that one call has to read and write at least
    prepare: Callable[[], Any] | None = None  # before every call, not timed


class Bar(NamedTuple):
    """What is to be shown of one run, in relation to the fastest of others."""

    ours: str
    theirs: tuple[str, ...]
    limit: float | None  # None: shown without a bar
    of: Literal["time", "rate"] = "time"  # time: at most; bytes per second: at least


@dataclass(frozen=True)
class Finding:
    """One measured figure and its bar."""

    ours: str
    theirs: str
    unit: str  # "time" and "rate" are ratios ours / theirs; others are units of the value itself
    value: float | None  # None: could not be measured, `note` says why
    limit: float | None
    low: float | None = None
    high: float | None = None
    milliseconds: tuple[float, float] | None = None  # of ours and theirs
    others: float | None = None  # share of a core that other processes used meanwhile
    note: str = ""

    @property
    def at_least(self) -> bool:
        """Whether the bar is a lower one."""
        return self.unit == "rate"

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; ``None`` without bar or value."""
        if self.value is None or self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Round(NamedTuple):
    """Seconds of one call of each run, and the share of a core that other processes used meanwhile."""

    seconds: dict[str, float]
    others: float | None


def alternate(runs: Sequence[Run], setup: Setup) -> list[Round]:
    """Call all runs in turn, round after round, and return the quietest rounds.

    Up to ``setup.patience`` times as many rounds are made as asked for, until enough of them were quiet.

    Args:
        runs: What to time; each is called a few times first.
        setup: How many rounds are wanted, and how long each run's share of a round is at least.
    """
    counts = {run.name: _warm_up(run, setup.seconds) for run in runs}
    gc.collect()
    rounds: list[Round] = []
    while len(rounds) < setup.patience * setup.rounds and sum(map(_is_quiet, rounds)) < setup.rounds:
        load = Load()
        seconds = {run.name: _measure(run, counts[run.name]) for run in runs}
        rounds.append(Round(seconds, load.others()))
    return sorted(rounds, key=lambda r: r.others or 0.0)[: setup.rounds]


def compare(runs: Sequence[Run], bars: Sequence[Bar], setup: Setup) -> list[Finding]:
    """Time runs in alternation and hold them to bars.

    A ratio is taken within each round; the finding is their median, with the smallest and the largest.
    """
    rounds = alternate(runs, setup)
    size = {run.name: run.bytes for run in runs}
    loads = [r.others for r in rounds if r.others is not None]
    findings = []
    for bar in bars:
        best = min(bar.theirs, key=lambda name: statistics.median(r.seconds[name] for r in rounds))
        ratios = [r.seconds[bar.ours] / r.seconds[best] for r in rounds]
        if bar.of == "rate":
            ratios = [size[bar.ours] / size[best] / ratio for ratio in ratios]
        ours, theirs = (1e3 * statistics.median(r.seconds[name] for r in rounds) for name in (bar.ours, best))
        value, low, high = statistics.median(ratios), min(ratios), max(ratios)
        others = statistics.median(loads) if loads else None
        findings.append(Finding(bar.ours, best, bar.of, value, bar.limit, low, high, (ours, theirs), others))
    return findings


def absent(ours: str, theirs: str, limit: float, why: str) -> Finding:
    """Return the finding of a comparison that cannot be made."""
    return Finding(ours, theirs, "time", None, limit, note=why)


def bandwidth(setup: Setup) -> dict[str, float]:
    """Measure how fast this machine copies and reads memory now: GB/s, counting bytes read and bytes written."""
    source = torch.ones(max(4 * setup.elements, 1))
    target = torch.empty_like(source)
    rounds = alternate([Run("copy", lambda: target.copy_(source)), Run("read", source.sum)], setup)
    fastest = {name: min(r.seconds[name] for r in rounds) for name in ("copy", "read")}
    return {"copy": 2e-9 * source.nbytes / fastest["copy"], "read": 1e-9 * source.nbytes / fastest["read"]}


def evict(setup: Setup) -> Callable[[], Any]:
    """Return a function that fills the caches with other data; for work small enough to stay in them."""
    filler = torch.ones(max(6 * setup.elements, 1))
    return filler.sum


class Load:
    """CPU time that other processes than this one and its children use; only Linux says."""

    def __init__(self) -> None:
        self._start = self._now()

    def others(self) -> float | None:
        """Return the mean share of a core since this object was made, or ``None`` if the system does not say."""
        (wall, busy, own), (wall_before, busy_before, own_before) = self._now(), self._start
        if busy is None or busy_before is None or wall == wall_before:
            return None
        return max(0.0, (busy - busy_before) - (own - own_before)) / (wall - wall_before)

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        times = os.times()
        own = time.process_time() + times.children_user + times.children_system
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return time.perf_counter(), None, own
        user, nice, system, _, _, irq, softirq, steal = fields
        return time.perf_counter(), (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own


def _is_quiet(measured: Round) -> bool:
    return measured.others is None or measured.others < QUIET


def _warm_up(run: Run, seconds: float) -> int:
    # Also tells how many calls make a measurement long enough.
    for _ in range(2):
        _measure(run, 1)
    return max(1, round(seconds / min(_measure(run, 1) for _ in range(2))))


def _measure(run: Run, count: int) -> float:
    if run.prepare is None:
        start = time.perf_counter()
        for _ in range(count):
            run.call()
        return (time.perf_counter() - start) / count
    total = 0.0
    for _ in range(count):
        run.prepare()
        start = time.perf_counter()
        run.call()
        total += time.perf_counter() - start
    return total / count
