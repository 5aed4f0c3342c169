"""nn.Module to pure function: ``apply(params, buffers, *args) -> (output, new_buffers)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

__all__ = ["Apply", "Buffers", "Functionalized", "functionalize"]


class Buffers(dict[str, Any]):
    """The buffers of a module by name: a dictionary that ``cast`` and ``cast_policy`` leave alone.

    >>> type(functionalize(torch.nn.BatchNorm1d(2)).buffers).__name__
    'Buffers'
    """


def _with_keys(buffers: Buffers) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(torch_pytree.MappingKey(name), value) for name, value in buffers.items()], tuple(buffers)


torch_pytree.register_pytree_node(
    Buffers,
    lambda buffers: (list(buffers.values()), tuple(buffers)),
    lambda values, names: Buffers(zip(names, values, strict=True)),
    serialized_type_name="npuamp_fn.modules.Buffers",
    flatten_with_keys_fn=_with_keys,
)


@dataclass(frozen=True)
class Apply:
    """A module as a function of its parameters and buffers; see :func:`functionalize`.

    Whether it runs in training or evaluation mode is read from the module at each call.
    """

    module: nn.Module

    def __call__(self, params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Buffers]:
        """Run the module; buffers are cloned, and what it made of them is returned.

        Raises:
            TypeError: ``params`` or ``buffers`` are no dictionaries, a FlatTree say.
            ValueError: ``params`` or ``buffers`` lack a name, or have one too many: the module's own tensors are
                never used in silence.
            RuntimeError: the module updates unbatched buffers under vmap; the message gives three ways out.
        """
        for what, tree in (("params", params), ("buffers", buffers)):
            if not hasattr(tree, "keys"):
                raise TypeError(_kind_advice(what, tree))
        tensors = {**params, **{name: value.clone() for name, value in buffers.items()}}
        try:
            output = torch.func.functional_call(self.module, tensors, args, kwargs, strict=True)
        except RuntimeError as error:
            text = str(error)
            if "vmap" in text and any(phrase in text for phrase in ("in-place", "in place", "out-of-place")):
                raise RuntimeError(_VMAP_ADVICE) from error
            if text.startswith("Error(s) in reparametrizing"):
                raise ValueError(_names_advice(self.module, params, buffers)) from error
            raise
        # functional_call puts what the module assigned to its attributes back into the dictionary.
        return output, Buffers((name, tensors[name]) for name in buffers)


_VMAP_ADVICE = (
    "the module updates a buffer in place with a value that has a vmap dimension the buffer lacks (BatchNorm's "
    "running statistics, usually). Give each member its own buffers (vmap with in_dims=0 for `buffers`), or run the "
    "module in .eval(), or call torch.func.replace_all_batch_norm_modules_(module) before functionalize."
)


def _kind_advice(what: str, tree: Any) -> str:
    advice = f"; write {what}.unflatten()" if hasattr(tree, "unflatten") else ""
    return f"apply: {what}: expected a dictionary like that of functionalize, found a {type(tree).__name__}{advice}"


def _names_advice(module: nn.Module, params: Any, buffers: Any) -> str:
    own = functionalize(module)
    problems = []
    for what, expected, given in (("params", own.params, params), ("buffers", own.buffers, buffers)):
        problems += [f"{what} lack `{name}`" for name in expected if name not in given]
        problems += [f"{what} have an unexpected `{name}`" for name in given if name not in expected]
    advice = "pass all that functionalize returned; merge parts first: {**frozen, **trained}"
    return f"apply: {'; '.join(problems)}: {advice}"


class Functionalized(NamedTuple):
    """What :func:`functionalize` returns."""

    apply: Apply
    params: dict[str, Tensor]  # detached, each tied weight once
    buffers: Buffers


_HOOKED = ("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")


def functionalize(module: nn.Module) -> Functionalized:
    """Split a module into a pure function, its parameters and its buffers.

    Parameters and buffers are detached and share storage with the module; tied weights appear once, under
    their first name. ``apply`` never mutates the buffers it is given: it returns new ones. On a skipped step
    keep the old ones with ``tree_where(out.finite, new, old)``.

    Args:
        module: Any module; it is not changed.

    Returns:
        ``(apply, params, buffers)`` with ``apply(params, buffers, *args, **kwargs) -> (output, new_buffers)``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or one that averages gradients by hooks on them (DDP, FSDP):
            gradients taken functionally would not be averaged.

    >>> apply, params, buffers = functionalize(torch.nn.Linear(2, 1))
    >>> out, _ = apply(params, buffers, torch.ones(3, 2))
    >>> sorted(params), out.shape
    (['bias', 'weight'], torch.Size([3, 1]))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functionalize: expected an nn.Module, found {type(module).__name__}")
    for name, child in module.named_modules():
        if any(cls.__name__ in _HOOKED and cls.__module__.startswith("torch.") for cls in type(child).__mro__):
            where = f"`{name}`" if name else "the module"
            raise TypeError(
                f"functionalize: {where} is a {type(child).__name__}, whose hooks do not run for functional gradients: "
                "ranks would silently go apart. Pass the module inside it (`ddp.module`), and write "
                "with_loss_scaling(grad(loss_fn), reduce=mean_over(group))"
            )
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    buffers = Buffers((name, buffer.detach()) for name, buffer in module.named_buffers())
    return Functionalized(Apply(module), params, buffers)
