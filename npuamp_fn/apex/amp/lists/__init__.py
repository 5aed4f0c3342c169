"""The built-in operation lists under apex's names; editing them edits the table that O1 follows."""

from npuamp_fn.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
