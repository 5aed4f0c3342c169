"""Operations of ``torch.nn.functional`` and how O1 runs them."""

import torch.nn.functional

from npuamp_fn.apex.amp import registry
from npuamp_fn.apex.amp.lists.editable import OperationList, names_of

__all__ = ["MODULE", "FP16_FUNCS", "FP32_FUNCS", "BANNED_FUNCS"]

MODULE = torch.nn.functional
FP16_FUNCS = OperationList(MODULE, names_of(MODULE, "low"), registry.register_half_function)
FP32_FUNCS = OperationList(MODULE, names_of(MODULE, "full"), registry.register_float_function)
BANNED_FUNCS = [("binary_cross_entropy", "use binary_cross_entropy_with_logits, or register a float function")]
