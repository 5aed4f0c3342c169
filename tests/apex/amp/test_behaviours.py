"""What users of mixed precision ran into: each report is a named test."""

import collections
import copy
import dataclasses
import gc
import warnings
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state

LEVELS = ["O0", "O1", "O2", "O3"]
FUSED = {
    "sgd": lambda p: optimizers.NpuFusedSGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: optimizers.NpuFusedAdam(p, lr=0.01),
    "adamw": lambda p: optimizers.NpuFusedAdamW(p, lr=0.01),
    "adamp": lambda p: optimizers.NpuFusedAdamP(p, lr=0.01),
    "bert_adam": lambda p: optimizers.NpuFusedBertAdam(p, lr=0.01),
    "adadelta": lambda p: optimizers.NpuFusedAdadelta(p),
    "lamb": lambda p: optimizers.NpuFusedLamb(p, lr=0.01),
    "rmsprop": lambda p: optimizers.NpuFusedRMSprop(p, lr=0.01),
    "rmsprop_tf": lambda p: optimizers.NpuFusedRMSpropTF(p, lr=0.01),
    "torch_sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "torch_adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
}


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def batch(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=0):
    x = batch(seed)
    return F.mse_loss(model(x), x[:, :2])


def one_step(model, optimizer, seed=0, factor=1.0):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, seed) * factor, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def initialized(make, level, **options):
    model = make_net()
    options = {"opt_level": level, "verbosity": 0, **options}
    return amp.initialize(model, make(model.parameters()), **options)


def everything(model, optimizer):
    tensors = [*model.parameters(), *amp.master_params(optimizer)]
    return [t.detach().clone() for t in tensors], copy.deepcopy(optimizer.state_dict()["state"])


def test_a1_the_scale_stays_above_its_floor_and_warns_once():
    model, optimizer = initialized(FUSED["sgd"], "O2")
    before = everything(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(60):
            one_step(model, optimizer, factor=float("inf"))
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**-14
    assert len(caught) == 1
    assert "the loss scale is at its floor" in str(caught[0].message)
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)


