"""``apex.amp``: the legacy interface over ``npuamp_fn``."""

from npuamp_fn import float_function, half_function, promote_function
from npuamp_fn.apex.amp import lists
from npuamp_fn.apex.amp._amp_state import _amp_state, master_params
from npuamp_fn.apex.amp.amp import disable_casts, init
from npuamp_fn.apex.amp.frontend import initialize
from npuamp_fn.apex.amp.handle import last_step_skipped, scale_loss
from npuamp_fn.apex.amp.registry import (
    register_float_function,
    register_half_function,
    register_promote_function,
)
from npuamp_fn.apex.amp.scaler_state import load_state_dict, state_dict

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "last_step_skipped",
    "load_state_dict",
    "lists",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
