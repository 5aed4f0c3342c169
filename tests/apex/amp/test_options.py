"""Options of amp.initialize: defaults, what is printed, and values of another kind."""

import inspect

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.apex.amp.scaler import LossScaler

DEFAULTS = {  # as in the vendor's version of apex, in its order
    "models": inspect.Parameter.empty,
    "optimizers": None,
    "enabled": True,
    "opt_level": "O1",
    "cast_model_type": None,
    "patch_torch_functions": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": None,
    "cast_model_outputs": None,
    "num_losses": 1,
    "verbosity": 1,
    "dynamic_init_scale": 65536.0,
    "scale_growth_factor": 2.0,
    "scale_backoff_factor": 0.5,
    "scale_window": 2000,
    "min_loss_scale": None,
    "max_loss_scale": 16777216.0,
    "combine_grad": None,
    "combine_ddp": None,
    "ddp_replica_count": 4,
    "user_cast_preferred": None,
    "check_combined_tensors": None,
}
NUMBERS = [name for name in DEFAULTS if "scale_" in name or name.endswith(("init_scale", "loss_scale"))][1:]


def make():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def quiet():
    yield
    _amp_state.verbosity = 1


def test_names_order_and_defaults_are_the_vendors():
    found = {name: parameter.default for name, parameter in inspect.signature(amp.initialize).parameters.items()}
    assert list(found.items()) == list(DEFAULTS.items())


def test_the_state_shows_the_numbers_of_the_scale_and_the_first_scale_is_within_its_ceiling():
    amp.initialize(*make(), verbosity=0, max_loss_scale=2.0**10, scale_window=7)
    found = {name: getattr(_amp_state, name) for name in NUMBERS}
    assert found == {**{name: DEFAULTS[name] for name in NUMBERS}, "max_loss_scale": 2.0**10, "scale_window": 7}
    assert len(NUMBERS) == 6
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**10


def test_a_scaler_of_its_own_starts_at_the_vendors_scale_and_within_its_ceiling():
    assert LossScaler("dynamic").loss_scale() == 65536.0
    assert LossScaler("dynamic", max_loss_scale=8.0).loss_scale() == 8.0
    assert LossScaler(4.0, init_scale=2.0).loss_scale() == 4.0


def test_clean_steps_of_a_static_scale_are_counted_and_overflows_are_not():
    scaler = LossScaler(4.0)
    for finite in (True, True, False, True):
        scaler.record(torch.tensor(finite))
        assert scaler.update_scale() is not finite
    assert (scaler._unskipped, scaler.loss_scale()) == (3, 4.0)


def test_everything_printed_at_o2(capsys):
    model, _ = make()
    amp.initialize(model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1), opt_level="O2", loss_scale=128.0)
    options = {
        "enabled": True,
        "opt_level": "O2",
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
        "combine_grad": None,
        "combine_ddp": None,
        "ddp_replica_count": 4,
        "check_combined_tensors": None,
        "user_cast_preferred": None,
    }
    preset = [f"{name:22} : {value}" for name, value in options.items()]
    assert capsys.readouterr().out.splitlines() == [
        "Selected optimization level O2:  Half-precision model with FP32 batchnorm and FP32 master weights.",
        "Defaults for this optimization level are:",
        *preset,
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *(line.replace("dynamic", "128.0") for line in preset),
        "Use npu fused optimizer",
    ]


@pytest.mark.parametrize(
    ("options", "fused", "printed"),
    [({}, False, True), ({"combine_grad": True}, False, False), ({}, True, False)],
)
def test_checking_combined_tensors_where_nothing_is_combined_says_so(capsys, options, fused, printed):
    model, optimizer = make()
    if fused:
        optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", check_combined_tensors=True, **options)
    out = capsys.readouterr().out
    assert ("check_combined_tensors=True has no effect" in out) is printed
    assert ("Use npu fused optimizer" in out) is fused


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_prints_the_options(capsys, monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    amp.initialize(*make(), opt_level="O0")
    assert bool(capsys.readouterr().out) is (rank == 0)


def test_a_level_in_the_place_of_enabled_is_refused_with_what_to_write():
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"enabled: expected a bool, found 'O2'.*opt_level='O2'"):
        amp.initialize(model, optimizer, "O2")
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_losses": 0}, ValueError),
        ({"num_losses": -1}, ValueError),
        ({"num_losses": 1.5}, ValueError),
        ({"num_losses": True}, ValueError),
        ({"cast_model_outputs": "half"}, TypeError),
        ({"cast_model_outputs": torch.int32}, TypeError),
        ({"loss_scale": [1]}, TypeError),
        ({"loss_scale": "large"}, ValueError),
        ({"verbosity": "x"}, TypeError),
        ({"max_loss_scale": "a"}, TypeError),
        ({"dynamic_init_scale": None}, TypeError),
        ({"min_loss_scale": "0"}, TypeError),
        ({"ddp_replica_count": 0}, ValueError),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name_and_nothing_changes(options, error):
    model, optimizer = make()
    (name, value), before = next(iter(options.items())), dict(_amp_state.__dict__)
    with pytest.raises(error, match=f"^{name}: .*{str(value)[:3]!s}".replace("[", r"\[")):
        amp.initialize(model, optimizer, **{"verbosity": 0, **options})
    assert _amp_state.__dict__ == before
    assert (type(model), type(optimizer)) == (nn.Linear, torch.optim.SGD)


@pytest.mark.parametrize("loss", [None, 0.0, (torch.ones(()),)])
def test_a_loss_that_is_no_tensor_is_refused(loss):
    _, optimizer = amp.initialize(*make(), verbosity=0)
    with pytest.raises(TypeError, match="expected the loss as a tensor, found"), amp.scale_loss(loss, optimizer):
        pass


@pytest.mark.parametrize("none", [[], ()])
def test_a_backward_pass_for_no_optimizer_is_refused(none):
    model, _ = amp.initialize(*make(), verbosity=0)
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(ValueError, match="nobody would unscale"), amp.scale_loss(loss, none) as scaled:
        scaled.backward()
    assert model.weight.grad is None
