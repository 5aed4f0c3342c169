"""Algorithms that torch lacks, against their published formulas, written here tensor by tensor in float64."""

import math

import pytest
import torch

from npuamp_fn import flatten, optim

STEPS = 12
SHAPES = {"weight": (8, 33), "kernel": (4, 3, 2, 2), "bias": (257,), "one": (1,), "scalar": (), "empty": (0,)}


def norm(x):
    return math.sqrt(float((x * x).sum()))


def lamb(p, g, s, t, *, lr, betas, eps, weight_decay, correct=True, clamp=None, averaging=True, scale=True):
    b1, b2 = betas
    s["m"] = b1 * s.get("m", 0) + (1 - b1 if averaging else 1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    c1, c2 = (1 - b1**t, 1 - b2**t) if correct else (1, 1)
    u = s["m"] / c1 / ((s["v"] / c2) ** 0.5 + eps) + weight_decay * p
    size, length = norm(p), norm(u)
    size = min(max(size, clamp[0]), clamp[1]) if clamp else size
    ratio = size / length if scale and size > 0 and length > 0 else 1
    return p - lr * ratio * u


def lars(p, g, s, t, *, lr, momentum, weight_decay, trust_coefficient, nesterov=False):
    size, slope = norm(p), norm(g)
    rate = trust_coefficient * size / (slope + weight_decay * size + 1e-8) if size > 0 and slope > 0 else 1
    step = lr * rate * (g + weight_decay * p)
    s["b"] = momentum * s.get("b", 0) + step
    return p - (momentum * s["b"] + step if nesterov else s["b"])


def novograd(p, g, s, t, *, lr, betas, eps, weight_decay):
    v = norm(g) ** 2 if t == 1 else betas[1] * s["v"] + (1 - betas[1]) * norm(g) ** 2
    s["v"] = v
    s["m"] = betas[0] * s.get("m", 0) + g / (math.sqrt(v) + eps) + weight_decay * p
    return p - lr * s["m"]


def novograd_outside(p, g, s, t, *, lr, betas, eps, weight_decay):
    # The variant of NVIDIA's fused optimizer: averages plain gradients, corrects both moments, decays afterwards.
    v = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * norm(g) ** 2
    s["v"] = v
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    root = math.sqrt(v) / math.sqrt(1 - betas[1] ** t) + eps
    return p - lr * (s["m"] / (1 - betas[0] ** t) / root + weight_decay * p)


def adamp(p, g, s, t, *, lr, betas, eps, weight_decay, delta, wd_ratio, nesterov):
    b1, b2 = betas
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    root = (s["v"] / (1 - b2**t)) ** 0.5 + eps
    u = (b1 * s["m"] + (1 - b1) * g if nesterov else s["m"]) / root
    ratio = 1
    if p.dim() > 1:
        for rows in (p.shape[0], 1):
            pv, gv = p.reshape(rows, -1), g.reshape(rows, -1)
            lengths = pv.norm(dim=1) + eps
            cosine = (pv * gv).sum(1).abs() / (gv.norm(dim=1) + eps) / lengths
            if cosine.max() < delta / math.sqrt(pv.shape[1]):
                unit = pv / lengths[:, None]
                u = u - (unit * (unit * u.reshape(rows, -1)).sum(1, keepdim=True)).reshape(p.shape)
                ratio = wd_ratio
                break
    return p * (1 - lr * weight_decay * ratio) - lr / (1 - b1**t) * u


def bert_adam(p, g, s, t, *, lr, warmup, t_total, schedule, betas, eps, weight_decay):
    s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g**2
    x = min((t - 1) / t_total, 1)
    factor = {
        "warmup_linear": (1 - x) / (1 - warmup),
        "warmup_cosine": (1 + math.cos(math.pi * x)) / 2,
        "warmup_constant": 1,
        "warmup_poly": (1 - x) ** 0.5,
    }[schedule]
    if x < warmup:
        factor = x / warmup
    return p - lr * factor * (s["m"] / (s["v"] ** 0.5 + eps) + weight_decay * p)


def rmsprop_tf(p, g, s, t, *, lr, alpha, eps, weight_decay, momentum, centered, decoupled_decay, lr_in_momentum, start):
    if decoupled_decay:
        p = p - weight_decay * p
    else:
        g = g + weight_decay * p
    s["v"] = alpha * s.get("v", start) + (1 - alpha) * g**2
    s["a"] = alpha * s.get("a", 0) + (1 - alpha) * g
    root = (s["v"] - (s["a"] ** 2 if centered else 0) + eps) ** 0.5
    s["b"] = momentum * s.get("b", 0) + (lr if lr_in_momentum else 1) * g / root
    return p - (1 if lr_in_momentum else lr) * s["b"]


LAMB = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
NOVOGRAD = {"lr": 0.02, "betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.01}
LARS = {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.01}
ADAMP = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "delta": 0.1, "wd_ratio": 0.1}
BERT = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "t_total": 9}
TF = {"lr": 0.02, "alpha": 0.9, "eps": 0.1, "weight_decay": 0.05}
TF_OFF = {"momentum": 0.0, "centered": False, "decoupled_decay": False, "lr_in_momentum": True, "start": 0.0}
NVIDIA = {"grad_averaging": True, "bias_correction": True, "reg_inside_moment": False, "init_zero": True}

