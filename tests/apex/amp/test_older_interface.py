"""``handle.wrap_optimizer``: optimizers of the older interface have loss scales, scale_loss and step of their own."""

import copy
import pickle

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state


@pytest.fixture
def handle(monkeypatch):
    monkeypatch.setattr(_amp_state, "verbosity", 1)
    made = amp.init()
    yield made
    made._deactivate()


def make_weight():
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def backward(wrapper, loss):
    with wrapper.scale_loss(loss) as scaled:
        scaled.backward()


def scales(wrapper):
    return [(scaler.loss_scale(), scaler._unskipped) for scaler in wrapper._amp_stash.scalers]


def test_a_loss_is_scaled_and_its_gradients_arrive_unscaled(handle):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    loss = (weight * torch.tensor([1.0, 3.0])).sum()
    with wrapper.scale_loss(loss) as scaled:
        assert scaled.item() == 7.0 * 2.0**16  # the dynamic scale starts there
        scaled.backward()
        assert weight.grad.tolist() == [2.0**16, 3 * 2.0**16]
    assert weight.grad.tolist() == [1.0, 3.0]
    assert weight.grad.dtype == torch.float32
    assert wrapper.step() is None
    assert weight.tolist() == [0.5, 0.5]
    assert scales(wrapper) == [(2.0**16, 1)]


def test_a_half_loss_is_widened_before_it_is_scaled(handle):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    with wrapper.scale_loss((weight * 8).sum().half()) as scaled:
        assert scaled.dtype == torch.float32
        assert scaled.item() == 24.0 * 2.0**16  # far beyond float16


def test_each_loss_has_its_own_scale_and_one_overflow_skips_the_step(handle, capsys):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5), num_loss=2)
    backward(wrapper, weight.sum())
    backward(wrapper, weight.sum() * torch.inf)
    wrapper.step()
    assert capsys.readouterr().out == "Gradient overflow, skipping update\n"
    assert weight.tolist() == [1.0, 2.0]
    assert scales(wrapper) == [(2.0**16, 1), (2.0**15, 0)]
    assert amp.last_step_skipped(wrapper)

    wrapper.zero_grad()
    backward(wrapper, weight.sum())
    backward(wrapper, (weight * 2).sum())
    assert weight.grad.tolist() == [3.0, 3.0]  # the sum, though the scales differ
    wrapper.step()
    assert capsys.readouterr().out == ""
    assert weight.tolist() == [-0.5, 0.5]
    assert scales(wrapper) == [(2.0**16, 2), (2.0**15, 1)]
    assert not amp.last_step_skipped(wrapper)


def test_gradients_from_before_stay(handle):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    weight.grad = torch.tensor([10.0, 10.0])
    backward(wrapper, weight.sum())
    assert weight.grad.tolist() == [11.0, 11.0]


def test_verbosity_zero_skips_silently(handle, capsys, monkeypatch):
    monkeypatch.setattr(_amp_state, "verbosity", 0)
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight := make_weight()], lr=0.5))
    backward(wrapper, weight.sum() * torch.nan)
    wrapper.step()
    assert capsys.readouterr().out == ""
    assert weight.tolist() == [1.0, 2.0]


def test_a_closure_is_refused_and_changes_nothing(handle):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    backward(wrapper, weight.sum())
    with pytest.raises(NotImplementedError, match="takes no closure"):
        wrapper.step(lambda: weight.sum())
    assert weight.tolist() == [1.0, 2.0]
    wrapper.step()
    assert weight.tolist() == [0.5, 1.5]


