import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from npuamp_fn import ScaledGrads, flatten, fused_update, optim
from npuamp_fn.kernels.rounding import round_stochastically

SHAPES = {"w": (6, 50), "k": (4, 3, 2, 2), "b": (257,), "s": (), "e": (0,)}


def draw(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def packed(tree, flat):
    return flatten(tree) if flat else tree


def plain(tree):
    return tree.unflatten() if hasattr(tree, "layout") else tree


def run(optimizer, flat=False, steps=4, dtype=torch.float32):
    params = packed(draw(0, dtype), flat)
    state = optimizer.init(params)
    for seed in range(1, 1 + steps):
        grads = draw(seed, dtype)
        params, state = optimizer.update(params.layout.pack(grads) if flat else grads, state, params)
    return params, state


flat_or_not = pytest.mark.parametrize("flat", [False, True], ids=["leaves", "flat"])


# --- clipping inside the rule ---


@flat_or_not
def test_value_clipping_equals_torch(flat):
    optimizer = optim.chain(optim.clip_by_value(0.3), optim.adamw(0.1))
    params = {name: value.requires_grad_() for name, value in draw(0).items()}
    theirs = torch.optim.AdamW(params.values(), 0.1, foreach=False)
    for seed in range(1, 5):
        for name, grad in draw(seed).items():
            params[name].grad = grad
        torch.nn.utils.clip_grad_value_(params.values(), 0.3)
        theirs.step()
    found = plain(run(optimizer, flat)[0])
    for name in SHAPES:
        assert torch.equal(found[name], params[name])


def adaptively_clipped(param, grad, clipping, eps):
    rows = 1 if param.dim() < 2 else param.shape[0]
    clipped = []
    for p, g in zip(param.reshape(rows, -1), grad.reshape(rows, -1), strict=True):
        bound = clipping * max(float(p.norm()), eps)
        clipped.append(g * bound / g.norm() if float(g.norm()) > bound else g)
    return torch.stack(clipped).reshape(param.shape)


@flat_or_not
def test_adaptive_clipping_by_row_follows_the_paper(flat):
    params = {name: value.double() for name, value in draw(0).items()}
    params["w"][0] = 0.0  # a row of zeros is measured by eps
    params["w"][1] *= 100.0  # long weights: this row's gradient stays
    grads = {name: value.double() for name, value in draw(1).items()}
    optimizer = optim.chain(optim.adaptive_clip(0.1, eps=1e-2), optim.sgd(1.0))
    tree = packed(params, flat)
    found, _ = optimizer.update(tree.layout.pack(grads) if flat else grads, optimizer.init(tree), tree)
    for name in SHAPES:
        expected = params[name] - adaptively_clipped(params[name], grads[name], 0.1, 1e-2)
        torch.testing.assert_close(plain(found)[name], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(plain(found)["w"][1], params["w"][1] - grads["w"][1])


def test_global_norm_then_value_then_rule():
    grads, params = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.clip_by_value(0.7), optim.sgd(1.0))
    new, _ = optimizer.update(grads, optimizer.init(params), params)
    torch.testing.assert_close(new["w"], torch.tensor([-0.6, -0.7]), rtol=1e-6, atol=0)
    scaled = ScaledGrads(
        {"w": torch.tensor([300.0, 400.0])}, torch.tensor(0.01), torch.ones(()), (), torch.tensor(True), None
    )
    again, _ = optimizer.update(scaled, optimizer.init(params), params)
    torch.testing.assert_close(again["w"], new["w"], rtol=1e-6, atol=0)


def test_order_that_needs_two_passes_is_refused():
    with pytest.raises(ValueError, match=r"clip_by_value comes before ClipByGlobalNorm.*put clip_by_value after it"):
        optim.chain(optim.clip_by_value(1.0), optim.clip_by_global_norm(1.0), optim.sgd())
    with pytest.raises(ValueError, match=r"already has \['clip_value'\]; use clip_by_value once"):
        optim.chain(optim.clip_by_value(1.0), optim.clip_by_value(2.0), optim.sgd())
    with pytest.raises(TypeError, match="expected a gradient transform before the optimizer, found float"):
        optim.chain(1.0, optim.sgd())
    with pytest.raises(TypeError, match="expected an optimizer as last part, found NoneType"):
        optim.chain()


@pytest.mark.parametrize(
    "make", [lambda: optim.clip_by_value(0.0), lambda: optim.adaptive_clip(-1.0), lambda: optim.adaptive_clip(eps=0.0)]
)
def test_bounds_must_be_positive(make):
    with pytest.raises(ValueError, match="expected a positive number"):
        make()


# --- averages ---


@flat_or_not
def test_ema_equals_torch_averaged_model(flat):
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in draw(0).items()})
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    for seed in range(1, 5):
        for name, grad in draw(seed).items():
            model[name].grad = grad
        theirs.step()
        average.update_parameters(model)
    params, state = run(optim.ema(optim.sgd(0.1, momentum=0.9), 0.9), flat)
    averages = plain(optim.ema_params(state, params))
    for name in SHAPES:
        assert torch.equal(plain(params)[name], model[name])
        torch.testing.assert_close(averages[name], average.module[name].detach(), rtol=1e-6, atol=1e-7)