CASES = {
    "lamb": (optim.lamb(**LAMB), lamb, LAMB),
    "lamb-uncorrected-clamped": (
        optim.lamb(**LAMB, bias_correction=False, norm_clamp=(0.0, 2.0)),
        lamb,
        {**LAMB, "correct": False, "clamp": (0.0, 2.0)},
    ),
    "lamb-sums-gradients": (optim.lamb(**LAMB, grad_averaging=False), lamb, {**LAMB, "averaging": False}),
    "lamb-without-ratio": (optim.lamb(**LAMB, trust_ratio=False), lamb, {**LAMB, "scale": False}),
    "lamb-undecayed": (optim.lamb(**{**LAMB, "weight_decay": 0.0}), lamb, {**LAMB, "weight_decay": 0.0}),
    "lamb-undecayed-unscaled": (
        optim.lamb(**{**LAMB, "weight_decay": 0.0}, nvlamb=False),
        lamb,
        {**LAMB, "weight_decay": 0.0, "scale": False},
    ),
    "lars": (optim.lars(**LARS), lars, LARS),
    "lars-nesterov": (optim.lars(**LARS, nesterov=True), lars, {**LARS, "nesterov": True}),
    "novograd": (optim.novograd(**NOVOGRAD), novograd, NOVOGRAD),
    "novograd-outside": (optim.novograd(**NOVOGRAD, **NVIDIA), novograd_outside, NOVOGRAD),
    "adamp": (optim.adamp(**ADAMP), adamp, {**ADAMP, "nesterov": False}),
    "adamp-nesterov": (optim.adamp(**ADAMP, nesterov=True), adamp, {**ADAMP, "nesterov": True}),
    "adamp-always-by-row": (optim.adamp(**{**ADAMP, "delta": 1e3}), adamp, {**ADAMP, "delta": 1e3, "nesterov": False}),
    **{
        f"bert_adam-{schedule}-{warmup}": (
            optim.bert_adam(**BERT, schedule=schedule, warmup=warmup),
            bert_adam,
            {**BERT, "schedule": schedule, "warmup": max(warmup, 0)},
        )
        for schedule in ("warmup_linear", "warmup_cosine", "warmup_constant", "warmup_poly")
        for warmup in (0.25, -1)
    },
    **{
        f"rmsprop_tf-{changes}": (optim.rmsprop_tf(**TF, **changes), rmsprop_tf, {**TF, **TF_OFF, **changes})
        for changes in (
            {},
            {"start": 1.0},
            {"momentum": 0.9},
            {"momentum": 0.9, "lr_in_momentum": False},
            {"centered": True, "momentum": 0.9},
            {"decoupled_decay": True},
        )
    },
}


