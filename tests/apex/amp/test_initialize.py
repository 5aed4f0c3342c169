"""amp.initialize: levels, options, printed output, and what it refuses."""

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_opt_level_with_a_zero_says_letter_o():
    model = make_net()
    with pytest.raises(RuntimeError, match=r"^Unexpected optimization level.*letter O, not the number zero: 'O1'"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="01")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_model_is_refused_by_name_and_nothing_changes(dtype):
    model = make_net()
    model[3].to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights, classes = list(optimizer.param_groups[0]["params"]), [type(m) for m in model.modules()]
    before = {name: value.dtype for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Found param/buffer 3.weight"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {name: value.dtype for name, value in model.state_dict().items()} == before
    assert [type(m) for m in model.modules()] == classes
    assert type(optimizer) is torch.optim.SGD
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], weights, strict=True))


def test_half_model_is_accepted_when_the_state_allows_it():
    model = make_net().half()
    _amp_state.allow_incoming_model_not_fp32 = True
    try:
        amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    finally:
        _amp_state.allow_incoming_model_not_fp32 = False
    assert model[0].weight.dtype == torch.float16


def test_o2_stores_half_weights_float32_batch_norm_and_float32_masters():
    model = make_net()
    exact = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        "0.weight": torch.float16,
        "0.bias": torch.float16,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "3.weight": torch.float16,
        "3.bias": torch.float16,
    }
    assert model[1].running_mean.dtype == torch.float32
    masters = list(amp.master_params(optimizer))
    assert [m.dtype for m in masters] == [torch.float32] * 6
    for master, name in zip(masters, [n for n, _ in model.named_parameters()], strict=True):
        assert torch.equal(master, exact[name]), "masters are the unrounded weights"
    exported = model.state_dict()
    assert all(torch.equal(exported[name], value) for name, value in exact.items())
    assert model(torch.randn(3, 4)).dtype == torch.float32


def test_o3_stores_everything_half():
    model = make_net()
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O3", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model(torch.randn(3, 4)).dtype == torch.float32


def test_o0_changes_no_weight():
    model = make_net()
    before = snapshot(model)
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O0", verbosity=0)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_bfloat16_model_needs_no_loss_scale(level):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, cast_model_type=torch.bfloat16, verbosity=0)
    assert model[0].weight.dtype == torch.bfloat16
    assert _amp_state.loss_scalers[0].loss_scale() == 1.0


def test_cast_model_outputs_decides_the_output_dtype():
    model = make_net()
    amp.initialize(model, opt_level="O2", cast_model_outputs=torch.float16, verbosity=0)
    assert model(torch.randn(3, 4)).dtype == torch.float16


def test_returned_shapes_follow_what_was_given():
    def fresh():
        model = make_net()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    options = {"opt_level": "O2", "verbosity": 0}
    model, optimizer = fresh()
    assert amp.initialize(model, **options) is model
    model, optimizer = fresh()
    assert amp.initialize([model], **options) == [model]
    model, optimizer = fresh()
    assert amp.initialize(model, optimizer, **options) == (model, optimizer)
    model, optimizer = fresh()
    assert amp.initialize([model], optimizer, **options) == ([model], optimizer)
    model, optimizer = fresh()
    assert amp.initialize(model, [optimizer], **options) == (model, [optimizer])
    model, optimizer = fresh()
    assert amp.initialize(model, [], **options) == (model, [])
    model, optimizer = fresh()
    assert amp.initialize((model,), (optimizer,), **options) == ((model,), (optimizer,))


