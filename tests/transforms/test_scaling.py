"""Loss scaling: the order of one step, what is reported, deferred unscaling, one scale per member."""

import math

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from npuamp_fn import (
    O2,
    DynamicLossScale,
    NoOpLossScale,
    ScaledGrads,
    StaticLossScale,
    cast_policy,
    flatten,
    grad,
    optim,
    scaled_grad,
    with_loss_scaling,
)
from npuamp_fn.tree import tree_map

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def square(p, k=1.0):
    return (p["w"].float() ** 2).sum() * k


def tree(dtype=f32):
    return {"w": torch.tensor([1.0, -3.0], dtype=dtype)}


class CountsDown:
    """A gradient function whose gradients are what the test says, whatever the scale."""

    def __init__(self, grads, value=1.0):
        self.grads, self.value = grads, value

    def __loss_scaling__(self, scale, *args):
        return self.grads, torch.tensor(self.value), ()


# the order of one step


def test_gradients_are_not_halved_at_growth_steps():
    # mpx unscaled with the new scale: with period 2 gradients came out 2, 1, 2, 1.
    scale = DynamicLossScale.create(4.0, growth_interval=2)
    step = with_loss_scaling(grad(square))
    seen = []
    for _ in range(5):
        out = step(scale, tree())
        seen.append((out.grads["w"].tolist(), out.value.item(), scale.value.item()))
        scale = out.loss_scale
    assert [grads for grads, _, _ in seen] == [[2.0, -6.0]] * 5
    assert [value for _, value, _ in seen] == [10.0] * 5
    assert [used for _, _, used in seen] == [4.0, 4.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize("scale", [NoOpLossScale.create(), StaticLossScale.create(128.0), DynamicLossScale.create()])
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_scaled_and_unscaled_gradients_are_equal_for_powers_of_two(scale, dtype):
    # Half leaves get half gradients of the scaled loss: exact here, whatever the scale.
    out = with_loss_scaling(grad(square))(scale, {"w": torch.tensor([0.5, -0.25], dtype=dtype)})
    assert out.grads["w"].tolist() == [1.0, -0.5]
    assert out.grads["w"].dtype == (f64 if dtype == f64 else f32)
    assert out.inv_scale.item() == 1.0
    assert (out.inv_scale.dtype, out.inv_scale.shape) == (f32, ())
    assert (out.finite.dtype, out.finite.shape, out.finite.item()) == (torch.bool, (), True)
    assert type(out.loss_scale) is type(scale)


def test_small_gradients_survive_float16():
    @cast_policy(O2)
    def product(w, x):
        return w * x

    def loss(w, x):
        return (product(w, x) * 1e-6).sum()

    w, x = torch.tensor([1.0, 2.0]), torch.tensor([0.01, 0.02])
    lost = with_loss_scaling(grad(loss))(NoOpLossScale.create(), w, x).grads
    kept = with_loss_scaling(grad(loss))(DynamicLossScale.create(2.0**15), w, x).grads
    assert torch.equal(lost, torch.zeros(2))
    torch.testing.assert_close(kept, x * 1e-6, rtol=2e-3, atol=0.0)


def test_overflow_is_reported_and_the_scale_backs_off():
    scale = DynamicLossScale.create(2.0**15)
    out = with_loss_scaling(grad(square))(scale, {"w": torch.tensor([3.0], dtype=f16)})
    assert out.finite.item() is False  # 6 * 2**15 > 65504
    assert out.loss_scale.value.item() == 2.0**14
    assert out.value.item() == 9.0
    again = with_loss_scaling(grad(square))(DynamicLossScale.create(2.0**13), {"w": torch.tensor([3.0], dtype=f16)})
    assert again.finite.item() is True
    assert again.grads["w"].item() == 6.0


def test_static_and_no_scale_test_for_overflow_too():
    for scale in (NoOpLossScale.create(), StaticLossScale.create(4.0)):
        out = with_loss_scaling(grad(square))(scale, tree(), math.inf)
        assert out.finite.item() is False


def test_reduce_comes_before_the_unscaling_and_the_finite_test():
    # Ranks must agree: an overflow on another rank arrives with the reduction.
    seen = []

    def reduce(grads):
        seen.append((grads["w"].dtype, grads["w"].tolist()))
        return tree_map(lambda g: g * math.inf, grads)

    step = with_loss_scaling(grad(lambda p: p["w"].sum()), reduce=reduce)
    out = step(DynamicLossScale.create(8.0), tree(bf16))
    assert seen == [(f32, [8.0, 8.0])]
    assert out.finite.item() is False
    assert out.loss_scale.value.item() == 4.0
    mean = with_loss_scaling(grad(square), reduce=lambda grads: tree_map(lambda g: g / 2, grads))
    assert mean(DynamicLossScale.create(), tree()).grads["w"].tolist() == [1.0, -3.0]
    deferred = with_loss_scaling(grad(square), reduce=reduce, defer_unscale=True)
    assert deferred(DynamicLossScale.create(8.0), tree()).finite.item() is False


@given(st.floats(-1e4, 1e4, width=32), st.sampled_from([3.0, 1000.0, 2.0**15, 12345.678]))
@settings(max_examples=60, deadline=None)
def test_the_value_is_the_loss_itself_bit_for_bit(number, scale):
    # Never obtained by dividing: 3 and 1/3 do not cancel.
    x = torch.tensor(number)
    out = with_loss_scaling(grad(lambda x: x * 1.1))(StaticLossScale.create(scale), x)
    assert torch.equal(out.value, x * 1.1)
    assert torch.equal(scaled_grad(lambda x: x * 1.1)(scale, x).value, x * 1.1)


def test_value_is_reported_though_the_scaled_loss_overflows():
    out = with_loss_scaling(grad(lambda x: x * 1e36))(DynamicLossScale.create(2.0**15), torch.tensor(2.0))
    assert out.value.item() == pytest.approx(2e36)
    assert out.finite.item() is False


# finite tests


def test_huge_finite_gradients_are_no_false_alarm():
    # Their sum of squares overflows.
    grads = {"a": torch.full((1000,), 3e38), "b": torch.full((3,), 65504.0, dtype=f16)}
    for defer in (False, True):
        out = with_loss_scaling(CountsDown(grads), defer_unscale=defer)(StaticLossScale.create(4.0))
        assert out.finite.item() is True


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("leaf", ["first", "last"])
def test_one_bad_element_in_any_leaf_is_seen(bad, dtype, defer, leaf):
    grads = {"first": torch.ones(300, dtype=dtype), "n": None, "last": torch.ones(2, 3, dtype=dtype)}
    step = with_loss_scaling(CountsDown(grads), defer_unscale=defer)
    assert step(StaticLossScale.create(2.0)).finite.item() is True
    grads[leaf].view(-1)[-1] = bad
    assert step(StaticLossScale.create(2.0)).finite.item() is False


def test_overflow_that_arises_in_the_unscaling_is_seen():
    # A scale below one: multiplying by its reciprocal can overflow.
    grads = {"w": torch.full((2,), 3e38)}
    for defer in (False, True):
        out = with_loss_scaling(CountsDown(grads), defer_unscale=defer)(StaticLossScale.create(0.25))
        assert out.finite.item() is False


# deferred unscaling


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_deferred_gradients_stay_scaled_in_their_own_dtype(dtype):
    scale = StaticLossScale.create(8.0)
    out = with_loss_scaling(grad(square), defer_unscale=True)(scale, tree(dtype))
    assert out.grads["w"].dtype == dtype
    assert out.grads["w"].tolist() == [16.0, -48.0]
    assert out.inv_scale.item() == 0.125
    assert out.inv_scale.dtype == f32
    direct = with_loss_scaling(grad(square))(scale, tree(dtype))
    wide = out.grads["w"] if dtype == f64 else out.grads["w"].float()
    assert torch.equal(wide * out.inv_scale, direct.grads["w"])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_deferred_and_direct_unscaling_give_the_same_step(flat, clip):
    params = {"w": torch.randn(20, 3), "b": torch.randn(3)}
    params = flatten(params) if flat else params
    x = torch.randn(7, 20)

    def loss(p, x):
        leaves = p.unflatten() if flat else p
        return (x @ leaves["w"] + leaves["b"]).square().mean()

    optimizer = optim.adamw(1e-2) if clip is None else optim.chain(optim.clip_by_global_norm(clip), optim.adamw(1e-2))
    results = []
    for defer in (False, True):
        out = with_loss_scaling(grad(loss), defer_unscale=defer)(DynamicLossScale.create(2.0**10), params, x)
        results.append(optimizer.update(out, optimizer.init(params), params))
    for a, b in zip(*map(torch_pytree.tree_leaves, results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_clipping_applies_to_the_true_gradients():
    # Clipping before unscaling is a bug users keep making: the norm would be 2**10 times too large.
    params = {"w": torch.tensor([3.0, 4.0])}
    optimizer = optim.chain(optim.clip_by_global_norm(2.5), optim.sgd(1.0))
    for defer in (False, True):
        step = with_loss_scaling(grad(lambda p: (p["w"] ** 2).sum() / 2), defer_unscale=defer)
        out = step(DynamicLossScale.create(2.0**10), params)
        new, _ = optimizer.update(out, optimizer.init(params), params)
        torch.testing.assert_close(new["w"], torch.tensor([1.5, 2.0]))


# ensembles


def stack(trees):
    return torch_pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_an_ensemble_has_one_scale_per_member(defer, flat):
    members = [{"w": torch.tensor([w], dtype=f16)} for w in (0.5, 3.0, 1e3)]
    members = [flatten(member) for member in members] if flat else members
    scales = [DynamicLossScale.create(2.0**k, growth_interval=1) for k in (4, 15, 2)]

    def loss(p):
        return square(p.unflatten() if flat else p)

    step = with_loss_scaling(grad(loss), defer_unscale=defer)
    out = vmap(step)(stack(scales), stack(members))
    assert type(out) is ScaledGrads
    assert out.finite.tolist() == [True, False, True]
    assert out.loss_scale.value.tolist() == [2.0**5, 2.0**14, 2.0**3]
    for index, (scale, member) in enumerate(zip(scales, members, strict=True)):
        alone = step(scale, member)
        for a, b in zip(torch_pytree.tree_leaves(out), torch_pytree.tree_leaves(alone), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a[index], b)


def test_whole_ensemble_step_skips_only_the_member_that_overflowed():
    members = [{"w": torch.tensor([w])} for w in (1.0, 2.0, 3.0)]
    optimizer = optim.adamw(0.1)
    params, states = stack(members), stack([optimizer.init(member) for member in members])
    scales = stack([DynamicLossScale.create(4.0)] * 3)

    def step(params, state, scale, k):
        out = with_loss_scaling(grad(square))(scale, params, k)
        params, state = optimizer.update(out, state, params)
        return params, state, out.loss_scale

    new, states, scales = vmap(step)(params, states, scales, torch.tensor([1.0, math.inf, 1.0]))
    assert new["w"][1].item() == 2.0
    assert states.count.tolist() == [1, 0, 1]
    assert scales.value.tolist() == [4.0, 2.0, 4.0]
    assert new["w"][0].item() != 1.0
    assert new["w"][2].item() != 3.0


@pytest.mark.parametrize("scale", [2.0**10, torch.tensor(2.0**10)])
def test_scaled_grad_under_vmap_gives_per_sample_gradients(scale):
    # A Python number came back as one, which vmap refuses.
    x = torch.randn(5, 2)
    out = vmap(scaled_grad(lambda p, x: (p["w"] * x).square().sum()), in_dims=(None, None, 0))(scale, tree(), x)
    expected = 2 * tree()["w"] * x**2
    torch.testing.assert_close(out.grads["w"], expected)
    assert out.finite.tolist() == [True] * 5
    assert out.loss_scale.tolist() == [2.0**10] * 5


def test_scaled_grad_with_one_scale_per_member():
    scales, w = torch.tensor([1.0, 2.0**20, 2.0**5]), torch.tensor([[1.0], [2.0], [3.0]])
    out = vmap(scaled_grad(lambda w: (w.half().float() ** 2).sum()))(scales, w)
    assert out.finite.tolist() == [True, False, True]
    assert out.grads[[0, 2], 0].tolist() == [2.0, 6.0]
    assert torch.equal(out.loss_scale, scales)


# scaled_grad


def test_scaled_grad_is_stateless_and_returns_its_scale():
    scale = torch.tensor(16.0)
    out = scaled_grad(square)(scale, tree())
    assert out.loss_scale is scale
    assert out.grads["w"].tolist() == [2.0, -6.0]
    number = scaled_grad(square)(16, tree())
    assert (number.loss_scale.item(), number.loss_scale.dtype) == (16.0, f32)
    assert number.aux == ()
    with_aux = scaled_grad(lambda a, p: (square(p), "aux"), argnums=1, has_aux=True)(16.0, 3, tree())
    assert (with_aux.aux, with_aux.grads["w"].tolist()) == ("aux", [2.0, -6.0])


def test_float64_scale_does_not_widen_a_scalar_gradient():
    out = scaled_grad(lambda w: w * w)(torch.tensor(4.0, dtype=f64), torch.tensor(3.0))
    assert (out.grads.dtype, out.grads.item()) == (f32, 6.0)
    assert out.inv_scale.dtype == f32


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0, ValueError, "scale: expected a positive finite number, found 0"),
        (-1.0, ValueError, "positive finite number"),
        (math.inf, ValueError, "positive finite number"),
        (math.nan, ValueError, "positive finite number"),
        ("8", TypeError, "expected a number or a 0-dim tensor as first argument, found str"),
        (True, TypeError, "found bool"),
        ({"w": 1}, TypeError, r"found dict; write scaled_grad\(loss_fn\)\(2.0\*\*15, params"),
        (DynamicLossScale.create(), TypeError, "found DynamicLossScale"),
        (torch.ones(1), TypeError, r"found torch.float32 of shape \(1,\); for one scale per member write vmap"),
        (torch.tensor(8), TypeError, "expected a float tensor of shape .* found torch.int64"),
    ],
)
def test_scaled_grad_validates_its_scale(scale, error, message):
    with pytest.raises(error, match=message):
        scaled_grad(square)(scale, tree())


