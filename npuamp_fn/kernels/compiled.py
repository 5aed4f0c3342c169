"""The compiled kernel: a rule's text as one pass over memory, for the rows of a flat buffer or for whole leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuamp_fn.flat import ROW
from npuamp_fn.kernels import reference
from npuamp_fn.kernels.inductor import compile_once, unavailable
from npuamp_fn.kernels.rule import Item, LeafSegments, Result, RowSegments, Rule, Step
from npuamp_fn.tracing import under_transform

__all__ = ["refusal", "run"]

_KEPT = 2**22  # elements of a whole leaf up to which the step is kept between its sums and its use, not recomputed


def refusal(rule: Rule, items: list[Item]) -> str | None:
    """Say why this kernel cannot run an update, or return ``None`` if it can."""
    if under_transform():
        return "under a transform or inside a compiled region the rule's own text is traced"
    per_tensor = {slot.name for slot in rule.slots if slot.per == "tensor"}
    for item in items:
        if not rule.whole_leaves and not isinstance(item.segments, RowSegments):
            return "the parameters are separate tensors; flatten(params) would make it one pass"
        if rule.whole_leaves:
            for name, x in (("", item.param), ("master", item.weights), *item.slots.items()):
                if not x.is_contiguous():
                    return f"`{item.path}` is not contiguous, and {rule.name} runs on whole tensors"
                if x.shape != item.param.shape and name not in per_tensor:
                    shapes = f"{tuple(item.param.shape)} but its {name} {tuple(x.shape)}"
                    return f"`{item.path}` has shape {shapes}"
        if item.param.device.type not in ("cpu", "cuda"):
            return f"`{item.path}` is on {item.param.device.type}, and compiled kernels serve CPU and CUDA"
    return unavailable()


def run(step: Step, items: list[Item]) -> list[Result] | None:
    """Update all items; where ``finite`` is False nothing changes, bit for bit.

    Returns:
        The results, or ``None`` if the kernel could not be compiled; then nothing was touched.
    """
    shared: dict[Any, _Numbers] = {}  # hundreds of leaves with the same hyper-parameters must not pay for them each
    calls = []
    for item in items:
        key = (id(item.hyper), item.param.device)
        numbers = shared.get(key)
        if numbers is None:
            numbers = shared[key] = _Numbers.of(item.hyper, key[1])
        signature = _Signature.of(step, item, numbers.kinds)
        kernel = _kernel(signature)
        if kernel is None:
            return None
        calls.append((kernel, signature, numbers.tensors))
    return [
        _call(kernel, signature, numbers, step, item)
        for (kernel, signature, numbers), item in zip(calls, items, strict=True)
    ]


class _Numbers(NamedTuple):
    """Hyper-parameters as compiled code takes them."""

    kinds: tuple[tuple[str, Any], ...]  # name -> "tensor", "vector", or a static value
    tensors: list[Tensor]  # those that are not static, float64

    @classmethod
    def of(cls, hyper: dict[str, Any], device: torch.device) -> _Numbers:
        kinds = tuple((name, _kind(value)) for name, value in hyper.items())
        return cls(kinds, [_tensor(hyper[name], device) for name, kind in kinds if kind in ("tensor", "vector")])


class _Signature(NamedTuple):
    """Everything that compiled code depends on; sizes, and numbers other than 0, are arguments."""

    rule: Rule
    hyper: tuple[tuple[str, Any], ...]  # as in _Numbers
    slots: tuple[tuple[str, torch.dtype], ...]
    grad: torch.dtype
    param: torch.dtype
    has_master: bool
    has_factor: bool
    has_real: bool
    finite: int | None  # dimensions
    counts: int  # dimensions
    donate: bool
    device: torch.device
    leaf: int | None  # dimensions of a whole leaf (1, or 2: its first and the others); None: rows of a buffer
    keep: bool

    @classmethod
    def of(cls, step: Step, item: Item, hyper: tuple[tuple[str, Any], ...]) -> _Signature:
        param = item.param
        leaf = None if isinstance(item.segments, RowSegments) else min(max(param.dim(), 1), 2)
        return cls(
            rule=step.rule,
            hyper=hyper,
            slots=tuple([(name, slot.dtype) for name, slot in item.slots.items()]),
            grad=item.grad.dtype,
            param=param.dtype,
            has_master=item.master is not None,
            has_factor=step.factor is not None,
            has_real=item.real is not None,
            finite=None if item.finite is None else item.finite.dim(),
            counts=item.count.dim(),
            donate=step.donate,
            device=param.device,
            leaf=leaf,
            keep=leaf is not None and param.numel() <= _KEPT,
        )

    @property
    def per_tensor(self) -> set[str]:
        """The slots with one value per tensor."""
        return {slot.name for slot in self.rule.slots if slot.per == "tensor"}

    def flatten(
        self, factor: Tensor | None, item: Item, rows: tuple[Tensor, ...], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the tensors of an item, and the numbers of its hyper-parameters, as the kernel's arguments."""
        shaped, per_tensor = self._shaped, self.per_tensor
        slots = [slot if name in per_tensor else shaped(slot) for name, slot in item.slots.items()]
        tensors = [shaped(item.grad), shaped(item.param), *slots, item.count, *rows]
        tensors += [] if item.master is None else [shaped(item.master)]
        tensors += [x for x in (factor, item.real, item.finite) if x is not None]
        return [*tensors, *numbers]

    def _shaped(self, x: Tensor) -> Tensor:
        if self.leaf is None:
            return x
        x = x.contiguous()  # what is written to is contiguous, or it would have been refused; gradients need not be
        return x if x.dim() == self.leaf else x.reshape(-1) if self.leaf == 1 else x.flatten(1)

    def unflatten(self, tensors: Iterator[Tensor]) -> tuple[Tensor | None, Item]:
        """Return the factor and the item that these arguments stand for."""
        grad, param = next(tensors), next(tensors)
        slots = {name: next(tensors) for name, _ in self.slots}
        count = next(tensors)
        rows = [next(tensors), next(tensors), next(tensors)] if self.leaf is None else []
        master = next(tensors) if self.has_master else None
        factor = next(tensors) if self.has_factor else None
        real = next(tensors) if self.has_real else None
        finite = next(tensors) if self.finite is not None else None
        hyper = {name: next(tensors) if kind in ("tensor", "vector") else kind for name, kind in self.hyper}
        segments = LeafSegments() if self.leaf else _TracedSegments(rows[0], rows[1], rows[2], real)
        return factor, Item("", grad, param, slots, master, count, hyper, finite, segments, real)