@flat_or_not
def test_ema_starts_at_the_parameters_and_keeps_their_dtype_and_leaves(flat):
    optimizer = optim.with_master_weights(optim.ema(optim.adamw(0.1)))
    half, full = draw(0, torch.float16), draw(0)
    params = packed({**half, "steps": 3}, flat)
    master = params.map(lambda b: params.layout.pack({**full, "steps": 3}).buffers[0]) if flat else {**full, "steps": 3}
    state = optimizer.init(params, master)
    for name in SHAPES:
        assert torch.equal(plain(state.slots["ema"])[name], full[name])
    averages = plain(optim.ema_params(state, params))
    assert averages["steps"] == 3
    assert {averages[name].dtype for name in SHAPES} == {torch.float16}
    assert all(torch.equal(averages[name], half[name]) for name in SHAPES)


def test_ema_decay_may_be_a_schedule_and_a_skipped_step_is_none():
    optimizer = optim.ema(optim.sgd(1.0), lambda count: 1 - 1 / (count + 1.0))  # the plain mean of all parameters
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    state = optimizer.init(params)
    seen = []
    for value in (1.0, 5.0, -2.0):
        params, state = optimizer.update({"w": torch.full((1,), value, dtype=torch.float64)}, state, params)
        seen.append(params["w"].item())
        nan = {"w": torch.full((1,), math.nan, dtype=torch.float64)}
        out = ScaledGrads(nan, torch.ones(()), torch.ones(()), (), torch.tensor(False), None)
        params, state = optimizer.update(out, state, params)
    assert state.slots["ema"]["w"].item() == pytest.approx(sum(seen) / 3, rel=1e-6)


def test_ema_refuses_what_it_cannot_average():
    with pytest.raises(TypeError, match="ema: expected an optimizer, found float"):
        optim.ema(0.9)
    with pytest.raises(ValueError, match=r"ema: decay: expected a number in \[0, 1\]"):
        optim.ema(optim.sgd(), 1.5)
    with pytest.raises(ValueError, match="use ema once"):
        optim.ema(optim.ema(optim.sgd()))
    with pytest.raises(TypeError, match="state of an optimizer made by ema"):
        optim.ema_params(optim.sgd().init({}), {})


# --- stochastic rounding ---

STOCHASTIC = optim.with_master_weights(optim.sgd(1e-4), "stochastic")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0003, -1.0003, 0.1, 3.1e-5, -3.3e-8, 1234.567])
def test_stochastic_rounding_has_the_right_mean_and_picks_neighbours(dtype, value):
    count = 2**17
    x = torch.full((count,), value)
    halves = round_stochastically(x, dtype, torch.tensor(3), torch.arange(count))
    low, high = halves.double().min(), halves.double().max()
    exact = x[0].double()
    assert halves.dtype == dtype
    assert low <= exact <= high
    assert halves.unique().numel() == 2
    share = (exact - low) / (high - low)
    error = (halves.double().mean() - exact) / (high - low)
    assert abs(error) < 5 * (share * (1 - share) / count).sqrt() + 1e-7
    assert x[0].to(dtype).double() in (low, high)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_keeps_what_is_exact_and_what_is_not_finite(dtype):
    exact = torch.tensor(
        [0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-24, math.inf, -math.inf, math.nan, torch.finfo(dtype).max]
    )
    for count in range(20):
        halves = round_stochastically(exact, dtype, torch.tensor(count), torch.arange(len(exact)))
        assert torch.equal(halves.view(torch.int16), exact.to(dtype).view(torch.int16))
    beyond = torch.full((1000,), torch.finfo(dtype).max) * (1 + 2.0**-20)
    assert torch.isfinite(round_stochastically(beyond, dtype, torch.tensor(1), torch.arange(1000))).all()


