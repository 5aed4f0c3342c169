"""The tensors and optimizer steps that several benchmarks time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Setup
from npuamp_fn import FlatTree, Optimizer, flatten, fused_update, optim

__all__ = ["OurState", "count", "flat_adamw", "gradients", "parameters", "torch_step", "weights"]


def weights(setup: Setup) -> list[Tensor]:
    """Return fresh float32 tensors, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [0.02 * torch.randn(shape, generator=generator) for shape in setup.shapes]


def gradients(setup: Setup) -> list[Tensor]:
    """Return float32 gradients for them."""
    generator = torch.Generator().manual_seed(1)
    return [0.001 * torch.randn(shape, generator=generator) for shape in setup.shapes]


def count(setup: Setup) -> int:
    """Return the number of elements in all tensors together."""
    return sum(rows * columns for rows, columns in setup.shapes)


def parameters(setup: Setup) -> list[nn.Parameter]:
    """Return the tensors as parameters with gradients."""
    parameters = [nn.Parameter(tensor) for tensor in weights(setup)]
    for parameter, gradient in zip(parameters, gradients(setup), strict=True):
        parameter.grad = gradient
    return parameters


def torch_step(setup: Setup, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], Any]:
    """Return the step of one of torch's optimizers."""
    return optimizer(parameters(setup), **options).step


def flat_adamw(setup: Setup) -> Callable[[], Any]:
    """Return torch's fused AdamW operator on one flat tensor: the fastest there is."""
    flat = torch.cat([tensor.reshape(-1) for tensor in weights(setup)])
    gradient = torch.cat([tensor.reshape(-1) for tensor in gradients(setup)])
    mean, square, steps = torch.zeros_like(flat), torch.zeros_like(flat), torch.tensor(10.0)
    options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    return lambda: torch.ops.aten._fused_adamw_([flat], [gradient], [mean], [square], [], [steps], **options)


class OurState:
    """Parameters, gradients and state of one of our optimizers on flat buffers.

    Args:
        setup: Which tensors.
        optimizer: Its updates are donated.
        half: Store parameters and gradients in this dtype, with float32 masters in the state.
        kernel: As for ``fused_update``.
    """

    def __init__(
        self, setup: Setup, optimizer: Optimizer, half: torch.dtype | None = None, kernel: str = "auto"
    ) -> None:
        master = flatten(weights(setup))
        self.optimizer = optim.with_master_weights(optimizer) if half else optimizer
        self.optimizer = fused_update(self.optimizer, donate=True, kernel=kernel)
        self.params: FlatTree = master.cast(half)
        self.grads = self.params.layout.pack(gradients(setup), half)
        self.state = self.optimizer.init(self.params, master=master) if half else self.optimizer.init(self.params)

    def step(self, grads: Any = None) -> None:
        """Update by the gradients, or by others."""
        grads = self.grads if grads is None else grads
        self.params, self.state = self.optimizer.update(grads, self.state, self.params)

    def persistent(self) -> Sequence[Tensor]:
        """Return the buffers that live from step to step."""
        trees = (self.params, self.grads, *self.state.slots.values(), self.state.master)
        buffers = [buffer for tree in trees if isinstance(tree, FlatTree) for buffer in tree.buffers]
        return [self.state.count, *(buffer for buffer in buffers if buffer is not None)]
