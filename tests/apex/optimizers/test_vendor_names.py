"""Paths and state entries of the vendor's optimizers that scripts rely on."""

import copy
import importlib
import inspect
import math

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers

LAMB_STATE = {"step", "exp_avg", "exp_avg_sq", "weight_norm", "adam_norm", "trust_ratio"}


def test_scripts_import_from_the_vendors_files():
    adam = importlib.import_module("npuamp_fn.apex.optimizers.npu_fused_adam")
    bert = importlib.import_module("npuamp_fn.apex.optimizers.npu_fused_bert_adam")
    assert adam.NpuFusedAdam is optimizers.NpuFusedAdam
    assert bert.NpuFusedBertAdam is optimizers.NpuFusedBertAdam


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
LAMB = {**ADAM, "eps": 1e-6, "adam": False}
# In the vendor's positional order; maximize and start, by keyword only, are ours.
DEFAULTS = {
    "NpuFusedSGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "NpuFusedAdam": {**ADAM, "amsgrad": False},
    "NpuFusedAdamW": {**ADAM, "weight_decay": 0.01, "amsgrad": False},
    "NpuFusedAdamP": {**ADAM, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False},
    "NpuFusedBertAdam": {"lr": 1e-3, "warmup": -1, "t_total": -1, "schedule": "warmup_linear", "b1": 0.9, "b2": 0.99}
    | {"e": 1e-6, "weight_decay": 0.01, "max_grad_norm": -1},
    "NpuFusedAdadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "Lamb": LAMB,
    "NpuFusedLamb": {**LAMB, "use_global_grad_norm": False},
    "NpuFusedRMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}
    | {"centered": False},
    "NpuFusedRMSpropTF": {"lr": 0.01, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.0}
    | {"centered": False, "decoupled_decay": False, "lr_in_momentum": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_arguments_and_defaults_are_the_vendors_in_their_order(name):
    parameters = inspect.signature(getattr(optimizers, name)).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [("params", inspect.Parameter.empty), *DEFAULTS[name].items()]
    optimizer = getattr(optimizers, name)([nn.Parameter(torch.ones(1))])
    assert {key: optimizer.param_groups[0][key] for key in DEFAULTS[name]} == DEFAULTS[name]


def test_every_exported_optimizer_has_its_defaults_tested():
    assert {name for name in optimizers.__all__ if not name.startswith("Fused")} == DEFAULTS.keys()


WARMUP = 0.25
AFTER_WARMUP = {
    "warmup_cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "warmup_constant": lambda x: 1.0,
    "warmup_linear": lambda x: max((x - 1) / (WARMUP - 1), 0.0),
    "warmup_poly": lambda x: (1 - x) ** 0.5,
}


@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_bert_adams_schedules_can_be_called_on_numbers(name):
    from npuamp_fn.apex.optimizers.npu_fused_bert_adam import SCHEDULES

    assert SCHEDULES.keys() == AFTER_WARMUP.keys()
    for x in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        expected = x / WARMUP if x < WARMUP else AFTER_WARMUP[name](x)
        value = SCHEDULES[name](x, WARMUP)
        assert isinstance(value, float)
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert SCHEDULES[name](x, warmup=WARMUP) == value


def test_bert_adam_follows_the_schedule_that_scripts_compute_beside_it():
    from npuamp_fn.apex.optimizers.npu_fused_bert_adam import SCHEDULES

    weight = nn.Parameter(torch.zeros(1))
    options = {"warmup": WARMUP, "t_total": 8, "b1": 0.0, "b2": 0.0, "e": 0.0, "weight_decay": 0.0}
    optimizer = optimizers.NpuFusedBertAdam([weight], lr=1.0, **options)
    for step in range(8):
        before = weight.item()
        weight.grad = torch.ones(1)  # m / sqrt(v) is 1: the weight moves by the rate
        optimizer.step()
        assert before - weight.item() == pytest.approx(SCHEDULES["warmup_linear"](step / 8, WARMUP), abs=1e-6)


def lamb_by_the_book(p, grads, weight_decay, adam, lr=0.01, b1=0.9, b2=0.999, eps=1e-6):
    """Follow the description of the vendor's Lamb in float64; return the parameter and the last step's numbers."""
    p = p.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for grad in grads:
        grad = grad.double()
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        u = m / (v.sqrt() + eps) + weight_decay * p
        weight_norm, adam_norm = p.norm().clamp(0, 10), u.norm()
        ratio = weight_norm / adam_norm if weight_norm > 0 and adam_norm > 0 else torch.ones(())
        p = p - lr * (1.0 if adam else ratio) * u
    return p, {"weight_norm": weight_norm, "adam_norm": adam_norm, "trust_ratio": ratio}


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lambs_state_has_the_norms_and_the_ratio_of_the_last_step(weight_decay, adam):
    torch.manual_seed(0)
    starts = [torch.randn(5, 3), torch.zeros(7), torch.full((400,), 3.0)]  # one at zero, one beyond the clamp
    all_grads = [[torch.randn_like(start) for start in starts] for _ in range(3)]
    weights = [nn.Parameter(start.clone()) for start in starts]
    optimizer = optimizers.Lamb(weights, lr=0.01, weight_decay=weight_decay, adam=adam)
    for grads in all_grads:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    for index, weight in enumerate(weights):
        expected, numbers = lamb_by_the_book(starts[index], [grads[index] for grads in all_grads], weight_decay, adam)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
        state = optimizer.state[weight]
        assert state.keys() == LAMB_STATE
        for name, number in numbers.items():
            assert state[name].shape == ()
            assert state[name].dtype == torch.float32
            torch.testing.assert_close(state[name].double(), number.double(), rtol=1e-5, atol=1e-7)
    assert optimizer.state[weights[2]]["weight_norm"].item() == 10.0


def test_the_first_step_from_zero_records_a_ratio_of_one():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = optimizers.Lamb([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[weight]
    assert (state["weight_norm"].item(), state["trust_ratio"].item()) == (0.0, 1.0)
    assert state["adam_norm"].item() > 0


def test_lambs_global_norm_clips_to_one():
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = optimizers.NpuFusedLamb(weights, 1.0, (0.0, 0.0), eps=1.0, adam=True, use_global_grad_norm=True)
    for weight, grad in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.tensor([grad])
    optimizer.step()
    found = torch.cat([weight.detach() for weight in weights])
    torch.testing.assert_close(found, torch.tensor([-0.6 / 1.6, -0.8 / 1.8]))  # g / 5, then g / (|g| + 1)


def test_the_fused_class_has_no_such_entries():
    weight = nn.Parameter(torch.ones(3))
    optimizer = optimizers.NpuFusedLamb([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_norms_survive_saving_and_may_be_numbers_in_older_checkpoints():
    weight, twin = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, other = optimizers.Lamb([weight], lr=0.1), optimizers.Lamb([twin], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["trust_ratio"] = 1  # the vendor writes the number where a norm was zero
    other.load_state_dict(saved)
    with torch.no_grad():
        twin.copy_(weight)
    for w, o in ((weight, optimizer), (twin, other)):
        w.grad = torch.full((3,), 2.0)
        o.step()
    assert torch.equal(weight, twin)
    for name in LAMB_STATE:
        assert torch.equal(optimizer.state[weight][name], other.state[twin][name])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_norms_are_recorded_at_every_level_and_kept_by_a_skipped_step(level):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optimizers.Lamb(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, dynamic_init_scale=2.0**10)

    def train(factor):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 3)).sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        states = [optimizer.state[p] for p in amp.master_params(optimizer)]
        return [{name: value.item() for name, value in state.items() if value.dim() == 0} for state in states]

    recorded = train(1.0)
    for entry in recorded:
        assert entry.keys() == {"step", "weight_norm", "adam_norm", "trust_ratio"}
        assert entry["trust_ratio"] == pytest.approx(entry["weight_norm"] / entry["adam_norm"], rel=1e-6)
    if level != "O0":
        assert train(torch.inf) == recorded
    assert train(1.0)[0]["step"] == 2
