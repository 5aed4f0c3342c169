"""functionalize: detached, tied once, buffers returned and never mutated, nothing of the module used in silence."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npuamp_fn import DynamicLossScale, flatten, functionalize, grad, tree_where, with_loss_scaling


def batch_norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Counting(nn.Module):
    """Assigns a new tensor to its buffer instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x * self.weight + self.mean


def test_parameters_and_buffers_are_detached_and_share_storage():
    model = batch_norm_net()
    apply, params, buffers = functionalize(model)
    assert list(params) == [name for name, _ in model.named_parameters()]
    assert list(buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for name, parameter in model.named_parameters():
        assert params[name].requires_grad is False
        assert params[name].grad_fn is None
        assert params[name].data_ptr() == parameter.data_ptr()
        assert parameter.requires_grad
    grads = grad(lambda p: apply(p, buffers, torch.randn(4, 3))[0].sum())(params)
    assert all(g.grad_fn is None and not g.requires_grad for g in grads.values())


def test_apply_equals_the_module_and_its_gradients():
    model = batch_norm_net()
    apply, params, buffers = functionalize(copy.deepcopy(model))
    x, y = torch.randn(6, 3), torch.randn(6, 1)

    def loss_fn(params):
        out, new = apply(params, buffers, x)
        return F.mse_loss(out, y), new

    grads, new = grad(loss_fn, has_aux=True)(params)
    F.mse_loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
    for name, buffer in model.named_buffers():
        assert torch.equal(new[name], buffer), name


def test_batch_norm_buffers_are_returned_and_never_mutated():
    model = batch_norm_net()
    apply, params, buffers = functionalize(model)
    before = {name: value.clone() for name, value in buffers.items()}
    _, new = apply(params, buffers, torch.randn(6, 3) + 5)
    for name, value in before.items():
        assert torch.equal(buffers[name], value)
        assert torch.equal(model.get_buffer(name), value)
        assert not torch.equal(new[name], value)
        assert (new[name].dtype, new[name].shape) == (value.dtype, value.shape)
    assert type(new) is type(buffers)


def test_a_buffer_that_the_module_reassigns_was_lost():
    model = Counting()
    apply, params, buffers = functionalize(model)
    x = torch.ones(3, 2)
    _, new = apply(params, buffers, x)
    assert new["calls"].item() == 1.0
    assert torch.equal(new["mean"], torch.full((2,), 0.5))
    _, newer = apply(params, new, x)
    assert newer["calls"].item() == 2.0
    assert buffers["calls"].item() == model.calls.item() == 0.0
    compiled = torch.compile(apply, fullgraph=True, backend="aot_eager")
    assert compiled(params, new, x)[1]["calls"].item() == 2.0


def test_skipped_step_keeps_the_old_buffers():
    apply, params, buffers = functionalize(batch_norm_net())

    def loss_fn(params, x, factor):
        out, new = apply(params, buffers, x)
        return out.sum() * factor, new

    step = with_loss_scaling(grad(loss_fn, has_aux=True))
    out = step(DynamicLossScale.create(), params, torch.randn(6, 3), torch.tensor(1e38))
    assert out.finite.item() is False
    kept = tree_where(out.finite, out.aux, buffers)
    assert all(torch.equal(kept[name], buffers[name]) for name in buffers)
    assert not torch.equal(out.aux["1.running_mean"], buffers["1.running_mean"])


def test_mode_is_read_from_the_module_at_each_call():
    model = batch_norm_net()
    apply, params, buffers = functionalize(model)
    x = torch.randn(6, 3)
    training, _ = apply(params, buffers, x)
    model.eval()
    evaluated, new = apply(params, buffers, x)
    assert not torch.equal(training, evaluated)
    assert all(torch.equal(new[name], buffers[name]) for name in buffers)
    assert new["1.running_mean"].data_ptr() != buffers["1.running_mean"].data_ptr()


def test_tied_weights_appear_once_and_get_the_sum_of_both_gradients():
    model = Tied()
    apply, params, buffers = functionalize(model)
    assert list(params) == ["embed.weight"]
    assert flatten(params).layout.size == 15
    tokens = torch.tensor([0, 1, 1, 4])
    grads = grad(lambda p: apply(p, buffers, tokens)[0].square().sum())(params)
    model(tokens).square().sum().backward()
    torch.testing.assert_close(grads["embed.weight"], model.embed.weight.grad)
    doubled = apply({"embed.weight": 2 * params["embed.weight"]}, buffers, tokens)[0]
    torch.testing.assert_close(doubled, 4 * model(tokens).detach())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_use_the_parameters_that_are_passed(kind):
    # They keep a list of their weights beside the attributes that functional_call swaps.
    torch.manual_seed(0)
    model = kind(3, 4, num_layers=2)
    apply, params, buffers = functionalize(model)
    x = torch.randn(5, 2, 3)
    other = {name: value * 1.5 for name, value in params.items()}
    reference = kind(3, 4, num_layers=2)
    reference.load_state_dict(other)
    torch.testing.assert_close(apply(other, buffers, x)[0][0], reference(x)[0].detach())
    grads = grad(lambda p: apply(p, buffers, x)[0][0].square().sum())(other)
    reference(x)[0].square().sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, msg=name)
    original = kind(3, 4, num_layers=2)
    original.load_state_dict(params)
    torch.testing.assert_close(model(x)[0], original(x)[0])  # the module itself is as before


