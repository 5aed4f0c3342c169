"""Precision policies: which dtype parameters are stored in, computed in, and returned in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from npuamp_fn.flat import FlatTree
from npuamp_fn.modules import Buffers
from npuamp_fn.op_tables import APEX_OPS, OpTable, table_named
from npuamp_fn.tree import HALVES, check_patterns, matches, tree_flatten, tree_paths, tree_unflatten

__all__ = ["O0", "O1", "O2", "O3", "Policy", "batch_norm_paths", "cast_tree", "keep_candidates"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Policy:
    """Say which dtypes a computation uses; ``None`` leaves a dtype alone.

    Args:
        params: Storage dtype of parameters; used by :meth:`cast_params` alone.
        compute: Dtype of the arguments inside a function wrapped by ``cast_policy``.
        output: Dtype of what such a function returns.
        ops: Table of operations that run in low precision, float32 or the widest dtype (level O1).
        keep: Dotted-path patterns inside each argument (``*`` is any text) that stay full precision.
        low: Dtype of the operations that ``ops`` runs low; float16 if there is a table and nothing is said. It is
            not ``compute``, which casts arguments: O1 leaves arguments and parameters alone.

    Raises:
        TypeError: a dtype is not float32, float16, bfloat16 or ``None``, ``low`` is no half dtype or comes without
            ``ops``, or ``keep`` is not a tuple of strings.
        ValueError: a pattern of ``keep`` could not be read back from the policy's string.

    Source: Micikevicius et al., Mixed Precision Training, 2018; the levels are those of apex.amp.

    >>> O2.with_half(torch.bfloat16).compute
    torch.bfloat16
    >>> Policy.parse("params=f32, compute=bf16, output=f32") == O2.with_half(torch.bfloat16)
    True
    """

    params: torch.dtype | None = None
    compute: torch.dtype | None = None
    output: torch.dtype | None = None
    ops: OpTable | None = None
    keep: tuple[str, ...] = ()
    low: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("params", "compute", "output"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _DTYPES.values():
                raise TypeError(
                    f"Policy({name}=...): expected torch.float32, torch.float16, torch.bfloat16 or None, "
                    f"found {dtype!r}"
                )
        if self.ops is not None and self.low is None:
            object.__setattr__(self, "low", torch.float16)
        if self.low is not None and (self.ops is None or self.low not in HALVES):
            raise TypeError(
                f"Policy(low=...): expected torch.float16 or torch.bfloat16 together with a table, Policy(ops=table, "
                f"low=...), found low={self.low!r} and ops={self.ops!r}"
            )
        if isinstance(self.keep, str):
            raise TypeError(
                f"Policy(keep=...): expected a tuple of patterns, found the string {self.keep!r}; "
                f"write keep=({self.keep!r},)"
            )
        object.__setattr__(self, "keep", tuple(self.keep))
        for pattern in self.keep:
            if not isinstance(pattern, str):
                raise TypeError(
                    f"Policy(keep=...): expected patterns, found {pattern!r} of type {type(pattern).__name__}"
                )
            if not pattern or pattern != pattern.strip() or "," in pattern or "|" in pattern:
                raise ValueError(
                    f"Policy(keep=...): found {pattern!r}: a pattern is not empty and has no comma, no | and no space "
                    "around it (they separate patterns in a policy's string); write * for such a character"
                )

    def replace(self, **changes: Any) -> Policy:
        """Return a copy with some fields changed; without ``ops`` there is no ``low``.

        >>> O2.replace(keep=("*.norm.*",)).keep
        ('*.norm.*',)
        """
        if changes.get("ops", self.ops) is None:
            changes.setdefault("low", None)
        return replace(self, **changes)

    def with_half(self, dtype: torch.dtype) -> Policy:
        """Return a copy whose float16 and bfloat16 fields are ``dtype``.

        >>> str(O3.with_half(torch.bfloat16))
        'params=bfloat16, compute=bfloat16, output=float32'
        >>> str(O1.with_half(torch.bfloat16))
        'output=float32, ops=apex, low=bfloat16'
        """
        if dtype not in HALVES:
            raise TypeError(f"with_half: expected torch.float16 or torch.bfloat16, found {dtype!r}")
        fields = ("params", "compute", "output", "low")
        return replace(self, **{name: dtype for name in fields if getattr(self, name) in HALVES})

    def cast_params(self, tree: Any) -> Any:
        """Cast the float32 and half leaves of a parameter tree to the storage dtype, ``keep`` leaves to float32.

        >>> O3.cast_params({"weight": torch.ones(2)})["weight"].dtype
        torch.float16
        """
        check_patterns(self.keep, keep_candidates(tree), "Policy.keep")
        return cast_tree(tree, self.params, self.keep)

    def __str__(self) -> str:
        dtypes = {"params": self.params, "compute": self.compute, "output": self.output}
        parts = [f"{name}={str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items() if dtype]
        parts += [f"ops={self.ops.name}", f"low={str(self.low).removeprefix('torch.')}"] if self.ops is not None else []
        parts += [f"keep={'|'.join(self.keep)}"] if self.keep else []
        return ", ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy back from its string; ``Policy.parse(str(policy)) == policy``.

        Dtypes may be written short (f32, f16, bf16); patterns of ``keep`` are separated by ``|``; tables by name.

        Raises:
            TypeError: not a string.
            ValueError: an unknown key, dtype or table; the message lists the known ones.

        >>> Policy.parse("compute=f16, keep=*.norm.*|head.*").keep
        ('*.norm.*', 'head.*')
        """
        if not isinstance(text, str):
            raise TypeError(f"Policy.parse: expected a string, found {text!r} of type {type(text).__name__}")
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in values or not equals or not value:
                raise ValueError(f"Policy.parse({text!r}): expected `key=value` once each, found {part!r}")
            if key in ("params", "compute", "output", "low"):
                value = _SHORT.get(value, value)
                if value != "None" and value not in _DTYPES:
                    raise ValueError(f"Policy.parse({text!r}): unknown dtype {value!r}; known: {[*_DTYPES, *_SHORT]}")
                values[key] = _DTYPES.get(value)
            elif key == "ops":
                values[key] = table_named(value)
            elif key == "keep":
                values[key] = tuple(pattern.strip() for pattern in value.split("|"))
            else:
                known = "params, compute, output, ops, low, keep"
                raise ValueError(f"Policy.parse({text!r}): unknown key {key!r}; known: {known}")
        return cls(**values)


