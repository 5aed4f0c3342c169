"""Loss scales against a model in plain Python; finite tests and norms against hand-computed values."""

import dataclasses
import math

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from npuamp_fn import DynamicLossScale, NoOpLossScale, StaticLossScale, all_finite, global_norm, optim, tree_where

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
YES, NO = torch.tensor(True), torch.tensor(False)


def run(scale, outcomes):
    """Return the scale's values after each outcome, and the last scale."""
    values = []
    for finite in outcomes:
        scale = scale.adjust(torch.tensor(finite))
        values.append(scale.value.item())
    return values, scale


class Model:
    """What the docstring says, in Python numbers."""

    def __init__(self, init, growth, backoff, interval, hysteresis, low, high):
        self.value, self.growth, self.backoff, self.interval = init, growth, backoff, interval
        self.hysteresis, self.low, self.high = hysteresis, low, high
        self.clean, self.left = 0, hysteresis

    def step(self, finite):
        if finite:
            self.clean += 1
            if self.clean >= self.interval:
                self.value = min(self.value * self.growth, self.high)
                self.clean, self.left = 0, self.hysteresis
        else:
            self.clean = 0
            self.left = max(self.left - 1, 0)
            if self.left == 0:
                self.value = max(self.value * self.backoff, self.low)


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(-4, 10),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([0.5, 0.25]),
    st.integers(1, 5),
    st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_any_sequence_follows_the_model(outcomes, exponent, growth, backoff, interval, hysteresis):
    low, high = 2.0**-5, 2.0**11
    scale = DynamicLossScale.create(
        2.0**exponent,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        hysteresis=hysteresis,
        min_scale=low,
        max_scale=high,
    )
    model = Model(2.0**exponent, growth, backoff, interval, hysteresis, low, high)
    numbers = scale.on_host()
    for finite in outcomes:
        scale, numbers = scale.adjust(torch.tensor(finite)), numbers.adjust(finite)
        model.step(finite)
        assert (numbers.value, numbers.good_steps, numbers.bad_steps_left) == (model.value, model.clean, model.left)
        assert list(map(type, (numbers.value, numbers.good_steps, numbers.bad_steps_left))) == [float, int, int]
        assert (scale.value.item(), scale.good_steps.item(), scale.bad_steps_left.item()) == (
            model.value,
            model.clean,
            model.left,
        )
        assert (scale.value.dtype, scale.value.shape) == (f32, ())
        assert (scale.good_steps.dtype, scale.bad_steps_left.dtype) == (torch.int32, torch.int32)
        assert (scale.growth_interval, scale.hysteresis, scale.min_scale) == (interval, hysteresis, low)


def test_a_scale_on_the_host_multiplies_and_divides_like_its_tensors():
    scale = DynamicLossScale.create(8.0)
    tree = {"g": torch.tensor([3.0, -1.5], dtype=f16), "wide": torch.tensor([3.0], dtype=f64), "n": 2}
    for there, here in zip(
        (scale.scale(tree), scale.unscale(tree)),
        (scale.on_host().scale(tree), scale.on_host().unscale(tree)),
        strict=True,
    ):
        assert here["n"] == there["n"] == 2
        for name in ("g", "wide"):
            assert here[name].dtype == there[name].dtype
            assert torch.equal(here[name], there[name])


@pytest.mark.parametrize("flag", [torch.tensor(True), 1, None])
def test_a_scale_on_the_host_takes_no_tensor_flag(flag):
    with pytest.raises(
        TypeError, match=r"adjust\(finite\): expected a Python bool, as the scale is on the host, found"
    ):
        DynamicLossScale.create().on_host().adjust(flag)


def test_growth_comes_at_exactly_growth_interval_clean_steps():
    # flax tested its counter before incrementing it and grew one step late.
    values, scale = run(DynamicLossScale.create(4.0, growth_interval=3), [True] * 7)
    assert values == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]
    assert scale.good_steps.item() == 1


