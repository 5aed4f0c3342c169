"""amp.state_dict and amp.load_state_dict: every loss scale that is in use, all or nothing."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp


def initialized(with_optimizer=True, **options):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    amp.initialize(model, optimizer, **{"dynamic_init_scale": 64.0, "verbosity": 0, **options})
    return model, optimizer


def one_step(model, optimizer, factor=1.0, loss_id=0):
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * factor, optimizer, loss_id=loss_id) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def quiet():
    yield
    amp._amp_state.verbosity = 1


@pytest.mark.parametrize("second", [True, False], ids=["with an optimizer", "model only"])
def test_scales_of_earlier_initialize_calls_are_saved_and_restored(second):
    discriminator = initialized()
    generator = initialized(second, num_losses=2, dynamic_init_scale=16.0)
    one_step(*discriminator, factor=float("inf"))
    one_step(*discriminator)
    saved = amp.state_dict()
    assert saved == {
        "loss_scaler0": {"loss_scale": 16.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 16.0, "unskipped": 0},
        "loss_scaler2": {"loss_scale": 32.0, "unskipped": 1},
    }
    discriminator, generator = initialized(), initialized(second, num_losses=2, dynamic_init_scale=16.0)
    assert amp.state_dict()["loss_scaler2"] == {"loss_scale": 64.0, "unskipped": 0}
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    assert discriminator[1]._amp_stash.scalers[0].loss_scale() == 32.0
    del generator


def test_the_order_is_the_latest_call_and_then_the_earlier_ones():
    models = [initialized(dynamic_init_scale=scale) for scale in (2.0, 4.0, 8.0)]
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [8.0, 2.0, 4.0]
    del models[0]
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [8.0, 4.0]


def test_initializing_anew_leaves_no_scale_behind():
    model, optimizer = initialized()
    for level in ("O2", "O1"):
        amp.initialize(model, optimizer, opt_level=level, dynamic_init_scale=8.0, verbosity=0)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}


def test_loss_ids_of_a_later_call_serve_earlier_optimizers_as_in_apex():
    model, optimizer = initialized(dynamic_init_scale=4.0)
    other = initialized(num_losses=2, dynamic_init_scale=16.0)
    one_step(model, optimizer, float("inf"), loss_id=1)
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [16.0, 8.0, 4.0]
    with pytest.raises(IndexError, match="there are 2 loss scales"):
        one_step(model, optimizer, loss_id=2)
    del other


def test_a_given_destination_is_filled():
    kept = initialized()
    destination = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert destination == {"mine": 1, "loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}
    assert type(amp.state_dict()) is OrderedDict
    del kept


@pytest.mark.parametrize(
    "broken",
    [
        {"loss_scale": 8.0},
        {"unskipped": 1},
        {"loss_scale": "large", "unskipped": 1},
        {"loss_scale": 0.0, "unskipped": 1},
        {"loss_scale": float("nan"), "unskipped": 1},
        {"loss_scale": float("inf"), "unskipped": 1},
        {"loss_scale": 8.0, "unskipped": -1},
        {"loss_scale": 8.0, "unskipped": float("inf")},
        None,
        8.0,
    ],
)
def test_a_broken_entry_is_named_and_nothing_is_loaded(broken):
    kept = initialized(num_losses=2)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=r"^Error\(s\) in loading state_dict. loss_scaler1: expected"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}, "loss_scaler1": broken})
    assert amp.state_dict() == before
    del kept


def test_more_or_fewer_entries_than_scales_are_loaded_by_key_and_told(capsys):
    kept = initialized(num_losses=2)
    amp.load_state_dict({"loss_scaler1": {"loss_scale": 4.0, "unskipped": 3}})
    assert capsys.readouterr().out == "Warning: state_dict contains 1 entries, while 2 loss_scalers are used\n"
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in (2, 1, 0)})
    assert capsys.readouterr().out == (
        "Warning: state_dict contains 3 entries, while 2 loss_scalers are used\n"
        "Skipping loss_scaler[2], since num_losses was set to 2\n"
    )
    assert amp.state_dict() == {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in (0, 1)}
    del kept


def test_a_disabled_run_loads_the_state_of_an_enabled_one_in_silence(capsys):
    model = nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 3}})
    assert capsys.readouterr().out == ""
    assert amp.state_dict() == {}
