"""What stays in memory between steps at O2."""

from __future__ import annotations

import torch

from benchmarks.timing import Finding, Setup
from benchmarks.update import ADAMW
from benchmarks.work import OurState, count
from npuamp_fn import optim

__all__ = ["memory"]


def memory(setup: Setup) -> list[Finding]:
    """Persistent memory at O2 with AdamW: masters, moments, half parameters, half gradients."""
    findings = []
    for half in (torch.float16, torch.bfloat16):
        ours = OurState(setup, optim.adamw(**ADAMW), half)
        ours.step()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in ours.persistent()}
        size = sum(storage.nbytes() for storage in storages.values()) / count(setup)
        name = f"ours, {str(half).removeprefix('torch.')}"
        findings.append(Finding(name, "", "bytes per parameter", size, 16.5))
    return findings