def test_an_overflow_restarts_the_interval():
    values, _ = run(DynamicLossScale.create(4.0, growth_interval=3), [True, True, False, True, True, True])
    assert values == [4.0, 4.0, 2.0, 2.0, 2.0, 4.0]


def test_counter_past_the_interval_still_grows():
    # A checkpoint of a run with a longer interval.
    scale = dataclasses.replace(
        DynamicLossScale.create(4.0, growth_interval=3), good_steps=torch.tensor(100, dtype=torch.int32)
    )
    values, scale = run(scale, [True])
    assert values == [8.0]
    assert scale.good_steps.item() == 0


def test_hysteresis_tolerates_overflows_and_is_refilled_on_growth():
    scale = DynamicLossScale.create(16.0, growth_interval=2, hysteresis=3)
    values, scale = run(scale, [False, False, True, False, False])
    assert values == [16.0, 16.0, 16.0, 8.0, 4.0]  # at zero every overflow counts
    values, scale = run(scale, [True, True])
    assert values == [4.0, 8.0]
    assert scale.bad_steps_left.item() == 3
    assert run(scale, [False, False, False])[0] == [8.0, 8.0, 4.0]


def test_scale_has_a_floor_and_a_ceiling():
    # torch.amp's scale decays to denormals and 0 while a model emits NaN; others grow to inf.
    values, _ = run(DynamicLossScale.create(4.0, min_scale=1.0), [False] * 5)
    assert values == [2.0, 1.0, 1.0, 1.0, 1.0]
    values, scale = run(DynamicLossScale.create(4.0, growth_interval=1, max_scale=16.0), [True] * 5)
    assert values == [8.0, 16.0, 16.0, 16.0, 16.0]
    assert scale.good_steps.item() == 0
    assert min(run(DynamicLossScale.create(), [False] * 200)[0]) == 2.0**-14
    assert max(run(DynamicLossScale.create(growth_interval=1), [True] * 200)[0]) == 2.0**24


def test_scale_goes_below_one_when_it_may():
    assert run(DynamicLossScale.create(1.0), [False, False])[0] == [0.5, 0.25]


def test_constant_scales_do_not_react():
    scale = StaticLossScale.create(128.0)
    assert scale.adjust(NO) is scale
    none = NoOpLossScale.create()
    assert none.adjust(NO) is none
    assert none.value.item() == 1.0
    assert none.value.dtype == f32


# scaling and unscaling


@pytest.mark.parametrize("make", [StaticLossScale.create, DynamicLossScale.create])
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_scale_and_unscale_compute_in_float32_at_least(make, dtype):
    scale = make(2.0**15)
    wide = torch.float64 if dtype == f64 else f32
    x = torch.tensor([1e-3, 2.0], dtype=dtype)
    up = scale.scale({"x": x, "n": 3, "i": torch.tensor([1]), "none": None})
    assert up["x"].dtype == wide
    assert torch.equal(up["x"], x.to(wide) * 2.0**15)
    assert (up["n"], up["none"], up["i"].dtype, up["i"].item()) == (3, None, torch.int64, 1)
    down = scale.unscale(up)
    assert down["x"].dtype == wide
    assert torch.equal(down["x"], x.to(wide))


def test_unscaled_half_gradients_do_not_underflow_again():
    # jmp's static scale left them float16: 1e-3 became 6e-8.
    for scale in (StaticLossScale.create(2.0**15), DynamicLossScale.create(2.0**15)):
        out = scale.unscale(torch.tensor([1e-3], dtype=f16))
        assert out.dtype == f32
        assert out.item() == pytest.approx(1e-3 / 2.0**15, rel=1e-3)
    assert NoOpLossScale.create().unscale(torch.tensor([1e-3], dtype=bf16)).dtype == f32
    assert NoOpLossScale.create().unscale(torch.ones(1, dtype=f64)).dtype == f64


def test_scale_above_the_float16_range_stays_finite():
    # mpx cast the scale itself to float16: 2**20 became inf. jmp's README scale raised at adjust.
    scale = DynamicLossScale.create(2.0**20, growth_interval=1)
    assert scale.scale(torch.tensor(0.5, dtype=f16)).item() == 2.0**19
    assert scale.adjust(YES).value.item() == 2.0**21


