"""The compiled kernel runs the reference's text: it must give its numbers, for every layout, from one compilation."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npuamp_fn import (
    ScaledGrads,
    StaticLossScale,
    explain,
    flatten,
    fused_update,
    grad,
    optim,
    with_loss_scaling,
)
from npuamp_fn.kernels import compiled, inductor, reduce
from npuamp_fn.kernels.rule import Rule
from npuamp_fn.tree import tree_leaves
from npuamp_fn.tree_math import all_finite, global_norm

SIZES = [(), (0,), (1,), (7,), (15,), (16,), (17,), (255,), (256,), (257,), (3, 5, 2), (40, 30)]
RULES = {
    "sgd": lambda: optim.sgd(0.1, 0.9, 0.1, 0.01),
    "adam": lambda: optim.adam(1e-2, weight_decay=0.1, amsgrad=True),
    "adam, eps 0": lambda: optim.adam(1e-2, eps=0.0),
    "adamw": lambda: optim.adamw(1e-2),
    "adamp": lambda: optim.adamp(1e-2, weight_decay=0.1, delta=0.9),
    "bert_adam": lambda: optim.bert_adam(1e-2),
    "adadelta": lambda: optim.adadelta(1.0),
    "adagrad": lambda: optim.adagrad(0.1),
    "lamb": lambda: optim.lamb(1e-2, weight_decay=0.1),
    "lars": lambda: optim.lars(0.1),
    "novograd": lambda: optim.novograd(1e-2),
    "rmsprop": lambda: optim.rmsprop(1e-2, momentum=0.9, centered=True),
    "rmsprop_tf": lambda: optim.rmsprop_tf(1e-2, momentum=0.9),
}


def make_tree(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {str(i): torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def run(optimizer, kernel, shapes, half=None, donate=True, steps=4, skip=2):
    """Take some steps, one of them not finite, and return every tensor of parameters and state."""
    params32 = flatten(make_tree(shapes))
    opt = fused_update(optim.with_master_weights(optimizer) if half else optimizer, donate=donate, kernel=kernel)
    params = params32.cast(half)
    state = opt.init(params, master=params32) if half else opt.init(params)
    for step in range(steps):
        grads = params.layout.pack(make_tree(shapes, seed=step + 1), half)
        grads = grads.map(lambda g, step=step: torch.where(g != 0, g if step != skip else torch.nan, 0.0).to(g.dtype))
        out = ScaledGrads(grads, torch.tensor(0.5), torch.tensor(0.0), (), torch.tensor(step != skip), ())
        params, state = opt.update(out, state, params)
    return [leaf for leaf in tree_leaves((params, state)) if isinstance(leaf, torch.Tensor)]


def assert_same_numbers(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        if a.numel() == 0:
            continue
        # One rounding of a half may fall to the other side where the float32 values differ in the last place.
        tolerance = torch.finfo(a.dtype).eps if a.dtype in (torch.float16, torch.bfloat16) else 1e-6
        assert (a.double() - b.double()).abs().max() <= tolerance * max(1.0, b.double().abs().max())


@pytest.mark.parametrize("rule", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_agrees_with_the_reference(rule, half):
    assert_same_numbers(*(run(RULES[rule](), kernel, SIZES, half) for kernel in ("compiled", "reference")))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("half", "donate"), [(None, True), (None, False), (torch.float16, True), (torch.bfloat16, False)]
)
def test_every_rule_agrees_with_the_reference(rule, half, donate):
    assert_same_numbers(*(run(RULES[rule](), kernel, SIZES, half, donate) for kernel in ("compiled", "reference")))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), min_size=1, max_size=6), st.floats(1e-4, 0.5))
def test_one_compilation_serves_every_layout_and_learning_rate(shapes, lr):
    assert_same_numbers(*(run(optim.adamw(lr), kernel, shapes) for kernel in ("compiled", "reference")))
    before = compiled._kernel.cache_info().misses
    run(optim.adamw(lr / 2, betas=(0.8, 0.9), eps=1e-6), "compiled", [*shapes, (300,)])
    assert compiled._kernel.cache_info().misses == before


def test_per_tensor_hyper_parameters_counts_and_activity():
    tree = make_tree([(3,), (300,), (2, 2)])
    params, grads = flatten(tree), flatten(make_tree([(3,), (300,), (2, 2)], seed=1))
    lrs, counts, active = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 5, 9]), torch.tensor([True, True, False])
    outcomes = []
    for kernel in ("compiled", "reference"):
        opt = fused_update(optim.adamw(1e-3), kernel=kernel)
        opt = opt.replace(hyper=type(opt.hyper)(**{**opt.hyper, "lr": lrs}))
        state = opt.init(params)._replace(count=counts.to(torch.int32))
        out = ScaledGrads(grads, torch.tensor(1.0), torch.tensor(0.0), (), active, ())
        outcomes.append(opt.update(out, state, params))
    (new, state), (expected, expected_state) = outcomes
    torch.testing.assert_close(new.buffers[0], expected.buffers[0], rtol=1e-6, atol=1e-7)
    assert state.count.tolist() == expected_state.count.tolist() == [1, 6, 9]
    assert torch.equal(new.unflatten()["2"], tree["2"])
    for name, lr, count in (("0", 0.1, 0), ("1", 0.2, 5)):  # each tensor as torch would step it alone
        parameter = torch.nn.Parameter(tree[name].clone())
        reference = torch.optim.AdamW([parameter], lr=lr)
        parameter.grad = grads.unflatten()[name]
        reference.state[parameter] = {
            "step": torch.tensor(float(count)),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        reference.step()
        torch.testing.assert_close(new.unflatten()[name], parameter.detach(), rtol=1e-6, atol=1e-7)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_a_skipped_step_changes_no_bit(half):
    params32 = flatten(make_tree(SIZES))
    opt = fused_update(optim.adamw(1e-2), donate=True, kernel="compiled")
    opt = optim.with_master_weights(opt) if half else opt
    params = params32.cast(half).map(torch.clone)
    state = opt.init(params, master=params32) if half else opt.init(params)
    params, state = opt.update(params.map(torch.clone), state, params)
    params.buffers[0][0] = -0.0
    if half:
        state.master.buffers[0][0] = -0.0
    before = [leaf.clone() for leaf in tree_leaves((params, state)) if isinstance(leaf, torch.Tensor)]
    nan = params.map(lambda b: torch.full_like(b, torch.nan))
    out = ScaledGrads(nan, torch.tensor(1.0), torch.tensor(0.0), (), torch.tensor(False), ())
    params, state = opt.update(out, state, params)
    after = [leaf for leaf in tree_leaves((params, state)) if isinstance(leaf, torch.Tensor)]
    for a, b in zip(after, before, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_donated_buffers_are_the_same_storages_and_pure_ones_are_left_alone():
    params, grads = flatten(make_tree(SIZES)), flatten(make_tree(SIZES, seed=1))
    original = params.buffers[0].clone()
    pure = fused_update(optim.adamw(1e-2), kernel="compiled")
    state = pure.init(params)
    new, new_state = pure.update(grads, state, params)
    assert torch.equal(params.buffers[0], original)
    assert not state.slots["exp_avg"].buffers[0].any()
    donating = pure.replace(donate=True)
    kept = params.buffers[0].data_ptr()
    same, same_state = donating.update(grads, state, params)
    assert same.buffers[0].data_ptr() == kept
    assert torch.equal(same.buffers[0], new.buffers[0])
    assert torch.equal(same_state.slots["exp_avg"].buffers[0], new_state.slots["exp_avg"].buffers[0])


def test_where_nothing_can_be_compiled_one_warning_and_the_same_numbers():
    script = """
        import warnings, torch
        from npuamp_fn import flatten, fused_update, optim
        params = flatten({"w": torch.randn(2**20, generator=torch.Generator().manual_seed(0))})
        opt = fused_update(optim.rmsprop(0.1))
        state = opt.init(params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            new, state = opt.update(params, state, params)
            new, state = opt.update(params, state, new)
        ours = [w for w in caught if "npuamp_fn" in str(w.message)]
        assert len(ours) == 1, [str(w.message) for w in caught]
        assert "no-such-compiler" in str(ours[0].message) and "same numbers" in str(ours[0].message), ours[0].message
        plain = opt.replace(kernel="reference")
        expected, state = plain.update(params, plain.init(params), params)
        expected, state = plain.update(params, state, expected)
        assert torch.equal(new.buffers[0], expected.buffers[0])
        try:
            opt.replace(kernel="compiled").update(params, state, params)
        except ValueError as error:
            assert "no-such-compiler" in str(error), error
        print("done")
    """
    environment = {"CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.endswith("done\n"), result.stderr[-2000:]


def test_the_choice_is_explained():
    small, large = flatten({"w": torch.ones(3)}), flatten({"w": torch.ones(2**20)})
    assert "kernel compiled, 1 tensors in 1 float32 buffers" in explain(fused_update(optim.sgd(0.1)), large)
    assert "kernel reference" in (text := explain(fused_update(optim.sgd(0.1)), small))
    assert "fewer than 1048576 elements" in text
    assert "kernel aten" in explain(fused_update(optim.adamw(0.1)), small)
    opt = fused_update(optim.sgd(0.1), kernel="compiled")
    with pytest.raises(
        ValueError, match=r"kernel='compiled' cannot run sgd here: .*flatten\(params\) would make it one"
    ):
        opt.update({"w": torch.ones(3)}, opt.init({"w": torch.ones(3)}), {"w": torch.ones(3)})


@pytest.fixture
def always_compiled(monkeypatch):
    monkeypatch.setattr(reduce, "WORTH_COMPILING", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_finite_test_in_one_read(always_compiled, dtype):
    flat = flatten({"a": torch.randn(70_000).to(dtype), "b": torch.randn(5).to(dtype)})
    exact = flat.buffers[0].double().norm()
    assert abs(reduce.global_norm(flat).double() / exact - 1) < 1e-6
    assert abs(global_norm(flat).double() / exact - 1) < 1e-6
    assert reduce.all_finite(flat)
    flat.buffers[0][-256] = torch.finfo(dtype).max  # huge but finite: no false alarm, and the norm is right
    assert reduce.all_finite(flat)
    assert abs(reduce.global_norm(flat).double() / flat.buffers[0].double().norm() - 1) < 1e-5
    assert not reduce.all_finite(flat, torch.tensor(2.0**126))
    for bad in (float("inf"), float("-inf"), float("nan")):
        for index in (0, 69_999, 70_148):
            broken = flat.map(torch.clone)
            broken.buffers[0][index] = bad
            assert not reduce.all_finite(broken)
            assert not all_finite(broken)


@pytest.mark.parametrize("scale", [1e-11, 1e-8])
def test_norm_of_gradients_whose_scaled_down_squares_would_be_subnormal(always_compiled, scale):
    flat = flatten({"a": scale * torch.randn(70_000)})
    exact = flat.buffers[0].double().norm()
    assert abs(reduce.global_norm(flat).double() / exact - 1) < 1e-6
    assert reduce.all_finite(flat)
    mixed = flat.map(lambda buffer: buffer.index_fill(0, torch.tensor([3, 40_000]), 3e38))
    assert reduce.all_finite(mixed)
    finite, norm = reduce.finite_and_norm(mixed, torch.tensor(0.25))
    assert finite
    assert abs(norm.double() / (0.75e38 * 2**0.5) - 1) < 1e-5


def test_norm_with_more_threads_than_when_it_was_compiled(always_compiled):
    flat = flatten({"a": torch.randn(500_000)})
    exact = flat.buffers[0].double().norm()
    threads = torch.get_num_threads()
    try:
        for number in (threads, threads + 5, 1):
            torch.set_num_threads(number)
            assert abs(reduce.global_norm(flat).double() / exact - 1) < 1e-6
            assert not reduce.all_finite(flat.map(lambda b: b.index_fill(0, torch.tensor(499_999), torch.nan)))
    finally:
        torch.set_num_threads(threads)


def test_small_or_traced_trees_take_the_general_path():
    flat = flatten({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    assert reduce.global_norm(flat) == 5.0
    assert reduce.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}) == 5.0
    members = flat.map(lambda b: torch.stack([b, 2 * b]))
    assert torch.func.vmap(reduce.global_norm)(members).tolist() == [5.0, 10.0]


def test_clipping_takes_the_norm_that_the_finite_test_read(always_compiled, monkeypatch):
    params = flatten(make_tree(SIZES))
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(1.0))
    grad_fn = with_loss_scaling(grad(lambda p: (p.buffers[0] ** 2).sum()), defer_unscale=True)
    out = grad_fn(StaticLossScale.create(64.0), params)
    exact = 2 * params.buffers[0].double().norm()
    torch.testing.assert_close(out.norm, exact.float())
    reads = []
    monkeypatch.setattr("npuamp_fn.optim.clip.global_norm", lambda tree: reads.append(1) or global_norm(tree))
    clipped, _ = opt.update(out, opt.init(params), params)
    assert reads == []
    expected = params.buffers[0].double() * (1 - 2 * 0.5 / exact)
    torch.testing.assert_close(clipped.buffers[0], expected.float(), rtol=1e-5, atol=1e-6)
    again, _ = opt.update(out._replace(norm=()), opt.init(params), params)
    assert reads == [1]
    torch.testing.assert_close(again.buffers[0], clipped.buffers[0])


def test_a_rule_that_cannot_be_traced_does_not_stop_others_from_being_compiled():
    def update(grad, param, slots, count, hyper, seg):
        return (param - hyper.lr * grad if float(grad.sum()) > 0 else param), {}

    params = flatten(make_tree(SIZES))
    opt = fused_update(optim.Optimizer(Rule("moody", update), optim.sgd(0.5).hyper), kernel="compiled")
    ones = params.map(torch.ones_like)
    with pytest.warns(RuntimeWarning, match=r"the rule moody cannot be traced .*same numbers"):
        new, state = opt.update(ones, opt.init(params), params)
    assert torch.equal(new.buffers[0], params.buffers[0] - 0.5)
    opt.update(ones, state, new)  # said once
    assert inductor.unavailable() is None
    assert_same_numbers(*(run(optim.adamw(1e-2), kernel, SIZES) for kernel in ("compiled", "reference")))