# refusals


@pytest.mark.parametrize("first", [2.0**15, torch.tensor(4.0), {"w": 1}, None])
def test_the_loss_scale_comes_first(first):
    with pytest.raises(TypeError, match=r"expected a loss scale as first argument, found .*DynamicLossScale.create"):
        with_loss_scaling(grad(square))(first, tree())


def half_loss(p):
    return (p["w"].half() ** 2).sum()


@pytest.mark.parametrize("how", ["with_loss_scaling", "scaled_grad", "vmap"])
def test_float16_loss_is_refused_and_nothing_is_changed(how):
    params, scale = tree(), DynamicLossScale.create()
    calls = {
        "with_loss_scaling": lambda: with_loss_scaling(grad(half_loss))(scale, params),
        "scaled_grad": lambda: scaled_grad(half_loss)(8.0, params),
        "vmap": lambda: vmap(with_loss_scaling(grad(half_loss)), in_dims=(None, 0))(scale, stack([params, params])),
    }
    with pytest.raises(TypeError, match=r"the loss is float16.*Compute the loss in float32.*cast_policy\(O2\)"):
        calls[how]()
    assert params["w"].tolist() == [1.0, -3.0]
    assert params["w"].requires_grad is False
    assert scale.value.item() == 2.0**15
    out = with_loss_scaling(grad(square))(scale, params)  # no transform is left behind
    assert out.grads["w"].tolist() == [2.0, -6.0]


