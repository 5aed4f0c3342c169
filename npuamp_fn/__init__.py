"""Mixed precision for PyTorch as composable pure transforms.

Policies and casts, gradients of any pytree under loss scaling, flat parameter storage, and optimizers as data:
values and pure functions that compose with ``torch.func`` and ``torch.compile``.
"""

from npuamp_fn import optim
from npuamp_fn.flat import FlatTree, Layout, flatten
from npuamp_fn.loss_scale import DynamicLossScale, NoOpLossScale, ScaledGrads, StaticLossScale
from npuamp_fn.modules import functionalize
from npuamp_fn.op_tables import APEX_OPS, OpTable
from npuamp_fn.optim import Optimizer
from npuamp_fn.policy import O0, O1, O2, O3, Policy, batch_norm_paths
from npuamp_fn.state_dict import load_state_dict, state_dict
from npuamp_fn.transforms.accumulate import accumulate
from npuamp_fn.transforms.cast import cast, cast_like, cast_policy, full_precision
from npuamp_fn.transforms.fused import explain, fused_update
from npuamp_fn.transforms.grad import GradFn, grad, grad_and_value
from npuamp_fn.transforms.op_cast import cast_ops
from npuamp_fn.transforms.op_functions import float_function, half_function, promote_function
from npuamp_fn.transforms.reduce import mean_over
from npuamp_fn.transforms.remat import remat
from npuamp_fn.transforms.scaling import SupportsLossScaling, scaled_grad, with_loss_scaling
from npuamp_fn.tree_math import all_finite, global_norm, tree_where

__version__ = "0.1.0"

__all__ = [
    # policies and casts
    "APEX_OPS",
    "O0",
    "O1",
    "O2",
    "O3",
    "OpTable",
    "Policy",
    "batch_norm_paths",
    "cast",
    "cast_like",
    "cast_ops",
    "cast_policy",
    "float_function",
    "full_precision",
    "half_function",
    "promote_function",
    # gradients and loss scaling
    "DynamicLossScale",
    "GradFn",
    "NoOpLossScale",
    "ScaledGrads",
    "StaticLossScale",
    "SupportsLossScaling",
    "accumulate",
    "all_finite",
    "global_norm",
    "grad",
    "grad_and_value",
    "mean_over",
    "remat",
    "scaled_grad",
    "tree_where",
    "with_loss_scaling",
    # parameters
    "FlatTree",
    "Layout",
    "flatten",
    "functionalize",
    "load_state_dict",
    "state_dict",
    # optimizers
    "Optimizer",
    "explain",
    "fused_update",
    "optim",
]