def test_complex_leaves_were_left_scaled():
    z = torch.tensor([3 + 4j], dtype=torch.complex64)
    scale = StaticLossScale.create(4.0)
    assert torch.equal(scale.unscale({"z": z})["z"], z / 4)
    assert torch.equal(scale.scale(z), z * 4)


# validation


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_scale": 0.0}, ValueError, "init_scale: expected a finite number greater than 0, found 0.0"),
        ({"init_scale": -1.0}, ValueError, "init_scale"),
        ({"init_scale": math.inf}, ValueError, "init_scale"),
        ({"init_scale": math.nan}, ValueError, "init_scale"),
        ({"init_scale": "big"}, TypeError, "init_scale: expected a number, found 'big' of type str"),
        ({"init_scale": True}, TypeError, "init_scale: expected a number"),
        ({"init_scale": torch.tensor(4.0)}, TypeError, "init_scale: expected a number"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor: expected a finite number greater than 1"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor: .* greater than 0 and less than 1, found 1.0"),
        ({"backoff_factor": 0.0}, ValueError, "backoff_factor"),
        ({"growth_interval": 0}, ValueError, "growth_interval: expected at least 1, found 0"),
        ({"growth_interval": 10.0}, TypeError, "growth_interval: expected an int, found 10.0 of type float"),
        ({"growth_interval": True}, TypeError, "growth_interval: expected an int"),
        ({"hysteresis": 0}, ValueError, "hysteresis: expected at least 1"),
        ({"min_scale": 4.0, "init_scale": 2.0}, ValueError, "min_scale <= init_scale <= max_scale, found 4.0, 2.0"),
        ({"max_scale": 4.0, "init_scale": 8.0}, ValueError, "min_scale <= init_scale <= max_scale"),
        ({"min_scale": 0.0}, ValueError, "min_scale"),
    ],
)
def test_dynamic_scale_validates(arguments, error, message):
    with pytest.raises(error, match=message):
        DynamicLossScale.create(**arguments)


def test_scales_that_float32_cannot_hold_became_inf_or_zero():
    with pytest.raises(ValueError, match=r"max_scale: expected a number from 2\*\*-126 to 2\*\*126"):
        DynamicLossScale.create(max_scale=1e39)
    with pytest.raises(ValueError, match="min_scale: expected a number from"):
        DynamicLossScale.create(min_scale=1e-45)
    with pytest.raises(ValueError, match="value: expected a number from"):
        StaticLossScale.create(1e39)


@pytest.mark.parametrize("value", [0, -2.0, math.inf, math.nan])
def test_static_scale_validates(value):
    with pytest.raises(ValueError, match="StaticLossScale: value: expected a finite number greater than 0"):
        StaticLossScale.create(value)
    with pytest.raises(TypeError, match="expected a number, found None"):
        StaticLossScale.create(None)


# as trees, under vmap, under compile


@given(
    st.floats(2.0**-10, 2.0**10),
    st.floats(1.5, 8.0),
    st.floats(0.125, 0.9),
    st.integers(1, 5000),
    st.integers(1, 9),
    st.floats(2.0**-20, 2.0**-10),
    st.floats(2.0**10, 2.0**30),
)
@settings(max_examples=50, deadline=None)
def test_every_field_survives_a_tree_round_trip(init, growth, backoff, interval, hysteresis, low, high):
    scale = DynamicLossScale.create(
        init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        hysteresis=hysteresis,
        min_scale=low,
        max_scale=high,
    )
    again = torch_pytree.tree_map(torch.clone, scale)
    for field in dataclasses.fields(scale):
        old, new = getattr(scale, field.name), getattr(again, field.name)
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new, field.name