class _TracedSegments:
    """RowSegments whose row lengths are tensors, so that one kernel serves every layout."""

    def __init__(self, tensor_of_row: Tensor, rows_per_tensor: Tensor, first_row: Tensor, real: Tensor | None) -> None:
        self._tensor_of_row, self._rows_per_tensor, self._first_row = tensor_of_row, rows_per_tensor, first_row
        self._real = real

    def sum(self, x: Tensor, per: str = "tensor") -> Tensor:
        del per  # rules with sums per row run on whole leaves
        if self._real is not None:
            x = torch.where(self._real, x, 0.0)
        sums = x.sum(dim=1).double()
        return torch.segment_reduce(sums, "sum", lengths=self._rows_per_tensor, unsafe=True).to(x.dtype)

    def expand(self, value: Tensor) -> Tensor:
        return value if value.dim() == 0 else value.index_select(0, self._tensor_of_row).unsqueeze(1)

    def per_tensor(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value.squeeze(1).index_select(0, self._first_row)


@functools.cache
def _kernel(signature: _Signature) -> Callable[..., Any] | None:
    what, update = f"the rule {signature.rule.name}", functools.partial(_update, signature)
    return compile_once(what, update, _example(signature), keep=signature.keep, checked=bool(signature.leaf))


def _update(signature: _Signature, *tensors: Tensor) -> list[Tensor]:
    """Run the reference kernel's steps on traced tensors."""
    factor, item = signature.unflatten(iter(tensors))
    if signature.leaf == 2:
        # One factor per row: otherwise Inductor's loops over elements would not be loops over rows, and not be fused
        # with those of the sums per row.
        ones = torch.ones(item.param.shape[0], 1, device=item.param.device)
        factor = ones if factor is None else ones * factor
    (result,) = reference.run(Step(signature.rule, factor, signature.donate), [item])
    if signature.donate:
        return [item.count + 0]  # a graph needs an output
    outputs = [result.param, *result.slots.values()]
    return outputs if result.master is None else [*outputs, result.master]


def _example(signature: _Signature) -> list[Tensor]:
    rows, tensors = 5, 3  # sizes that differ: equal ones would be taken for the same
    device = signature.device
    shape = {None: (rows, ROW), 1: (40,), 2: (rows, 40)}[signature.leaf]
    entries = (tensors,) if signature.leaf is None else ()

    def elements(dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def value(vector: bool, dtype: torch.dtype) -> Tensor:
        return torch.ones(entries if vector else (), dtype=dtype, device=device)

    item = Item(
        path="",
        grad=elements(signature.grad),
        param=elements(signature.param),
        slots={
            name: value(True, dtype) if name in signature.per_tensor else elements(dtype)
            for name, dtype in signature.slots
        },
        master=elements(torch.float32) if signature.has_master else None,
        count=value(bool(signature.counts), torch.int32),
        hyper={n: value(k == "vector", torch.float64) if k in ("tensor", "vector") else k for n, k in signature.hyper},
        finite=None if signature.finite is None else value(bool(signature.finite), torch.bool),
        segments=LeafSegments() if signature.leaf else RowSegments([2, 2, 1], device),
        real=elements(torch.bool) if signature.has_real else None,
    )
    factor = value(False, torch.float32) if signature.has_factor else None
    rows_of = () if signature.leaf else _row_tensors((2, 2, 1), device)
    return signature.flatten(factor, item, rows_of, _Numbers.of(item.hyper, device).tensors)


def _call(
    kernel: Callable[..., Any], signature: _Signature, numbers: Sequence[Tensor], step: Step, item: Item
) -> Result:
    if signature.leaf and item.param.numel() == 0:
        return Result(item.param, item.slots, item.master)
    segments = item.segments
    rows = _row_tensors(segments.rows_per_tensor, item.param.device) if isinstance(segments, RowSegments) else ()
    outputs = kernel(*signature.flatten(step.factor, item, rows, numbers))
    if step.donate:
        return Result(item.param, item.slots, item.master)
    param, *others = outputs
    slots = {name: new.view(old.shape) for (name, old), new in zip(item.slots.items(), others, strict=False)}
    master = others[-1].view(item.param.shape) if signature.has_master else None
    return Result(param.view(item.param.shape), slots, master)


@functools.lru_cache(maxsize=64)
def _row_tensors(rows_per_tensor: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.tensor(rows_per_tensor, device=device)
    tensor_of_row = torch.arange(len(rows_per_tensor), device=device).repeat_interleave(counts)
    # An empty tensor has no row; it gets a neighbour's, whose value nobody sees.
    first_row = (counts.cumsum(0) - counts).clamp(max=max(len(tensor_of_row) - 1, 0))
    return tensor_of_row, counts, first_row


@functools.lru_cache(maxsize=1024)
def _number(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)


def _tensor(value: Any, device: torch.device) -> Tensor:
    return value.to(torch.float64) if isinstance(value, Tensor) else _number(float(value), device)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "vector" if value.dim() else "tensor"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "tensor" if is_number and value != 0 else value
