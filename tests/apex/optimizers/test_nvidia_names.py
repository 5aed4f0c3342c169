"""The fused optimizers under NVIDIA's names: formulas written out in float64, arguments, refusals, state dicts."""

import ast
import copy
import inspect

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers

SHAPES = [(5, 7), (), (300,), (2, 3, 4)]
STEPS = 5


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def fused_sgd(p, g, s, t, o):
    wd, after = o["weight_decay"], o["wd_after_momentum"]
    g = g if after else g + wd * p
    if o["momentum"]:
        s["b"] = g if t == 1 else o["momentum"] * s["b"] + (1 - o["dampening"]) * g
        g = g + o["momentum"] * s["b"] if o["nesterov"] else s["b"]
    return p - o["lr"] * (g + wd * p if after else g)


def moments(g, s, t, o):
    b1, b2 = o["betas"]
    share = 1 - b1 if o.get("grad_averaging", True) else 1
    s["m"] = b1 * s.get("m", 0) + share * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1, 1)
    return s["m"] / c1 / ((s["v"] / c2).sqrt() + o["eps"])


def adam_direction(p, g, s, t, o):
    decoupled = o["adam_w_mode"]
    u = moments(g if decoupled else g + o["weight_decay"] * p, s, t, o)
    return u + o["weight_decay"] * p if decoupled else u


def fused_adam(p, g, s, t, o):
    return p - o["lr"] * adam_direction(p, g, s, t, o)


def fused_lamb(p, g, s, t, o):
    u = adam_direction(p, g, s, t, o)
    scaled = (o["use_nvlamb"] or o["weight_decay"] != 0) and p.norm() > 0 and u.norm() > 0
    return p - o["lr"] * (p.norm() / u.norm() if scaled else 1) * u


def fused_novograd(p, g, s, t, o):
    (b1, b2), first = o["betas"], 0 if o["init_zero"] else g.norm()
    s["n"] = (b2 * s.get("n", first) ** 2 + (1 - b2) * g.norm() ** 2) ** 0.5
    c1, c2 = (1 - b1**t, (1 - b2**t) ** 0.5) if o["bias_correction"] else (1, 1)
    scale, share = s["n"] / c2 + o["eps"], 1 - b1 if o["grad_averaging"] else 1
    inside = o["reg_inside_moment"]
    s["m"] = b1 * s.get("m", 0) + share * (g / scale + o["weight_decay"] * p if inside else g)
    u = s["m"] / c1
    return p - o["lr"] * (u if inside else u / scale + o["weight_decay"] * p)


def fused_adagrad(p, g, s, t, o):
    wd, decoupled = o["weight_decay"], o["adagrad_w_mode"]
    g = g if decoupled else g + wd * p
    s["h"] = s.get("h", 0) + g * g
    u = g / (s["h"].sqrt() + o["eps"])
    return p - o["lr"] * (u + wd * p if decoupled else u)


