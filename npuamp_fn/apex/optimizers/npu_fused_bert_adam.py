"""The path under which the vendor has ``NpuFusedBertAdam`` and its schedules; scripts import from it."""

from __future__ import annotations

from functools import partial

import torch

from npuamp_fn.apex.optimizers.bert import NpuFusedBertAdam
from npuamp_fn.optim.bert_adam import BERT_SCHEDULES, schedule_factor

__all__ = ["SCHEDULES", "NpuFusedBertAdam"]


def _factor(schedule: str, x: float, warmup: float = 0.002) -> float:
    return float(schedule_factor(schedule, torch.tensor(x, dtype=torch.float64), warmup))


SCHEDULES = {name: partial(_factor, name) for name in BERT_SCHEDULES}
"""What the learning rate is multiplied by: ``SCHEDULES["warmup_linear"](step / t_total, warmup)``."""
