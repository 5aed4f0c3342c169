"""Update rules, and what combines them."""

from npuamp_fn.optim import schedules
from npuamp_fn.optim.adadelta import adadelta
from npuamp_fn.optim.adagrad import adagrad
from npuamp_fn.optim.adam import adam, adamw
from npuamp_fn.optim.adamp import adamp
from npuamp_fn.optim.base import Hyper, Optimizer, OptimizerState
from npuamp_fn.optim.bert_adam import bert_adam
from npuamp_fn.optim.clip import clip_by_global_norm
from npuamp_fn.optim.lamb import lamb
from npuamp_fn.optim.lars import lars
from npuamp_fn.optim.novograd import novograd
from npuamp_fn.optim.rmsprop import rmsprop, rmsprop_tf
from npuamp_fn.optim.sgd import sgd
from npuamp_fn.optim.wrappers import chain, with_master_weights

__all__ = [
    "Hyper",
    "Optimizer",
    "OptimizerState",
    "adadelta",
    "adagrad",
    "adam",
    "adamp",
    "adamw",
    "bert_adam",
    "chain",
    "clip_by_global_norm",
    "lamb",
    "lars",
    "novograd",
    "rmsprop",
    "rmsprop_tf",
    "schedules",
    "sgd",
    "with_master_weights",
]
