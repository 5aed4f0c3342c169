"""Training through the shell: parity with plain torch, skipped steps, accumulation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state

PAIRS = {
    "sgd": (torch.optim.SGD, optimizers.NpuFusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, optimizers.NpuFusedAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, optimizers.NpuFusedAdamW, {"lr": 0.01}),
}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return F.mse_loss(model(x), x[:, :2] * 2)


def amp_steps(model, optimizer, data):
    for x in data:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def plain_steps(model, optimizer, data):
    for x in data:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


@pytest.mark.parametrize("combine_grad", [None, True])
@pytest.mark.parametrize("name", PAIRS)
def test_o0_with_a_torch_optimizer_is_plain_torch_bitwise(name, combine_grad):
    cls, _, options = PAIRS[name]
    plain, model = make_net(), make_net()
    plain_steps(plain, cls(plain.parameters(), **options), batches(10))
    optimizer = cls(model.parameters(), **options)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", combine_grad=combine_grad, verbosity=0)
    amp_steps(model, optimizer, batches(10))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", PAIRS)
def test_o0_with_a_fused_optimizer_equals_plain_torch(name):
    cls, fused, options = PAIRS[name]
    plain, model = make_net(), make_net()
    plain_steps(plain, cls(plain.parameters(), **options), batches(10))
    model, optimizer = amp.initialize(model, fused(model.parameters(), **options), opt_level="O0", verbosity=0)
    amp_steps(model, optimizer, batches(10))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combine_grad", [None, True])
@pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
@pytest.mark.parametrize("name", PAIRS)
def test_o2_fused_and_torch_optimizers_follow_the_same_masters(name, loss_scale, combine_grad):
    cls, fused, options = PAIRS[name]
    results = []
    for made in (cls, fused):
        model = make_net()
        model, optimizer = amp.initialize(
            model,
            made(model.parameters(), **options),
            opt_level="O2",
            loss_scale=loss_scale,
            combine_grad=combine_grad,
            verbosity=0,
        )
        amp_steps(model, optimizer, batches(10))
        results.append((model, list(amp.master_params(optimizer))))
    for p, q in zip(results[0][1], results[1][1], strict=True):
        assert q.dtype == torch.float32
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    model, masters = results[1]
    for low, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(low, master.to(low.dtype)), "the half copy is the rounded master"


def test_o2_keeps_updates_smaller_than_half_precision():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=1e-5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    for _ in range(20):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    (master,) = amp.master_params(optimizer)
    torch.testing.assert_close(master.detach(), torch.full((1, 1), 1 - 20e-5), rtol=0, atol=1e-6)
    assert model.weight.item() == 1.0


def test_a_tiny_gradient_survives_through_the_loss_scale():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=65536.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * 2e-8, optimizer) as scaled:
        scaled.backward()
    (master,) = amp.master_params(optimizer)
    assert master.grad.dtype == torch.float32
    torch.testing.assert_close(master.grad, torch.full((1, 1), 2e-8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflowing_step_leaves_no_trace_and_prints_the_exact_message(level, fused, capsys):
    model = make_net()
    made = (optimizers.NpuFusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, made, opt_level=level, loss_scale="dynamic")
    _amp_state.loss_scalers[0]._loss_scale = 2.0**4
    amp_steps(model, optimizer, batches(2))
    weights = [p.clone() for p in (*model.parameters(), *amp.master_params(optimizer))]
    state = copy.deepcopy(optimizer.state_dict())
    capsys.readouterr()
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward()
        model[0].weight.grad[0, 0] = float("inf")
    assert optimizer.step() is None
    assert capsys.readouterr().out == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 8.0\n"
    for before, after in zip(weights, (*model.parameters(), *amp.master_params(optimizer)), strict=True):
        assert torch.equal(before, after)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
    amp_steps(model, optimizer, batches(1))
    assert not torch.equal(weights[0], next(iter(model.parameters())))


def test_a_static_scale_skips_too_and_says_that_it_stays(capsys):
    model = make_net()
    optimizer = optimizers.NpuFusedAdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    capsys.readouterr()
    before = [p.clone() for p in model.parameters()]
    with amp.scale_loss(loss_of(model, batches(1)[0]) * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    out = capsys.readouterr().out
    assert out == "Gradient overflow.  Skipping step, loss scaler 0 keeping static loss scale 128.0\n"
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_accumulated_contexts_sum_true_gradients(level, fused, delay):
    model = make_net().eval()
    made = (optimizers.NpuFusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, made, opt_level=level, loss_scale=64.0, verbosity=0)
    reference = make_net().eval()
    data = batches(4)
    for i, x in enumerate(data):
        with amp.scale_loss(loss_of(model, x), optimizer, delay_unscale=delay and i < 3) as scaled:
            scaled.backward()
        loss_of(reference, x).backward()
    for weight, expected in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=2e-2, atol=2e-3)


def test_delayed_gradients_of_two_scales_add_up():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    for scale in (8.0, 32.0):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})
        with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer, delay_unscale=scale == 8.0) as scaled:
            scaled.backward()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad, torch.full((1, 3), 2.0))


def test_a_ragged_last_window_is_unscaled_before_the_step():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    (master,) = amp.master_params(optimizer)
    before = master.detach().clone()
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(master.detach(), before - 1.0)


def test_gradients_from_before_the_first_context_are_kept():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale=64.0, verbosity=0)
    model(torch.ones(1, 3)).sum().backward()
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    assert torch.equal(model.weight.grad, torch.full((1, 3), 2.0))


def test_an_exception_in_the_body_puts_earlier_gradients_back():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale=64.0, verbosity=0)
    with amp.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward()
    before = [p.grad.clone() for p in model.parameters()]

    class StopError(Exception):
        pass

    def broken_off():
        with amp.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
            scaled.backward()
            raise StopError

    with pytest.raises(StopError):
        broken_off()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_two_losses_of_different_scale_reach_one_optimizer():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", num_losses=2, verbosity=0)
    _amp_state.loss_scalers[0]._loss_scale = 4.0
    _amp_state.loss_scalers[1]._loss_scale = 16.0
    for loss_id in range(2):
        with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad, torch.full((1, 3), 2.0))
    with pytest.raises(IndexError, match="num_losses"), amp.scale_loss(torch.ones(()), optimizer, loss_id=2):
        pass


def test_one_scale_decision_per_context_whatever_the_number_of_optimizers():
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    made = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, made = amp.initialize(models, made, opt_level="O2", scale_window=4, dynamic_init_scale=8.0, verbosity=0)
    for _ in range(4):
        for optimizer in made:
            optimizer.zero_grad()
        with amp.scale_loss(sum(m(torch.ones(1, 2)).sum() for m in models), made) as scaled:
            scaled.backward()
        for optimizer in made:
            optimizer.step()
    assert _amp_state.loss_scalers[0].loss_scale() == 16.0


def test_scaler_state_goes_by_key_and_a_late_counter_still_grows():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", num_losses=2, scale_window=4, verbosity=0)
    amp.load_state_dict(
        {"loss_scaler1": {"loss_scale": 4.0, "unskipped": 5}, "loss_scaler0": {"loss_scale": 32.0, "unskipped": 1}}
    )
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [32.0, 4.0]
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 4.0, "unskipped": 5}
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 8.0, "unskipped": 0}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*'epoch'"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}, "epoch": 3})
    assert _amp_state.loss_scalers[0].loss_scale() == 32.0, "a refused load changes nothing"
