"""Run benchmarks: ``python -m benchmarks --rows adamw_fp32,tail --elements 25_000_000 --rounds 7``."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import casts, memory, report, rules, shell, startup, step, tail, timing, update
from benchmarks.timing import Finding, Setup

BENCHMARKS: dict[str, Callable[[Setup], list[Finding]]] = {
    function.__name__: function
    for function in (
        update.adamw_fp32,
        tail.tail,
        update.small_tensors,
        update.o2_rate,
        update.o2_separate,
        rules.elementwise_rates,
        rules.norm_rates,
        rules.best_torch,
        rules.plain_rules,
        update.functional_libraries,
        tail.norm_and_finite,
        step.step_eager,
        step.step_compiled,
        casts.operation_casts,
        memory.memory,
        shell.shell_small,
        shell.shell_large,
        startup.kernel_startup,
        startup.import_time,
    )
}
RESULTS, PAGE = Path("runs/bench.json"), Path("docs/benchmarks.md")


def main() -> None:
    """Run the rows asked for, print them, and merge them into runs/bench.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    default = Setup()
    parser.add_argument("--rows", default=",".join(BENCHMARKS), help="comma-separated; default: all")
    parser.add_argument("--elements", type=int, default=default.elements, help="parameters of the large updates")
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--threads", type=int, default=default.threads)
    parser.add_argument("--patience", type=int, default=default.patience, help="up to so many times as many, if busy")
    parser.add_argument("--write-page", action="store_true", help=f"only put {RESULTS} into {PAGE}")
    options = parser.parse_args()
    results = report.load(RESULTS)
    if options.write_page:
        report.write_page(PAGE, results)
        return
    names = options.rows.split(",")
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown rows {unknown}; known: {', '.join(BENCHMARKS)}")

    torch.set_num_threads(options.threads)
    setup = Setup(options.elements, rounds=options.rounds, threads=options.threads, patience=options.patience)
    results["machine"] = report.machine(timing.bandwidth(setup))
    for name in names:
        results["rows"][name] = report.entry(name, BENCHMARKS[name], BENCHMARKS[name](setup), setup)
        results["rows"] = {known: results["rows"][known] for known in BENCHMARKS if known in results["rows"]}
        report.save(RESULTS, results)
        report.show([results["rows"][name]])
        gc.collect()


if __name__ == "__main__":
    main()