def test_bfloat16_and_float64_losses_are_fine():
    out = with_loss_scaling(grad(lambda p: (p["w"].bfloat16() ** 2).sum()))(DynamicLossScale.create(2.0**20), tree())
    assert (out.grads["w"].tolist(), out.value.dtype) == ([2.0, -6.0], bf16)
    wide = with_loss_scaling(grad(lambda p: (p["w"].double() ** 2).sum()))(DynamicLossScale.create(), tree(f64))
    assert (wide.grads["w"].dtype, wide.value.dtype) == (f64, f64)
    assert wide.grads["w"].tolist() == [2.0, -6.0]


def test_error_in_the_loss_function_comes_through():
    def broken(p):
        raise KeyError("missing")

    for transform in (grad(broken), torch.func.grad(broken)):
        with pytest.raises(KeyError, match="missing"):
            with_loss_scaling(transform)(DynamicLossScale.create(), tree())
    assert grad(square)(tree())["w"].tolist() == [2.0, -6.0]


def test_arguments_are_not_changed():
    params = {"w": torch.tensor([1.0, -3.0]), "n": 3}
    scale = DynamicLossScale.create(4.0, growth_interval=1)
    out = with_loss_scaling(grad(square))(scale, params)
    assert params["w"].tolist() == [1.0, -3.0]
    assert params["w"].grad is None
    assert (scale.value.item(), scale.good_steps.item()) == (4.0, 0)
    assert out.loss_scale.value.item() == 8.0


def test_transforms_are_values():
    step = with_loss_scaling(grad(square), defer_unscale=True)
    assert step == with_loss_scaling(grad(square), defer_unscale=True)
    assert hash(step) == hash(with_loss_scaling(torch.func.grad(square), defer_unscale=True))
    assert step.grad_fn.fun is square
    assert step.defer_unscale is True
