"""``apex.amp``: the legacy interface over ``npuamp_fn``."""

from npuamp_fn.apex.amp._amp_state import _amp_state, master_params
from npuamp_fn.apex.amp.frontend import initialize, load_state_dict, state_dict
from npuamp_fn.apex.amp.handle import scale_loss

__all__ = ["_amp_state", "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
