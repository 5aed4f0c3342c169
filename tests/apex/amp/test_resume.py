"""Checkpoints, copies and pickles: training goes on exactly where it was."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npuamp_fn.apex import amp, optimizers

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused_sgd": lambda p: optimizers.NpuFusedSGD(p, lr=0.1, momentum=0.9),
    "fused_adam": lambda p: optimizers.NpuFusedAdam(p, lr=0.01),
    "fused_adamw": lambda p: optimizers.NpuFusedAdamW(p, lr=0.01),
}


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def initialized(make, level, seed=0, **options):
    model = make_net(seed)
    options = {"opt_level": level, "verbosity": 0, "dynamic_init_scale": 2.0**10, **options}
    return amp.initialize(model, make(model.parameters()), **options)


def steps(model, optimizer, first, count):
    for i in range(first, first + count):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        with amp.scale_loss(F.mse_loss(model(x), x[:, :2]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def exact(model, optimizer):
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *amp.master_params(optimizer))]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("load_first", [False, True], ids=["load after initialize", "load before initialize"])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_equals_the_uninterrupted_run_bitwise(name, level, load_first):
    if (name, level) in {("adam", "O3")}:
        pytest.skip("torch's Adam in float16 divides by an eps of zero")
    make = OPTIMIZERS[name]
    model, optimizer = initialized(make, level)
    steps(model, optimizer, 0, 5)
    saved = through_file(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": dict(amp.state_dict())}
    )
    assert all(v.dtype in (torch.float32, torch.int64) for v in saved["model"].values())
    steps(model, optimizer, 5, 5)
    expected, expected_amp = exact(model, optimizer), amp.state_dict()
    del model, optimizer  # its loss scale would be saved with the new one's

    other = make_net(seed=9)
    made = make(other.parameters())
    if load_first:
        other.load_state_dict(saved["model"])
        made.load_state_dict(saved["optimizer"])
    other, made = amp.initialize(other, made, opt_level=level, verbosity=0)
    if not load_first:
        other.load_state_dict(saved["model"])
        made.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    steps(other, made, 5, 5)
    assert_same(exact(other, made), expected)
    assert amp.state_dict() == expected_amp


def test_weights_loaded_in_the_middle_of_training_stay():
    model, optimizer = initialized(OPTIMIZERS["fused_sgd"], "O2")
    steps(model, optimizer, 0, 3)
    target = {name: torch.full_like(value, 0.123456) for name, value in model[0].state_dict().items()}
    model[0].load_state_dict(target)
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.123456))
    optimizer.param_groups[0]["lr"] = 0.0
    steps(model, optimizer, 3, 1)
    assert torch.equal(model.state_dict()["0.weight"], target["weight"])


@pytest.mark.parametrize("assign", [False, True])
def test_load_with_assign_keeps_the_parameters_of_the_optimizer(assign):
    model, optimizer = initialized(OPTIMIZERS["adam"], "O2")
    weight = model[0].weight
    model.load_state_dict({name: v.clone() + 1 for name, v in model.state_dict().items()}, assign=assign)
    assert model[0].weight is weight
    assert weight.dtype == torch.float16
    steps(model, optimizer, 0, 1)


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("name", ["sgd", "fused_adamw"])
def test_copies_of_model_and_optimizer_train_on_exactly_and_independently(name, level, order, copier):
    model, optimizer = initialized(OPTIMIZERS[name], level)
    steps(model, optimizer, 0, 3)
    pair = (model, optimizer) if order == "model first" else (optimizer, model)
    if copier == "deepcopy":
        pair = copy.deepcopy(pair)
    elif copier == "pickle":
        pair = pickle.loads(pickle.dumps(pair))
    else:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        pair = torch.load(file, weights_only=False)
    other, made = pair if order == "model first" else pair[::-1]
    before = exact(other, made)
    assert_same(before, exact(model, optimizer))
    steps(model, optimizer, 3, 3)
    assert_same(exact(other, made), before)
    steps(other, made, 3, 3)
    assert_same(exact(other, made), exact(model, optimizer))
    assert type(made).__name__ == type(optimizer).__name__


def test_a_deepcopied_model_exports_exact_weights_and_can_be_initialized_again():
    model, optimizer = initialized(OPTIMIZERS["fused_sgd"], "O2")
    steps(model, optimizer, 0, 3)
    ema = copy.deepcopy(model)
    assert_same(ema.state_dict().values(), model.state_dict().values())
    steps(model, optimizer, 3, 2)
    assert not torch.equal(ema.state_dict()["0.weight"], model.state_dict()["0.weight"])
    exported = {name: value.clone() for name, value in ema.state_dict().items()}
    made = torch.optim.SGD(ema.parameters(), lr=0.1)
    amp.initialize(ema, made, opt_level="O2", verbosity=0)
    for master, (name, _) in zip(amp.master_params(made), ema.named_parameters(), strict=True):
        assert torch.equal(master, exported[name])


def test_a_moving_average_written_into_an_exported_state_dict_reaches_the_copy():
    model, optimizer = initialized(OPTIMIZERS["fused_sgd"], "O2")
    ema = copy.deepcopy(model)
    steps(model, optimizer, 0, 3)
    with torch.no_grad():
        for name, value in ema.state_dict().items():
            if value.is_floating_point():
                value.mul_(0.9).add_(model.state_dict()[name], alpha=0.1)
    x = torch.randn(3, 4)
    ema.eval()(x)
    assert torch.equal(ema[0].weight, ema.state_dict()["0.weight"].half())


def test_a_saved_parameter_holds_only_its_own_memory():
    model, _ = initialized(OPTIMIZERS["fused_sgd"], "O2")
    file = io.BytesIO()
    torch.save({"w": model.state_dict()["3.bias"]}, file)
    assert file.tell() < 2500
    assert len(pickle.dumps(model.state_dict()["3.bias"])) < 1500


def test_float_gives_exact_weights_for_inference_and_the_next_step_says_what_happened():
    model, optimizer = initialized(OPTIMIZERS["sgd"], "O2")
    steps(model, optimizer, 0, 2)
    exported = {name: value.clone() for name, value in model.state_dict().items()}
    model.float()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, exported[name])
    assert model.eval()(torch.randn(2, 4)).dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"is torch.float32, but amp.initialize keeps it in torch.float16"):
        optimizer.step()


def test_state_dict_of_keep_vars_returns_the_parameters_themselves():
    model, _ = initialized(OPTIMIZERS["sgd"], "O2")
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight
