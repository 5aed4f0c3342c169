"""Arithmetic over whole trees: finite tests, norms, selects and widening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npuamp_fn.tree import (
    HALVES,
    check_same_structure,
    describe,
    is_float,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)

__all__ = ["all_finite", "all_true", "check_flag", "global_norm", "is_complex", "multiply", "to_float32", "tree_where"]

_TINY = 2.0**-96


def all_finite(tree: Any, factor: Tensor | None = None) -> Tensor:
    """Tell whether every element of every float leaf is finite; large finite values are no false alarm.

    Args:
        tree: Leaves of any dtype; those that are not floating point (or complex) count as finite.
        factor: shape [], float32: test ``leaf * factor`` instead, without computing it.

    Returns:
        shape [], bool. No host synchronisation.

    Raises:
        TypeError: a leaf is sparse.

    >>> all_finite({"a": torch.tensor([1.0, float("inf")]), "n": None})
    tensor(False)
    """
    extremes = []
    for index, leaf in enumerate(tree_leaves(tree)):
        leaf = _as_real(leaf)
        if is_float(leaf) and leaf.layout is not torch.strided:
            raise TypeError(
                f"leaf `{tree_paths(tree)[index]}`: expected a dense tensor, found layout {leaf.layout}; gradients "
                "become sparse with nn.Embedding(sparse=True): pass sparse=False"
            )
        if is_float(leaf) and leaf.numel() > 0:
            extremes += torch.aminmax(leaf)  # one read, NaN is passed on
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=_device(tree))
    device, dtypes = extremes[0].device, {value.dtype for value in extremes}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    if len(dtypes) > 1:
        extremes = [value.to(wide) for value in extremes]
    values = torch.stack([value.to(device) for value in extremes]).to(wide)
    return torch.isfinite(values if factor is None else values * factor.to(device)).all()


def all_true(flags: Sequence[Tensor]) -> Tensor:
    """Return whether all flags of shape [] are true, wherever they lie: one flag, on the device of the first.

    >>> all_true([torch.tensor(True), torch.tensor(False)])
    tensor(False)
    """
    first = flags[0]
    return first if len(flags) == 1 else torch.stack([flag.to(first.device) for flag in flags]).all()


def tree_where(pred: Tensor, a: Any, b: Any) -> Any:
    """Select one of two trees of equal structure, leaf by leaf, without a host synchronisation.

    Args:
        pred: shape [], bool.
        a: The result where ``pred`` holds.
        b: The result elsewhere. Leaves that are not tensors come from here.

    Raises:
        TypeError: ``pred`` is not such a tensor.
        ValueError: structures, shapes or dtypes differ; the message names the first differing path.

    >>> tree_where(torch.tensor(False), {"x": torch.ones(1)}, {"x": torch.zeros(1)})
    {'x': tensor([0.])}
    """
    check_flag("tree_where(pred)", pred)
    check_same_structure(b, a, "tree_where")
    leaves, treedef = tree_flatten(b)
    others = tree_leaves(a)
    for index, (new, old) in enumerate(zip(others, leaves, strict=True)):
        if _kind(new) != _kind(old):
            raise ValueError(
                f"tree_where: leaf `{tree_paths(b)[index]}`: expected {describe(old)} in both trees, found "
                f"{describe(new)} in the first; a select would change the state's shape or dtype"
            )
    chosen = [
        torch.where(pred.to(old.device), new, old) if isinstance(old, Tensor) else old
        for new, old in zip(others, leaves, strict=True)
    ]
    return tree_unflatten(treedef, chosen)


def global_norm(tree: Any) -> Tensor:
    """Return the Euclidean norm of all float (and complex) leaves together: shape [], float32; no host synchronisation.

    Large leaves are summed in rows first: one float32 sum over millions of elements is off by 0.1 %.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    norms = []
    for leaf in tree_leaves(tree):
        leaf = _as_real(leaf)
        if is_float(leaf) and leaf.numel() > 0:
            rows = (leaf.reshape(-1, 256) if leaf.numel() % 256 == 0 else leaf.reshape(-1)).float()
            norm = torch.linalg.vector_norm(rows, dim=-1)
            # Squares of huge values overflow; those of tiny multiples of them do not.
            safe = torch.linalg.vector_norm(rows * _TINY, dim=-1).double() / _TINY
            norms.append(torch.where(torch.isfinite(norm), norm.double(), safe).square().sum())
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=_device(tree))
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).sum().sqrt().float()


def multiply(tree: Any, factor: Tensor | float) -> Any:
    """Multiply the float and complex leaves of a tree, float16 and bfloat16 ones as float32.

    >>> multiply({"g": torch.ones(1).half(), "n": 3}, torch.tensor(0.5))
    {'g': tensor([0.5000]), 'n': 3}
    """

    def product(leaf: Any) -> Any:
        if not (is_float(leaf) or is_complex(leaf)):
            return leaf
        own = factor.to(leaf.device) if isinstance(factor, Tensor) else factor
        return (leaf.float() if leaf.dtype in HALVES else leaf) * own

    return product(tree) if isinstance(tree, Tensor) else tree_map(product, tree)


def to_float32(tree: Any) -> Any:
    """Return the tree with float16 and bfloat16 leaves as float32."""
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x, tree)


def check_flag(what: str, flag: Any) -> None:
    """Raise ``TypeError`` if a flag is not a bool tensor of shape ().

    >>> check_flag("adjust(finite)", True)
    Traceback (most recent call last):
    TypeError: adjust(finite): expected a bool tensor of shape (), found True of type bool
    """
    if not (isinstance(flag, Tensor) and flag.dtype == torch.bool and flag.dim() == 0):
        raise TypeError(f"{what}: expected a bool tensor of shape (), found {describe(flag)}")


def is_complex(leaf: Any) -> bool:
    """Tell whether a leaf is a complex tensor."""
    return isinstance(leaf, Tensor) and leaf.is_complex()


def _as_real(leaf: Any) -> Any:
    return torch.view_as_real(leaf.resolve_conj()) if is_complex(leaf) else leaf


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _device(tree: Any) -> torch.device | None:
    return next((leaf.device for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)
