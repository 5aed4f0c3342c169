"""Views of an optimizer's flat buffers, and clipping on them: the vendor's additions to optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuamp_fn.apex.amp._amp_state import maybe_print
from npuamp_fn.apex.grads import clip_grads
from npuamp_fn.apex.storage import Bucket

__all__ = ["CombinedTensors", "flat_grads"]


class CombinedTensors:
    """Methods of initialized optimizers that hand out flat buffers.

    Each returns a list: with master weights ``[of masters, of float32 parameters]``, else ``[of parameters]``; more
    entries where parameters differ in device, dtype or options; ``None`` where there is nothing; ``[]`` with a printed
    hint where tensors are not combined.
    """

    _amp_stash: Any

    @property
    def accelerate(self) -> bool:
        """Whether gradients are combined: the vendor's name for ``combine_grad``."""
        return bool(self._amp_stash.properties.combine_grad)

    @property
    def combine_ddp(self) -> bool:
        """Whether gradients are averaged over the processes."""
        return bool(self._amp_stash.properties.combine_ddp)

    @property
    def init_combine_ddp(self) -> bool:
        """Whether that is set up: from the beginning."""
        return self.combine_ddp

    @property
    def ddp_replica_count(self) -> int:
        """The option of that name."""
        return self._amp_stash.properties.ddp_replica_count

    @property
    def check_combined_tensors(self) -> bool:
        """The option of that name; flat buffers are always checked."""
        return bool(self._amp_stash.properties.check_combined_tensors)

    def get_optimizer_combined_params(self) -> list[Tensor | None]:
        """Return the flat parameters that the optimizer updates."""
        if not self._combined_params():
            return []
        return self._by_class(lambda bucket: bucket.flat.buffers[0], lambda bucket: bucket.flat.buffers[0])

    def get_model_combined_params(self) -> list[Tensor | None]:
        """Return the flat parameters of the model; ``None`` stands for half ones that have masters."""
        if not self._combined_params():
            return []
        return self._by_class(lambda bucket: None, lambda bucket: bucket.flat.buffers[0])

    def get_optimizer_combined_grads(self) -> list[Tensor | None]:
        """Return the flat gradients that the optimizer reads: unscaled, float32."""
        if not self._combined_grads():
            return []
        return self._by_class(flat_grads, flat_grads)

    def get_model_combined_grads(self) -> list[Tensor | None]:
        """Return the flat gradients of the model; half ones are scaled still."""
        if not self._combined_grads():
            return []
        return self._by_class(lambda bucket: bucket.low_grads, flat_grads)

    def get_optimizer_combined_grad_masks(self) -> list[Tensor | None]:
        """Return tensors like the flat gradients, 1 at elements and 0 at padding."""
        if not self._combined_grads():
            return []
        return self._by_class(_mask, _mask)

    def get_model_combined_grad_masks(self) -> list[Tensor | None]:
        """Return tensors like the model's flat gradients, 1 at elements and 0 at padding."""
        return self.get_optimizer_combined_grad_masks()

    @torch.no_grad()
    def clip_optimizer_grad_norm_fused(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients that the optimizer reads by their norm over all parameters.

        Args:
            max_norm: Gradients are scaled down to this norm.
            norm_type: The p of the norm; ``inf`` for the largest element.

        Returns:
            shape []: the norm before clipping, as ``torch.nn.utils.clip_grad_norm_`` gives it. Where it is not finite
            it says so, and the gradients are not finite either.
        """
        flats = []
        buckets = self._amp_stash.buckets()
        for bucket in buckets:
            if any(weight.grad is not None for weight in bucket.weights):
                flats.append(bucket.settled_grads())
        inside = {id(weight) for bucket in buckets for weight in bucket.weights}
        for _, weights in self._amp_stash.groups():
            flats += [w.grad for w in weights if w.grad is not None and id(w) not in inside]
        return clip_grads(flats, max_norm, norm_type)

    def clip_model_grad_norm_fused(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the model's gradients; see :meth:`clip_optimizer_grad_norm_fused`.

        Raises:
            RuntimeError: there are master weights: the optimizer does not read the model's gradients then.
        """
        if self._amp_stash.master_weights:
            raise RuntimeError(
                "clip_model_grad_norm_fused can only be used when opt_level='O1': with master weights the optimizer "
                "reads the masters' gradients; call clip_optimizer_grad_norm_fused"
            )
        return self.clip_optimizer_grad_norm_fused(max_norm, norm_type)

    def _combined_params(self) -> bool:
        if getattr(self, "is_npu_fused_optimizer", False):
            return True
        maybe_print("Combined parameters need an optimizer of apex.optimizers (NpuFused...).", True)
        return False

    def _combined_grads(self) -> bool:
        if getattr(self, "is_npu_fused_optimizer", False) or self._amp_stash.properties.combine_grad:
            return True
        maybe_print("Combined gradients need combine_grad=True or an optimizer of apex.optimizers (NpuFused...).", True)
        return False

    def _by_class(self, of_masters: Any, of_others: Any) -> list[Tensor | None]:
        buckets = self._amp_stash.buckets()
        for bucket in buckets:
            bucket.follow_edits()
        masters = [of_masters(bucket) for bucket in buckets if bucket.low is not None]
        others = [of_others(bucket) for bucket in buckets if bucket.low is None]
        return [*(masters or [None]), *(others or [None])] if self._amp_stash.master_weights else others or [None]


def flat_grads(bucket: Bucket) -> Tensor | None:
    """Return the flat gradients of a bucket; ``None`` if none of its weights has one."""
    if all(weight.grad is None for weight in bucket.weights):
        return None
    return bucket.settled_grads()


def _mask(bucket: Bucket) -> Tensor | None:
    ones = [torch.ones_like(weight) for weight in bucket.weights]
    return bucket.layout.pack(ones).buffers[0]