def test_embedding_gradients_under_loss_scaling():
    model = nn.Embedding(6, 2, padding_idx=0)
    apply, params, buffers = functionalize(model)
    tokens = torch.tensor([0, 1, 1, 3])
    out = with_loss_scaling(grad(lambda p: apply(p, buffers, tokens)[0].sum()))(DynamicLossScale.create(), params)
    expected = torch.zeros(6, 2)
    expected[1], expected[3] = 2.0, 1.0
    assert torch.equal(out.grads["weight"], expected)


def test_output_may_be_any_tree_and_any_keyword_passes():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, *, params=1.0):
            return {"y": x * self.weight * params, "n": None}

    apply, params, buffers = functionalize(Two())
    out, new = apply(params, buffers, torch.ones(2), params=3.0)
    assert torch.equal(out["y"], torch.full((2,), 3.0))
    assert out["n"] is None
    assert new == {}


# errors


def test_batch_norm_under_vmap_gets_advice_that_works():
    model = batch_norm_net()
    apply, params, buffers = functionalize(model)
    x = torch.randn(5, 6, 3)
    with pytest.raises(RuntimeError, match=r"in_dims=0 for `buffers`.*\.eval\(\).*replace_all_batch_norm_modules_"):
        torch.vmap(apply, in_dims=(None, None, 0))(params, buffers, x)
    stacked = {name: torch.stack([value] * 5) for name, value in buffers.items()}
    out, new = torch.vmap(apply, in_dims=(None, 0, 0))(params, stacked, x)
    assert out.shape == (5, 6, 1)
    assert new["1.running_mean"].shape == (5, 4)
    expected, _ = apply(params, buffers, x[2])
    torch.testing.assert_close(out[2], expected)
    model.eval()
    assert torch.vmap(apply, in_dims=(None, None, 0))(params, buffers, x)[0].shape == (5, 6, 1)
    model.train()
    torch.func.replace_all_batch_norm_modules_(model)
    apply, params, buffers = functionalize(model)
    assert torch.vmap(apply, in_dims=(None, None, 0))(params, buffers, x)[0].shape == (5, 6, 1)


def test_in_place_buffer_update_under_vmap_gets_advice():
    apply, params, buffers = functionalize(Counting())
    with pytest.raises(RuntimeError, match="Give each member its own buffers"):
        torch.vmap(apply, in_dims=(None, None, 0))(params, buffers, torch.randn(4, 3, 2))


def test_missing_names_used_the_modules_own_tensors_in_silence():
    model = batch_norm_net()
    apply, params, buffers = functionalize(model)
    x = torch.randn(6, 3)
    before = model[1].running_mean.clone()
    with pytest.raises(ValueError, match=r"apply: buffers lack `1\.running_mean`; buffers lack `1\.running_var`"):
        apply(params, {}, x)
    assert torch.equal(model[1].running_mean, before)
    short = {name: value for name, value in params.items() if name != "0.bias"}
    with pytest.raises(ValueError, match=r"apply: params lack `0.bias`: .*merge parts first"):
        apply(short, buffers, x)
    with pytest.raises(ValueError, match="params have an unexpected `extra`"):
        apply({**params, "extra": x}, buffers, x)


def test_other_errors_of_the_module_come_through():
    apply, params, buffers = functionalize(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        apply(params, buffers, torch.ones(2, 4))


@pytest.mark.parametrize("wrong", [lambda x: x, nn.Linear, None])
def test_functionalize_of_no_module(wrong):
    with pytest.raises(TypeError, match=r"functionalize: expected an nn\.Module, found"):
        functionalize(wrong)


def test_gradients_of_a_wrapped_module_were_silently_not_averaged():
    inside = nn.Sequential(nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 1)))
    for module, where in ((nn.DataParallel(nn.Linear(2, 1)), "the module"), (inside, "`1`")):
        with pytest.raises(TypeError, match=rf"{where} is a DataParallel, whose hooks do not run.*reduce=mean_over"):
            functionalize(module)

    class FSDPLinear(nn.Linear):  # what fully_shard makes of a module: a subclass of torch's FSDPModule
        pass

    FSDPLinear.__bases__ = (type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"}), nn.Linear)
    with pytest.raises(TypeError, match=r"the module is a FSDPLinear"):
        functionalize(FSDPLinear(2, 1))


def test_flat_parameters_that_were_not_unflattened_are_refused():
    apply, params, buffers = functionalize(nn.BatchNorm1d(2))
    x = torch.ones(2, 2)
    with pytest.raises(
        TypeError, match=r"^apply: params: expected a dictionary.*FlatTree; write params.unflatten\(\)$"
    ):
        apply(flatten(params), buffers, x)
    with pytest.raises(TypeError, match=r"^apply: buffers: expected a dictionary.*found a list$"):
        apply(params, list(buffers.values()), x)
    assert apply(flatten(params).unflatten(), buffers, x)[0].shape == (2, 2)
