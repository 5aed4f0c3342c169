"""``amp.last_step_skipped``: the public answer to whether gradients overflowed."""

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused": lambda p: optimizers.NpuFusedSGD(p, lr=0.1),
}


def make_model():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def train(model, optimizer, factor):
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_answer_is_whether_the_weights_stayed(level, make):
    model = make_model()
    model, optimizer = amp.initialize(
        model, make(model.parameters()), opt_level=level, verbosity=0, dynamic_init_scale=2.0**10
    )
    assert amp.last_step_skipped(optimizer) is False  # before the first step
    for factor in (1.0, torch.inf, torch.nan, 1.0):
        changed = train(model, optimizer, factor)
        assert amp.last_step_skipped(optimizer) is not changed
        assert changed == (factor == 1.0)


def test_o0_never_skips():
    model = make_model()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    train(model, optimizer, torch.inf)
    assert amp.last_step_skipped(optimizer) is False


def test_a_wrapper_around_the_optimizer_is_looked_through():
    class Wrapper:
        def __init__(self, optim):
            self.optim = optim

    model = make_model()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    train(model, optimizer, torch.inf)
    assert amp.last_step_skipped(Wrapper(optimizer)) is True


def test_without_amp_the_answer_is_no_and_a_forgotten_optimizer_is_an_error(monkeypatch):
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(make_model(), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"this SGD did not go through amp.initialize"):
        amp.last_step_skipped(plain)
    amp.initialize(model, plain, enabled=False)
    assert amp.last_step_skipped(plain) is False
    monkeypatch.delattr(_amp_state, "opt_properties")
    with pytest.raises(RuntimeError, match=r"amp.initialize\(model, optimizer"):
        amp.last_step_skipped(plain)
