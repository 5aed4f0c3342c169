"""Buffers of half models: what half precision cannot hold stays float32, and the forward pass runs all the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from npuamp_fn.apex import amp


class Attention(nn.Module):
    """A causal mask of -1e9, which is -inf in float16."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.register_buffer("mask", torch.triu(torch.full((3, 3), -1e9), 1))

    def forward(self, x):
        q = self.query(x)
        if self.kind == "fused":
            return self.out(F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask, scale=1.0))
        weights = torch.softmax(q @ q.transpose(-1, -2) + self.mask, -1)
        return self.out(torch.einsum("bij,bjk->bik", weights, q) if self.kind == "einsum" else weights @ q)


class Positions(nn.Module):
    """Angles from whole numbers beyond 2048, which float16 rounds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("positions", torch.arange(4096.0))
        self.register_buffer("frequencies", torch.tensor([1.0, 0.5, 0.25, 0.125]))
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        self.angles = torch.einsum("i,j->ij", self.positions, self.frequencies)
        return self.out(self.norm(x + self.angles[-3:].cos()))


def initialized(model, level, **options):
    return amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, loss_scale=8.0, verbosity=0, **options
    )


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", ["plain", "einsum", "fused"])
def test_a_mask_beyond_the_half_range_keeps_its_value_and_the_forward_pass_runs(level, kind):
    x, plain = torch.randn(2, 3, 4), Attention(kind)
    expected = plain(x)
    expected.square().sum().backward()
    model, optimizer = initialized(Attention(kind), level)
    assert (model.mask.dtype, model.mask.min().item()) == (torch.float32, -1e9)
    assert model.query.weight.dtype == torch.float16
    out = model(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=5e-3)
    with amp.scale_loss(out.square().sum(), optimizer) as scaled:
        scaled.backward()
    for weight, other in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        assert weight.grad.dtype == (torch.float32 if level == "O2" else torch.float16)
        torch.testing.assert_close(weight.grad.float(), other.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_whole_numbers_that_half_would_round_stay_exact_in_what_is_computed_from_them(level, half):
    x = torch.randn(3, 4)
    expected = Positions()(x)
    model, _ = initialized(Positions(), level, cast_model_type=half)
    seen = []
    model.out.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    out = model(x)
    assert torch.equal(model.angles, torch.arange(4096.0)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125]))
    assert seen == [half], "weights multiply in half precision"
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2 if half == torch.float16 else 5e-2)


def test_operations_of_one_dtype_are_left_alone_beside_a_float32_buffer():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("large", torch.tensor([1e6, 1.0]))

        def forward(self, x):
            full = torch.ones(2, 2)
            self.seen = [F.softmax(x, -1).dtype, (x @ x).dtype, (full @ full).dtype, F.linear(full, full).dtype]
            return x + self.large

    model, _ = amp.initialize(Mixed(), [], opt_level="O2", verbosity=0)
    assert model(torch.ones(2, 2))[0].tolist() == [1e6 + 1, 2.0]
    assert model.seen == [torch.float16, torch.float16, torch.float32, torch.float32]


def test_a_number_that_half_cannot_hold_widens_nothing():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("factor", torch.tensor(1e6))

        def forward(self, x):
            self.seen = (x * self.factor).dtype
            return super().forward(x)

    model, _ = initialized(Scaled(), "O2")
    assert model.factor.item() == 1e6
    model(torch.ones(1, 2))
    assert model.seen == torch.float16
    assert model._amp_scope.low is None


def test_such_a_model_runs_compiled_checkpointed_and_where_casts_are_disabled():
    x = torch.randn(2, 3, 4)
    expected = initialized(Attention("plain"), "O2")[0](x)

    model, optimizer = initialized(Attention("plain"), "O2")
    with amp.disable_casts():
        assert torch.equal(model(x), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), expected)
    for reentrant in (False, True):
        with amp.scale_loss(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum(), optimizer) as scaled:
            scaled.backward()
    grads = [p.grad for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    with amp.scale_loss(model(x).sum() * 2, optimizer) as scaled:
        scaled.backward()
    torch.testing.assert_close(grads, [p.grad for p in amp.master_params(optimizer)], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_sub_modules_are_recomputed_and_called_by_themselves_as_inside(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("positions", torch.arange(4096.0))
            self.block, self.checkpointed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), True

        def forward(self, x):
            x = x + self.positions[:4]
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.checkpointed else self.block(x)

    x = torch.ones(2, 4, requires_grad=True)
    model, optimizer = initialized(Net(), "O2")
    grads = []
    for model.checkpointed in (False, True):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).square().sum(), optimizer) as scaled:
            scaled.backward()
        grads.append([p.grad for p in amp.master_params(optimizer)])
    assert all(a.any() and torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert model.block(torch.ones(2, 4)).dtype == torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("tracked", [False, True])
def test_normalization_layers_take_what_such_a_buffer_widened(level, tracked):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.arange(4096.0))
            self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=tracked)
            self.group, self.batch = nn.GroupNorm(1, 3), nn.BatchNorm1d(3, affine=level == "O2")

        def forward(self, x):
            return self.batch(self.group(self.instance(x + self.positions[:5])))

    x, plain = torch.randn(4, 3, 5), Net()
    expected = plain(x)
    model, _ = initialized(Net(), level)
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    for name, value in plain.named_buffers():
        mine = model.get_buffer(name)
        assert mine.dtype == value.dtype
        torch.testing.assert_close(mine, value, rtol=1e-2, atol=1e-2)