FORMULAS = {
    "FusedSGD": fused_sgd,
    "FusedAdam": fused_adam,
    "FusedLAMB": fused_lamb,
    "FusedNovoGrad": fused_novograd,
    "FusedAdagrad": fused_adagrad,
}
# What the constructors must take and start from.
DEFAULTS = {
    "FusedSGD": "momentum=0 dampening=0 weight_decay=0 nesterov=False wd_after_momentum=False "
    "materialize_master_grads=True set_grad_none=False",
    "FusedAdam": "lr=1e-3 bias_correction=True betas=(0.9,0.999) eps=1e-8 adam_w_mode=True weight_decay=0 "
    "amsgrad=False set_grad_none=True",
    "FusedLAMB": "lr=1e-3 bias_correction=True betas=(0.9,0.999) eps=1e-6 weight_decay=0.01 amsgrad=False "
    "adam_w_mode=True grad_averaging=True set_grad_none=True max_grad_norm=1.0 use_nvlamb=False",
    "FusedNovoGrad": "lr=1e-3 bias_correction=True betas=(0.9,0.999) eps=1e-8 weight_decay=0 amsgrad=False "
    "reg_inside_moment=False grad_averaging=True norm_type=2 init_zero=False set_grad_none=True",
    "FusedAdagrad": "lr=1e-2 eps=1e-10 weight_decay=0 set_grad_none=True adagrad_w_mode=False",
}
DECAYED = {"lr": 0.05, "weight_decay": 0.1}
CASES = [
    ("FusedSGD", {"lr": 0.1}),
    ("FusedSGD", {**DECAYED, "momentum": 0.9, "dampening": 0.5}),
    ("FusedSGD", {**DECAYED, "momentum": 0.9, "nesterov": True, "wd_after_momentum": True}),
    ("FusedAdam", {}),
    ("FusedAdam", DECAYED),
    ("FusedAdam", {**DECAYED, "adam_w_mode": False, "betas": (0.8, 0.9), "eps": 1e-3}),
    ("FusedAdam", {**DECAYED, "bias_correction": False}),
    ("FusedAdam", {**DECAYED, "bias_correction": False, "adam_w_mode": False}),
    ("FusedLAMB", {}),
    ("FusedLAMB", {**DECAYED, "bias_correction": False, "adam_w_mode": False, "grad_averaging": False}),
    ("FusedLAMB", {"lr": 0.05, "weight_decay": 0.0, "max_grad_norm": 0.0}),
    ("FusedLAMB", {"lr": 0.05, "weight_decay": 0.0, "use_nvlamb": True, "max_grad_norm": 7.0}),
    ("FusedNovoGrad", {}),
    ("FusedNovoGrad", {**DECAYED, "init_zero": True, "betas": (0.8, 0.9), "eps": 1e-3}),
    ("FusedNovoGrad", {**DECAYED, "bias_correction": False, "reg_inside_moment": True, "grad_averaging": False}),
    ("FusedAdagrad", {}),
    ("FusedAdagrad", {**DECAYED, "adagrad_w_mode": True}),
    ("FusedAdagrad", DECAYED),
]


def by_formula(name, params, options, first=1, states=None):
    """Return the parameters after five steps, in float64, and the formula's states."""
    params = [p.double() for p in params]
    states = [{} for _ in params] if states is None else states
    limit = options.get("max_grad_norm", 0)
    for t in range(first, first + STEPS):
        grads = [g.double() for g in draw(100 + t)]
        norm = torch.stack([g.norm() for g in grads]).norm()
        grads = [g / norm * limit for g in grads] if limit and norm > limit else grads
        params = [FORMULAS[name](p, g, s, t, options) for p, g, s in zip(params, grads, states, strict=True)]
    return params, states


def run(optimizer, params, first=1):
    for t in range(first, first + STEPS):
        for p, g in zip(params, draw(100 + t), strict=True):
            p.grad = g
        optimizer.step()


def assert_close(params, expected):
    for p, q in zip(params, expected, strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(p.detach(), q.float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_arguments_and_defaults_are_nvidias_in_their_order(name):
    parameters = list(inspect.signature(getattr(optimizers, name)).parameters.values())
    assert parameters.pop(0).name == "params"
    if name == "FusedSGD":
        assert (parameters[0].name, parameters.pop(0).default) == ("lr", inspect.Parameter.empty)
    expected = [entry.split("=") for entry in DEFAULTS[name].split()]
    assert [(p.name, p.default) for p in parameters] == [(key, ast.literal_eval(value)) for key, value in expected]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_numbers_are_those_of_the_formula(name, options):
    params = [nn.Parameter(p) for p in draw(0)]
    optimizer = getattr(optimizers, name)(params, **options)
    expected, _ = by_formula(name, draw(0), optimizer.param_groups[0])
    run(optimizer, params)
    assert_close(params, expected)


def test_lamb_scales_the_decayed_group_alone_and_clips_over_both():
    params = [nn.Parameter(p) for p in draw(0)]
    groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 0.02}]
    optimizer = optimizers.FusedLAMB(groups, lr=0.05)
    first, second = (by_formula("FusedLAMB", draw(0), group)[0] for group in optimizer.param_groups)
    run(optimizer, params)
    assert_close(params, [*first[:2], *second[2:]])


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_amsgrad_is_refused(name):
    with pytest.raises(RuntimeError, match=f"{name} has no AMSGrad variant"):
        getattr(optimizers, name)([nn.Parameter(torch.ones(1))], amsgrad=True)


