"""The path under which the vendor has ``NpuFusedAdam``; scripts import from it."""

from npuamp_fn.apex.optimizers.classes import NpuFusedAdam

__all__ = ["NpuFusedAdam"]