def draw(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("case", CASES)
def test_steps_follow_the_published_formula(case):
    optimizer, formula, options = CASES[case]
    plain, memory = draw(0), {name: {} for name in SHAPES}
    leaves, flat = draw(0), flatten(draw(0))
    single = {name: value.float() for name, value in draw(0).items()}
    states = [optimizer.init(leaves), optimizer.init(flat), optimizer.init(single)]
    for step in range(1, STEPS + 1):
        grads = draw(step)
        plain = {name: formula(plain[name], grads[name], memory[name], step, **options) for name in SHAPES}
        leaves, states[0] = optimizer.update(grads, states[0], leaves)
        flat, states[1] = optimizer.update(flat.layout.pack(grads), states[1], flat)
        single, states[2] = optimizer.update({k: g.float() for k, g in grads.items()}, states[2], single)
    flat = flat.unflatten()
    for name in SHAPES:
        torch.testing.assert_close(leaves[name], plain[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(flat[name], plain[name], rtol=1e-12, atol=1e-12)
        assert single[name].dtype == torch.float32
        torch.testing.assert_close(single[name].double(), plain[name], rtol=2e-5, atol=2e-6)


def test_adamp_projection_by_row_by_tensor_and_not_at_all_by_hand():
    # The first direction is the gradient's sign; decay is lr * wd * wd_ratio = .01 where it was projected, else .1.
    params = {
        "by_row": torch.tensor([[3.0, 1.0], [2.0, 0.0]]),
        "by_tensor": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        "neither": torch.tensor([[1.0, 1.0]]),
        "vector": torch.tensor([3.0, 1.0]),
    }
    grads = {
        "by_row": torch.tensor([[1.0, -3.0], [0.0, 5.0]]),
        "by_tensor": torch.tensor([[2.0, 0.0], [0.0, -1.0]]),
        "neither": torch.tensor([[1.0, 1.0]]),
        "vector": torch.tensor([1.0, -3.0]),
    }
    expected = {
        "by_row": torch.tensor([[2.97 - 0.04, 0.99 + 0.12], [1.98, -0.1]]),
        "by_tensor": torch.tensor([[0.99 - 0.12, 0.0], [0.0, 1.98 + 0.06]]),
        "neither": torch.tensor([[0.9 - 0.1, 0.9 - 0.1]]),
        "vector": torch.tensor([2.7 - 0.1, 0.9 + 0.1]),
    }
    optimizer = optim.adamp(0.1, weight_decay=1.0)
    moved, _ = optimizer.update(grads, optimizer.init(params), params)
    for name in params:
        torch.testing.assert_close(moved[name], expected[name], rtol=1e-6, atol=1e-6)


def test_lamb_zero_weights_move_by_the_unscaled_step():
    params = {"b": torch.zeros(3)}
    optimizer = optim.lamb(0.5, eps=0.0)
    moved, _ = optimizer.update({"b": torch.tensor([1.0, -2.0, 4.0])}, optimizer.init(params), params)
    torch.testing.assert_close(moved["b"], torch.tensor([-0.5, 0.5, -0.5]), rtol=1e-6, atol=0)


def test_lamb_with_eps_zero_is_not_spoiled_by_padding():
    params, grads = {"w": torch.full((5,), 2.0)}, {"w": torch.ones(5)}
    optimizer = optim.lamb(0.5, eps=0.0)
    flat = flatten(params)
    moved, state = optimizer.update(flat.layout.pack(grads), optimizer.init(flat), flat)
    torch.testing.assert_close(moved.unflatten()["w"], torch.ones(5), rtol=1e-6, atol=0)
    for tree in (moved, *state.slots.values()):
        assert torch.equal(tree.buffers[0][5:], torch.zeros(251))


def test_rmsprop_tf_two_steps_by_hand_with_eps_and_momentum():
    # v = .1, root = sqrt(.2); b = .1 / sqrt(.2) = .223607; then v = .19, root = sqrt(.29), b = .201246 + .185695
    params, grads = {"w": torch.ones(1, dtype=torch.float64)}, {"w": torch.ones(1, dtype=torch.float64)}
    optimizer = optim.rmsprop_tf(0.1, alpha=0.9, eps=0.1, momentum=0.9)
    params, state = optimizer.update(grads, optimizer.init(params), params)
    assert params["w"].item() == pytest.approx(1 - 0.22360679774997896, abs=1e-12)
    params, state = optimizer.update(grads, state, params)
    assert params["w"].item() == pytest.approx(1 - 0.22360679774997896 - 0.38694145, abs=1e-7)
    assert state.slots["square_avg"]["w"].item() == pytest.approx(0.19, abs=1e-12)


def test_bert_adam_rate_is_never_negative_and_stays_at_its_end():
    for schedule in ("warmup_linear", "warmup_cosine", "warmup_poly"):
        optimizer = optim.bert_adam(1.0, 0.25, 4, schedule, betas=(0.0, 0.0), weight_decay=0.0)
        params = {"w": torch.zeros(1, dtype=torch.float64)}
        state = optimizer.init(params)
        rates = []
        for _ in range(8):
            moved, state = optimizer.update({"w": torch.ones(1, dtype=torch.float64)}, state, params)
            rates.append(-moved["w"].item())
        assert rates[0] == 0.0
        assert min(rates) >= 0.0
        assert rates[4:] == [pytest.approx(0.0, abs=1e-12)] * 4


def test_bert_adam_resumes_its_schedule_from_the_saved_count():
    optimizer = optim.bert_adam(0.1, 0.2, 10, "warmup_cosine")
    params = draw(0)
    state = optimizer.init(params)
    for step in range(6):
        if step == 3:
            middle = params, optim.OptimizerState(*torch.load(save(tuple(state)), weights_only=True))
        params, state = optimizer.update(draw(step), state, params)
    resumed, state = middle
    for step in range(3, 6):
        resumed, state = optimizer.update(draw(step), state, resumed)
    for name in SHAPES:
        assert torch.equal(resumed[name], params[name])


def save(value):
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.lamb(-1.0), "lamb: lr: expected a number of at least 0, found -1.0"),
        (lambda: optim.lamb(betas=(1.0, 0.9)), r"lamb: beta1: expected a number in \[0, 1\), found 1.0"),
        (lambda: optim.lamb(norm_clamp=(2.0, 1.0)), r"norm_clamp: expected 0 <= low < high, found \(2.0, 1.0\)"),
        (lambda: optim.lars(momentum=-0.1), "lars: momentum: expected a number of at least 0"),
        (lambda: optim.novograd(betas=(0.9, -1.0)), r"novograd: beta2: expected a number in \[0, 1\)"),
        (lambda: optim.adamp(eps=-1.0), "adamp: eps"),
        (lambda: optim.bert_adam(schedule="linear"), "unknown schedule 'linear'; known: .*'warmup_poly'"),
        (lambda: optim.bert_adam(warmup=1.0), r"bert_adam: warmup: expected a number in \[0, 1\), found 1.0"),
        (lambda: optim.bert_adam(t_total=0), "t_total: expected a positive number, or -1 for none, found 0"),
        (lambda: optim.adadelta(rho=1.1), r"adadelta: rho: expected a number in \[0, 1\], found 1.1"),
        (lambda: optim.rmsprop(alpha=-0.1), "rmsprop: alpha"),
        (lambda: optim.rmsprop_tf(start=-1.0), "rmsprop_tf: start"),
        (lambda: optim.adagrad(initial_accumulator_value=-1.0), "adagrad: initial_accumulator_value"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
