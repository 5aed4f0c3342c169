"""The vendor's signatures: names, order and defaults of the NpuFused optimizers."""

import inspect

import pytest
import torch
from torch import nn

from npuamp_fn.apex import optimizers

BETAS = (0.9, 0.999)
ADAM = {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0}
LAMB = {"lr": 1e-3, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.0, "adam": False}
DEFAULTS = {
    "NpuFusedSGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "NpuFusedAdam": {**ADAM, "amsgrad": False},
    "NpuFusedAdamW": {**ADAM, "weight_decay": 1e-2, "amsgrad": False},
    "NpuFusedAdamP": {**ADAM, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False},
    "NpuFusedBertAdam": {
        "lr": 1e-3,
        "warmup": -1,
        "t_total": -1,
        "schedule": "warmup_linear",
        "b1": 0.9,
        "b2": 0.99,
        "e": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": -1,
    },
    "NpuFusedAdadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "NpuFusedLamb": {**LAMB, "use_global_grad_norm": False},
    "Lamb": LAMB,
    "NpuFusedRMSprop": {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
    },
    "NpuFusedRMSpropTF": {
        "lr": 1e-2,
        "alpha": 0.9,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
        "decoupled_decay": False,
        "lr_in_momentum": True,
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_names_order_and_defaults_are_the_vendors(name):
    made = getattr(optimizers, name)
    parameters = list(inspect.signature(made).parameters.values())[1:]
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(DEFAULTS[name].items())
    group = made([nn.Parameter(torch.ones(1))]).param_groups[0]
    assert {option: group[option] for option in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("size", [0.5, 3.0])
def test_lamb_divides_gradients_by_their_global_norm_where_it_is_above_one(size):
    def step(grads, **options):
        weights = [nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([[1.0]]))]
        groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.2}]
        optimizer = optimizers.NpuFusedLamb(groups, lr=0.1, eps=0.5, weight_decay=0.1, **options)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        optimizer.step()
        return [weight.detach() for weight in weights]

    grads = [torch.tensor([2.0, 1.0]) / 3 * size, torch.tensor([[2.0]]) / 3 * size]  # of norm `size`
    by_hand = [grad / max(size, 1.0) for grad in grads]
    torch.testing.assert_close(step(grads, use_global_grad_norm=True), step(by_hand), rtol=1e-6, atol=0)
