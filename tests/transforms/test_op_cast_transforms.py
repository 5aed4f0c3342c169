"""O1 under grad, vmap, jvp, compile, export, functional_call and remat equals the plain loop, dtypes included."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev, jvp, vmap

from npuamp_fn import (
    APEX_OPS,
    O1,
    DynamicLossScale,
    cast_ops,
    cast_policy,
    functionalize,
    grad,
    remat,
    with_loss_scaling,
)

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
LOWS = [HALF, BF16]


class Net(nn.Module):
    """One operation of every kind: low, full, promote, untouched, in place, operators."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.dtypes = []

    def forward(self, x):
        h = self.inp(x)
        n = self.norm(h)
        a = (n @ n.mT).softmax(-1) @ h
        y = self.out(torch.relu(a) + n) ** 2
        self.dtypes = [v.dtype for v in (h, n, a, y, 2 - h, 1 / h, h * n, torch.cat([h, n], -1))]
        return y


def by_hand(params, x, low):
    """The same network with every cast written out."""
    h = F.linear(x.to(low), params["inp.weight"].to(low), params["inp.bias"].to(low))
    n = F.layer_norm(h.float(), (8,), params["norm.weight"], params["norm.bias"])
    attention = (n.to(low) @ n.mT.to(low)).float().softmax(-1)
    a = attention.to(low) @ h
    y = F.linear((torch.relu(a).float() + n).to(low), params["out.weight"].to(low), params["out.bias"].to(low))
    return y.float() ** 2


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = Net()
    apply, params, buffers = functionalize(net)
    return net, lambda p, x: apply(p, buffers, x)[0], params, torch.randn(3, 5, 4)


def check(ours, expected, low):
    """Equal up to the order of sums in half precision, and equal in dtype."""
    eps = torch.finfo(low).eps
    torch.testing.assert_close(ours, expected, rtol=4 * eps, atol=4 * eps)


DTYPES = {low: [low, FULL, low, FULL, low, FULL, FULL, FULL] for low in LOWS}


@pytest.mark.parametrize("low", LOWS)
def test_the_forward_pass_is_the_one_with_every_cast_written_out(problem, low):
    net, forward, params, x = problem
    assert torch.equal(cast_ops(APEX_OPS, low)(forward)(params, x), by_hand(params, x, low))
    assert net.dtypes == DTYPES[low]


@pytest.mark.parametrize("low", LOWS)
def test_grad(problem, low):
    net, forward, params, x = problem
    ours = grad(lambda p: cast_ops(APEX_OPS, low)(forward)(p, x[0]).mean())(params)
    check(ours, torch.func.grad(lambda p: by_hand(p, x[0], low).mean())(params), low)
    assert {g.dtype for g in ours.values()} == {FULL}
    assert net.dtypes == DTYPES[low]


@pytest.mark.parametrize("low", LOWS)
def test_vmap_equals_the_loop_and_keeps_the_casts(problem, low):
    net, forward, params, x = problem
    fn = cast_ops(APEX_OPS, low)(forward)
    ours = vmap(fn, in_dims=(None, 0))(params, x)
    assert net.dtypes == DTYPES[low]
    check(ours, torch.stack([by_hand(params, item, low) for item in x]), low)


@pytest.mark.parametrize("low", LOWS)
def test_per_sample_gradients_equal_the_loop(problem, low):
    net, forward, params, x = problem
    gradient = grad(lambda p, x: cast_policy(O1.with_half(low))(forward)(p, x).mean())
    ours = vmap(gradient, in_dims=(None, 0))(params, x)
    assert net.dtypes == DTYPES[low]
    loop = [torch.func.grad(lambda p, item=item: by_hand(p, item, low).mean())(params) for item in x]
    check(ours, {name: torch.stack([g[name] for g in loop]) for name in params}, low)


def test_an_ensemble_equals_the_loop(problem):
    _, forward, params, x = problem
    stacked = {name: torch.stack([value, value * 0.5]) for name, value in params.items()}
    gradient = grad(lambda p, x: cast_ops(APEX_OPS, HALF)(forward)(p, x).mean())
    ours = vmap(gradient, in_dims=(0, None))(stacked, x[0])
    for member, factor in enumerate((1.0, 0.5)):
        single = {name: value * factor for name, value in params.items()}
        expected = torch.func.grad(lambda p: by_hand(p, x[0], HALF).mean())(single)
        check({name: value[member] for name, value in ours.items()}, expected, HALF)


def test_jvp_and_jacrev(problem):
    _, forward, params, x = problem
    fn = cast_ops(APEX_OPS, HALF)(forward)
    ours = jvp(lambda x: fn(params, x), (x[0],), (x[1],))
    check(ours, jvp(lambda x: by_hand(params, x, HALF), (x[0],), (x[1],)), HALF)
    assert ours[1].dtype == FULL
    jacobian = jacrev(lambda x: fn(params, x))(x[0, :2])
    check(jacobian, jacrev(lambda x: by_hand(params, x, HALF))(x[0, :2]), HALF)


