"""``apex.optimizers``: fused optimizers with the legacy names, usable alone or with amp at every level."""

from npuamp_fn.apex.optimizers.bert import Lamb, NpuFusedBertAdam, NpuFusedLamb
from npuamp_fn.apex.optimizers.classes import (
    NpuFusedAdadelta,
    NpuFusedAdam,
    NpuFusedAdamP,
    NpuFusedAdamW,
    NpuFusedRMSprop,
    NpuFusedRMSpropTF,
    NpuFusedSGD,
)
from npuamp_fn.apex.optimizers.nvidia import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]
