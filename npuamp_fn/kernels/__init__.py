"""Kernels: how an update rule is run on a buffer."""

from __future__ import annotations

import torch

from npuamp_fn.kernels import aten, compiled, reference
from npuamp_fn.kernels.inductor import WORTH_COMPILING
from npuamp_fn.kernels.rule import Item, Result, RowSegments, Rule, Slot, Step

__all__ = ["KERNELS", "WORTH_COMPILING", "Item", "Result", "Rule", "Slot", "Step", "choose", "run"]

KERNELS = ("auto", "reference", "aten", "compiled")


def choose(kernel: str, rule: Rule, items: list[Item]) -> tuple[str, str]:
    """Return the kernel that will run these items, and why.

    Raises:
        ValueError: ``kernel`` names a kernel that cannot run them; the message says why not.
    """
    if kernel == "reference":
        return "reference", "asked for"
    if any(item.index is not None for item in items):
        if kernel == "auto":
            return "reference", "the others round to nearest"
        raise ValueError(f"kernel={kernel!r} rounds half copies to nearest, not stochastically; use kernel='auto'")
    if kernel in ("aten", "compiled"):
        refusal = (aten if kernel == "aten" else compiled).refusal(rule, items)
        if refusal is not None:
            raise ValueError(f"kernel={kernel!r} cannot run {rule.name} here: {refusal}; use kernel='auto'")
        return kernel, "asked for"
    no_compiled = compiled.refusal(rule, items)
    is_large = sum(item.param.numel() for item in items) >= WORTH_COMPILING
    if torch.compiler.is_compiling() and is_large and all(isinstance(i.segments, RowSegments) for i in items):
        return "reference", "part of a compiled region, where the rule's text becomes one pass over memory"
    if no_compiled is None and not is_large:
        no_compiled = f"fewer than {WORTH_COMPILING} elements: compiling costs more than it saves"
    if no_compiled is None:
        return "compiled", "one pass over memory"
    no_aten = aten.refusal(rule, items)
    if no_aten is None:
        return "aten", f"torch's fused operator for {rule.name}; not compiled: {no_compiled}"
    return "reference", f"not compiled: {no_compiled}; not aten: {no_aten}"


def run(kernel: str, step: Step, items: list[Item]) -> list[Result]:
    """Update all items with the kernel that fits; if it cannot be compiled, with the next best one."""
    name, _ = choose(kernel, step.rule, items)
    if name == "compiled":
        results = compiled.run(step, items)
        if results is not None:
            return results
        name, _ = choose("auto", step.rule, items)
    return (aten if name == "aten" else reference).run(step, items)
