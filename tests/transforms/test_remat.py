"""Rematerialisation gives the function's own derivatives, and keeps less for the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

from npuamp_fn import O2, DynamicLossScale, cast_policy, flatten, functionalize, grad, remat, with_loss_scaling


def block(w, x, power):
    return torch.tanh(x @ w) ** power, (x * w).sum(), {"index": torch.arange(3), "name": "block"}


def losses():
    def make(fn):
        def loss(w, x):
            out, total, _ = fn(w, x, 2)
            return (out.exp().sum() * total).sin()

        return loss

    return make(block), make(remat(block))


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(3, 3, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64)


def test_outputs_keep_their_containers_and_everything_that_is_no_float(data):
    w, x = data
    out = remat(block)(w, x[0], 2)
    assert isinstance(out, tuple)
    assert out[2]["name"] == "block"
    assert torch.equal(out[2]["index"], torch.arange(3))
    assert torch.equal(out[0], block(w, x[0], 2)[0])


@pytest.mark.parametrize(
    "derivative",
    [
        lambda loss, w, x: grad(loss)(w, x[0]),
        lambda loss, w, x: torch.func.grad(loss, argnums=(0, 1))(w, x[0]),
        lambda loss, w, x: vmap(grad(loss), in_dims=(None, 0))(w, x),
        lambda loss, w, x: jacrev(grad(loss))(w, x[0]),
        lambda loss, w, x: hessian(loss)(w, x[0]),
        lambda loss, w, x: jacfwd(loss)(w, x[0]),
        lambda loss, w, x: jvp(lambda w: loss(w, x[0]), (w,), (torch.ones_like(w),))[1],
        lambda loss, w, x: grad(lambda w: (grad(loss)(w, x[0]) ** 2).sum())(w),
        lambda loss, w, x: vmap(grad(lambda w, x: (grad(loss)(w, x) ** 2).sum()), in_dims=(None, 0))(w, x),
        lambda loss, w, x: with_loss_scaling(grad(loss))(DynamicLossScale.create(), w, x[0]).grads,
        lambda loss, w, x: torch.compile(grad(loss), fullgraph=True, backend="aot_eager")(w, x[0]),
        lambda loss, w, x: torch.compile(vmap(grad(loss), (None, 0)), fullgraph=True, backend="aot_eager")(w, x),
    ],
    ids=["grad", "argnums", "vmap", "jacrev", "hessian", "jacfwd", "jvp", "second", "vmap-second", "scaled", "compile",
         "compile-vmap"],
)  # fmt: skip
def test_derivatives_equal_those_of_the_plain_function(data, derivative):
    plain, recomputed = losses()
    torch.testing.assert_close(derivative(recomputed, *data), derivative(plain, *data))


def test_plain_autograd_first_and_second_order(data):
    plain, recomputed = losses()
    w, x = data
    results = []
    for loss in (plain, recomputed):
        leaf = w.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf, x[0]), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
        results.append((first.detach(), second))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("batched", [False, True])
def test_dropout_draws_the_same_mask_again_and_leaves_the_generator_alone(batched):
    def loss(x):
        return F.dropout(x, 0.5).exp().sum()

    x = torch.ones(2, 40) if batched else torch.ones(40)
    results = []
    for fn in (loss, remat(loss)):
        torch.manual_seed(3)
        call = vmap(grad(fn), randomness="different") if batched else grad(fn)
        results.append((call(x), torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0])
    assert 0 < (results[1][0] == 0).sum() < x.numel()
    assert torch.equal(results[0][1], results[1][1])


def saved_bytes(loss, *args):
    """Count the bytes that autograd holds for the backward pass."""
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    leaves = [arg.detach().requires_grad_() for arg in args]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(*leaves)
    return total


def test_less_is_kept_for_the_backward_pass():
    def layer(w, x):
        return torch.tanh(F.gelu(x @ w).exp().log1p())

    def loss(wrap):
        def total(w, x):
            for _ in range(6):
                x = wrap(w, x)
            return x.sum()

        return total

    w, x = torch.randn(16, 16) * 0.1, torch.randn(64, 16)
    kept, kept_remat = saved_bytes(loss(layer), w, x), saved_bytes(loss(remat(layer)), w, x)
    boundaries = 6 * (x.numel() + w.numel()) * 4
    assert kept_remat == boundaries
    assert kept > 2 * kept_remat


def test_a_module_in_low_precision():
    torch.manual_seed(0)
    apply, params, buffers = functionalize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    flat, x = flatten(params), torch.randn(5, 4)

    def loss(run):
        forward = cast_policy(O2)(lambda p, x: run(p.unflatten(), buffers, x)[0])
        return with_loss_scaling(grad(lambda p, x: forward(p, x).square().mean()))

    scale = DynamicLossScale.create()
    plain, recomputed = loss(apply)(scale, flat, x), loss(remat(apply))(scale, flat, x)
    assert torch.equal(plain.grads.buffers[0], recomputed.grads.buffers[0])
    assert recomputed.grads.buffers[0].dtype == torch.float32


def test_a_parameter_from_outside_is_refused_instead_of_getting_no_gradient(data):
    w, x = data

    def loss(w, x):
        return remat(lambda x: (x @ w).sum())(x)

    for call in (
        lambda: grad(loss)(w, x[0]),
        lambda: vmap(grad(loss), in_dims=(None, 0))(w, x),
        lambda: loss(w.clone().requires_grad_(), x[0]),
    ):
        with pytest.raises(TypeError, match=r"uses a tensor from outside that needs gradients.*Pass it as an argument"):
            call()
    torch.testing.assert_close(loss(w, x[0]), (x[0] @ w).sum())


def test_a_gradient_inside_the_function_is_its_own_business():
    inner = remat(lambda x: (grad(lambda y: (y**3).sum())(x) ** 2).sum())
    torch.testing.assert_close(grad(inner)(torch.tensor([1.0, 2.0])), torch.tensor([36.0, 288.0]))
