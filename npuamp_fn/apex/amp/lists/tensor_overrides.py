"""Operations of ``torch.Tensor`` and how O1 runs them."""

import torch

from npuamp_fn.apex.amp import registry
from npuamp_fn.apex.amp.lists.editable import OperationList, names_of

__all__ = ["MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS"]

MODULE = torch.Tensor
FP16_FUNCS = OperationList(MODULE, names_of(MODULE, "low"), registry.register_half_function)
FP32_FUNCS = OperationList(MODULE, names_of(MODULE, "full"), registry.register_float_function)
CASTS = OperationList(MODULE, names_of(MODULE, "promote"), registry.register_promote_function)
