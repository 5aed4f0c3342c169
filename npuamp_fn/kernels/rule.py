"""Update rules as data: an algorithm's arithmetic over one tensor, and what a kernel needs to run it anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from npuamp_fn.tracing import materialized

__all__ = [
    "HyperValues",
    "Item",
    "LeafSegments",
    "Result",
    "RowSegments",
    "Rule",
    "Segments",
    "Slot",
    "Step",
    "add_scaled",
    "addcdiv",
    "addcmul",
    "coefficient",
    "compute_dtype",
    "lerp",
    "present",
    "scaled",
    "shifted",
]


class Slot(NamedTuple):
    """One tensor of state per parameter."""

    name: str
    start: float | Literal["param"] = 0.0  # a number, or a copy of the parameter
    per: Literal["element", "tensor"] = "element"  # like the parameter, or one value per tensor


@dataclass(frozen=True)
class Rule:
    """An update rule: ``update(grad, param, slots, count, hyper, seg) -> (param, slots)``, pure.

    Everything arrives in the compute dtype (float32; float64 for float64 parameters). ``count`` is the number of
    this step, from 1: an integer tensor of shape [], or one that broadcasts against the rows of a flat buffer.
    ``hyper`` has the hyper-parameters as attributes: Python numbers, or float64 tensors that broadcast likewise; use
    :func:`coefficient`, :func:`lerp`, :func:`addcmul`, :func:`addcdiv`, :func:`shifted` to combine them with elements.
    ``seg`` gives whole-tensor sums. Slots of one value per tensor arrive as ``seg.sum`` gives them.
    """

    name: str
    update: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    slots: tuple[Slot, ...] = ()
    whole_leaves: bool = False  # needs each tensor in its own shape, not rows of a flat buffer
    aten: str | None = None  # torch's fused operator for this algorithm


class HyperValues:
    """The hyper-parameters of one step as attributes (what types.SimpleNamespace is, but Dynamo can trace it)."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"rule: no hyper-parameter {name!r}; the optimizer has {list(vars(self))}")


_INDEX_BITS = 40  # of an element's number, for its place in its tensor

Per: TypeAlias = Literal["tensor", "row"]


class Segments(Protocol):
    """What a rule may ask about whole tensors, whatever they are stored in."""

    def sum(self, x: Tensor, per: Per = "tensor") -> Tensor:
        """Return the sum over each tensor, or over each row (index of the first dimension, like an output channel)."""
        ...

    def expand(self, value: Tensor) -> Tensor:
        """Return per-tensor values in a shape that broadcasts against the elements."""
        ...

    def per_tensor(self, value: Any) -> Any:
        """Return what broadcasts against the elements (count, a hyper-parameter) as per-tensor values; undo expand."""
        ...


class LeafSegments:
    """One tensor in its own shape, the ``ordinal``-th of its tree."""

    def __init__(self, ordinal: int = 0) -> None:
        self._ordinal = ordinal

    def sum(self, x: Tensor, per: Per = "tensor") -> Tensor:
        """Return the sum of all elements: shape []; or of each row: shape [n, 1, ...]. A vector is one row."""
        if per == "row" and x.dim() > 1:
            return x.sum(dim=tuple(range(1, x.dim())), keepdim=True)
        return x.sum()

    def expand(self, value: Tensor) -> Tensor:
        """Return the value: shape [] broadcasts by itself."""
        return value

    def per_tensor(self, value: Any) -> Any:
        """Return the value: it is one per tensor already."""
        return value

    def index(self, x: Tensor) -> Tensor:
        """Return each element's place in its tensor, below the tensor's ordinal in the upper bits: int64."""
        first = self._ordinal << _INDEX_BITS
        return torch.arange(first, first + x.numel(), device=x.device).view(x.shape)


