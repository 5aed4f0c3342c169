"""What scale_loss contexts leave open: scaled gradients and decisions about skipping; and contexts used wrongly."""

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state

INF = float("inf")
NAMES = {"sgd": torch.optim.SGD, "fused_sgd": optimizers.NpuFusedSGD}


def setup(level, lr=1.0, made=torch.optim.SGD, bias=False, **options):
    """One model with weight 0, so that a gradient is the input and a step its negative."""
    model = nn.Linear(1, 1, bias=bias)
    nn.init.zeros_(model.weight)
    return amp.initialize(model, made(model.parameters(), lr=lr), opt_level=level, verbosity=0, **options)


def backward(model, optimizers, x, loss_id=0, **options):
    with amp.scale_loss(model(torch.tensor([[float(x)]])).sum() * 1.0, optimizers, loss_id, **options) as scaled:
        scaled.backward()


def overflow(model, optimizers, loss_id=0, **options):
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * INF, optimizers, loss_id, **options) as scaled:
        scaled.backward()


def weight_of(optimizer):
    return next(amp.master_params(optimizer)).item()


def grad_of(optimizer):
    return next(amp.master_params(optimizer)).grad.item()


def scales():
    return [scaler.loss_scale() for scaler in _amp_state.loss_scalers]


def clean_steps():
    return [entry["unskipped"] for entry in amp.state_dict().values()]


@pytest.mark.parametrize("made", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_of_a_delayed_loss_is_not_forgotten_when_another_loss_follows(level, made):
    model, optimizer = setup(level, made=made, num_losses=2, dynamic_init_scale=128.0)
    _amp_state.loss_scalers[1]._loss_scale = 64.0
    overflow(model, optimizer, 0, delay_unscale=True)
    backward(model, optimizer, 1.0, 1)
    optimizer.step()
    assert weight_of(optimizer) == 0.0
    assert amp.last_step_skipped(optimizer)
    assert scales() == [64.0, 64.0]
    assert clean_steps() == [0, 1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_equal_scales_of_two_losses_do_not_blame_the_other_loss(level):
    model, optimizer = setup(level, num_losses=2, dynamic_init_scale=128.0)
    overflow(model, optimizer, 1, delay_unscale=True)
    backward(model, optimizer, 1.0, 0)
    optimizer.step()
    assert weight_of(optimizer) == 0.0
    assert scales() == [128.0, 64.0]


@pytest.mark.parametrize("follow", [None, 0, 1])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delay_overflow_check_is_decided_by_the_next_context_or_by_the_step(level, follow):
    model, optimizer = setup(level, num_losses=2, dynamic_init_scale=128.0)
    overflow(model, optimizer, 0, delay_overflow_check=True)
    assert scales() == [128.0, 128.0]
    if follow is not None:
        backward(model, optimizer, 1.0, follow)
        assert scales() == [64.0, 128.0]
    optimizer.step()
    assert weight_of(optimizer) == 0.0
    assert amp.last_step_skipped(optimizer)
    assert scales() == [64.0, 128.0]
    assert clean_steps() == [0, int(follow == 1)]
    backward(model, optimizer, 3.0)
    optimizer.step()
    assert weight_of(optimizer) == -3.0


def test_clean_delayed_contexts_of_one_loss_count_once():
    model, optimizer = setup("O1", dynamic_init_scale=128.0)
    backward(model, optimizer, 1.0, delay_overflow_check=True)
    backward(model, optimizer, 1.0, delay_unscale=True)
    assert clean_steps() == [0]
    backward(model, optimizer, 1.0)
    assert clean_steps() == [1]
    assert grad_of(optimizer) == 3.0
    optimizer.step()
    assert clean_steps() == [1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_ragged_window_of_two_optimizers_decides_once_for_both(level):
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, both, opt_level=level, loss_scale="dynamic", dynamic_init_scale=128.0, verbosity=0)
    x = torch.ones(1, 2)
    with amp.scale_loss(models[0](x).sum() + models[1](x).sum(), both, delay_unscale=True) as scaled:
        scaled.backward()
    for optimizer in both:
        optimizer.step()
    assert clean_steps() == [1]
    before = [p.detach().clone() for optimizer in both for p in amp.master_params(optimizer)]
    with amp.scale_loss(models[0](x).sum() * INF + models[1](x).sum(), both, delay_unscale=True) as scaled:
        scaled.backward()
    for optimizer in reversed(both):
        optimizer.step()
    assert [amp.last_step_skipped(optimizer) for optimizer in both] == [True, True]
    assert scales() == [64.0]
    after = [p.detach() for optimizer in both for p in amp.master_params(optimizer)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_closing_the_window_of_one_optimizer_settles_those_it_was_shared_with():
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    both = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, both, opt_level="O1", dynamic_init_scale=128.0, verbosity=0)
    x = torch.ones(1, 1)
    with amp.scale_loss(models[0](x).sum() + models[1](x).sum() * INF, both, delay_unscale=True) as scaled:
        scaled.backward()
    backward(models[0], both[0], 1.0)
    assert scales() == [64.0]
    for optimizer in both:
        optimizer.step()
    assert [amp.last_step_skipped(optimizer) for optimizer in both] == [True, True]
    assert scales() == [64.0]


def test_two_windows_of_one_loss_become_one_decision_when_a_context_closes_both():
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    both = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, both, opt_level="O1", dynamic_init_scale=128.0, verbosity=0)
    for model, optimizer in zip(models, both, strict=True):
        backward(model, optimizer, 2.0, delay_unscale=True)
    x = torch.ones(1, 1)
    with amp.scale_loss(models[0](x).sum() + models[1](x).sum(), both) as scaled:
        scaled.backward()
    assert clean_steps() == [1]
    assert [grad_of(optimizer) for optimizer in both] == [3.0, 3.0]


def test_the_skip_message_names_the_first_loss_that_overflowed(capsys):
    model, optimizer = setup("O2", num_losses=2, dynamic_init_scale=128.0)
    _amp_state.verbosity = 1
    overflow(model, optimizer, 1)
    overflow(model, optimizer, 0)
    optimizer.step()
    expected = "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 64.0\n"
    assert capsys.readouterr().out == expected
    assert scales() == [64.0, 64.0]
    backward(model, optimizer, 1.0)
    optimizer.step()  # both overflows cost one step
    assert weight_of(optimizer) == -1.0


def test_gradients_discarded_while_scaled_decide_nothing():
    model, optimizer = setup("O2", dynamic_init_scale=128.0)
    overflow(model, optimizer, delay_unscale=True)
    optimizer.zero_grad()
    optimizer.step()
    assert scales() == [128.0]
    assert clean_steps() == [0]
    backward(model, optimizer, 2.0)
    optimizer.step()
    assert weight_of(optimizer) == -2.0


def test_an_optimizer_initialized_anew_leaves_the_windows_it_shared():
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    both = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, both, opt_level="O2", dynamic_init_scale=128.0, verbosity=0)
    first = _amp_state.loss_scalers[0]
    x = torch.ones(1, 1)
    with amp.scale_loss(models[0](x).sum() * INF + models[1](x).sum(), both, delay_unscale=True) as scaled:
        scaled.backward()
    amp.initialize(models[0], both[0], opt_level="O2", verbosity=0)
    both[1].step()
    assert not amp.last_step_skipped(both[1])
    assert first.loss_scale() == 128.0


