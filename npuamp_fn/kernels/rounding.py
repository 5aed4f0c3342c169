"""Storing float32 parameters as halves: to nearest, or stochastically by a hash instead of a random generator."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDINGS", "round_stochastically"]

ROUNDINGS = ("nearest", "stochastic")
_WORD = 0xFFFFFFFF


def round_stochastically(x: Tensor, dtype: torch.dtype, count: Tensor, index: Tensor) -> Tensor:
    """Round to one of the two nearest halves, each with the probability that makes the mean exact.

    The choice is a hash of step and element: the same step rounds the same way whenever it is repeated. Values beyond
    the largest half become what rounding to nearest makes of them.

    Args:
        x: float32.
        dtype: float16 or bfloat16.
        count: The step, an integer tensor that broadcasts against ``x``.
        index: shape like x, int64: a number for each element, different for all.

    Returns:
        shape like x, ``dtype``.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015; constants of the hash: Wellons,
    Prospecting for Hash Functions, 2018.

    >>> x = torch.full((4096,), 1.0 + 2.0**-10)
    >>> halves = round_stochastically(x, torch.bfloat16, torch.tensor(1), torch.arange(4096))
    >>> sorted(set(halves.tolist())), abs(halves.double().mean().item() - x[0].item()) < 2.0**-13
    ([1.0, 1.0078125], True)
    """
    near = x.to(dtype)
    distance = x.abs() - near.abs().to(x.dtype)
    # In sign and magnitude, the next half away from zero is one bit pattern up, whatever the sign.
    other = (near.view(torch.int16) + distance.sign().to(torch.int16)).view(dtype)
    gap = (other.to(x.dtype) - near.to(x.dtype)).abs()
    chance = distance.abs() / torch.where(gap > 0, gap, 1.0)
    moves = _uniform(count, index).to(x.dtype) < chance
    return torch.where(moves & torch.isfinite(other), other, near)


def _uniform(count: Tensor, index: Tensor) -> Tensor:
    # 24 bits in (0, 1), so that float32 holds them exactly.
    bits = _mix(_mix(index & _WORD) ^ _mix((count.long() & _WORD) ^ (_mix((index >> 32) + 1))))
    return ((bits >> 8).double() + 0.5) * 2.0**-24


def _mix(bits: Tensor) -> Tensor:
    # 32-bit words in int64 with 31-bit factors: no product overflows, on any device.
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & _WORD
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & _WORD
    return bits ^ (bits >> 15)
