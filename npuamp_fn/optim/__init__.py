"""Update rules, and what combines them."""

from npuamp_fn.optim import schedules
from npuamp_fn.optim.adadelta import adadelta
from npuamp_fn.optim.adagrad import adagrad
from npuamp_fn.optim.adam import adam, adamw
from npuamp_fn.optim.adamp import adamp
from npuamp_fn.optim.base import Hyper, Optimizer, OptimizerState
from npuamp_fn.optim.bert_adam import bert_adam
from npuamp_fn.optim.clip import clip_by_global_norm
from npuamp_fn.optim.clip_rules import adaptive_clip, clip_by_value
from npuamp_fn.optim.compose import GradientRule
from npuamp_fn.optim.ema import ema, ema_params
from npuamp_fn.optim.interchange import from_torch_state, to_torch_state
from npuamp_fn.optim.lamb import lamb
from npuamp_fn.optim.lars import lars
from npuamp_fn.optim.novograd import novograd
from npuamp_fn.optim.partition import Partition, masked, partition
from npuamp_fn.optim.rmsprop import rmsprop, rmsprop_tf
from npuamp_fn.optim.sgd import sgd
from npuamp_fn.optim.wrappers import chain, with_master_weights

__all__ = [
    "GradientRule",
    "Hyper",
    "Optimizer",
    "OptimizerState",
    "Partition",
    "adadelta",
    "adagrad",
    "adam",
    "adaptive_clip",
    "adamp",
    "adamw",
    "bert_adam",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "ema",
    "ema_params",
    "from_torch_state",
    "lamb",
    "lars",
    "masked",
    "novograd",
    "partition",
    "rmsprop",
    "rmsprop_tf",
    "schedules",
    "sgd",
    "to_torch_state",
    "with_master_weights",
]
