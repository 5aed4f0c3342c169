"""The shell and the functional core are one mathematics; initialized models work with the rest of torch."""

import importlib.util
import io
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npuamp_fn
from npuamp_fn import DynamicLossScale, flatten, functionalize, fused_update, grad, optim, with_loss_scaling
from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state

PAIRS = {
    "sgd": (optimizers.NpuFusedSGD, optim.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (optimizers.NpuFusedAdamW, optim.adamw, {"lr": 0.01}),
    "lamb": (
        optimizers.NpuFusedLamb,
        lambda lr: optim.lamb(lr, bias_correction=False, norm_clamp=(0, 10)),
        {"lr": 0.01},
    ),
}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PAIRS)
def test_a_shell_run_and_a_functional_run_agree_step_by_step(name, half):
    fused, rule, options = PAIRS[name]
    model = make_net()
    exact = flatten(functionalize(make_net()).params)
    model, optimizer = amp.initialize(
        model,
        fused(model.parameters(), **options),
        opt_level="O2",
        cast_model_type=half,
        loss_scale="dynamic",
        dynamic_init_scale=2.0**17,  # overflows in float16 at first
        scale_window=3,
        verbosity=0,
    )
    apply, _, buffers = functionalize(make_net())

    def loss_fn(params, x):
        out, _ = apply(params.unflatten(), buffers, x.to(half))
        return F.mse_loss(out.float(), x[:, :2])

    grad_fn = with_loss_scaling(grad(loss_fn), defer_unscale=True)
    core = fused_update(optim.with_master_weights(rule(**options)))
    params = exact.cast(half)
    state = core.init(params, master=exact)
    scale = DynamicLossScale.create(2.0**17, growth_interval=3)
    skipped = 0
    for step in range(8):
        x = batch(step)
        optimizer.zero_grad()
        with amp.scale_loss(F.mse_loss(model(x), x[:, :2]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        out = grad_fn(scale, params, x)
        params, state = core.update(out, state, params)
        scale = out.loss_scale
        skipped += not bool(out.finite)
        assert optimizer._amp_stash.last_step_skipped is not bool(out.finite)
        assert _amp_state.loss_scalers[0].loss_scale() == scale.value.item()
        masters = state.master.unflatten()
        for (key, low), master in zip(model.named_parameters(), amp.master_params(optimizer), strict=True):
            torch.testing.assert_close(master.detach(), masters[key], rtol=1e-6, atol=1e-7)
            assert torch.equal(low, master.to(half))
    assert (skipped > 0) == (half == torch.float16)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_compile_trace_export_and_functional_call(level):
    model = make_net()
    model, optimizer = amp.initialize(
        model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=8.0, verbosity=0
    )
    x = batch(0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
        with amp.scale_loss(compiled(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    model.eval()
    traced, file = torch.jit.trace(model, x), io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), model(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
    params = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, params, (x,)), model(x))
    each = torch.vmap(lambda row: torch.func.functional_call(model, params, (row,)))(x)
    torch.testing.assert_close(each, model(x), rtol=1e-2, atol=1e-3)


def test_tracing_right_after_an_edit_raised_about_a_constant_that_requires_grad():
    model = make_net()
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    model.eval()
    first = next(model.parameters())
    first.data.mul_(2.0)
    traced = torch.jit.trace(model, batch(0))
    assert torch.equal(traced(batch(1)), model(batch(1)))
    assert not any(node.kind().endswith("_") for node in traced.inlined_graph.nodes()), "writes would be repeated"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_scripted_module_is_refused_with_advice(level):
    scripted = torch.jit.script(make_net())
    with pytest.raises(RuntimeError, match=r"is a ScriptModule.*trace it afterwards"):
        amp.initialize(scripted, opt_level=level, verbosity=0)
    assert {p.dtype for p in scripted.parameters()} == {torch.float32}


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_at_o2(cell):
    model = cell(4, 3)
    optimizer = optimizers.NpuFusedAdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    hidden = torch.zeros(1, 2, 3)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for state in (None, (hidden, hidden) if cell is nn.LSTM else hidden):
        out, _ = model(torch.randn(5, 2, 4), state)
        assert out.dtype == torch.float32
        with amp.scale_loss(out.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(before, amp.master_params(optimizer), strict=True))


def test_gradients_nobody_looks_at_stay_half_until_the_step():
    model = make_net()
    optimizer = optimizers.NpuFusedAdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    with amp.scale_loss(F.mse_loss(model(batch(0)), batch(0)[:, :2]), optimizer) as scaled:
        scaled.backward()
    (bucket,) = optimizer._amp_stash.buckets()
    assert bucket.waiting.grads.buffers[0].dtype == torch.float16
    assert bucket.grads is None
    first = next(amp.master_params(optimizer))
    expected = model[0].weight.grad.float() / 8
    assert torch.equal(first.grad, expected)
    assert bucket.waiting is None
    optimizer.step()
    assert (bucket.waiting, bucket.grads, first.grad) == (None, None, None)


def test_after_a_step_nothing_but_weights_masters_moments_and_half_gradients_is_kept():
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    count = 4 * 256 * 256
    optimizer = optimizers.NpuFusedAdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(torch.randn(2, 256)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (bucket,) = optimizer._amp_stash.buckets()
    trees = [bucket.flat, bucket.low, *bucket.slots.values()]
    held = sum(buffer.nbytes for tree in trees for buffer in tree.buffers)
    held += sum(p.grad.nbytes for p in model.parameters())
    assert bucket.grads is bucket.waiting is bucket.low_grads is None
    assert held <= 16.5 * count


def test_the_legacy_example_learns():
    path = pathlib.Path(npuamp_fn.__file__).parents[1] / "examples" / "legacy_apex.py"
    spec = importlib.util.spec_from_file_location("legacy_apex", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main() < 0.1
