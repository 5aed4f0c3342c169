"""Level O1: operations of initialized models are cast, and nothing else."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.apex.amp.registry import _tables


class Probe(nn.Module):
    """A small net that notes the dtypes inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.seen = {}

    def forward(self, x):
        h = self.first(x)
        n = self.norm(h)
        self.seen = {"linear": h.dtype, "norm": n.dtype, "relu": h.relu().dtype, "sum": (h + n).dtype}
        return self.last(n.relu())


@pytest.fixture(autouse=True)
def clean():
    table = _tables[0]
    yield
    _tables[0] = table
    if getattr(_amp_state, "handle", None) is not None:
        _amp_state.handle._deactivate()


def initialized(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_operations_inside_are_cast_and_the_output_is_float32(half):
    options = {} if half == torch.float16 else {"cast_model_type": half}
    model, _ = initialized(Probe(), **options)
    out = model(torch.randn(3, 4))
    assert model.seen == {"linear": half, "norm": torch.float32, "relu": half, "sum": torch.float32}
    assert out.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_gradients_are_float32_and_close_to_plain_torch():
    plain, x = Probe(), torch.randn(8, 4)
    plain(x).square().mean().backward()
    model, optimizer = initialized(Probe(), loss_scale=128.0)
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
        scaled.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-3)


def test_other_models_and_free_functions_are_not_cast():
    other = Probe()
    initialized(Probe())
    linear = F.linear
    other(torch.randn(2, 4))
    assert other.seen["linear"] == torch.float32
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert F.linear is linear


def test_a_sub_module_called_directly_returns_float32():
    model, _ = initialized(Probe())
    assert model.first(torch.randn(2, 4)).dtype == torch.float32


def test_patch_torch_functions_false_casts_nothing():
    model, _ = initialized(Probe(), patch_torch_functions=False)
    model(torch.randn(2, 4))
    assert model.seen["linear"] == torch.float32


def test_one_handle_ends_the_casts_of_the_process_and_of_models_initialized_later():
    handle = amp.init()
    model, _ = initialized(Probe())
    assert _amp_state.handle is handle
    _amp_state.handle._deactivate()
    assert not handle.is_active()
    assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32
    model(torch.ones(1, 4))
    assert model.seen["linear"] == torch.float32
    again, _ = initialized(Probe())
    assert _amp_state.handle is not handle
    again(torch.ones(1, 4))
    assert again.seen["linear"] == torch.float16


def test_patch_torch_functions_true_casts_in_the_whole_process_until_deactivated():
    initialized(Probe(), patch_torch_functions=True)
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    initialized(Probe(), patch_torch_functions=True)
    _amp_state.handle._deactivate()
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_init_casts_in_the_whole_process_and_its_handle_ends_it():
    handle = amp.init(enabled=True)
    assert handle.is_active()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        F.binary_cross_entropy(torch.rand(2).half(), torch.rand(2).half())
    handle._deactivate()
    assert not handle.is_active()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    handle = amp.init(enabled=True, allow_banned=True)
    assert F.binary_cross_entropy(torch.rand(2).half(), torch.rand(2).half()).dtype == torch.float32
    handle._deactivate()
    assert amp.init(enabled=False).is_active() is False
    with pytest.raises(RuntimeError, match="old Amp API"):
        handle.scale_loss(1)


def test_deactivating_the_handle_ends_the_casts_of_its_models():
    model, _ = initialized(Probe())
    _amp_state.handle._deactivate()
    model(torch.randn(2, 4))
    assert model.seen["linear"] == torch.float32


def test_disable_casts_is_nestable_and_survives_exceptions():
    model, _ = initialized(Probe())
    with amp.disable_casts():
        model(torch.randn(2, 4))
        assert model.seen["linear"] == torch.float32
    with pytest.raises(ZeroDivisionError), amp.disable_casts(), amp.disable_casts():
        raise ZeroDivisionError
    model(torch.randn(2, 4))
    assert model.seen["linear"] == torch.float16


def test_late_registration_takes_effect_and_the_last_one_wins():
    class Batched(nn.Module):
        def forward(self, x):
            self.dtype = torch.bmm(x, x).dtype
            return x

    model = Batched()
    amp.initialize(model, opt_level="O1", verbosity=0)
    for register, expected in (
        (amp.register_float_function, torch.float32),
        (amp.register_half_function, torch.float16),
        (amp.register_float_function, torch.float32),
    ):
        register(torch, "bmm")
        model(torch.ones(1, 2, 2))
        assert model.dtype == expected


def test_registering_a_float_function_does_not_round_through_half():
    class Product(nn.Module):
        def forward(self, x):
            return torch.mm(x, x)

    model = Product()
    amp.initialize(model, opt_level="O1", verbosity=0)
    amp.register_float_function(torch, "mm")
    assert model(torch.full((1, 1), 1.0001)).item() == torch.full((1, 1), 1.0001).square().item()


