"""What each rule of an operation table does to the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["APPLY", "cast_arguments"]

Call = tuple[Any, dict[str, Any]]  # positional and keyword arguments

# What tensors a call has, as bits: of the low dtype, of float32, of another floating or complex dtype, sparse.
_LOW, _FULL, _FOREIGN, _SPARSE = 1, 2, 4, 8
_STRIDED = torch.strided
_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_NUMBERS = (bool, int, float, complex)
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")
_MASKS = ("attn_mask", "key_padding_mask")


def cast_arguments(rule: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    """Cast the float32 and low tensors of a user's function to what a rule promises; nothing else is touched.

    Args:
        rule: ``"low"``, ``"full"`` or ``"promote"``.
        args: Positional arguments; tensors may stand in nested lists, tuples and dictionaries.
        kwargs: Keyword arguments, likewise.
        low: The low dtype.

    >>> from npuamp_fn.transforms.op_rules import cast_arguments
    >>> (x,), _ = cast_arguments("low", ([torch.ones(2)],), {}, torch.bfloat16)
    >>> x[0].dtype
    torch.bfloat16
    """
    if rule == "promote":
        seen = _seen((*args, *kwargs.values()), low)
        rule = "full" if seen & _LOW and seen & _FULL else "none"
    source, target = {"low": (torch.float32, low), "full": (low, torch.float32), "none": (low, low)}[rule]
    return _cast(args, source, target), _cast(kwargs, source, target)


def _low(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    seen = _seen(args, low) | (_seen(kwargs.values(), low) if kwargs else 0)
    if seen & _FOREIGN or not seen & _FULL:
        return args, kwargs
    if seen & _SPARSE:  # hardly any kernel multiplies sparse matrices in half precision
        return _cast(args, low, torch.float32), _cast(kwargs, low, torch.float32)
    if name in _ATTENTION and low is torch.float16:
        args = (*args[:3], _finite_mask(args[3]), *args[4:]) if len(args) > 3 and name == _ATTENTION[0] else args
        kwargs = {key: _finite_mask(value) if key in _MASKS else value for key, value in kwargs.items()}
    return _cast(args, torch.float32, low), _cast(kwargs, torch.float32, low) if kwargs else kwargs


def _full(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    if kwargs and kwargs.get("dtype") is low:  # asked for by name; some operations refuse to narrow
        return args, kwargs
    return _cast(args, low, torch.float32), _cast(kwargs, low, torch.float32) if kwargs else kwargs


def _promote(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    if len(args) == 2 and not kwargs:  # the usual x + y, quickly
        x, y = args
        if isinstance(x, Tensor) and (x.dtype is y.dtype if isinstance(y, Tensor) else type(y) in _NUMBERS):
            return args, kwargs
        if name == "truediv" and type(x) in _NUMBERS:  # strict export's way to say Tensor.__rtruediv__
            return _full(name, args, kwargs, low)
    seen = _seen(args, low) | (_seen(kwargs.values(), low) if kwargs else 0)
    if seen & _FOREIGN or not seen & _FULL or not seen & _LOW:
        return args, kwargs
    return _cast(args, low, torch.float32), _cast(kwargs, low, torch.float32) if kwargs else kwargs


def _narrow(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    mixed = (_seen(args, low) | _seen(kwargs.values(), low)) & _LOW
    return _low(name, args, kwargs, low) if mixed else (args, kwargs)


def _match(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    written = _written_to(args, kwargs)
    if not isinstance(written, Tensor) or written.dtype not in (low, torch.float32):
        return args, kwargs
    target = written.dtype
    source = torch.float32 if target is low else low
    return _cast(args, source, target), _cast(kwargs, source, target)


def _refuse(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    written = _written_to(args, kwargs)
    if isinstance(written, Tensor) and written.dtype is low:
        raise NotImplementedError(
            f"{name}: this operation runs in float32, but it would write its result into a tensor of dtype {low}. "
            f"Write `y = x.{name.removesuffix('_')}(...)`, which gives float32, or convert first, `x = x.float()`; "
            f"to let it run in place anyway take the rule away: table.without({'torch.Tensor.' + name!r})"
        )
    return args, kwargs


def _banned(name: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Call:
    if not (_seen(args, low) | _seen(kwargs.values(), low)) & _LOW:
        return args, kwargs
    key = f"torch.nn.functional.{name}"
    advice = _ADVICE.get(name, "")
    raise NotImplementedError(
        f"{key}: refused on arguments of dtype {low}.{advice} To compute it in float32 all the same, allow it in the "
        f"table: cast_ops(table.full({key!r}), {low}); or call it on `x.float()`, or inside full_precision. Scripts of "
        f"apex.amp write amp.register_float_function(torch.nn.functional, {name!r}), or amp.init(allow_banned=True)"
    )


_ADVICE = {
    "binary_cross_entropy": (
        " Its input comes out of a sigmoid, which rounds to 0 or 1 in low precision, and the logarithm is then "
        "infinite. Pass the logits, before the sigmoid, to torch.nn.functional.binary_cross_entropy_with_logits "
        "(nn.BCEWithLogitsLoss), which is safe; or run the sigmoid in float32 too: table.full('torch.sigmoid')."
    )
}

APPLY: dict[str, Callable[[str, Any, dict[str, Any], torch.dtype], Call]] = {
    "low": _low,
    "full": _full,
    "promote": _promote,
    "narrow": _narrow,
    "match": _match,
    "refuse": _refuse,
    "banned": _banned,
}


def _written_to(args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def _seen(values: Iterable[Any], low: torch.dtype) -> int:
    seen = 0
    for value in values:
        if isinstance(value, Tensor):
            dtype = value.dtype
            if dtype is torch.float32:
                seen |= _FULL
            elif dtype is low:
                seen |= _LOW
            elif dtype.is_floating_point or dtype.is_complex:
                seen |= _FOREIGN
            if value.layout is not _STRIDED and value.layout in _SPARSE_LAYOUTS:
                seen |= _SPARSE
        elif isinstance(value, (list, tuple)):
            seen |= _seen(value, low)
        elif isinstance(value, dict):
            seen |= _seen(value.values(), low)
    return seen


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype is source else value
    kind = type(value)
    if kind is tuple:
        return tuple([_cast(item, source, target) for item in value])
    if kind is list:
        return [_cast(item, source, target) for item in value]
    if kind is dict:
        return {key: _cast(item, source, target) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_cast(item, source, target) for item in value))
    return value


def _finite_mask(mask: Any) -> Any:
    # -1e9 would become -inf in float16, and a fully masked row NaN; half of the range leaves room for the scores.
    if not isinstance(mask, Tensor) or mask.dtype is not torch.float32:
        return mask
    bound = torch.finfo(torch.float16).max / 2
    return torch.where(mask.isinf(), mask, mask.clamp(-bound, bound))
