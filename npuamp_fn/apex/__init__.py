"""The legacy apex interface, as a thin stateful shell over the functional core.

It mirrors apex's import paths: ``from npuamp_fn.apex import amp, optimizers`` stands for ``from apex import ...``.
"""

from npuamp_fn.apex import amp, optimizers

__all__ = ["amp", "optimizers"]