@pytest.mark.parametrize("clear", ["model", "model to zero", "optimizer", "optimizer to zero"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cleared_gradients_do_not_come_back_from_before_a_delayed_context(level, clear):
    model, optimizer = setup(level, loss_scale=8.0)
    backward(model, optimizer, 1.0)
    backward(model, optimizer, 10.0, delay_unscale=True)
    (model if clear.startswith("model") else optimizer).zero_grad(set_to_none=not clear.endswith("to zero"))
    backward(model, optimizer, 100.0)
    assert grad_of(optimizer) == 100.0


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_delayed_context_adds_to_gradients_that_are_unscaled_already(level):
    model, optimizer = setup(level, loss_scale=8.0)
    backward(model, optimizer, 1.0)
    backward(model, optimizer, 10.0, delay_unscale=True)
    backward(model, optimizer, 100.0)
    assert grad_of(optimizer) == 111.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_inside_a_context_clears_the_gradients_of_earlier_ones(level):
    model, optimizer = setup(level, loss_scale=8.0)
    backward(model, optimizer, 1.0)
    with amp.scale_loss(model(torch.tensor([[10.0]])).sum(), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    assert grad_of(optimizer) == 10.0


@pytest.mark.parametrize("made", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(("level", "combine"), [("O0", None), ("O1", None), ("O1", True), ("O2", None), ("O2", True)])
@pytest.mark.parametrize("delay", [False, True])
def test_a_tensor_shared_by_two_optimizers_of_one_context_is_collected_once(level, delay, combine, made):
    shared, own = (nn.Linear(1, 1, bias=False) for _ in range(2))
    for module in (shared, own):
        nn.init.zeros_(module.weight)
    a, b = made(shared.parameters(), lr=1.0), made([*shared.parameters(), *own.parameters()], lr=0.5)
    options = {"opt_level": level, "loss_scale": 8.0, "combine_grad": combine, "verbosity": 0}
    amp.initialize([shared, own], [a, b], **options)
    for _ in range(2):
        loss = (shared.weight * 3).float().sum() + (own.weight * 2).float().sum()
        with amp.scale_loss(loss, [a, b], delay_unscale=delay) as scaled:
            scaled.backward()
    a.step()
    b.step()
    assert weight_of(a) == -9.0  # 6 * (1 + 0.5), as without amp
    assert [p.item() for p in amp.master_params(b)] == [-9.0, -2.0]


@pytest.mark.parametrize("made", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_skipped_gradient_that_nobody_cleared_does_not_reach_the_weights(level, made):
    model, optimizer = setup(level, made=made, loss_scale="dynamic", dynamic_init_scale=8.0)
    for factor in (INF, 3.0):
        with amp.scale_loss((model.weight * factor).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert not amp.last_step_skipped(optimizer)
    assert weight_of(optimizer) == -3.0


def test_a_second_step_after_a_skipped_one_changes_nothing():
    model, optimizer = setup("O1", loss_scale=8.0)
    overflow(model, optimizer)
    optimizer.step()
    optimizer.step()
    assert weight_of(optimizer) == 0.0


def test_dense_and_sparse_gradients_of_one_embedding_add_up():
    for order in ((0, 1), (1, 0)):
        embedding = nn.Embedding(3, 1, sparse=True)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        amp.initialize(embedding, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
        for which in order:
            loss = embedding(torch.tensor([1, 1])).sum() if which else embedding.weight.sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        assert torch.equal(embedding.weight.grad.to_dense(), torch.tensor([[1.0], [3.0], [1.0]]))


def test_a_dynamic_scale_asked_for_at_o0_grows_and_skips():
    model, optimizer = setup("O0", loss_scale="dynamic", scale_window=2)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, optimizer, 1.0)
        optimizer.step()
    assert scales() == [2.0**17]
    overflow(model, optimizer)
    optimizer.step()
    assert scales() == [2.0**16]
    assert weight_of(optimizer) == -2.0


def test_a_static_scale_at_o0_checks_nothing_delayed_or_not():
    for delay in (False, True):
        model, optimizer = setup("O0", loss_scale=8.0)
        overflow(model, optimizer, delay_unscale=delay)
        optimizer.step()
        assert weight_of(optimizer) == -INF
        assert not amp.last_step_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nested_contexts_of_one_optimizer_are_refused_and_change_nothing(level):
    model, optimizer = setup(level, num_losses=2, dynamic_init_scale=128.0)
    one, ten = model(torch.tensor([[1.0]])).sum(), model(torch.tensor([[10.0]])).sum()
    with amp.scale_loss(one, optimizer) as outer:
        outer.backward()
        with pytest.raises(RuntimeError, match="Put one block after the other"):
            amp.scale_loss(ten, optimizer, 1).__enter__()
    assert grad_of(optimizer) == 1.0
    backward(model, optimizer, 7.0)
    assert grad_of(optimizer) == 8.0


def test_nested_contexts_of_different_optimizers_are_fine():
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    a, b = both = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, both, opt_level="O2", loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 1)
    with amp.scale_loss(models[0](x).sum(), a) as first, amp.scale_loss(models[1](x).sum() * 2, b) as second:
        first.backward()
        second.backward()
    assert (grad_of(a), grad_of(b)) == (1.0, 2.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_the_context_is_refused(level):
    model, optimizer = setup(level, loss_scale=128.0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError, match=r"SGD\.step was called inside `with amp\.scale_loss.*dedent it"):
            optimizer.step()
    assert weight_of(optimizer) == 0.0
    optimizer.step()
    assert weight_of(optimizer) == -1.0


def test_a_step_inside_the_context_works_where_nothing_is_scaled():
    model, optimizer = setup("O3", loss_scale=1.0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        scaled.backward()
        optimizer.step()
    assert weight_of(optimizer) == -1.0


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_backward_of_the_loss_that_is_not_scaled_warns(level, delay):
    model, optimizer = setup(level, loss_scale=128.0)
    loss = model(torch.ones(1, 1)).sum()
    message = r"did not start from the scaled loss.*not loss\.backward\(\)"
    with (
        pytest.warns(UserWarning, match=message) as caught,
        amp.scale_loss(loss, optimizer, delay_unscale=delay),
    ):
        loss.backward()
    assert caught[0].filename == __file__


def test_other_ways_through_the_scaled_loss_do_not_warn():
    model, optimizer = setup("O1", loss_scale=128.0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        (scaled / 2).backward(retain_graph=True)
        torch.autograd.backward([scaled])
    assert grad_of(optimizer) == 1.5
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        (model.weight.grad,) = torch.autograd.grad(scaled, [model.weight])
    assert grad_of(optimizer) == 1.0
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer):
        pass
    assert model.weight.grad is None


@pytest.mark.parametrize("clear", ["optimizer", "model", "nothing"])
def test_a_bare_backward_pass_in_a_later_iteration_is_not_lost_in_silence(clear):
    model, optimizer = setup("O2", loss_scale=128.0)
    backward(model, optimizer, 1.0)
    optimizer.step()
    if clear != "nothing":
        (optimizer if clear == "optimizer" else model).zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    with pytest.warns(UserWarning, match="since the last step no backward pass ran inside amp.scale_loss"):
        optimizer.step()
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert weight_of(optimizer) == -2.0


def test_gradients_written_to_the_masters_by_hand_do_not_warn():
    model, optimizer = setup("O2", loss_scale=128.0)
    backward(model, optimizer, 1.0)
    optimizer.step()
    next(amp.master_params(optimizer)).grad = torch.tensor([[2.0]])
    optimizer.step()
    assert weight_of(optimizer) == -3.0