O0 = Policy(torch.float32, torch.float32, torch.float32)
O1 = Policy(None, None, torch.float32, ops=APEX_OPS)
O2 = Policy(torch.float32, torch.float16, torch.float32)
O3 = Policy(torch.float16, torch.float16, torch.float32)


def cast_tree(tree: Any, dtype: torch.dtype | None, keep: tuple[str, ...] = ()) -> Any:
    """Cast the float32, float16 and bfloat16 leaves of a tree; leaves whose path matches ``keep`` become float32.

    Leaves that already fit are returned as they are. Buffers of ``functionalize``, other dtypes and other
    objects pass untouched, and containers keep their type.
    """
    if dtype is None:
        return tree
    leaves, treedef = tree_flatten(tree, _is_unit)
    paths = tree_paths(tree, _is_unit) if keep else [""] * len(leaves)
    return tree_unflatten(treedef, [_cast_unit(u, p, dtype, keep) for u, p in zip(leaves, paths, strict=True)])


def keep_candidates(tree: Any) -> list[str]:
    """Return the paths that a ``keep`` pattern can match in a tree; those of a FlatTree are its layout's."""
    paths: list[str] = []
    units = tree_flatten(tree, _is_unit)[0]
    for path, unit in zip(tree_paths(tree, _is_unit), units, strict=True):
        paths += unit.layout.paths if isinstance(unit, FlatTree) else [path]
    return paths


def batch_norm_paths(module: nn.Module) -> tuple[str, ...]:
    """Return ``keep`` patterns for the affine batch-norm layers of a module (apex's keep_batchnorm_fp32).

    >>> batch_norm_paths(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ('1.*',)
    """
    norms = (nn.modules.batchnorm._BatchNorm,)
    names = [name for name, child in module.named_modules() if isinstance(child, norms) and child.affine]
    return tuple(f"{name}.*" if name else "*" for name in names)


def _is_unit(node: Any) -> bool:
    return isinstance(node, (FlatTree, Buffers))


def _cast_unit(unit: Any, path: str, dtype: torch.dtype, keep: tuple[str, ...]) -> Any:
    if isinstance(unit, FlatTree):
        return unit.cast(dtype, keep)
    if isinstance(unit, Tensor) and unit.dtype in _DTYPES.values():
        return unit.to(torch.float32 if any(matches(path, pattern) for pattern in keep) else dtype)
    return unit
