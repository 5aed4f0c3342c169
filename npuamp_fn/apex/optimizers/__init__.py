"""``apex.optimizers``: fused optimizers with the legacy names, usable alone or with amp at every level."""

from npuamp_fn.apex.optimizers.classes import NpuFusedAdam, NpuFusedAdamW, NpuFusedSGD

__all__ = ["NpuFusedAdam", "NpuFusedAdamW", "NpuFusedSGD"]
