"""Data-parallel reduction of gradients, for ``with_loss_scaling(..., reduce=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npuamp_fn.flat import FlatTree, flatten
from npuamp_fn.tree import is_float, tree_leaves

__all__ = ["MeanOver", "mean_over"]


@dataclass(frozen=True)
class MeanOver:
    """Average gradients over the ranks of a process group; see :func:`mean_over`."""

    group: Any = None
    dtype: torch.dtype | None = None

    def __call__(self, grads: Any) -> Any:
        """Return the mean of the gradients over all ranks; dtypes are kept."""
        if not dist.is_initialized():
            raise RuntimeError(
                "mean_over: torch.distributed is not initialized; start with torchrun and call init_process_group first"
            )
        if isinstance(grads, FlatTree):
            return grads.map(self._mean)
        if not any(is_float(leaf) for leaf in tree_leaves(grads)):
            return grads
        return flatten(grads, tie=True).map(self._mean).unflatten()

    def _mean(self, buffer: Tensor) -> Tensor:
        # Divided first: a sum of halves over many ranks could overflow where their mean does not.
        share = buffer / dist.get_world_size(self.group)
        sent = share if self.dtype is None else share.to(self.dtype)
        dist.all_reduce(sent, group=self.group)
        return sent.to(buffer.dtype)


def mean_over(group: Any = None, dtype: torch.dtype | None = None) -> MeanOver:
    """Average gradients over the ranks of a process group, with one collective per flat buffer.

    In ``with_loss_scaling`` this happens before the finite test: inf and NaN reach every rank, so all ranks skip
    and adjust alike. A plain tree is packed into flat buffers for the way.

    Args:
        group: A ``torch.distributed`` process group; ``None`` is the default group.
        dtype: Send in this dtype (bfloat16 halves the traffic); ``None`` sends gradients as they are, float32.

    Raises:
        RuntimeError: at the call, if ``torch.distributed`` is not initialized.

    >>> with_loss_scaling(grad(lambda x: x * x), reduce=mean_over()).reduce
    MeanOver(group=None, dtype=None)
    """
    return MeanOver(group, dtype)
