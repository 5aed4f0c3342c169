"""Optimizers and models from elsewhere: other signatures, other state dicts, sharded parameters."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from npuamp_fn.apex import amp, optimizers

LEVELS = ["O0", "O1", "O2", "O3"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def initialized(make, level, **options):
    model = make_model()
    return amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)


def backward(model, optimizer):
    x = torch.tensor([[1.0, -1.0], [2.0, 0.5], [-1.0, 1.0]])
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
        scaled.backward()


class Old(torch.optim.SGD):
    """Its zero_grad takes no argument, and fills with zeros, as it did before torch 1.7."""

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_whose_zero_grad_takes_no_argument(level):
    model, optimizer = initialized(lambda p: Old(p, lr=0.1), level, loss_scale=8.0)
    backward(model, optimizer)
    first = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    assert all(p.grad is None or not p.grad.any() for p in (*model.parameters(), *amp.master_params(optimizer)))
    backward(model, optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(amp.master_params(optimizer), first, strict=True))
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # releases it, which clears gradients too
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("args", "options", "to_none"),
    [
        ((), {}, True),
        ((True,), {}, True),
        ((False,), {}, False),
        ((), {"set_to_none": True}, True),
        ((), {"set_to_none": False}, False),
    ],
)
def test_zero_grad_clears_model_and_masters_either_way(level, args, options, to_none):
    model, optimizer = initialized(lambda p: torch.optim.SGD(p, lr=0.1), level, loss_scale=8.0)
    backward(model, optimizer)
    optimizer.zero_grad(*args, **options)
    for p in model.parameters():
        assert p.grad is None if to_none else not p.grad.any()
    for p in amp.master_params(optimizer):
        assert p.grad is None or not (to_none or p.grad.any())


class Lookahead(torch.optim.Optimizer):
    """A wrapper as published: the state dict has keys of its own, and groups are the inner optimizer's."""

    def __init__(self, inner):
        self.optimizer = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, defaultdict(dict), inner.defaults

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def state_dict(self):
        inner = self.optimizer.state_dict()
        return {"fast_state": inner["state"], "slow_state": {}, "param_groups": inner["param_groups"]}

    def load_state_dict(self, state_dict):
        state = {"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]}
        self.optimizer.load_state_dict(state)
        self.param_groups = self.optimizer.param_groups


class Sam(torch.optim.Optimizer):
    """A wrapper with torch's state dict, that hands its groups to the inner optimizer after loading."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.optimizer = torch.optim.Adam(self.param_groups)
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.optimizer.param_groups, self.optimizer.state = self.param_groups, self.state


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("wrapper", [lambda p: Lookahead(torch.optim.Adam(p)), Sam], ids=["lookahead", "sam"])
def test_a_wrapper_that_loads_its_state_itself_resumes_and_its_groups_stay_shared(level, wrapper):
    model, optimizer = initialized(wrapper, level, loss_scale=8.0)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    groups, saved = list(optimizer.param_groups), copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    def rest():
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().clone() for p in amp.master_params(optimizer)]

    expected = rest()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert all(torch.equal(a, b) for a, b in zip(rest(), expected, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    optimizer.param_groups[0]["lr"] = 0.0  # what a scheduler does
    assert all(torch.equal(a, b) for a, b in zip(rest(), list(amp.master_params(optimizer)), strict=True))
    before = rest()
    assert all(torch.equal(a, b) for a, b in zip(rest(), before, strict=True))


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_models_are_refused_with_what_to_write_and_nothing_changes(process_group):
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = type(model)
    for level in ("O1", "O2", "O3"):
        with pytest.raises(RuntimeError, match=r"`0.weight` is a DTensor.*fully_shard\(module, mp_policy="):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert (type(model), type(optimizer)) == (kind, torch.optim.SGD)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    backward(model, optimizer)
    optimizer.step()


NAMES = ("accelerate", "combine_ddp", "init_combine_ddp", "ddp_replica_count", "check_combined_tensors")


def test_optimizers_show_the_vendors_attributes():
    _, optimizer = initialized(lambda p: torch.optim.SGD(p, lr=0.1), "O2")
    assert [getattr(optimizer, name) for name in NAMES] == [False, False, False, 4, False]
    assert optimizer.is_npu_fused_optimizer is False
    options = {"combine_grad": True, "check_combined_tensors": True, "ddp_replica_count": 2}
    _, optimizer = initialized(lambda p: optimizers.NpuFusedSGD(p, lr=0.1), "O2", **options)
    assert [getattr(optimizer, name) for name in NAMES] == [True, False, False, 2, True]
    assert optimizer.is_npu_fused_optimizer is True
    assert optimizer._amp_stash.already_combined


def test_the_stash_shows_the_flat_buffers_of_masters_and_of_batch_norm():
    model, optimizer = initialized(lambda p: optimizers.NpuFusedSGD(p, lr=0.1), "O2", combine_grad=True, loss_scale=8.0)
    stash = optimizer._amp_stash
    assert stash.process_zero_grad
    assert stash.main_fp32_from_fp16_grad_combine is None
    backward(model, optimizer)
    assert not stash.process_zero_grad
    half, full = stash.main_fp16_grad_combine, stash.main_fp32_from_fp16_grad_combine
    assert (half.dtype, full.dtype) == (torch.float16, torch.float32)
    assert torch.equal(half.float() / 8, full)
    norm = stash.main_fp32_from_fp32_grad_combine
    assert norm.sum() == torch.cat([model[1].weight.grad, model[1].bias.grad]).sum()
    assert stash.main_fp32_grad_combine is norm
    masters, others = stash.main_fp32_from_fp16_param_combine, stash.main_fp32_from_fp32_param_combine
    by_hand = [p.detach().double().sum() for p in (model[1].weight, model[1].bias)]
    torch.testing.assert_close(others.double().sum(), sum(by_hand))
    assert masters.data_ptr() == stash.all_fp32_from_fp16_params[0].data_ptr()
    assert stash.main_fp16_param_combine is None
    optimizer.zero_grad()
    assert stash.process_zero_grad


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [optimizers.NpuFusedSGD, torch.optim.SGD])
def test_the_stash_says_whether_gradients_wait_for_the_step(level, make):
    model = nn.Linear(2, 1)
    model, optimizer = amp.initialize(model, make(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    assert optimizer._amp_stash.process_zero_grad
    backward(model, optimizer)
    assert not optimizer._amp_stash.process_zero_grad
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer._amp_stash.process_zero_grad


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_zero_grad_inside_scale_loss_drops_the_gradients_of_earlier_passes(level):
    model, optimizer = initialized(lambda p: torch.optim.SGD(p, lr=0.1), level, loss_scale=8.0)
    weight = next(iter(amp.master_params(optimizer)))
    backward(model, optimizer)
    with amp.scale_loss(model[0].weight.float().sum(), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    assert weight.grad.tolist() == torch.ones(3, 2).tolist()


def test_the_stash_has_no_flat_buffers_where_nothing_is_combined():
    model, optimizer = initialized(lambda p: torch.optim.SGD(p, lr=0.1), "O2")
    backward(model, optimizer)
    stash = optimizer._amp_stash
    assert not stash.already_combined
    assert stash.main_fp32_from_fp16_grad_combine is None
    assert stash.main_fp32_from_fp16_param_combine is None


@pytest.mark.parametrize(
    ("make_net", "expected"),
    [
        (lambda: nn.Linear(2, 1), ["masters", None]),
        (lambda: nn.BatchNorm1d(2), [None, "others"]),
        (lambda: nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), ["masters", "others"]),
    ],
    ids=["half only", "batch norm only", "both"],
)
def test_getters_pad_with_none_so_that_masters_come_first(make_net, expected):
    model = make_net()
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    x = torch.tensor([[1.0, -1.0], [2.0, 0.5]])
    with amp.scale_loss(model(x).square().sum(), optimizer) as scaled:
        scaled.backward()
    of_masters = {p.data_ptr() for p in optimizer._amp_stash.all_fp32_from_fp16_params}
    for get in (optimizer.get_optimizer_combined_params, optimizer.get_optimizer_combined_grads):
        assert [flat is not None for flat in get()] == [kind is not None for kind in expected]
    for flat, kind in zip(optimizer.get_optimizer_combined_params(), expected, strict=True):
        assert kind is None or (flat.data_ptr() in of_masters) is (kind == "masters")
    model_params = optimizer.get_model_combined_params()
    assert [flat is not None for flat in model_params] == [False, expected[1] is not None]


def test_getters_have_one_entry_without_masters():
    _, optimizer = initialized(lambda p: optimizers.NpuFusedSGD(p, lr=0.1), "O1")
    assert len(optimizer.get_optimizer_combined_params()) == 1
    assert optimizer.get_optimizer_combined_grads() == [None]