def test_functional_call_with_other_parameters(problem):
    net, _, params, x = problem
    half_size = {name: value * 0.5 for name, value in params.items()}
    out = cast_ops(APEX_OPS, HALF)(lambda p, x: functional_call(net, p, (x,)))(half_size, x)
    assert torch.equal(out, by_hand(half_size, x, HALF))


def test_loss_scaling_around_o1(problem):
    _, forward, params, x = problem

    def loss(p):
        return cast_policy(O1)(forward)(p, x).mean()

    out = with_loss_scaling(grad(loss))(DynamicLossScale.create(2.0**10), params)
    check(out.grads, torch.func.grad(lambda p: by_hand(p, x, HALF).mean())(params), HALF)
    assert bool(out.finite)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: vmap(f, in_dims=(None, 0))])
def test_remat_recomputes_under_the_casts(problem, transform):
    net, forward, params, x = problem
    block = remat(forward)

    def both(forward):
        return transform(grad(lambda p, x: cast_ops(APEX_OPS, HALF)(lambda p, x: forward(p, x))(p, x).mean()))

    ours, expected = both(block)(params, x), both(forward)(params, x)
    assert net.dtypes == DTYPES[HALF]
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name


def test_torch_autocast_loses_the_cast_under_vmap_and_o1_does_not():
    """pytorch#192617: under vmap, nn.Linear inside torch.autocast gives float32."""
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)

    def autocast(x):
        with torch.autocast("cpu", dtype=BF16):
            return linear(x)

    ours = cast_ops(APEX_OPS, BF16)(linear)
    assert autocast(x).dtype == ours(x).dtype == BF16
    batched = vmap(ours)(x)
    assert vmap(autocast)(x).dtype == FULL
    assert batched.dtype == BF16
    torch.testing.assert_close(batched, torch.stack([autocast(item) for item in x]), rtol=1e-2, atol=1e-2)


# --- compile and export ----------------------------------------------------------------------------------------------


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("low", LOWS)
def test_compiled_equals_eager_bitwise_with_the_scope_inside_or_outside(problem, low):
    net, forward, params, x = problem
    fn = cast_ops(APEX_OPS, low)(forward)
    expected = fn(params, x)
    assert torch.equal(compiled(lambda p, x: fn(p, x))(params, x), expected)
    assert net.dtypes == DTYPES[low]
    assert torch.equal(cast_ops(APEX_OPS, low)(compiled(forward))(params, x), expected)


def test_gradients_through_a_compiled_function_equal_eager(problem):
    net, _, _, x = problem
    fn = cast_ops(APEX_OPS, HALF)(net)
    for run in (fn, compiled(lambda x: fn(x))):
        net.zero_grad()
        run(x).mean().backward()
        gradients = [p.grad for p in net.parameters()]
        if run is fn:
            expected = gradients
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)


def operators(x, y):
    z = y.clone()
    z **= 2
    outs = [x @ y, x + y, 1 + y, y - x, 2 - y, x * y, y / x, 2 / y, x**2, y**2, 2**y, z, x == y, x < y, x >= y]
    return [*outs, F.linear(x, y), torch.bmm(x[None], y[None]), y.exp(), torch.cat([x, y]), torch.einsum("ij,jk", x, y)]


# Strict export says so of every function mode that a model enters.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_every_operator_has_the_same_dtype_eager_compiled_and_exported():
    class Operators(nn.Module):
        def forward(self, x, y):
            return operators(x, y)

    x, y = torch.rand(2, 2) + 0.5, (torch.rand(2, 2) + 0.5).half()
    fn = cast_ops(APEX_OPS, HALF)(operators)
    eager = fn(x, y)
    dtypes = [out.dtype for out in eager]
    assert dtypes[:12] == [HALF, FULL, HALF, FULL, HALF, FULL, FULL, FULL, FULL, FULL, FULL, FULL]
    assert dtypes[12:] == [torch.bool] * 3 + [HALF, HALF, FULL, FULL, HALF]
    again = compiled(lambda x, y: fn(x, y))(x, y)
    assert [out.dtype for out in again] == dtypes
    torch.testing.assert_close(again, eager)

    class Wrapped(nn.Module):
        def forward(self, x, y):
            return fn(x, y)

    for strict in (True, False):
        exported = torch.export.export(Wrapped(), (x, y), strict=strict).module()(x, y)
        assert [out.dtype for out in exported] == dtypes, strict


def test_a_compiled_function_is_recompiled_for_another_table_and_not_for_the_same(problem):
    _, forward, params, x = problem
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    torch._dynamo.reset()
    run = torch.compile(lambda fn, p, x: fn(p, x), fullgraph=True, backend=backend)
    for table, count in ((APEX_OPS, 1), (APEX_OPS, 1), (APEX_OPS.full("linear"), 2), (APEX_OPS, 2)):
        fn = cast_ops(table, HALF)(forward)
        assert torch.equal(run(fn, params, x), fn(params, x))
        assert len(graphs) == count
