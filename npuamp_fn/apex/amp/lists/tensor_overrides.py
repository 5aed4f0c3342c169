"""Operations of ``torch.Tensor`` and how O1 runs them."""

import torch

from npuamp_fn.apex.amp.lists.editable import OperationList

__all__ = ["MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS"]

MODULE = torch.Tensor
FP16_FUNCS = OperationList(MODULE, "low")
FP32_FUNCS = OperationList(MODULE, "full")
CASTS = OperationList(MODULE, "promote")