def test_other_refusals():
    weights = [nn.Parameter(torch.ones(1))]
    with pytest.raises(RuntimeError, match="norm_type: only 2"):
        optimizers.FusedNovoGrad(weights, norm_type=0)
    with pytest.raises(TypeError, match="lr"):
        optimizers.FusedSGD(weights)
    with pytest.raises(ValueError, match="nesterov"):
        optimizers.FusedSGD(weights, lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="max_norm"):
        optimizers.FusedLAMB(weights, max_grad_norm=-1.0)
    for name in FORMULAS:
        for bad in ({"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}):
            with pytest.raises(ValueError, match="expected a number of at least 0"):
                getattr(optimizers, name)(weights, **bad)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB"])
def test_a_checkpoint_of_nvidias_class_goes_on_with_its_step_count(name):
    params = [nn.Parameter(p) for p in draw(0)]
    optimizer = getattr(optimizers, name)(params, lr=0.05, weight_decay=0.1)
    options = optimizer.param_groups[0]
    middle, states = by_formula(name, draw(0), options)
    saved = {  # NVIDIA's layout: one step count per group
        "state": {
            i: {"exp_avg": state["m"].float(), "exp_avg_sq": state["v"].float()} for i, state in enumerate(states)
        },
        "param_groups": [
            {"lr": 0.05, "bias_correction": True, "betas": (0.9, 0.999), "weight_decay": 0.1, "step": STEPS}
            | {"eps": options["eps"], "params": list(range(len(params)))}
        ],
    }
    before = copy.deepcopy(saved)
    with torch.no_grad():
        for p, q in zip(params, middle, strict=True):
            p.copy_(q)
    optimizer.load_state_dict(saved)
    assert "step" not in optimizer.param_groups[0]
    assert saved["param_groups"] == before["param_groups"]
    assert all("step" not in entry for entry in saved["state"].values())
    run(optimizer, params, first=1 + STEPS)
    assert_close(params, by_formula(name, middle, options, first=1 + STEPS, states=states)[0])
    assert optimizer.state[params[0]]["step"].item() == 2 * STEPS


def test_a_checkpoint_of_nvidias_novograd_is_refused():
    optimizer = optimizers.FusedNovoGrad([nn.Parameter(torch.ones(2))])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["exp_avg_sq"] = [torch.ones(0), torch.ones(1)]
    with pytest.raises(ValueError, match=r"NVIDIA's FusedNovoGrad.*Nothing was loaded"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", FORMULAS)
def test_amp_at_every_level_skips_an_overflow_and_then_takes_the_formulas_step(name, level):
    model = nn.Linear(4, 1, bias=False)
    start = torch.tensor([[1.0, -2.0, 0.5, 4.0]])
    with torch.no_grad():
        model.weight.copy_(start)
    optimizer = getattr(optimizers, name)(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    x = torch.tensor([[1.0, 2.0, -4.0, 0.25]])
    for factor in (torch.inf, 1.0) if level != "O0" else (1.0,):
        with amp.scale_loss(model(x).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if factor != 1.0:
            assert torch.equal(model.weight.detach().float(), start)
            optimizer.zero_grad()
    options = optimizer.param_groups[0]
    limit = options.get("max_grad_norm", 0)
    grad = x.double() / x.norm() * limit if limit else x.double()
    expected = FORMULAS[name](start.double(), grad, {}, 1, options).float()
    rtol = 2e-5 if level in ("O0", "O1") else 1e-3
    torch.testing.assert_close(model.weight.detach().float(), expected, rtol=rtol, atol=1e-6)