def test_editing_apexs_lists_edits_the_table():
    from npuamp_fn.apex.amp.lists import functional_overrides, torch_overrides

    class Net(nn.Module):
        def forward(self, x):
            self.dtypes = (F.softmax(x, 0).dtype, torch.mm(x, x).dtype)
            return x

    model = Net()
    amp.initialize(model, opt_level="O1", verbosity=0)
    half = torch.ones(2, 2, dtype=torch.float16)
    model(half)
    assert model.dtypes == (torch.float32, torch.float16)
    assert "mm" in torch_overrides.FP16_FUNCS
    functional_overrides.FP32_FUNCS.remove("softmax")
    functional_overrides.FP16_FUNCS.append("softmax")
    torch_overrides.FP16_FUNCS.remove("mm")
    model(torch.ones(2, 2))
    assert model.dtypes == (torch.float16, torch.float32)


def test_registering_a_missing_function_says_so():
    with pytest.raises(ValueError, match=r"No function named no_such in module"):
        amp.register_half_function(torch, "no_such")


def test_a_users_own_function_is_cast_inside_models_only():
    class Library:
        @staticmethod
        def dtype_of(x):
            return x.dtype

    class Net(nn.Module):
        def forward(self, x):
            self.dtype = Library.dtype_of(x)
            return x

    amp.register_half_function(Library, "dtype_of")
    model = Net()
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(torch.ones(1))
    assert model.dtype == torch.float16
    assert Library.dtype_of(torch.ones(1)) == torch.float32


def test_decorators_are_the_identity_outside_models():
    assert amp.half_function(lambda x: x.dtype)(torch.ones(1)) == torch.float32


def test_evaluating_after_loading_other_weights_uses_those():
    model, _ = initialized(Probe())
    x, other = torch.randn(3, 4), Probe()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.5)
        model.eval()(x)
        model.load_state_dict(other.state_dict())
        fresh, _ = initialized(other)
        assert torch.equal(model(x), fresh.eval()(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_gives_the_same_gradients(reentrant):
    grads = []
    for use in (False, True):
        model, optimizer = initialized(Probe(), loss_scale=8.0)
        x = torch.ones(3, 4, requires_grad=True)

        def block(x, model=model):
            return torch.relu(model.first(x)) + model.norm(model.first(x))

        def forward(x, use=use, block=block, model=model):
            h = checkpoint(block, x, use_reentrant=reentrant) if use else block(x)
            return model.last(h)

        model.forward = forward
        with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_outside_the_model_stays_float32_in_scale_loss(reentrant):
    seen, grads = [], []
    frozen = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2)).requires_grad_(False)
    frozen[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    for use in (False, True):
        model, optimizer = initialized(Probe(), loss_scale=8.0)
        h = model(torch.ones(3, 4))
        loss = (checkpoint(frozen, h, use_reentrant=reentrant) if use else frozen(h)).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert seen == [torch.float32] * 3
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model_and_more_gives_the_same_gradients(reentrant):
    grads = []
    for use in (False, True):
        model, optimizer = initialized(Probe(), loss_scale=8.0)
        x = torch.ones(3, 4, requires_grad=True)

        def around(x, model=model):
            return model(x.sin()).square()

        loss = (checkpoint(around, x, use_reentrant=reentrant) if use else around(x)).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_copies_pickle_and_stay_independent():
    model, optimizer = initialized(Probe())
    x = torch.randn(3, 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other.first.weight.zero_()
        assert not torch.equal(other(x), model(x))
    assert pickle.loads(pickle.dumps(optimizer)).state_dict() == optimizer.state_dict()


def test_tracing_in_eval_keeps_the_casts():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model, _ = initialized(model)
    x = torch.randn(3, 4)
    traced = torch.jit.trace(model.eval(), x)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), model(x))


def test_float64_and_integers_follow_torch():
    class Net(nn.Module):
        def forward(self, x):
            return (x @ x).dtype, (x + x.float()).dtype, torch.cat([x.float(), x.half()]).dtype, x.int().sum().dtype

    model = Net()
    amp.initialize(model, opt_level="O1", verbosity=0)
    out = model(torch.ones(2, 2, dtype=torch.float64))
    assert out == (torch.float64, torch.float64, torch.float32, torch.int64)


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_run_half_with_any_hidden_state(cell):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.rnn = nn.Linear(4, 4), cell(4, 3)

        def forward(self, x, hidden=None):
            out, _ = self.rnn(self.inner(x), hidden)
            self.dtype = out.dtype
            return out

    model, optimizer = initialized(Net())
    hidden = torch.zeros(1, 2, 3)
    for state in (None, (hidden, hidden) if cell is nn.LSTM else hidden):
        with amp.scale_loss(model(torch.randn(5, 2, 4), state).sum(), optimizer) as scaled:
            scaled.backward()
        assert model.dtype == torch.float16
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("combine_grad", [None, True])
def test_training_follows_float32(fused, combine_grad):
    def run(level):
        model = Probe()
        optimizer = (optimizers.NpuFusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, combine_grad=combine_grad, verbosity=0)
        for i in range(30):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :2])
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return loss.item()

    assert run("O1") == pytest.approx(run("O0"), rel=0.05)