def test_vmap_gives_one_scale_per_member():
    scales = [DynamicLossScale.create(2.0**k, growth_interval=2, hysteresis=2) for k in (2, 3, 4)]
    stacked = torch_pytree.tree_map(lambda *leaves: torch.stack(leaves), *scales)
    outcomes = [[True, False, True], [True, False, False], [False, False, True], [True, True, True]]
    for finite in outcomes:
        stacked = torch.vmap(lambda scale, ok: scale.adjust(ok))(stacked, torch.tensor(finite))
        scales = [scale.adjust(torch.tensor(ok)) for scale, ok in zip(scales, finite, strict=True)]
    for name in ("value", "good_steps", "bad_steps_left"):
        assert torch.equal(getattr(stacked, name), torch.stack([getattr(scale, name) for scale in scales])), name
    assert stacked.growth_interval == 2
    scaled = torch.vmap(lambda scale, x: scale.unscale(scale.scale(x)))(stacked, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(scaled, torch.tensor([1.0, 2.0, 3.0]))


def test_compiled_adjust_is_one_graph_over_clean_overflow_and_growth():
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda scale, ok: scale.adjust(ok), fullgraph=True, backend=backend)
    eager = traced = DynamicLossScale.create(8.0, growth_interval=2, hysteresis=2)
    for ok in [True, True, False, False, True, False, True, True]:
        eager, traced = eager.adjust(torch.tensor(ok)), compiled(traced, torch.tensor(ok))
        assert torch.equal(eager.value, traced.value)
        assert torch.equal(eager.good_steps, traced.good_steps)
        assert torch.equal(eager.bad_steps_left, traced.bad_steps_left)
    assert len(graphs) == 1


# finite tests


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64, torch.complex64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 7, 99])
def test_one_bad_element_anywhere_is_seen(dtype, bad, position):
    x = torch.ones(100, dtype=dtype)
    tree = {"a": torch.ones(3), "n": None, "b": [x, 3, torch.arange(2)]}
    assert all_finite(tree).item() is True
    x[position] = complex(0.0, bad) if dtype.is_complex else bad
    assert all_finite(tree).item() is False
    assert all_finite(tree).dtype == torch.bool
    assert all_finite(tree).shape == ()


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_the_largest_finite_numbers_are_no_false_alarm(dtype):
    # A sum of squares, or a cast to a narrower type, would overflow.
    largest = torch.finfo(dtype).max
    tree = [torch.full((4096,), largest, dtype=dtype), torch.full((10,), -largest, dtype=dtype)]
    assert all_finite(tree).item() is True


def test_factor_is_taken_into_account_without_computing_the_products():
    x = torch.tensor([1e30])
    assert all_finite([x], torch.tensor(1e30)).item() is False
    assert all_finite([x], torch.tensor(1e-30)).item() is True
    assert all_finite([torch.tensor([60000.0], dtype=f16)], torch.tensor(2.0)).item() is True
    assert all_finite([torch.tensor([math.inf])], torch.tensor(0.0)).item() is False


def test_trees_without_float_leaves_are_finite():
    for tree in ({}, None, [torch.arange(3)], [torch.empty(0)], {"a": "text"}):
        assert all_finite(tree).item() is True


def test_lazily_conjugated_gradients_raised():
    z = torch.ones(2, dtype=torch.complex64).conj()
    assert z.is_conj()
    assert all_finite([z]).item() is True
    assert global_norm([z]).item() == pytest.approx(2**0.5)


def test_sparse_gradients_are_refused_with_advice():
    weight, tokens = torch.ones(4, 2, requires_grad=True), torch.tensor([0, 1])
    torch.nn.functional.embedding(tokens, weight, sparse=True).sum().backward()
    with pytest.raises(TypeError, match=r"leaf `embed.w`: expected a dense tensor, .*sparse=True\): pass sparse=False"):
        all_finite({"embed": {"w": weight.grad}})


def test_finite_test_under_vmap_is_per_member():
    x = torch.tensor([[1.0, 2.0], [math.inf, 1.0], [1.0, math.nan]])
    assert torch.vmap(lambda row: all_finite({"g": row}))(x).tolist() == [True, False, False]


# selects and norms