def test_a1_min_loss_scale_below_one_is_honoured():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", dynamic_init_scale=4.0, min_loss_scale=2.0**-6, verbosity=0
    )
    before = next(amp.master_params(optimizer)).detach().clone()
    for _ in range(10):  # the half gradient is 200 000 times the scale: it fits at 1/4
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum() * 2e5, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert _amp_state.loss_scalers[0].loss_scale() == 0.25
    assert not torch.equal(next(amp.master_params(optimizer)), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", FUSED)
def test_a2_a_skipped_step_leaves_no_trace_and_says_so(name, level):
    model, optimizer = initialized(FUSED[name], level, dynamic_init_scale=8.0)
    for seed in range(2):
        one_step(model, optimizer, seed)
    assert not optimizer._amp_stash.last_step_skipped
    model.eval()
    before = everything(model, optimizer)
    one_step(model, optimizer, 2, factor=float("nan"))
    assert optimizer._amp_stash.last_step_skipped
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0, equal_nan=True)
    undisturbed, other = initialized(FUSED[name], level, dynamic_init_scale=8.0)
    for seed in range(2):
        one_step(undisturbed, other, seed)
    undisturbed.eval()
    one_step(model, optimizer, 3)
    one_step(undisturbed, other, 3)
    torch.testing.assert_close(everything(model, optimizer), everything(undisturbed, other), rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a3_schedulers_see_no_spurious_warning_even_when_the_first_step_is_skipped(name, when, level):
    model = make_net()
    optimizer = FUSED[name](model.parameters())
    group = optimizer.param_groups[0]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if when == "before" else []
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after":
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    for seed in range(3):
        one_step(model, optimizer, seed, factor=float("inf") if seed == 0 and level != "O0" else 1.0)
        schedulers[0].step()
    assert optimizer.param_groups[0] is group
    assert group["lr"] == pytest.approx(0.05 * 1e-3)
    assert optimizer.step.__self__ is optimizer, "step is a bound method"
    group["lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    one_step(model, optimizer, 5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "adamw", "torch_sgd", "torch_adamw"])
def test_a3_a_step_takes_a_closure_skipped_or_not(name, level):
    results = []
    for use_closure in (False, True):
        model, optimizer = initialized(FUSED[name], level, loss_scale=8.0)
        if not use_closure:
            one_step(model, optimizer, 0)
            one_step(model, optimizer, 2)
        else:
            for seed, factor in ((0, 1.0), (1, float("inf")), (2, 1.0)):

                def closure(model=model, optimizer=optimizer, seed=seed, factor=factor):
                    optimizer.zero_grad()
                    loss = loss_of(model, seed) * factor
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                    return loss

                if level != "O0" or factor == 1.0:
                    statistics = copy.deepcopy(model[1].state_dict())
                    assert optimizer.step(closure).shape == ()
                    if factor != 1.0:
                        model[1].load_state_dict(statistics)
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a3_lbfgs_evaluates_its_closure_again_at_the_new_weights(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    x, losses = batch(0), []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(losses) > 3
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a4_a_users_own_optimizer_class_works(level):
    class Mine(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None, bonus=0.0):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"]).add_(bonus)
            return "stepped"

    model = nn.Linear(3, 1, bias=False)
    optimizer = Mine(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    (weight,) = amp.master_params(optimizer)
    before = weight.detach().clone()
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    assert optimizer.step(bonus=1.0) == "stepped"
    torch.testing.assert_close(weight.detach(), before - 0.1 + 1.0)
    assert torch.equal(model.weight, weight.to(model.weight.dtype))
    assert isinstance(optimizer, Mine)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a4_step_and_zero_grad_before_backward_and_without_gradients_are_quiet(name, level):
    model, optimizer = initialized(FUSED[name], level)
    other = FUSED[name](nn.Linear(2, 2).parameters())
    before = [p.clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    counter = dict(amp.state_dict())
    with amp.scale_loss(torch.ones((), requires_grad=True) * 1, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert dict(amp.state_dict()) == counter
    assert other is not optimizer


@pytest.mark.parametrize(
    ("name", "level"),
    [*((name, level) for name in ("sgd", "torch_sgd") for level in LEVELS), ("adamw", "O0"), ("torch_adamw", "O0")],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a11_a_group_may_be_added_at_any_time(name, steps_before, level):
    def train(level):
        models = [make_net(0), make_net(1)]
        optimizer = FUSED[name](models[0].parameters())
        if level is not None:
            models, optimizer = amp.initialize(models, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
        added = False
        for seed in range(5):
            if seed == steps_before and not added:
                optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.02})
                added = True
            loss = loss_of(models[0], seed) + loss_of(models[1], seed)
            for model in models:
                model.zero_grad()
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        return [p.detach().float() for model in models for p in model.parameters()]

    exact = level == "O0"
    for p, q in zip(train(level), train(None), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if exact else 0.1, atol=1e-6 if exact else 0.02)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("combine_grad", [None, True])
@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a12_missing_late_and_cleared_gradients(name, combine_grad, level):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x, use):
            return sum(layer(x) for layer, on in zip((self.a, self.b), use, strict=True) if on)

    def train(level):
        model = Branches()
        optimizer = FUSED[name](model.parameters())
        if level is not None:
            options = {"loss_scale": 8.0, "combine_grad": combine_grad, "verbosity": 0}
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
        for seed, use in enumerate([(1, 0), (1, 1), (0, 1), (1, 1)]):
            loss = F.mse_loss(model(batch(seed), use), batch(seed)[:, :2])
            for p in model.parameters():
                p.grad = None
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        return [p.detach().float() for p in model.parameters()]

    for p, q in zip(train(level), train(None), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=3e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a12_sparse_gradients_are_unscaled(level):
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table, optimizer = amp.initialize(table, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    (weight,) = amp.master_params(optimizer)
    before = weight.detach().clone()
    with amp.scale_loss(table(torch.tensor([1, 1, 3])).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    expected = before - torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]).unsqueeze(1)
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a12_edits_of_weights_and_masters_reach_the_other_side(name):
    model, optimizer = initialized(FUSED[name], "O2", loss_scale=8.0)
    one_step(model, optimizer, 0)
    masters = dict(zip([n for n, _ in model.named_parameters()], amp.master_params(optimizer), strict=True))
    optimizer.param_groups[0]["lr"] = 0.0
    edits = {
        "fill through .data": lambda p: p.data.fill_(0.3),
        "in place": lambda p: p.detach().mul_(0.5),
        "replaced": lambda p: setattr(p, "data", torch.full_like(p, 0.7)),
        "one element": lambda p: p.data[0].mul_(3.0),
        "vector": lambda p: nn.utils.vector_to_parameters(torch.full((p.numel(),), 0.2, dtype=p.dtype), [p]),
    }
    for what, edit in edits.items():
        for side in ("low", "master"):
            low, master = model[0].weight, masters["0.weight"]
            edited, other = (low, master) if side == "low" else (master, low)
            edit(edited)
            expected = edited.detach().clone()
            one_step(model, optimizer, 1)
            assert torch.equal(edited.detach(), expected), (what, side)
            assert torch.equal(low, master.to(low.dtype)), (what, side)
            assert other.data_ptr() != edited.data_ptr()


def test_a12_untouched_weights_pull_nothing_into_the_masters():
    model, optimizer = initialized(FUSED["torch_sgd"], "O2", loss_scale=8.0)
    lows = [p for p in model.parameters() if p.dtype == torch.float16]
    for seed in range(5):
        one_step(model, optimizer, seed)
        saved = [p.detach().clone() for p in lows]
        masters = [m.detach().clone() for m in amp.master_params(optimizer)]
        for p in lows:  # an average swapped in and out again
            p.data = torch.zeros_like(p)
        for p, value in zip(lows, saved, strict=True):
            p.data.copy_(value)
        optimizer.zero_grad()
        optimizer.step()
        for before, master in zip(masters, amp.master_params(optimizer), strict=True):
            torch.testing.assert_close(before, master.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a13_two_models_two_optimizers_three_losses(name, level):
    def train(level):
        generator, critic = make_net(0), make_net(1)
        made = [FUSED[name](m.parameters()) for m in (generator, critic)]
        if level is not None:
            models, made = amp.initialize(
                [generator, critic], made, opt_level=level, num_losses=3, loss_scale=8.0, verbosity=0
            )
            generator, critic = models

        def backward(loss, loss_id, own, **options):
            if level is None:
                loss.backward(**options)
                return
            with amp.scale_loss(loss, own, loss_id=loss_id) as scaled:
                scaled.backward(**options)

        for seed in range(4):
            for optimizer in made:
                optimizer.zero_grad()
            fake = generator(batch(seed))
            real = critic(batch(seed + 50)).mean()
            backward(critic(torch.cat([fake, fake], 1)).mean(), 0, [made[0], made[1]], retain_graph=True)
            backward(-real, 1, made[1])
            backward(fake.square().mean(), 2, (made[0], made[0]))
            for optimizer in made:
                optimizer.step()
        return [p.detach().float() for m in (generator, critic) for p in m.parameters()]

    rtol, atol = (1e-5, 1e-6) if level == "O0" else (0.1, 1e-2)
    for p, q in zip(train(level), train(None), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("poisoned_loss", [0, 1])
@pytest.mark.parametrize("number_of_scales", [1, 2])
def test_a13_an_inf_in_one_of_two_losses_skips_the_step_and_touches_its_own_scale(
    number_of_scales, poisoned_loss, fused, level
):
    torch.manual_seed(0)
    models = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    cls = optimizers.NpuFusedSGD if fused else torch.optim.SGD
    optimizer = cls([{"params": m.parameters()} for m in models], lr=0.25, momentum=0.5)
    models, optimizer = amp.initialize(
        models, optimizer, opt_level=level, loss_scale="dynamic", num_losses=number_of_scales, verbosity=0
    )
    for scaler, value in zip(_amp_state.loss_scalers, (4.0, 16.0), strict=False):
        scaler._loss_scale = value
    weights = list(amp.master_params(optimizer))
    expected, velocity = [w.detach().clone() for w in weights], [torch.zeros(1, 3)] * 2
    for iteration in range(4):
        optimizer.zero_grad()
        for loss in range(2):
            scale_of_loss = loss if number_of_scales == 2 else 0
            total = models[0](torch.ones(1, 3)).sum() + (loss + 1) * models[1](torch.ones(1, 3)).sum()
            with amp.scale_loss(total, optimizer, loss_id=scale_of_loss) as scaled:
                scaled.backward()
                if iteration == 1 and loss == poisoned_loss:
                    models[loss].weight.grad[0, 1] = float("inf")
        optimizer.step()
        assert optimizer._amp_stash.last_step_skipped == (iteration == 1)
        if iteration != 1:
            velocity = [0.5 * v + g for v, g in zip(velocity, (2.0, 3.0), strict=True)]
            expected = [w - 0.25 * v for w, v in zip(expected, velocity, strict=True)]
        tolerance = 2e-2 if level == "O3" else 1e-5
        for model, weight, value in zip(models, weights, expected, strict=True):
            torch.testing.assert_close(weight.detach().float(), value.float(), rtol=tolerance, atol=tolerance)
            assert torch.equal(model.weight, weight.to(model.weight.dtype))
    scales = [4.0, 16.0][:number_of_scales]
    scales[poisoned_loss if number_of_scales == 2 else 0] /= 2
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == scales


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a15_clipping_after_the_context_clips_true_gradients(name, level, norm):
    plain = make_net()
    loss_of(plain).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm)
    for fused in (False, True):
        model, optimizer = initialized(FUSED[name], level, loss_scale=64.0)
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        if fused:
            total = optimizer.clip_optimizer_grad_norm_fused(0.01, norm)
        else:
            total = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01, norm)
        torch.testing.assert_close(total.float(), expected, rtol=1e-5 if level == "O0" else 2e-2, atol=1e-4)
        for p, q in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.float(), q.grad, rtol=5e-2, atol=1e-3)
        optimizer.step()


def test_a15_a_non_finite_norm_is_returned():
    model, optimizer = initialized(FUSED["sgd"], "O2", loss_scale=64.0, combine_grad=True)
    assert optimizer.clip_optimizer_grad_norm_fused(1.0).item() == 0.0
    with amp.scale_loss(loss_of(model) * float("inf"), optimizer) as scaled:
        scaled.backward()
    assert not torch.isfinite(optimizer.clip_optimizer_grad_norm_fused(1.0))
    with pytest.raises(RuntimeError, match="can only be used when opt_level='O1'"):
        optimizer.clip_model_grad_norm_fused(1.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a16_a_gradient_penalty_matches_float32(level):
    def train(level):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
        if level is not None:
            critic, optimizer = amp.initialize(critic, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        for seed in range(5):
            x = batch(seed).requires_grad_()
            (inner,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = (inner.norm(dim=1) - 1).square().mean() + critic(x).mean()
            optimizer.zero_grad()
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        return [p.detach().float() for p in critic.parameters()]

    for p, q in zip(train(level), train(None), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a18_rounds_of_fresh_models_start_clean_and_leak_nothing(level):
    alive, losses = [], []
    for _ in range(3):
        model, optimizer = initialized(FUSED["sgd"], level)
        for seed in range(2):
            one_step(model, optimizer, seed)
        losses.append(loss_of(model, 9).item())
        alive += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
        del model, optimizer
    gc.collect()
    assert losses[0] == losses[1] == losses[2]
    assert [ref() for ref in alive] == [None] * 9


def test_a18_unfreezing_with_a_new_optimizer_and_a_second_initialize():
    model = make_net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    first = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, first = amp.initialize(model, first, opt_level="O2", loss_scale=8.0, verbosity=0)
    one_step(model, first, 0)
    exported = {name: value.clone() for name, value in model.state_dict().items()}
    for p in model.parameters():
        p.requires_grad_(True)
    second = optimizers.NpuFusedSGD(model.parameters(), lr=0.05)
    model, second = amp.initialize(model, second, opt_level="O2", loss_scale=8.0, verbosity=0)
    for master, (name, low) in zip(amp.master_params(second), model.named_parameters(), strict=True):
        assert torch.equal(master, exported[name])
        assert torch.equal(low, master.to(low.dtype))
    frozen = model[0].weight.detach().clone()
    for seed in range(3):
        one_step(model, second, seed)
    assert not torch.equal(model[0].weight, frozen)


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("name", ["sgd", "torch_sgd"])
def test_a18_the_same_model_and_optimizer_can_change_level(name, first, second):
    model, optimizer = initialized(FUSED[name], first, loss_scale=8.0)
    one_step(model, optimizer, 0)
    exported = {n: v.clone() for n, v in model.state_dict().items()}
    model, optimizer = amp.initialize(model, optimizer, opt_level=second, loss_scale=8.0, verbosity=0)
    for (n, v), (_, w) in zip(model.state_dict().items(), exported.items(), strict=True):
        torch.testing.assert_close(v, w, rtol=1e-3 if second == "O3" else 0, atol=1e-3 if second == "O3" else 0, msg=n)
    one_step(model, optimizer, 1)
    dtype = {"O0": torch.float32, "O1": torch.float32, "O2": torch.float16, "O3": torch.float16}[second]
    assert model[0].weight.dtype == dtype
    assert all(p.dtype == (torch.float16 if second == "O3" else torch.float32) for p in amp.master_params(optimizer))
    assert next(iter(optimizer.state.values()))["momentum_buffer"].any()


@dataclasses.dataclass(frozen=True)
class Example:
    image: torch.Tensor
    label: torch.Tensor
    name: str = "x"


Point = collections.namedtuple("Point", "x y")


class Custom:
    def __init__(self, value):
        self.value = value

    def to(self, dtype):
        return Custom(self.value.to(dtype))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a22_arguments_of_every_kind(level):
    class Net(nn.Module):
        def forward(self, *args, **kwargs):
            self.seen = (args, kwargs)
            return args[0]

    model = Net()
    amp.initialize(model, opt_level=level, verbosity=0)
    x, ids = torch.ones(2), torch.arange(2)
    ordered = collections.OrderedDict(a=x, b=[x, None])
    default = collections.defaultdict(list, c=x)
    array = numpy.ones(2, dtype=numpy.float32)
    arguments = ([x, (ids, "s", 3, None, True)], Point(x, ids), Example(x, ids), Custom(x), ordered, default, array)
    out = model(*arguments, keyword={"deep": {"x": x}}, double=x.double(), half=x.half())
    (listed, point, example, custom, seen_ordered, seen_default, seen_array), kwargs = model.seen
    half = torch.float16
    assert listed[0].dtype == half
    assert listed[1] is arguments[0][1], "nothing to cast: the same object"
    assert isinstance(point, Point)
    assert (point.x.dtype, point.y.dtype) == (half, torch.int64)
    assert isinstance(example, Example)
    assert (example.image.dtype, example.label.dtype, example.name) == (half, torch.int64, "x")
    assert custom.value.dtype == half
    assert type(seen_ordered) is collections.OrderedDict
    assert (seen_ordered["a"].dtype, seen_ordered["b"][0].dtype, seen_ordered["b"][1]) == (half, half, None)
    assert seen_default.default_factory is list
    assert seen_array is array
    assert kwargs["keyword"]["deep"]["x"].dtype == half
    assert kwargs["double"].dtype == half, "as apex does: numpy's default dtype"
    assert x.dtype == torch.float32
    assert arguments[2].image.dtype == torch.float32, "the caller's objects are not changed"
    assert isinstance(out, list)
    assert out[0].dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("training", [True, False])
def test_a23_norm_layers_and_buffers(level, training):
    class MyNorm(nn.LayerNorm):
        def forward(self, x):
            if level in ("O2", "O3"):
                assert self.weight.dtype == x.dtype == torch.float16
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 1)
            self.norms = nn.ModuleList(
                [
                    nn.BatchNorm1d(4),
                    nn.BatchNorm1d(4, affine=False),
                    nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
                    nn.GroupNorm(2, 4),
                ]
            )
            self.mine = MyNorm(5)
            self.register_buffer("positions", torch.arange(4096.0))
            self.register_buffer("large", torch.tensor([1e5]))
            self.register_buffer("small", torch.tensor([0.1]))
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x):
            x = self.conv(x)
            for norm in self.norms:
                x = norm(x)
            return self.mine(x)

    torch.manual_seed(0)
    model = Net().train(training)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(3):
        with amp.scale_loss(model(torch.randn(6, 3, 5)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    for index, norm in enumerate(model.norms[:3]):
        half = level == "O3" and index == 0
        assert norm.running_mean.dtype == (torch.float16 if half else torch.float32)
        assert torch.isfinite(norm.running_var).all()
    assert torch.equal(model.positions.float(), torch.arange(4096.0))
    assert model.large.item() == 1e5
    assert model.small.dtype == (torch.float32 if level == "O1" else torch.float16)
    assert model.count.dtype == torch.int64


@pytest.mark.parametrize("form", ["old", "parametrized"])
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a25_weight_and_spectral_norm(level, kind, form):
    torch.manual_seed(0)
    module = nn.utils if form == "old" else nn.utils.parametrizations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(getattr(module, kind)(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for seed in range(5):
        one_step(model, optimizer, seed)
    model.eval()
    out = model(batch(0))
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(value.dtype == torch.float32 for value in saved.values())
    model.load_state_dict(saved)
    torch.testing.assert_close(model(batch(0)), out, rtol=1e-3, atol=1e-3)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a25_parametrizations_come_and_go(level, when):
    model = nn.Linear(4, 2)
    if when == "before":
        nn.utils.parametrize.register_parametrization(model, "weight", Doubled())
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    if when == "after":
        nn.utils.parametrize.register_parametrization(model, "weight", Doubled())
    one_step(model, optimizer)
    exported = model.state_dict()
    masters = list(amp.master_params(optimizer))
    for value in exported.values():
        assert any(torch.equal(value, master) for master in masters)
    before = model(batch(1))
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    assert model(batch(1)).dtype == torch.float32
    torch.testing.assert_close(model(batch(1)), before, rtol=1e-3, atol=1e-3)


def test_a25_pruning_after_initialize_keeps_masters():
    model = nn.Linear(4, 2)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    prune.l1_unstructured(model, "weight", 0.5)
    one_step(model, optimizer)
    assert int((model.weight == 0).sum()) == 4
    assert torch.equal(model.state_dict()["weight_orig"], next(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_tied_weights_stay_tied(level):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))[:, :2]

    model = Tied()
    optimizer = optimizers.NpuFusedAdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for seed in range(2):
        one_step(model, optimizer, seed)
    assert model.a.weight is model.b.weight
    exported, twin = model.state_dict(), copy.deepcopy(model)
    assert torch.equal(exported["a.weight"], exported["b.weight"])
    assert twin.a.weight is twin.b.weight


def test_two_optimizers_over_the_same_parameters_share_their_masters():
    model = nn.Linear(4, 2)
    made = [torch.optim.SGD(model.parameters(), lr=0.1), optimizers.NpuFusedSGD(model.parameters(), lr=0.1)]
    model, made = amp.initialize(model, made, opt_level="O2", loss_scale=8.0, verbosity=0)
    first, second = (next(amp.master_params(optimizer)) for optimizer in made)
    assert first is second
    before = first.detach().clone()
    for optimizer in made:
        with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(first.detach(), before - 0.2)
    assert torch.equal(model.weight, first.half())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("combine_grad", [None, True])
@pytest.mark.parametrize("name", ["sgd", "adamw", "torch_sgd"])
def test_a28_zero_grad_both_ways(name, combine_grad, level):
    if level in ("O0", "O3") and combine_grad:
        pytest.skip("covered by the other levels")
    model, optimizer = initialized(FUSED[name], level, loss_scale=8.0, combine_grad=combine_grad)
    for zero in (optimizer.zero_grad, model.zero_grad):
        for to_none in (True, False):
            with amp.scale_loss(loss_of(model), optimizer) as scaled:
                scaled.backward()
            zero(set_to_none=to_none)
            for p in (*model.parameters(), *amp.master_params(optimizer)):
                assert p.grad is None if to_none else p.grad is None or not p.grad.any()
            before = [p.detach().clone() for p in model.parameters()]
            if to_none:
                optimizer.step()
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_backward_pass_outside_scale_loss_is_not_lost_in_silence():
    model, optimizer = initialized(FUSED["sgd"], "O2")
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="no backward pass ran inside amp.scale_loss"):
        optimizer.step()


def test_named_parameters_and_wrapped_optimizers_are_taken():
    class Larc:
        def __init__(self, optim):
            self.optim = optim
            self.param_groups = optim.param_groups

        def step(self):
            self.optim.step()

    model = make_net()
    wrapper = Larc(torch.optim.SGD(model.named_parameters(), lr=0.1))
    model, returned = amp.initialize(model, wrapper, opt_level="O2", loss_scale=8.0, verbosity=0)
    assert returned is wrapper
    before = [p.detach().clone() for p in amp.master_params(wrapper)]
    with amp.scale_loss(loss_of(model), wrapper) as scaled:
        scaled.backward()
    wrapper.step()
    assert all(not torch.equal(p, q) for p, q in zip(before, amp.master_params(wrapper), strict=True) if p.numel() > 6)
    assert wrapper.param_groups[0]["param_names"][0] == "0.weight"


def test_combined_getters_follow_the_vendors_shapes():
    model, optimizer = initialized(FUSED["sgd"], "O2", loss_scale=8.0, combine_grad=True)
    assert optimizer.get_optimizer_combined_grads() == [None, None]
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    masters, plain = optimizer.get_optimizer_combined_params()
    assert (masters.dtype, plain.dtype) == (torch.float32, torch.float32)
    assert optimizer.get_model_combined_params()[0] is None
    scaled_grads, plain_grads = optimizer.get_model_combined_grads()
    assert scaled_grads.dtype == torch.float16
    true_grads, same = optimizer.get_optimizer_combined_grads()
    assert torch.equal(true_grads, scaled_grads.float() / 8)
    assert same.data_ptr() == plain_grads.data_ptr()
    masks = optimizer.get_optimizer_combined_grad_masks()
    lows = [p for p in model.parameters() if p.dtype == torch.float16]
    assert [int(mask.sum()) for mask in masks] == [sum(p.numel() for p in lows), 12]
    true_grads.zero_()
    assert not next(amp.master_params(optimizer)).grad.any(), "gradients of masters are views of the flat one"
    assert lows[0].grad.data_ptr() == scaled_grads.data_ptr()


def test_combined_getters_print_a_hint_where_nothing_is_combined(capsys):
    _, optimizer = initialized(FUSED["torch_sgd"], "O1", loss_scale=8.0)
    _amp_state.verbosity = 1
    assert optimizer.get_optimizer_combined_params() == []
    assert optimizer.get_model_combined_grads() == []
    assert "combine_grad=True" in capsys.readouterr().out


def test_stash_fields_that_scripts_read():
    model, optimizer = initialized(FUSED["torch_sgd"], "O2", loss_scale=8.0)
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    assert not stash.already_patched
    assert [p.dtype for p in stash.all_fp16_params] == [torch.float16] * 4
    assert [p.dtype for p in stash.all_fp32_from_fp16_params] == [torch.float32] * 4
    assert stash.all_fp16_params[0] is model[0].weight
    assert len(stash.all_fp32_from_fp32_params) == 2
    assert len(stash.fp16_groups) == len(stash.fp32_from_fp16_groups) == len(stash.fp32_from_fp32_groups) == 1
    with amp.scale_loss(loss_of(model), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    assert stash.params_have_scaled_gradients