class RowSegments:
    """Tensors stored as rows of a flat buffer: elements have shape [rows, ROW]."""

    def __init__(
        self,
        rows_per_tensor: Sequence[int],
        device: torch.device,
        real: Tensor | None = None,
        ordinals: Sequence[int] | None = None,
    ) -> None:
        self.rows_per_tensor = tuple(rows_per_tensor)
        self._ordinals = tuple(range(len(self.rows_per_tensor))) if ordinals is None else tuple(ordinals)
        self._device = device
        self._real = real
        self._index: Tensor | None = None  # made when first asked for: element-wise rules never ask

    def sum(self, x: Tensor, per: Per = "tensor") -> Tensor:
        """Return the sum over each tensor: shape [tensors]; rows are summed in ``x.dtype``, tensors in float64."""
        if per == "row":
            raise ValueError("rule: sums per row need tensors in their own shape: make it Rule(..., whole_leaves=True)")
        if self._real is not None:
            x = torch.where(self._real, x, 0.0)
        start = torch.zeros(len(self.rows_per_tensor), dtype=torch.float64, device=x.device)
        return start.index_add(0, self._tensor_of_row(), x.sum(dim=1).double()).to(x.dtype)

    def expand(self, value: Tensor) -> Tensor:
        """Return values of shape [tensors] as a column of shape [rows, 1]; shape [] stays."""
        return value if value.dim() == 0 else value.index_select(0, self._tensor_of_row()).unsqueeze(1)

    def per_tensor(self, value: Any) -> Any:
        """Return a column of shape [rows, 1] as values of shape [tensors]; numbers and shape [] stay.

        An empty tensor has no row: it gets a neighbour's value, or 0 if there is no row at all.
        """
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        last = value.shape[0] - 1
        if last < 0:
            return torch.zeros(len(self.rows_per_tensor), dtype=value.dtype, device=value.device)
        firsts = [min(first, last) for first in accumulate((0, *self.rows_per_tensor[:-1]))]
        return value.squeeze(1).index_select(0, torch.tensor(firsts, device=value.device))

    def index(self, x: Tensor) -> Tensor:
        """Return each element's place in its tensor, below the tensor's ordinal in the upper bits: int64."""
        firsts = accumulate([0, *self.rows_per_tensor[:-1]])
        offsets = [(o << _INDEX_BITS) - first * x.shape[1] for o, first in zip(self._ordinals, firsts, strict=True)]
        return torch.arange(x.numel(), device=x.device).view(x.shape) + self.expand(
            torch.tensor(offsets, dtype=torch.int64, device=x.device)
        )

    def _tensor_of_row(self) -> Tensor:
        if self._index is None:
            index = torch.arange(len(self.rows_per_tensor), device=self._device)
            counts = torch.tensor(self.rows_per_tensor, dtype=torch.int64, device=self._device)
            self._index = index.repeat_interleave(counts, output_size=sum(self.rows_per_tensor))
        return self._index


@dataclass(frozen=True)
class Item:
    """One buffer (as rows of ROW elements) or one leaf to update."""

    path: str
    grad: Tensor  # any float dtype
    param: Tensor
    slots: dict[str, Tensor]
    master: Tensor | None  # float32 parameters, where `param` is only their half copy
    count: Tensor  # of this step, from 1: shape [] or [tensors]
    hyper: dict[str, Any]  # numbers, or tensors of shape [] or [tensors]
    finite: Tensor | None  # shape [] or [tensors], bool: where False, nothing changes; None: all is applied
    segments: Segments
    real: Tensor | None  # shape like param, bool: False at padding, where the rule could leave something but zero
    # Numbers the elements, for rounding masters stochastically; None: to nearest.
    index: Callable[[Tensor], Tensor] | None = None

    @property
    def weights(self) -> Tensor:
        """The parameters in full precision, if there are masters; else as they are."""
        return self.param if self.master is None else self.master


class Step(NamedTuple):
    """What all items of one update share."""

    rule: Rule
    factor: Tensor | None  # shape [], float32: gradients are multiplied by it first
    donate: bool  # whether params, slots and masters are updated in place


class Result(NamedTuple):
    """What became of an item; the same tensors as went in if they were donated."""

    param: Tensor
    slots: dict[str, Tensor]
    master: Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic on a storage dtype runs in.

    >>> compute_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def present(value: Any) -> bool:
    """Tell whether a hyper-parameter does anything: false only for the Python number 0.

    >>> present(0.0), present(0.1), present(torch.tensor(0.0))
    (False, True, True)
    """
    return isinstance(value, Tensor) or value != 0


def coefficient(value: Any, like: Tensor) -> Any:
    """Return a number, or a float64 tensor rounded once to the dtype of the elements it will multiply."""
    return materialized(value.to(like.dtype)) if isinstance(value, Tensor) else value


def scaled(x: Tensor, factor: Any) -> Tensor:
    """Return ``x * factor``."""
    return x * coefficient(factor, x)


def shifted(x: Tensor, amount: Any) -> Tensor:
    """Return ``x + amount``."""
    return x + coefficient(amount, x)


def add_scaled(x: Tensor, y: Tensor, factor: Any) -> Tensor:
    """Return ``x + factor * y``."""
    if isinstance(factor, Tensor):
        return x + coefficient(factor, x) * y
    return torch.add(x, y, alpha=factor)


def lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Return ``start + weight * (end - start)``."""
    weight = coefficient(weight, start)
    return torch.lerp(start, end, weight if not isinstance(weight, Tensor) else weight.expand_as(start))


def addcmul(start: Tensor, a: Tensor, b: Tensor, value: Any) -> Tensor:
    """Return ``start + value * a * b``."""
    if isinstance(value, Tensor):
        return start + coefficient(value, start) * a * b
    return torch.addcmul(start, a, b, value=value)


def addcdiv(start: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    """Return ``start + value * a / b``, written out: Dynamo replaces torch.addcdiv by another order of operations."""
    return start + (a if not isinstance(value, Tensor) and value == 1 else scaled(a, value)) / b