def test_stochastic_rounding_differs_between_steps_and_elements():
    x, index = torch.full((2**16,), 1.00390625), torch.arange(2**16)  # midway between two bfloat16
    first, second = (round_stochastically(x, torch.bfloat16, torch.tensor(c), index).double() for c in (1, 2))
    signs = torch.stack([first, second, first.roll(1)]) * 2 - 2.0078125
    assert abs(torch.corrcoef(signs)[0, 1]) < 0.02
    assert abs(torch.corrcoef(signs)[0, 2]) < 0.02


@flat_or_not
def test_stochastic_master_weights_are_reproducible_and_leave_random_state_alone(flat):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    (params, state), (again, _) = (run(STOCHASTIC, flat, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    leaves, _ = run(STOCHASTIC, False, dtype=torch.bfloat16)
    nearest, nearest_state = run(optim.with_master_weights(optim.sgd(1e-4)), flat, dtype=torch.bfloat16)
    for name in SHAPES:
        assert torch.equal(plain(params)[name], plain(again)[name])
        assert torch.equal(plain(params)[name], leaves[name])  # numbered by tensor, not by place in a buffer
        assert torch.equal(plain(state.master)[name], plain(nearest_state.master)[name])
    assert not torch.equal(plain(params)["w"], plain(nearest)["w"])


@flat_or_not
def test_stochastic_rounding_lets_small_updates_through_on_average(flat):
    params = packed({"w": torch.ones(4096, dtype=torch.bfloat16)}, flat)
    state = STOCHASTIC.init(params)
    grads = {"w": torch.ones(4096, dtype=torch.bfloat16)}
    grads = params.layout.pack(grads) if flat else grads
    params, state = STOCHASTIC.update(grads, state, params)
    mean = plain(params)["w"].double().mean().item()
    assert mean == pytest.approx(1 - 1e-4, abs=4 * 2**-8 * math.sqrt(1e-4 * 256 / 4096))
    assert mean < 1.0


@flat_or_not
def test_stochastic_step_donated_skipped_and_compiled(flat):
    torch._dynamo.reset()
    grads = draw(1, torch.float16)
    expected = run(STOCHASTIC, flat, 1, torch.float16)[0]

    def once(update, finite=True):
        params = packed(draw(0, torch.float16), flat)
        out = ScaledGrads(
            params.layout.pack(grads) if flat else grads, torch.ones(()), torch.ones(()), (), torch.tensor(finite), None
        )
        return plain(update(out, STOCHASTIC.init(params), params)[0])

    compiled = torch.compile(STOCHASTIC.update, backend="aot_eager", fullgraph=True)
    for update in (STOCHASTIC.replace(donate=True).update, compiled, fused_update(STOCHASTIC).update):
        found, kept = once(update), once(update, finite=False)
        for name in SHAPES:
            assert torch.equal(found[name], plain(expected)[name])
            assert torch.equal(kept[name], draw(0, torch.float16)[name])


def test_stochastic_rounding_under_vmap_equals_a_loop():
    params = torch.stack([draw(seed, torch.bfloat16)["w"] for seed in (0, 1)])
    grads = torch.stack([draw(seed, torch.bfloat16)["w"] for seed in (2, 3)])

    def step(param, grad):
        return STOCHASTIC.update(grad, STOCHASTIC.init(param), param)[0]

    found = torch.func.vmap(step)(params, grads)
    for index in range(2):
        assert torch.equal(found[index], step(params[index], grads[index]))


def test_only_the_reference_kernel_rounds_stochastically():
    with pytest.raises(ValueError, match="rounds half copies to nearest"):
        run(fused_update(STOCHASTIC, kernel="aten"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="unknown rounding 'up'"):
        optim.with_master_weights(optim.sgd(), "up")
