"""Gradient clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from npuamp_fn.kernels.reduce import global_norm

__all__ = ["ClipByGlobalNorm", "clip_by_global_norm"]


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scale all gradients down to a total norm; see :func:`clip_by_global_norm`."""

    max_norm: float

    def factor(self, grads: Any, factor: Tensor | None, norm: Tensor | None = None) -> Tensor:
        """Return the factor that takes the gradients, after ``factor``, below the norm."""
        if norm is None:
            norm = global_norm(grads) if factor is None else global_norm(grads) * factor
        clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return clip if factor is None else factor * clip


def clip_by_global_norm(max_norm: float) -> ClipByGlobalNorm:
    r"""Scale gradients so that the norm of all together is at most ``max_norm``; for ``chain``.

    .. math:: g = g \min(1, c / (\lVert g \rVert + 10^{-6}))

    Scaled gradients are clipped as what they stand for: the true ones. The factor travels to the optimizer's
    kernel, so clipping costs one read of the gradients and no write; none where the finite test of
    ``with_loss_scaling`` has read the norm already.

    Raises:
        ValueError: ``max_norm`` is not positive.

    Source: Pascanu et al., On the difficulty of training recurrent neural networks, 2013; numbers as in
    ``torch.nn.utils.clip_grad_norm_``.

    >>> optim.chain(clip_by_global_norm(1.0), optim.sgd(0.1)).transforms
    (ClipByGlobalNorm(max_norm=1.0),)
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: expected a positive max_norm, found {max_norm!r}")
    return ClipByGlobalNorm(float(max_norm))
