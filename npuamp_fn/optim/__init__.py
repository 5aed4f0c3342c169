"""Update rules, and what combines them."""

from npuamp_fn.optim.adam import adam, adamw
from npuamp_fn.optim.base import Optimizer, OptimizerState
from npuamp_fn.optim.clip import clip_by_global_norm
from npuamp_fn.optim.sgd import sgd
from npuamp_fn.optim.wrappers import chain, with_master_weights

__all__ = [
    "Optimizer",
    "OptimizerState",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "sgd",
    "with_master_weights",
]
