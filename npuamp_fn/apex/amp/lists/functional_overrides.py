"""Operations of ``torch.nn.functional`` and how O1 runs them."""

import torch.nn.functional

from npuamp_fn.apex.amp.lists.editable import OperationList

__all__ = ["MODULE", "FP16_FUNCS", "FP32_FUNCS", "BANNED_FUNCS"]

MODULE = torch.nn.functional
FP16_FUNCS = OperationList(MODULE, "low")
FP32_FUNCS = OperationList(MODULE, "full")
BANNED_FUNCS = [("binary_cross_entropy", "use binary_cross_entropy_with_logits, or register a float function")]