def test_positional_arguments_are_in_the_vendors_order():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers = (2.0**10, 4.0, 0.25, 50, 2.0**-3, 2.0**20)
    amp.initialize(
        model, optimizer, True, "O2", None, None, None, None, "dynamic", None, 2, 0, *numbers, True, None, 4, None, None
    )
    assert len(_amp_state.loss_scalers) == 2
    scale = _amp_state.loss_scalers[0].state
    found = (float(scale.value), scale.growth_factor, scale.backoff_factor, scale.growth_interval)
    assert (*found, scale.min_scale, scale.max_scale) == numbers
    assert _amp_state.opt_properties.combine_grad is True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "opt_level='O1'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32"),
        ({"opt_level": "O1", "master_weights": False}, RuntimeError, "master_weights"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "true"}, TypeError, "'True' or 'False'"),
        ({"opt_level": "O2", "loss_scale": "large"}, ValueError, "'large'"),
        ({"opt_level": "O2", "cast_model_type": "half"}, TypeError, "torch.float16"),
        ({"opt_level": "O2", "scale_growth_factor": 0.5}, ValueError, "growth_factor"),
        ({"opt_level": "O2", "scale_window": 0}, ValueError, "growth_interval"),
        ({"opt_level": "O2", "loss_scale": -1.0}, ValueError, "StaticLossScale"),
        ({"opt_level": "O0", "user_cast_preferred": True}, RuntimeError, "opt_level='O1'"),
    ],
)
def test_contradicting_options_are_refused_before_anything_changes(options, error, message):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(error, match=message):
        amp.initialize(model, optimizer, verbosity=0, **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.parametrize("optimizer", ["adam", [1], 3.0])
def test_an_optimizer_of_another_kind_is_refused(optimizer):
    with pytest.raises(TypeError, match="optimizers must be either"):
        amp.initialize(make_net(), optimizer, opt_level="O2", verbosity=0)


class Stepper(torch.optim.Optimizer):
    """Leaves its step to an optimizer inside, over the same groups or over a copy of them."""

    def __init__(self, params, copies):
        super().__init__(params, {"lr": 0.5})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5)
        if not copies:
            self.inner.param_groups = self.param_groups
            self.param_groups[0].update({**self.inner.defaults, "lr": 0.5})

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("copies", [False, True], ids=["shared groups", "own groups"])
def test_an_optimizer_whose_inner_one_would_miss_the_masters_is_refused_at_o2(level, copies):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = Stepper(model.parameters(), copies)
    if level == "O2" and copies:
        with pytest.raises(TypeError, match=r"Stepper steps its own SGD \(attribute 'inner'\).*Use opt_level='O1'"):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert model.weight.dtype == torch.float32
        assert type(optimizer) is Stepper
        return
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(torch.full((1, 1), 3.0)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == -1.5


def test_zero_redundancy_optimizer_is_refused_at_o2():
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = make_net()
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with pytest.raises(TypeError, match="ZeroRedundancyOptimizer steps its own Adam"):
            amp.initialize(model, sharded, opt_level="O2", verbosity=0)
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="models must be either"):
        amp.initialize({"net": make_net()}, opt_level="O2", verbosity=0)


def test_a_wrapped_model_is_refused():
    with pytest.raises(RuntimeError, match="Incoming model is an instance of DataParallel"):
        amp.initialize(nn.DataParallel(make_net()), opt_level="O2", verbosity=0)


def test_hard_override_turns_contradictions_into_printed_warnings(capsys):
    _amp_state.hard_override = True
    try:
        amp.initialize(make_net(), opt_level="O2", user_cast_preferred=True, verbosity=0)
    finally:
        _amp_state.hard_override = False
    assert capsys.readouterr().out.startswith("Warning:  user_cast_preferred")


def test_verbosity_decides_what_is_printed(capsys):
    amp.initialize(make_net(), opt_level="O2", loss_scale=128.0, verbosity=0)
    assert capsys.readouterr().out == ""
    amp.initialize(make_net(), opt_level="O2", loss_scale=128.0)
    out = capsys.readouterr().out
    assert out.startswith("Selected optimization level O2")
    assert "Processing user overrides (additional kwargs that are not None)..." in out
    assert f"{'loss_scale':22} : dynamic" in out
    assert f"{'loss_scale':22} : 128.0" in out


def test_disabled_changes_nothing_and_scale_loss_is_transparent():
    model = make_net()
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, enabled=False)
    assert type(optimizer) is optimizers.NpuFusedSGD
    assert type(model) is nn.Sequential
    loss = model(torch.randn(3, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    assert list(amp.master_params(optimizer)) == list(model.parameters())


def test_properties_drop_unknown_names_and_refuse_to_read_them():
    amp.initialize(make_net(), opt_level="O2", verbosity=0)
    _amp_state.opt_properties.no_such_option = 3
    with pytest.raises(AttributeError, match="no_such_option"):
        _ = _amp_state.opt_properties.no_such_option


def test_scale_loss_without_initialize_says_so():
    properties = _amp_state.__dict__.pop("opt_properties", None)
    try:
        expected = pytest.raises(RuntimeError, match="internal Amp state has not been initialized")
        with expected, amp.scale_loss(torch.ones(()), None):
            pass
    finally:
        if properties is not None:
            _amp_state.opt_properties = properties


def test_scale_loss_names_an_optimizer_that_was_not_initialized():
    model = make_net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    other = torch.optim.Adam(model.parameters())
    with pytest.raises(RuntimeError, match=r"this Adam did not go through"), amp.scale_loss(torch.ones(()), other):
        pass
