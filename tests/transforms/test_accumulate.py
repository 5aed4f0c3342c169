"""Gradient accumulation against one large batch, and what an overflow in it does."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from npuamp_fn import (
    DynamicLossScale,
    accumulate,
    all_finite,
    flatten,
    functionalize,
    fused_update,
    grad,
    grad_and_value,
    optim,
    with_loss_scaling,
)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    apply, params, buffers = functionalize(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)))

    def loss_fn(params, x, y):
        return ((apply(params.unflatten(), buffers, x)[0] - y) ** 2).mean()

    return loss_fn, flatten(params), torch.randn(4, 6, 5), torch.randn(4, 6, 1)


def test_mean_over_micro_batches_is_the_gradient_of_the_large_batch(problem):
    loss_fn, params, x, y = problem
    out = with_loss_scaling(accumulate(grad(loss_fn), 4))(DynamicLossScale.create(), params, x, y)
    expected, value = torch.func.grad_and_value(loss_fn)(params, x.flatten(0, 1), y.flatten(0, 1))
    torch.testing.assert_close(out.grads.buffers[0], expected.buffers[0])
    torch.testing.assert_close(out.value, value)
    assert out.grads.buffers[0].dtype == torch.float32
    assert out.finite


@pytest.mark.parametrize("defer", [False, True])
def test_a_ragged_last_window_is_averaged_over_what_it_has(problem, defer):
    loss_fn, params, x, y = problem
    step = with_loss_scaling(accumulate(grad(loss_fn), 4), defer_unscale=defer)
    out = step(DynamicLossScale.create(2.0**7), params, x[:3], y[:3])
    expected = torch.func.grad(loss_fn)(params, x[:3].flatten(0, 1), y[:3].flatten(0, 1))
    torch.testing.assert_close(out.grads.buffers[0] * out.inv_scale, expected.buffers[0])
    assert out.inv_scale == (1 / (3 * 2.0**7) if defer else 1.0)


def test_half_gradients_are_summed_in_float32():
    def loss_fn(w, x):
        return (w * x).sum()

    w = torch.ones(3, dtype=torch.bfloat16)
    x = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # bfloat16 cannot represent 257
    out = with_loss_scaling(accumulate(grad(loss_fn), 3))(DynamicLossScale.create(1.0), w, x)
    assert out.grads.dtype == torch.float32
    torch.testing.assert_close(out.grads, torch.full((3,), 86.0))


def test_called_by_itself_it_is_a_gradient_function(problem):
    loss_fn, params, x, y = problem

    def with_aux(params, x, y):
        return loss_fn(params, x, y), {"rows": x.shape[0], "mean": x.mean(), "name": "b", "none": None}

    grads, (value, aux) = accumulate(grad_and_value(with_aux, has_aux=True), 4)(params, x, y)
    expected = torch.func.grad(loss_fn)(params, x.flatten(0, 1), y.flatten(0, 1))
    torch.testing.assert_close(grads.buffers[0], expected.buffers[0])
    torch.testing.assert_close(value, loss_fn(params, x.flatten(0, 1), y.flatten(0, 1)))
    assert aux["rows"] == 6
    assert aux["name"] == "b"
    assert aux["none"] is None
    torch.testing.assert_close(aux["mean"], x.mean((1, 2)))
    assert accumulate(torch.func.grad(loss_fn), 4)(params, x, y).buffers[0].grad_fn is None


def test_in_dims_marks_what_all_micro_batches_share(problem):
    loss_fn, params, x, y = problem

    def weighted(params, x, y, weight, *, shift):
        return loss_fn(params, x + shift, y) * weight

    step = accumulate(grad(weighted), 4, in_dims=(None, 1, 0, None))
    shift = torch.arange(4.0)
    got = step(params, x.transpose(0, 1), y, torch.tensor(3.0), shift=shift)
    parts = [torch.func.grad(weighted)(params, x[i], y[i], 3.0, shift=shift[i]).buffers[0] for i in range(4)]
    torch.testing.assert_close(got.buffers[0], torch.stack(parts).mean(0))


def test_gradients_that_share_memory_are_not_added_to_twice():
    # (a + b).sum() hands one expanded tensor to both leaves.
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    got = accumulate(grad(lambda p, x: ((p["a"] + p["b"]) * x).sum()), 2)(params, torch.tensor([1.0, 3.0]))
    assert got["a"].tolist() == got["b"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1, 3])
def test_overflow_in_any_micro_batch_skips_the_step_and_poisons_nothing_later(problem, bad, where):
    loss_fn, params, x, y = problem
    step = with_loss_scaling(accumulate(grad(loss_fn), 4), defer_unscale=True)
    opt = fused_update(optim.adamw(1e-2))
    state, scale = opt.init(params), DynamicLossScale.create(2.0**10)
    broken = x.clone()
    broken[where, 0, 0] = bad
    out = step(scale, params, broken, y)
    new_params, new_state = opt.update(out, state, params)
    assert not out.finite
    assert out.loss_scale.value == 2.0**9
    assert torch.equal(new_params.buffers[0], params.buffers[0])
    assert new_state.count == 0
    assert torch.equal(new_state.slots["exp_avg"].buffers[0], state.slots["exp_avg"].buffers[0])
    clean = step(out.loss_scale, new_params, x, y)
    assert clean.finite
    assert all_finite(opt.update(clean, new_state, new_params)[0])


def test_one_graph_and_the_eager_numbers_under_compile(problem):
    loss_fn, params, x, y = problem
    graphs = []

    def count_graphs(module, inputs):
        graphs.append(module)
        return module

    step = with_loss_scaling(accumulate(grad(loss_fn), 4))
    compiled = torch.compile(step, fullgraph=True, backend=count_graphs)
    scale = DynamicLossScale.create(growth_interval=2)
    for batch in (x, x * float("inf"), x, x):
        eager, other = step(scale, params, batch, y), compiled(scale, params, batch, y)
        assert torch.equal(eager.finite, other.finite)
        if eager.finite:
            assert torch.equal(eager.grads.buffers[0], other.grads.buffers[0])
        assert torch.equal(eager.loss_scale.value, other.loss_scale.value)
        scale = eager.loss_scale
    assert len(graphs) == 1


def test_under_vmap_every_member_accumulates_its_own(problem):
    loss_fn, params, x, y = problem
    members = params.map(lambda b: torch.stack([b, 2 * b]))
    step = with_loss_scaling(accumulate(grad(loss_fn), 4))
    out = torch.func.vmap(step, in_dims=(None, 0, None, None))(DynamicLossScale.create(), members, x, y)
    alone = step(DynamicLossScale.create(), params.map(lambda b: 2 * b), x, y)
    torch.testing.assert_close(out.grads.buffers[0][1], alone.grads.buffers[0])


def test_one_unscale_and_one_finite_test_per_window(problem):
    loss_fn, params, x, y = problem
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    step = with_loss_scaling(accumulate(grad(loss_fn), 4))
    with Count():
        step(DynamicLossScale.create(), params, x, y)
    assert calls.count("aten.aminmax.default") == 1
    assert not any("_local_scalar_dense" in call for call in calls)


def test_what_does_not_fit_is_refused_with_advice(problem):
    loss_fn, params, x, y = problem
    step = accumulate(grad(loss_fn), 2)
    with pytest.raises(
        ValueError, match=r"expected 1 to 2 micro-batches along the leading axis, found 4 in argument 1"
    ):
        step(params, x, y)
    with pytest.raises(
        ValueError, match=r"differ in their number of micro-batches: argument 1 has 2, argument 2 has 1"
    ):
        step(params, x[:2], y[:1])
    with pytest.raises(ValueError, match=r"shape \(\) and has no micro-batch axis; mark what all"):
        step(params, x[:2], torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"entry of a differentiated argument must be None"):
        accumulate(grad(loss_fn), 2, in_dims=(0, 0, 0))(params, x[:2], y[:2])
    with pytest.raises(ValueError, match=r"has 2 entries, the call has 3 positional"):
        accumulate(grad(loss_fn), 2, in_dims=(None, 0))(params, x[:2], y[:2])
    with pytest.raises(TypeError, match=r"not a gradient function"):
        accumulate(loss_fn, 2)
    with pytest.raises(TypeError, match=r"put what wraps it outside"):
        accumulate(functools.partial(grad(loss_fn), params), 2)
    with pytest.raises(ValueError, match=r"expected a positive int, found 0"):
        accumulate(grad(loss_fn), 0)
    rows = iter(range(9))
    changing = accumulate(grad(lambda p, x, y: (loss_fn(p, x, y), {"rows": next(rows)}), has_aux=True), 4)
    with pytest.raises(ValueError, match=r"aux leaf `rows` differs between micro-batches"):
        changing(params, x, y)
