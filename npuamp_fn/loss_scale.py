"""Loss scales: what the loss is multiplied by, and how that adapts to overflow."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from npuamp_fn.tree import (
    check_same_structure,
    is_float,
    struct,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "ScaledGrads",
    "StaticLossScale",
    "all_finite",
    "global_norm",
    "to_float32",
    "tree_where",
]


@struct
class NoOpLossScale:
    """Do not scale: for float32 and bfloat16.

    >>> NoOpLossScale.create().scale(torch.tensor(3.0))
    tensor(3.)
    """

    @classmethod
    def create(cls) -> NoOpLossScale:
        """Return the loss scale that changes nothing."""
        return cls()

    @property
    def value(self) -> Tensor:
        """The scale, 1: shape [], float32."""
        return torch.ones((), dtype=torch.float32)

    def scale(self, x: Any) -> Any:
        """Return the tree as it is."""
        return x

    def unscale(self, tree: Any) -> Any:
        """Return the float leaves of a tree as float32 (float64 stays)."""
        return to_float32(tree)

    def adjust(self, finite: Tensor) -> NoOpLossScale:
        """Return this loss scale."""
        del finite
        return self


@struct
class StaticLossScale:
    """Multiply the loss by a constant.

    >>> StaticLossScale.create(128.0).scale(torch.tensor(2.0))
    tensor(256.)
    """

    value: Tensor  # shape=[], dtype=float32

    @classmethod
    def create(cls, value: float, *, device: torch.device | str | None = None) -> StaticLossScale:
        """Make a constant loss scale; powers of two scale and unscale exactly.

        Raises:
            ValueError: ``value`` is not positive, or float32 cannot hold it and its reciprocal.
        """
        _check_scale("StaticLossScale", "value", value)
        return cls(torch.tensor(float(value), dtype=torch.float32, device=device))

    def scale(self, x: Any) -> Any:
        """Multiply the float leaves of a tree by the scale, in float32."""
        return _multiply(x, self.value)

    def unscale(self, tree: Any) -> Any:
        """Divide the float leaves of a tree by the scale; they become float32."""
        return _multiply(tree, self.value.reciprocal())

    def adjust(self, finite: Tensor) -> StaticLossScale:
        """Return this loss scale: a constant does not react to overflow."""
        del finite
        return self


@struct(static=("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale"))
class DynamicLossScale:
    """Multiply the loss by a scale that falls on overflow and grows after ``growth_interval`` clean steps.

    On overflow: ``value = max(value * backoff_factor, min_scale)``, once the countdown of ``hysteresis``
    overflows has reached 0. After ``growth_interval`` clean steps in a row:
    ``value = min(value * growth_factor, max_scale)``, and the countdown is refilled.

    Everything that changes is a tensor, so nothing synchronises and nothing recompiles; ``vmap`` over it gives
    an ensemble with one scale per member.

    Source: Micikevicius et al., Mixed Precision Training, 2018; hysteresis as in Megatron-LM, 2019.

    >>> DynamicLossScale.create(4.0).adjust(torch.tensor(False)).value
    tensor(2.)
    """

    value: Tensor  # shape=[], dtype=float32
    good_steps: Tensor  # shape=[], dtype=int32: clean steps since the last change
    bad_steps_left: Tensor  # shape=[], dtype=int32: overflows left before the scale backs off
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float

    @classmethod
    def create(
        cls,
        init_scale: float = 2.0**15,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        device: torch.device | str | None = None,
    ) -> DynamicLossScale:
        """Make a dynamic loss scale.

        Args:
            init_scale: First value; 2**15 is the largest that a float16 loss survives.
            growth_factor: Multiplies the scale on growth; more than 1.
            backoff_factor: Multiplies the scale on overflow; between 0 and 1.
            growth_interval: Clean steps in a row before the scale grows.
            hysteresis: Overflows tolerated, counting this one, before the scale falls.
            min_scale: Floor of the scale.
            max_scale: Ceiling of the scale.
            device: Where the three tensors live; the parameters' device.

        Raises:
            TypeError: an interval is not an int.
            ValueError: a number is out of its range.
        """
        name = "DynamicLossScale"
        _check_scale(name, "min_scale", min_scale)
        _check_scale(name, "max_scale", max_scale)
        _check_scale(name, "init_scale", init_scale)
        _check_number(name, "growth_factor", growth_factor, low=1.0)
        _check_number(name, "backoff_factor", backoff_factor, low=0.0, high=1.0)
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"{name}: expected min_scale <= init_scale <= max_scale, found {min_scale}, {init_scale}, {max_scale}"
            )
        for field, value in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: {field}: expected an int, found {value!r} of type {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: {field}: expected at least 1, found {value}")
        return cls(
            value=torch.tensor(float(init_scale), dtype=torch.float32, device=device),
            good_steps=torch.zeros((), dtype=torch.int32, device=device),
            bad_steps_left=torch.full((), hysteresis, dtype=torch.int32, device=device),
            growth_factor=float(growth_factor),
            backoff_factor=float(backoff_factor),
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=float(min_scale),
            max_scale=float(max_scale),
        )

    def scale(self, x: Any) -> Any:
        """Multiply the float leaves of a tree by the scale, in float32."""
        return _multiply(x, self.value)

    def unscale(self, tree: Any) -> Any:
        """Divide the float leaves of a tree by the scale; they become float32."""
        return _multiply(tree, self.value.reciprocal())

    def adjust(self, finite: Tensor) -> DynamicLossScale:
        """Return the next loss scale.

        Args:
            finite: shape [], bool: whether all gradients of this step were finite.

        Raises:
            TypeError: ``finite`` is not such a tensor.
        """
        _check_flag("adjust(finite)", finite)
        good = torch.where(finite, self.good_steps + 1, 0)
        bad_left = torch.where(finite, self.bad_steps_left, (self.bad_steps_left - 1).clamp(min=0))
        grow = finite & (good >= self.growth_interval)
        back_off = ~finite & (bad_left == 0)
        grown = (self.value * self.growth_factor).clamp(max=self.max_scale)
        backed = (self.value * self.backoff_factor).clamp(min=self.min_scale)
        return DynamicLossScale(
            value=torch.where(grow, grown, torch.where(back_off, backed, self.value)),
            good_steps=torch.where(grow, 0, good).to(torch.int32),
            bad_steps_left=torch.where(grow, self.hysteresis, bad_left).to(torch.int32),
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale


class ScaledGrads(NamedTuple):
    """Gradients and what loss scaling knows about them; the true gradient is ``grads * inv_scale``.

    >>> out = with_loss_scaling(grad(lambda x: x * x), defer_unscale=True)(
    ...     StaticLossScale.create(4.0), torch.tensor(3.0)
    ... )
    >>> out.grads, out.inv_scale, out.value
    (tensor(24.), tensor(0.2500), tensor(9.))
    """

    grads: Any  # like the differentiated argument; float32 unless deferred; None at non-float leaves
    inv_scale: Tensor  # shape=[], dtype=float32: 1 unless `defer_unscale=True`
    value: Tensor  # shape=[]: the loss, never scaled
    aux: Any  # what the loss function returned beside the loss; () if nothing
    finite: Tensor  # shape=[], dtype=bool: whether every gradient is finite
    loss_scale: Any  # for the next step


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
            low, high = torch.aminmax(leaf)  # one read, NaN is passed on
            extremes += [low, high] if leaf.dtype == torch.float64 else [low.float(), high.float()]
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=_device(tree))
    device = extremes[0].device
    values = torch.stack([value.to(device) for value in extremes])
    return torch.isfinite(values if factor is None else values * factor.to(device)).all()


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
    _check_flag("tree_where(pred)", pred)
    check_same_structure(b, a, "tree_where")
    leaves, treedef = tree_flatten(b)
    others = tree_leaves(a)
    for index, (new, old) in enumerate(zip(others, leaves, strict=True)):
        if _kind(new) != _kind(old):
            raise ValueError(
                f"tree_where: leaf `{tree_paths(b)[index]}`: expected {_describe(old)} in both trees, found "
                f"{_describe(new)} in the first; a select would change the state's shape or dtype"
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
            rows = leaf.reshape(-1, 256) if leaf.numel() % 256 == 0 else leaf.reshape(-1)
            norms.append(torch.linalg.vector_norm(rows.float(), dim=-1).double().square().sum())
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=_device(tree))
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).sum().sqrt().float()


def to_float32(tree: Any) -> Any:
    """Return the tree with float16 and bfloat16 leaves as float32."""
    halves = (torch.float16, torch.bfloat16)
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in halves else x, tree)


def _multiply(tree: Any, factor: Tensor) -> Any:
    return tree_map(lambda x: x * factor.to(x.device) if is_float(x) or _is_complex(x) else x, to_float32(tree))


def _is_complex(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_complex()


def _as_real(leaf: Any) -> Any:
    return torch.view_as_real(leaf.resolve_conj()) if _is_complex(leaf) else leaf


def _check_flag(what: str, flag: Any) -> None:
    if not (isinstance(flag, Tensor) and flag.dtype == torch.bool and flag.dim() == 0):
        raise TypeError(f"{what}: expected a bool tensor of shape (), found {_describe(flag)}")


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _describe(leaf: Any) -> str:
    return f"a {leaf.dtype} tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _device(tree: Any) -> torch.device | None:
    return next((leaf.device for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)


def _check_scale(owner: str, name: str, value: Any) -> None:
    _check_number(owner, name, value, low=0.0)
    if not 2.0**-126 <= value <= 2.0**126:
        raise ValueError(
            f"{owner}: {name}: expected a number from 2**-126 to 2**126, so that it and its reciprocal fit float32, "
            f"found {value!r}"
        )


def _check_number(owner: str, name: str, value: Any, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name}: expected a number, found {value!r} of type {type(value).__name__}")
    if not low < value < high:
        upper = "" if math.isinf(high) else f" and less than {high:g}"
        raise ValueError(f"{owner}: {name}: expected a finite number greater than {low:g}{upper}, found {value!r}")
