"""Kernels: how an update rule is run on a buffer."""

from __future__ import annotations

from npuamp_fn.kernels import aten, reference
from npuamp_fn.kernels.rule import Item, Result, Rule, Slot, Step

__all__ = ["KERNELS", "Item", "Result", "Rule", "Slot", "Step", "choose", "run"]

KERNELS = ("auto", "reference", "aten")


def choose(kernel: str, rule: Rule, items: list[Item]) -> tuple[str, str]:
    """Return the kernel that will run these items, and why.

    Raises:
        ValueError: ``kernel`` names a kernel that cannot run them; the message says why not.
    """
    if kernel == "reference":
        return "reference", "asked for"
    refusal = aten.refusal(rule, items)
    if refusal is None:
        return "aten", "asked for" if kernel == "aten" else f"torch's fused operator for {rule.name}"
    if kernel == "aten":
        raise ValueError(f"kernel='aten' cannot run {rule.name} here: {refusal}; use kernel='auto'")
    return "reference", refusal


def run(kernel: str, step: Step, items: list[Item]) -> list[Result]:
    """Update all items with the kernel that fits."""
    name, _ = choose(kernel, step.rule, items)
    return (aten if name == "aten" else reference).run(step, items)