def test_other_attributes_are_the_optimizers(handle):
    weight, late = make_weight(), make_weight()
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    wrapper = handle.wrap_optimizer(optimizer)
    assert wrapper.param_groups is optimizer.param_groups
    assert wrapper.state is optimizer.state
    assert wrapper.defaults["momentum"] == 0.9
    wrapper.add_param_group({"params": [late], "lr": 0.25})
    backward(wrapper, weight.sum() + late.sum())
    wrapper.step()
    assert (weight.tolist(), late.tolist()) == ([0.5, 1.5], [0.75, 1.75])
    assert wrapper.state_dict()["state"].keys() == {0, 1}
    assert [p is q for p, q in zip(amp.master_params(wrapper), (weight, late), strict=True)] == [True, True]
    assert not hasattr(wrapper, "no_such_thing")


def test_more_losses_than_announced_are_refused(handle):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    backward(wrapper, weight.sum())
    with pytest.raises(IndexError, match="num_loss=2"):
        backward(wrapper, weight.sum())
    assert weight.grad.tolist() == [1.0, 1.0]
    wrapper.step()
    backward(wrapper, weight.sum())  # the count starts anew with every step


def test_an_exception_in_the_body_leaves_no_trace(handle):
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    weight.grad = torch.tensor([10.0, 10.0])

    def interrupted():
        with wrapper.scale_loss(weight.sum()) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert weight.grad.tolist() == [10.0, 10.0]
    assert scales(wrapper) == [(2.0**16, 0)]
    backward(wrapper, weight.sum())
    assert weight.grad.tolist() == [11.0, 11.0]


@pytest.mark.parametrize("ended", [False, True])
def test_without_casts_the_wrapper_is_transparent(ended):
    handle = amp.init() if ended else amp.init(enabled=False)
    handle._deactivate()
    weight = make_weight()
    wrapper = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    loss = weight.sum()
    with wrapper.scale_loss(loss) as same:
        assert same is loss
        same.backward()
    wrapper.step()
    assert weight.tolist() == [0.5, 1.5]

    def closure():
        wrapper.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert wrapper.step(closure).item() == 4.0
    assert weight.tolist() == [-0.5, 0.5]


def test_the_optimizers_arithmetic_is_not_cast(handle):
    class Multiplies(torch.optim.SGD):
        def step(self, closure=None):
            self.seen = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    wrapper = handle.wrap_optimizer(Multiplies([make_weight()], lr=0.5))
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    wrapper.step()
    assert wrapper.seen == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
        lambda p: optimizers.NpuFusedSGD(p, lr=0.125, momentum=0.5),
    ],
    ids=["torch", "fused"],
)
def test_a_skipped_step_in_between_equals_plain_torch_without_it(handle, make):
    weight, plain = make_weight(), make_weight()
    wrapper, expected = handle.wrap_optimizer(make([weight])), torch.optim.SGD([plain], lr=0.125, momentum=0.5)
    for factor in (1.0, torch.inf, 0.5, 2.0):
        wrapper.zero_grad()
        backward(wrapper, (weight * weight).sum() * factor)
        wrapper.step()
        if factor != torch.inf:
            expected.zero_grad()
            ((plain * plain).sum() * factor).backward()
            expected.step()
    assert torch.equal(weight, plain)


def test_schedulers_on_the_optimizer_take_a_skipped_first_step_quietly(handle):
    weight = make_weight()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wrapper = handle.wrap_optimizer(optimizer)
    backward(wrapper, weight.sum() * torch.inf)
    wrapper.step()
    scheduler.step()  # a warning is an error here
    assert wrapper.param_groups[0]["lr"] == 0.25


def test_what_cannot_be_wrapped_is_refused(handle):
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer.*Linear"):
        handle.wrap_optimizer(nn.Linear(1, 1))
    optimizer = torch.optim.SGD([make_weight()], lr=0.5)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="num_loss"):
            handle.wrap_optimizer(optimizer, num_loss=wrong)
    model = nn.Linear(1, 1)
    _, initialized = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"went through amp.initialize"):
        handle.wrap_optimizer(initialized)


def test_copies_are_refused_with_advice(handle):
    wrapper = handle.wrap_optimizer(torch.optim.SGD([make_weight()], lr=0.5))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(wrapper)
