"""What a fresh process pays before its first step: the import, the compiler, the first kernels."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.timing import Finding, Load, Setup

__all__ = ["import_time", "kernel_startup"]

IMPORT = """
import json, time
import torch, optree
start = time.perf_counter()
import npuamp_fn
print(json.dumps({"import": time.perf_counter() - start}))
"""
KERNELS = """
import json, time
import torch
from npuamp_fn import flatten, fused_update, optim

torch.set_num_threads({threads})
rules = {{"adamw": optim.adamw(1e-3), "sgd": optim.sgd(1e-3, 0.9), "adagrad": optim.adagrad(), "lamb": optim.lamb()}}
seconds = {{}}
for name, rule in rules.items():
    params = flatten({{"w": torch.ones(1000)}})
    opt = fused_update(rule, donate=True, kernel="compiled")
    state = opt.init(params)
    start = time.perf_counter()
    opt.update(params.map(torch.ones_like), state, params)
    seconds[name] = time.perf_counter() - start
print(json.dumps(seconds))
"""


def import_time(setup: Setup) -> list[Finding]:
    """``import npuamp_fn`` beyond ``import torch, optree``, in fresh processes."""
    load = Load()
    seconds = [_run(IMPORT, {})["import"] for _ in range(setup.rounds)]
    return [_finding("import npuamp_fn", seconds, 0.25, load)]


def kernel_startup(setup: Setup) -> list[Finding]:
    """First kernel of a fresh process, and each further rule, with Inductor's cache empty and filled."""
    code = KERNELS.format(threads=setup.threads)
    load = Load()
    with tempfile.TemporaryDirectory() as folder:
        cache = {"TORCHINDUCTOR_CACHE_DIR": folder}
        cold = [_run(code, cache)]
        warm = [_run(code, cache) for _ in range(min(3, setup.rounds))]
    findings = []
    for runs, state in ((cold, "empty"), (warm, "warm")):
        for index, name in enumerate(cold[0]):
            what, limit = ("further rule", 0.2) if index else ("first kernel", 4.5)
            seconds = [run[name] for run in runs]
            findings.append(
                _finding(f"{what}, {name}: {state} cache", seconds, limit if state == "warm" else None, load)
            )
    return findings


def _finding(what: str, seconds: list[float], limit: float | None, load: Load) -> Finding:
    value, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return Finding(what, "", "seconds", value, limit, low, high, others=load.others())


def _run(code: str, environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])
