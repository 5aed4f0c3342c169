"""Operations of ``torch`` and how O1 runs them."""

import torch

from npuamp_fn.apex.amp.lists.editable import OperationList

__all__ = ["MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS"]

MODULE = torch
FP16_FUNCS = OperationList(MODULE, "low")
FP32_FUNCS = OperationList(MODULE, "full")
CASTS = OperationList(MODULE, "promote")
SEQUENCE_CASTS = ["cat", "stack"]
