"""torch's fused Adam operators as a kernel: one read and one write per tensor, whole lists at once."""

from __future__ import annotations

import torch
from torch import Tensor

from npuamp_fn.kernels.rule import Item, Result, Rule, Step
from npuamp_fn.tracing import under_transform

__all__ = ["refusal", "run"]

# The in-place operators of ATen cannot be traced; an operator of our own that says what it mutates can.
_library = torch.library.Library("npuamp_fn", "DEF")
_library.define(
    "fused_adam_(str name, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor count, Tensor lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool amsgrad, bool maximize, Tensor? found_inf) -> ()"
)
_OPERATORS = {"adam": torch.ops.aten._fused_adam_, "adamw": torch.ops.aten._fused_adamw_}


def _fused_adam(
    name: str,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    count: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    found_inf: Tensor | None,
) -> None:
    if not params:
        return
    _OPERATORS[name](
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        [count] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        grad_scale=None,  # with it the operator would write the unscaled gradients back
        found_inf=found_inf,
    )


_library.impl("fused_adam_", _fused_adam, "CompositeExplicitAutograd")
_library.impl("fused_adam_", lambda *args: None, "Meta")


def refusal(rule: Rule, items: list[Item]) -> str | None:
    """Say why this kernel cannot run an update, or return ``None`` if it can."""
    if rule.aten is None:
        return f"torch has no fused operator for {rule.name}"
    for item in items:
        weights = item.weights
        device = weights.device.type
        if device not in ("cpu", "cuda"):
            return f"`{item.path}` is on {device}, and torch's fused operators serve CPU and CUDA"
        if weights.dtype not in (torch.float32, torch.float64):
            return f"`{item.path}` is {weights.dtype} without master weights"
        if weights.is_complex():
            return f"`{item.path}` is complex"
        vectors = [item.count, item.finite, *item.hyper.values()]
        if any(isinstance(value, Tensor) and value.dim() > 0 for value in vectors):
            return "hyper-parameters, counts or activity differ between tensors"
        numbers = [value for name, value in item.hyper.items() if name != "lr"]
        if any(isinstance(value, Tensor) for value in numbers):
            return "a hyper-parameter beside lr is a tensor"
    if under_transform() and not torch.compiler.is_compiling():
        return "torch's fused operators have no rule for functorch transforms"
    return None


def run(step: Step, items: list[Item]) -> list[Result]:
    """Update all items; where ``finite`` is False nothing changes, bit for bit."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault((item.grad.device, (item.param if item.master is None else item.master).dtype), []).append(
            index
        )
    results: list[Result | None] = [None] * len(items)
    for indices in groups.values():
        group = _run_group(step, [items[index] for index in indices])
        for index, result in zip(indices, group, strict=True):
            results[index] = result
    return [result for result in results if result is not None]


def _run_group(step: Step, items: list[Item]) -> list[Result]:
    own = (lambda t: t) if step.donate else torch.clone
    weights = [own(item.weights) for item in items]
    slots = {slot.name: [own(item.slots[slot.name]) for item in items] for slot in step.rule.slots}
    first, like = items[0], weights[0]
    hyper = first.hyper
    lr = hyper["lr"]
    torch.ops.npuamp_fn.fused_adam_(
        step.rule.aten,
        weights,
        [_gradient(item.grad, like.dtype, step.factor) for item in items],
        slots["exp_avg"],
        slots["exp_avg_sq"],
        slots.get("max_exp_avg_sq", []),
        first.count.to(torch.float32),
        lr if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float64),
        hyper["beta1"],
        hyper["beta2"],
        hyper["eps"],
        hyper["weight_decay"],
        hyper["amsgrad"],
        hyper["maximize"],
        None if first.finite is None else (~first.finite).to(torch.float32),
    )
    results = []
    for index, item in enumerate(items):
        own_slots = {name: tensors[index] for name, tensors in slots.items()}
        if item.master is None:
            results.append(Result(weights[index], own_slots, None))
            continue
        half = item.param.copy_(weights[index]) if step.donate else weights[index].to(item.param.dtype)
        results.append(Result(half, own_slots, weights[index]))
    return results


def _gradient(grad: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    grad = grad.to(dtype)
    return grad if factor is None else grad * factor.to(dtype)
