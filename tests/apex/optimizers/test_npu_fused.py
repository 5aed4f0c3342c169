"""The NpuFused optimizers alone: torch's numbers, torch's manners."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from npuamp_fn.apex import amp, optimizers

TWINS = {
    torch.optim.SGD: optimizers.NpuFusedSGD,
    torch.optim.Adam: optimizers.NpuFusedAdam,
    torch.optim.AdamW: optimizers.NpuFusedAdamW,
    torch.optim.Adadelta: optimizers.NpuFusedAdadelta,
    torch.optim.RMSprop: optimizers.NpuFusedRMSprop,
}
INFOS = [info for info in optim_db if info.optim_cls in TWINS]
ALL = [
    *TWINS.values(),
    optimizers.NpuFusedAdamP,
    optimizers.NpuFusedBertAdam,
    optimizers.NpuFusedLamb,
    optimizers.Lamb,
    optimizers.NpuFusedRMSpropTF,
    optimizers.FusedSGD,
    optimizers.FusedAdam,
    optimizers.FusedLAMB,
    optimizers.FusedNovoGrad,
    optimizers.FusedAdagrad,
]
NOT_OURS = {"foreach", "capturable", "differentiable", "fused"}  # how torch runs a step, not what it computes


def configurations():
    for info in INFOS:
        for config in info.optim_inputs_func(device="cpu"):
            if not NOT_OURS & set(config.kwargs):
                yield pytest.param(info.optim_cls, config.kwargs, id=f"{info.optim_cls.__name__}: {config.desc}")


def misuses():
    for info in INFOS:
        for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            options = error.optimizer_error_input.kwargs
            if not NOT_OURS & set(options) and "Tensors" not in error.optimizer_error_input.desc:
                name = f"{info.optim_cls.__name__}: {error.optimizer_error_input.desc}"
                yield pytest.param(info.optim_cls, error, id=name)


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (), (1,), (0,), (300,), (2, 3, 4, 5)]
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    params.append(torch.randn(3, 4, 2, 2, generator=generator).contiguous(memory_format=torch.channels_last))
    params.append(torch.randn(6, 4, generator=generator).t())
    return [nn.Parameter(p.to(dtype)) for p in params]


def give_grads(params, step, missing=()):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if i in missing else grad.to(p.dtype)


def run(optimizer, params, first, count, missing=lambda step: ()):
    for step in range(first, first + count):
        give_grads(params, step, missing(step))
        optimizer.step()


def assert_close(left, right):
    for p, q in zip(left, right, strict=True):
        assert p.dtype == q.dtype
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("cls", "options"), list(configurations()))
def test_every_configuration_of_torchs_database_equals_its_twin(cls, options):
    left, right = make_params(), make_params()
    run(cls(left, **options), left, 0, 12)
    run(TWINS[cls](right, **options), right, 0, 12)
    assert_close(left, right)


@pytest.mark.parametrize(("cls", "options"), list(configurations()))
def test_groups_missing_and_late_gradients_equal_the_twin(cls, options):
    def grouped(params):
        lr = float(options.get("lr", 0.01))
        return [
            {"params": params[:2]},
            {"params": params[2:5], "lr": lr * 0.5, "weight_decay": 0.05},
            {"params": params[5:], "lr": lr * 2},
        ]

    def missing(step):
        return {0: (0, 5), 1: (0,), 4: (1, 2, 3), 7: tuple(range(8))}.get(step, ())

    left, right = make_params(), make_params()
    run(cls(grouped(left), **options), left, 0, 10, missing)
    run(TWINS[cls](grouped(right), **options), right, 0, 10, missing)
    assert_close(left, right)


@pytest.mark.parametrize(("cls", "error"), list(misuses()))
def test_every_misuse_of_torchs_database_raises_its_kind_of_error(cls, error):
    params = error.optimizer_error_input.params
    params = make_params() if params is None else params
    assert error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    expected = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
    with expected(error.error_type):
        TWINS[cls](params, **error.optimizer_error_input.kwargs)


@pytest.mark.parametrize("steps_are", ["tensors", "numbers"])
@pytest.mark.parametrize("into", ["torch to fused", "fused to torch"])
@pytest.mark.parametrize(("cls", "options"), list(configurations()))
def test_state_dicts_interchange_with_torch(cls, options, into, steps_are):
    source, target = (cls, TWINS[cls]) if into == "torch to fused" else (TWINS[cls], cls)
    reference = make_params()
    run(cls(reference, **options), reference, 0, 6)
    left = make_params()
    first = source(left, **options)
    run(first, left, 0, 3)
    saved = copy.deepcopy(first.state_dict())
    if target is TWINS[cls] and steps_are == "numbers":
        for entry in saved["state"].values():
            if "step" in entry:
                entry["step"] = int(entry["step"])
        for group in saved["param_groups"]:
            group.pop("maximize", None) if not group.get("maximize") else None
    second = target(left, **options)
    second.load_state_dict(saved)
    run(second, left, 3, 3)
    assert_close(left, reference)


@pytest.mark.parametrize("cls", ALL)
def test_a_state_dict_resumes_bitwise(cls):
    left = make_params()
    optimizer = cls(left, lr=0.01)
    run(optimizer, left, 0, 3)
    file = io.BytesIO()
    torch.save({"params": left, "state": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    right = saved["params"]
    other = cls(right, lr=0.5)
    other.load_state_dict(saved["state"])
    run(optimizer, left, 3, 3)
    run(other, right, 3, 3)
    assert all(torch.equal(p, q) for p, q in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", ALL)
def test_half_parameters_keep_float32_moments_through_a_load(cls, dtype):
    params = make_params(dtype)
    optimizer = cls(params, lr=0.01)
    run(optimizer, params, 0, 2)
    assert all(p.dtype == dtype for p in params)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for name, value in entry.items():
            if name == "step":
                value.fill_(300.0)
            else:
                assert value.dtype == torch.float32
                value.fill_(1e-9)
    other = cls(make_params(dtype), lr=0.01)
    other.load_state_dict(saved)
    for entry in other.state.values():
        for name, value in entry.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, torch.full_like(value, 300.0 if name == "step" else 1e-9), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 67, 256, 257])
def test_every_element_moves_whatever_the_size(dtype, size):
    params = [nn.Parameter(torch.ones(size, dtype=dtype)), nn.Parameter(torch.empty(0, dtype=dtype))]
    optimizer = optimizers.NpuFusedSGD(params, lr=0.5)
    params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], torch.full((size,), 0.5, dtype=dtype))


@pytest.mark.parametrize("cls", ALL)
def test_gradients_are_left_alone_bit_for_bit(cls):
    params = make_params()
    optimizer = cls(params, lr=0.01, **({"max_grad_norm": 0.1} if cls is optimizers.NpuFusedBertAdam else {}))
    give_grads(params, 0)
    before = [p.grad.clone() for p in params]
    tensors = [p.grad for p in params]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    assert all(p.grad is g for p, g in zip(params, tensors, strict=True))


@pytest.mark.parametrize("cls", ALL)
def test_zero_grad_both_ways(cls):
    params = make_params()
    optimizer = cls(params, lr=0.01)
    give_grads(params, 0)
    optimizer.step()
    tensors = [p.grad for p in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for p, g in zip(params, tensors, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    before = [p.clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("cls", ALL)
def test_clip_grad_norm_fused_equals_torchs(cls, norm_type):
    left, right = make_params(), make_params()
    optimizer = cls([{"params": left[:3]}, {"params": left[3:]}], lr=0.01)
    give_grads(left, 0, missing=(2,))
    give_grads(right, 0, missing=(2,))
    norm = optimizer.clip_grad_norm_fused_(0.5, norm_type)
    right_norm = torch.nn.utils.clip_grad_norm_(
        [q for q in right if q.numel()], 0.5, norm_type
    )  # inf fails on empty ones
    torch.testing.assert_close(norm, right_norm)
    assert norm.shape == ()
    assert left[2].grad is None
    for p, q in zip(left, right, strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_clip_grad_norm_fused_under_amp_clips_unscaled_gradients(level):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=1.0)
    assert optimizer.clip_grad_norm_fused_(1.0).item() == 0.0
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(torch.tensor([[3.0, 4.0]])).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert optimizer.clip_grad_norm_fused_(1.0).item() == pytest.approx(5.0, rel=1e-3)
    optimizer.step()
    expected = torch.tensor([[-0.6, -0.8]])
    torch.testing.assert_close(model.weight.detach().float(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("cls", list(TWINS))
def test_a_group_added_in_the_middle_equals_the_twin(cls):
    results = []
    for made in (cls, TWINS[cls]):
        params = make_params()
        optimizer = made(params[:3], lr=0.01)
        run(optimizer, params, 0, 2)
        optimizer.add_param_group({"params": params[3:], "lr": 0.02})
        run(optimizer, params, 2, 3)
        results.append(params)
    assert_close(*results)


@pytest.mark.parametrize("cls", list(TWINS))
def test_weights_that_are_replaced_edited_or_converted_are_followed(cls):
    results = []
    for made in (cls, TWINS[cls]):
        params = make_params()
        optimizer = made(params, lr=0.01)
        run(optimizer, params, 0, 2)
        with torch.no_grad():
            params[0].data = params[0].data.clone() * 2
            params[4].mul_(0.5)
            params[5].data = params[5].data.contiguous(memory_format=torch.channels_last)
            params[2].data.fill_(3.0)
        run(optimizer, params, 2, 2)
        results.append(params)
    assert_close(*results)


@pytest.mark.parametrize("cls", list(TWINS))
def test_state_that_is_cleared_or_edited_counts(cls):
    results = []
    for made in (cls, TWINS[cls]):
        params = make_params()
        optimizer = made(params, lr=0.01)
        run(optimizer, params, 0, 2)
        optimizer.state.pop(params[0], None)
        for entry in optimizer.state.values():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and name != "step":
                    value.mul_(0.5)
        run(optimizer, params, 2, 2)
        results.append(params)
    assert_close(*results)


@pytest.mark.parametrize("cls", ALL)
def test_closures_hooks_and_schedulers_work(cls):
    params = make_params()
    optimizer = cls(params, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure():
        assert torch.is_grad_enabled()
        give_grads(params, len(calls))
        return 7.0

    assert optimizer.step(closure) == 7.0
    scheduler.step()
    assert calls == ["hook"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("cls", ALL)
def test_a_copy_is_independent(cls):
    params = make_params()
    optimizer = cls(params, lr=0.01)
    run(optimizer, params, 0, 2)
    twin_params, twin = copy.deepcopy((params, optimizer))
    before = [p.clone() for p in twin_params]
    run(optimizer, params, 2, 2)
    assert all(torch.equal(p, b) for p, b in zip(twin_params, before, strict=True))
    run(twin, twin_params, 2, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, twin_params, strict=True))


def test_sparse_gradients_are_taken_by_sgd_and_refused_by_the_others():
    for cls in (torch.optim.SGD, optimizers.NpuFusedSGD, optimizers.NpuFusedAdam):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        before = table.weight.detach().clone()
        table(torch.tensor([1, 1, 3])).sum().backward()
        optimizer = cls(table.parameters(), lr=0.5)
        if cls is optimizers.NpuFusedAdam:
            with pytest.raises(RuntimeError, match="does not support sparse gradients"):
                optimizer.step()
            assert torch.equal(table.weight, before)
        else:
            optimizer.step()
            expected = before - 0.5 * torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]).unsqueeze(1)
            torch.testing.assert_close(table.weight.detach(), expected)


def test_group_dictionaries_keep_their_identity():
    params = make_params()
    optimizer = optimizers.NpuFusedSGD(params, lr=0.1)
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0] is group
    group["lr"] = 0.0
    before = [p.clone() for p in params]
    run(optimizer, params, 0, 1)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_autograd_still_notices_a_step_between_forward_and_backward():
    layer = nn.Linear(2, 2, bias=False)
    optimizer = optimizers.NpuFusedSGD(layer.parameters(), lr=0.1)
    out = layer(layer(torch.ones(1, 2, requires_grad=True)))
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bert_adam_clips_each_group_by_the_global_norm():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [a], "max_grad_norm": 1.0}, {"params": [b], "max_grad_norm": -1}]
    optimizer = optimizers.NpuFusedBertAdam(groups, lr=1.0, weight_decay=0.0, b1=0.0, b2=0.0, e=1.0)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    torch.testing.assert_close(a.detach(), torch.tensor([-0.6 / 1.6]))  # 3 / 5, then g / (|g| + 1)
    torch.testing.assert_close(b.detach(), torch.tensor([-4.0 / 5.0]))


def test_bert_adam_resumes_its_schedule():
    rates = []
    params = [nn.Parameter(torch.zeros(1))]
    optimizer = optimizers.NpuFusedBertAdam(params, lr=1.0, warmup=0.5, t_total=4, b1=0.0, b2=0.0, weight_decay=0.0)
    for step in range(4):
        before = params[0].item()
        params[0].grad = torch.ones(1)
        optimizer.step()
        rates.append(before - params[0].item())
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizers.NpuFusedBertAdam(params, lr=1.0)
            optimizer.load_state_dict(saved)
    torch.testing.assert_close(torch.tensor(rates), torch.tensor([0.0, 0.5, 1.0, 0.5]), rtol=1e-4, atol=1e-5)


def test_lamb_moves_zero_weights_and_clamps_the_norm_at_ten():
    zero, large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.full((4,), 100.0))
    optimizer = optimizers.NpuFusedLamb([zero, large], lr=0.1, betas=(0.0, 0.0), eps=0.0)
    zero.grad, large.grad = torch.ones(2), torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((2,), -0.1))  # ratio 1
    torch.testing.assert_close(large.detach(), torch.full((4,), 100.0 - 0.1 * 10.0 / 2.0))  # |p| counts as 10, |u| = 2


def test_rmsprop_tf_starts_at_zero_or_at_one_by_argument():
    for start, square in ((0.0, 0.1), (1.0, 1.0)):
        p = nn.Parameter(torch.zeros(1))
        optimizer = optimizers.NpuFusedRMSpropTF([p], lr=0.5, alpha=0.9, eps=0.0, start=start)
        p.grad = torch.ones(1)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.tensor([-0.5 / square**0.5]))


def test_nothing_warns_in_a_plain_loop():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = make_params()
        run(optimizers.NpuFusedAdamW(params), params, 0, 2)
