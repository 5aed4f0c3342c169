"""The composition matrix: every transform under every level, eager and compiled, against plain torch.

The table in docs/compatibility.md is written from these cases by ``make compatibility``.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, jvp, vmap

from npuamp_fn import (
    O0,
    O1,
    O2,
    O3,
    DynamicLossScale,
    accumulate,
    cast_policy,
    flatten,
    functionalize,
    fused_update,
    grad,
    grad_and_value,
    optim,
    remat,
    scaled_grad,
    with_loss_scaling,
)

LEVELS = {
    "O0": O0,
    "O1": O1,
    "O1 bfloat16": O1.with_half(torch.bfloat16),
    "O2": O2,
    "O2 bfloat16": O2.with_half(torch.bfloat16),
    "O3": O3,
}


class Problem:
    """A small network, its data, and the loss under a policy, ours and written out by hand."""

    def __init__(self, policy):
        torch.manual_seed(0)
        self.policy = policy
        self.module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.apply, params, self.buffers = functionalize(self.module)
        self.params = policy.cast_params(params)
        self.x, self.y = torch.randn(3, 5, 4), torch.randn(3, 5, 1)

    def loss(self, wrap=lambda fn: fn):
        forward = cast_policy(self.policy)(wrap(lambda params, x: self.apply(params, self.buffers, x)[0]))
        return lambda params, x, y: ((forward(params, x) - y) ** 2).mean()

    def expected_loss(self, params, x, y):
        half = self.policy.compute or self.policy.low  # this network has nothing that O1 runs in float32
        params = {name: value.to(half) for name, value in params.items()}
        return ((functional_call(self.module, params, (x.to(half),)).float() - y) ** 2).mean()


def stack_members(params):
    return {name: torch.stack([value, value * 1.5, value * 0.5]) for name, value in params.items()}


SCALE = 2.0**6  # a power of two: scaling and unscaling change nothing unless a half gradient leaves its range


# Each case: what it shows -> (function of a problem returning (ours, expected) callables, and their arguments).
def case_grad(p):
    return grad(p.loss()), torch.func.grad(p.expected_loss), (p.params, p.x[0], p.y[0])


def case_grad_and_value(p):
    return grad_and_value(p.loss()), torch.func.grad_and_value(p.expected_loss), (p.params, p.x[0], p.y[0])


def case_vmap_grad(p):
    ours, plain = (vmap(g, in_dims=(None, 0, 0)) for g in (grad(p.loss()), torch.func.grad(p.expected_loss)))
    return ours, plain, (p.params, p.x, p.y)


def case_ensemble(p):
    ours, plain = (vmap(g, in_dims=(0, None, None)) for g in (grad(p.loss()), torch.func.grad(p.expected_loss)))
    return ours, plain, (stack_members(p.params), p.x[0], p.y[0])


def case_jvp(p):
    def push(loss):
        return lambda params, x, y: jvp(lambda q: loss(q, x, y), (params,), (params,))

    return push(p.loss()), push(p.expected_loss), (p.params, p.x[0], p.y[0])


def case_jacrev(p):
    return jacrev(p.loss(), argnums=1), jacrev(p.expected_loss, argnums=1), (p.params, p.x[0], p.y[0])


def case_jacrev_of_grad(p):
    ours, plain = (jacrev(g, argnums=1) for g in (grad(p.loss()), torch.func.grad(p.expected_loss)))
    return ours, plain, (p.params, p.x[0], p.y[0])


def case_second_order(p):
    def penalty(gradient, loss):
        def total(params, x, y):
            return loss(params, x, y) + (gradient(loss, argnums=1)(params, x, y) ** 2).sum()

        return gradient(total)

    return penalty(grad, p.loss()), penalty(torch.func.grad, p.expected_loss), (p.params, p.x[0], p.y[0])


def case_functional_call(p):
    forward = cast_policy(p.policy)(lambda params, x: functional_call(p.module, params, (x,)))

    def loss(params, x, y):
        return ((forward(params, x) - y) ** 2).mean()

    return grad(loss), torch.func.grad(p.expected_loss), (p.params, p.x[0], p.y[0])


def case_remat(p):
    return grad(p.loss(remat)), torch.func.grad(p.expected_loss), (p.params, p.x[0], p.y[0])


def case_vmap_remat(p):
    ours, plain = (vmap(g, in_dims=(None, 0, 0)) for g in (grad(p.loss(remat)), torch.func.grad(p.expected_loss)))
    return ours, plain, (p.params, p.x, p.y)


def plain_float32(gradient):
    def run(*args):
        return {name: value.float() for name, value in gradient(*args).items()}

    return run


def expected_scaled(p):
    def loss(params, x, y):
        return p.expected_loss(params, x, y) * SCALE

    def run(*args):
        return {name: value.float() / SCALE for name, value in torch.func.grad(loss)(*args).items()}

    return run


def case_loss_scaling(p):
    step = with_loss_scaling(grad(p.loss()))

    def ours(*args):
        return step(DynamicLossScale.create(SCALE), *args).grads

    return ours, expected_scaled(p), (p.params, p.x[0], p.y[0])


def case_torch_func_grad(p):
    step = with_loss_scaling(torch.func.grad(p.loss()))

    def ours(*args):
        return step(DynamicLossScale.create(SCALE), *args).grads

    return ours, expected_scaled(p), (p.params, p.x[0], p.y[0])


def case_vmap_loss_scaling(p):
    step = with_loss_scaling(grad(p.loss()))

    def ours(*args):
        return vmap(step, in_dims=(None, 0, None, None))(DynamicLossScale.create(SCALE), *args).grads

    plain = vmap(expected_scaled(p), in_dims=(0, None, None))
    return ours, plain, (stack_members(p.params), p.x[0], p.y[0])


def case_scaled_grad(p):
    step = scaled_grad(p.loss())

    def ours(*args):
        return vmap(lambda *a: step(SCALE, *a).grads, in_dims=(None, 0, 0))(*args)

    return ours, vmap(expected_scaled(p), in_dims=(None, 0, 0)), (p.params, p.x, p.y)


def case_accumulate(p):
    step = with_loss_scaling(accumulate(grad(p.loss()), 3))

    def ours(*args):
        return step(DynamicLossScale.create(SCALE), *args).grads

    def plain(params, x, y):
        parts = [expected_scaled(p)(params, x[i], y[i]) for i in range(len(x))]
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}

    return ours, plain, (p.params, p.x, p.y)


def case_flat(p):
    def ours(params, x, y):
        loss = p.loss()
        return grad(lambda flat: loss(flat.unflatten(), x, y))(flatten(params)).unflatten()

    return ours, torch.func.grad(p.expected_loss), (p.params, p.x[0], p.y[0])


def case_update(p):
    opt = fused_update(optim.sgd(0.1))
    step = with_loss_scaling(grad(lambda flat, x, y: p.loss()(flat.unflatten(), x, y)), defer_unscale=True)

    def ours(params, x, y):
        flat = flatten(params)
        out = step(DynamicLossScale.create(SCALE), flat, x, y)
        return opt.update(out, opt.init(flat), flat)[0].unflatten()

    def plain(params, x, y):
        gradients = expected_scaled(p)(params, x, y)
        return {name: (value.float() - 0.1 * gradients[name]).to(value.dtype) for name, value in params.items()}

    return ours, plain, (p.params, p.x[0], p.y[0])


def case_vmap_update(p):
    ours, plain, args = case_update(p)
    axes = (0, None, None)
    return vmap(ours, in_dims=axes), vmap(plain, in_dims=axes), (stack_members(p.params), *args[1:])


CASES = {
    "grad": case_grad,
    "grad_and_value": case_grad_and_value,
    "vmap(grad), per-sample gradients": case_vmap_grad,
    "vmap(grad), ensemble": case_ensemble,
    "jvp": case_jvp,
    "jacrev": case_jacrev,
    "jacrev(grad)": case_jacrev_of_grad,
    "grad of a gradient penalty": case_second_order,
    "functional_call": case_functional_call,
    "remat": case_remat,
    "vmap(grad(remat))": case_vmap_remat,
    "with_loss_scaling(grad)": case_loss_scaling,
    "with_loss_scaling(torch.func.grad)": case_torch_func_grad,
    "vmap(with_loss_scaling(grad))": case_vmap_loss_scaling,
    "vmap(scaled_grad)": case_scaled_grad,
    "with_loss_scaling(accumulate(grad))": case_accumulate,
    "grad of a FlatTree": case_flat,
    "fused_update": case_update,
    "vmap(whole step)": case_vmap_update,
}


def tolerance(policy):
    # Both sides do the same half operations; only the order of sums differs.
    dtype = policy.compute or policy.low
    half = dtype in (torch.float16, torch.bfloat16)
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4} if half else {"rtol": 1e-5, "atol": 1e-6}


def columns():
    for level in LEVELS:
        yield level, "eager"
        if level in ("O1", "O2", "O3"):
            yield level, "compiled"


@pytest.mark.parametrize(("level", "how"), list(columns()))
@pytest.mark.parametrize("case", CASES)
def test_composes(case, level, how):
    problem = Problem(LEVELS[level])
    ours, expected, args = CASES[case](problem)
    if how == "compiled":
        torch._dynamo.reset()  # functions made by one transform share a code object, and Dynamo's limit of versions
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(ours(*args), expected(*args), **tolerance(problem.policy))


REFUSED = {
    "with_loss_scaling(vmap(grad))": lambda p: with_loss_scaling(vmap(grad(p.loss()))),
    "with_loss_scaling(jacrev)": lambda p: with_loss_scaling(jacrev(p.loss())),
    "with_loss_scaling(torch.compile(grad))": lambda p: with_loss_scaling(torch.compile(grad(p.loss()))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_could_not_be_scaled(case):
    with pytest.raises(TypeError, match=r"not a gradient function[\s\S]*vmap\(with_loss_scaling\(grad"):
        REFUSED[case](Problem(O2))