def test_select_is_no_multiplication():
    bad = torch.tensor([math.nan, math.inf, 1.0])
    old = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(tree_where(NO, [bad], [old])[0], old)
    assert torch.equal(tree_where(YES, [old], [bad])[0], old)


def test_select_keeps_structure_dtypes_and_other_leaves():
    new = {"h": torch.ones(2).half(), "i": torch.tensor(3), "n": None, "s": DynamicLossScale.create(4.0)}
    old = {"h": torch.zeros(2).half(), "i": torch.tensor(1), "n": None, "s": DynamicLossScale.create(2.0)}
    out = tree_where(NO, new, old)
    assert (out["h"].dtype, out["i"].dtype) == (f16, torch.int64)
    assert (out["i"].item(), out["n"], out["s"].value.item()) == (1, None, 2.0)
    assert tree_where(YES, new, old)["s"].value.item() == 4.0


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"v": torch.ones(2)}, "tree_where: structures differ: expected leaf `w`, found `v`"),
        ({"w": torch.ones(1)}, r"tree_where: leaf `w`: expected a torch.float32 tensor of shape \(2,\) in both"),
        ({"w": torch.ones(2).half()}, r"leaf `w`: .* found a torch.float16 tensor of shape \(2,\) in the first"),
        ({"w": None}, "leaf `w`: .* found None in the first"),
    ],
)
def test_select_between_different_trees_broadcast_or_promoted_in_silence(new, message):
    with pytest.raises(ValueError, match=message):
        tree_where(YES, new, {"w": torch.ones(2)})


@pytest.mark.parametrize("flag", [True, torch.tensor([True, False]), torch.tensor(1.0), None])
def test_what_is_no_flag_is_refused(flag):
    # A flag of shape [2] used to select element by element.
    with pytest.raises(TypeError, match=r"tree_where\(pred\): expected a bool tensor of shape \(\), found"):
        tree_where(flag, [torch.ones(2)], [torch.zeros(2)])
    with pytest.raises(TypeError, match=r"adjust\(finite\): expected a bool tensor of shape \(\), found"):
        DynamicLossScale.create().adjust(flag)


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_global_norm_is_that_of_all_elements_in_float64(dtype):
    gen = torch.Generator().manual_seed(0)
    tree = {"a": torch.randn(1000, generator=gen).to(dtype), "b": [torch.randn(2, 256, generator=gen).to(dtype), None]}
    flat = torch.cat([tree["a"].double(), tree["b"][0].double().flatten()])
    norm = global_norm(tree)
    assert (norm.dtype, norm.shape) == (f32, ())
    assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-6)
    assert global_norm({"n": 3}).item() == 0.0


def test_global_norm_of_half_values_does_not_overflow():
    assert global_norm([torch.full((512,), 60000.0, dtype=f16)]).item() == pytest.approx(60000 * 512**0.5, rel=1e-3)


def test_global_norm_counts_complex_leaves():
    assert global_norm([torch.tensor([3 + 4j]), torch.tensor([12.0])]).item() == 13.0


@pytest.mark.parametrize("size", [3, 512])
def test_norm_of_huge_finite_values_overflowed_and_clipping_made_them_zero(size):
    huge = {"w": torch.full((size,), 1e30)}
    torch.testing.assert_close(global_norm(huge).item(), 1e30 * size**0.5, rtol=1e-6, atol=0)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0))
    zeros = {"w": torch.zeros(size)}
    stepped, _ = opt.update(huge, opt.init(zeros), zeros)
    torch.testing.assert_close(stepped["w"], torch.full((size,), -(size**-0.5)))
    assert global_norm({"w": torch.tensor([1.0, float("inf")])}).isinf()
    assert global_norm({"w": torch.tensor([1.0, float("nan")])}).isnan()


@pytest.mark.parametrize("arguments", [(), (2.0**15,)])
def test_a_dynamic_loss_scale_without_create_says_what_to_write(arguments):
    with pytest.raises(TypeError, match=r"DynamicLossScale\.create\(2\.0\*\*15\)"):
        DynamicLossScale(*arguments)
