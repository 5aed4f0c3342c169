"""Every operation of the apex table gets the dtype of its rule, forward and backward."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from npuamp_fn import APEX_OPS, cast_ops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the operator database uses deprecated names of torch itself
    from torch.testing._internal.common_methods_invocations import op_db

LOW, FULL = torch.float16, torch.float32
o1 = cast_ops(APEX_OPS, LOW)


def t(*shape):
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)


def square():
    return torch.eye(3) * 2 + 0.1 * t(3, 3)


def weights(gates):  # of one recurrent layer of size 2
    return t(2 * gates, 2), t(2 * gates, 2), t(2 * gates), t(2 * gates)


def rnn(op):
    return lambda x, h, *w: op(x, h, list(w), True, 1, 0.0, False, False, False)


def setitem(x, y):
    x[torch.tensor([0])] = y
    return x


# Operations that the operator database does not call in this form.
CALLS = {
    "__setitem__": (setitem, t(2, 2), t(1, 2)),
    "affine_grid": (lambda x: F.affine_grid(x, [1, 1, 2, 2], align_corners=False), t(1, 2, 3)),
    "arccos": (torch.arccos, t(3)),
    "arcsin": (torch.arcsin, t(3)),
    "arctan2": (torch.arctan2, t(3), t(3)),
    "chain_matmul": (lambda *m: torch.chain_matmul(*m), square(), square(), square()),
    "concat": (lambda x, y: torch.concat([x, y]), t(3), t(3)),
    "concatenate": (lambda x, y: torch.concatenate([x, y]), t(3), t(3)),
    "conv_tbc": (torch.conv_tbc, t(4, 1, 2), t(3, 2, 2), t(2)),
    "cpu": (Tensor.cpu, t(3)),
    "det": (torch.det, square()),
    "divide": (torch.divide, t(3), t(3)),
    "grid_sampler": (lambda x, g: torch.grid_sampler(x, g, 0, 0, False), t(1, 1, 2, 2), t(1, 2, 2, 2)),
    "gru": (rnn(torch.gru), t(3, 1, 2), t(1, 1, 2), *weights(3)),
    "gru_cell": (torch.gru_cell, t(1, 2), t(1, 2), *weights(3)),
    "gumbel_softmax": (F.gumbel_softmax, t(2, 3)),
    "inverse": (torch.inverse, square()),
    "istft": (
        lambda x, w: torch.istft(torch.view_as_complex(x), 4, window=w, return_complex=False, center=True),
        t(1, 3, 5, 2),
        torch.ones(4),
    ),
    "linalg.matmul": (torch.linalg.matmul, square(), square()),
    "linalg.matrix_exp": (torch.linalg.matrix_exp, square()),
    "lp_pool1d": (lambda x: F.lp_pool1d(x, 2.0, 2), t(1, 1, 4)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2.0, 2), t(1, 1, 4, 4)),
    "lp_pool3d": (lambda x: F.lp_pool3d(x, 2.0, 2), t(1, 1, 4, 4, 4)),
    "lstm": (
        lambda x, h, c, *w: torch.lstm(x, (h, c), list(w), True, 1, 0.0, False, False, False),
        t(3, 1, 2),
        t(1, 1, 2),
        t(1, 1, 2),
        *weights(4),
    ),
    "lstm_cell": (lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), t(1, 2), t(1, 2), t(1, 2), *weights(4)),
    "matrix_power": (lambda x: torch.matrix_power(x, 2), square()),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), t(2), t(3)),
    "multiply": (torch.multiply, t(3), t(3)),
    "norm_except_dim": (lambda x: torch.norm_except_dim(x, 2, 0), t(3, 3)),
    "nuclear_norm": (torch.nuclear_norm, square()),
    "orgqr": (torch.orgqr, square(), t(3)),
    "rnn_relu": (rnn(torch.rnn_relu), t(3, 1, 2), t(1, 1, 2), *weights(1)),
    "rnn_relu_cell": (torch.rnn_relu_cell, t(1, 2), t(1, 2), *weights(1)),
    "rnn_tanh": (rnn(torch.rnn_tanh), t(3, 1, 2), t(1, 1, 2), *weights(1)),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, t(1, 2), t(1, 2), *weights(1)),
    "row_stack": (lambda x, y: torch.row_stack([x, y]), t(3), t(3)),
    "slogdet": (torch.slogdet, square()),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, torch.ones(3)), t(3)),
    "subtract": (torch.subtract, t(3), t(3)),
    "true_divide": (torch.true_divide, t(3), t(3)),
    "__rtruediv__": (lambda x: 2 / x, t(3)),
}


def call_of(key, least=1):
    """Return a function that calls the operation once, with arguments that hold some float32 tensors."""
    if key in CALLS:
        function, *args = CALLS[key]
        return function, args, {}
    in_place = key.endswith("_") and not key.endswith("__")
    entries = [op for op in op_db if op.name.removeprefix("nn.functional.") == key.removesuffix("_" * in_place)]
    for op in sorted(entries, key=lambda op: len(op.variant_test_name)):
        function = op.inplace_variant if in_place else op.op
        for sample in op.sample_inputs("cpu", FULL):
            args, kwargs = [sample.input, *sample.args], sample.kwargs
            floats = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype == FULL]
            if len(floats) >= least and all(x.numel() and x.dim() for x in floats) and runs(function, args, kwargs):
                return function, args, kwargs
    raise LookupError(key)


def runs(function, args, kwargs):
    args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
    try:
        function(*args, **kwargs)
    except RuntimeError:
        return False
    return True


def cast_floats(tree, dtypes):
    """Cast the float32 tensors of a tree to these dtypes, in order, the last one repeated; detached copies."""
    queue = list(dtypes)

    def one(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = leaf.dtype if leaf.dtype != FULL else queue.pop(0) if len(queue) > 1 else queue[0]
        return leaf.detach().to(dtype, copy=True).requires_grad_(dtype.is_floating_point)

    return tree_map(one, tree)


def run(function, tree):
    """Return the outputs' dtypes, and the gradients' dtypes next to the inputs' if there is a derivative."""
    args, kwargs = tree
    torch.manual_seed(0)
    outputs = [out for out in tree_leaves(function(*args, **kwargs)) if isinstance(out, Tensor)]
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
    losses = [out.abs().sum(dtype=torch.float64) for out in outputs if out.requires_grad]
    try:
        grads = torch.autograd.grad(sum(losses), leaves, allow_unused=True) if losses else ()
    except RuntimeError as error:
        if not re.search("derivative|not implemented|not differentiable", str(error)):
            raise
        grads = ()
    pairs = [(grad.dtype, leaf.dtype) for grad, leaf in zip(grads, leaves, strict=False) if grad is not None]
    return [out.dtype for out in outputs], pairs


def keys(*rules):
    return [key for key, rule in APEX_OPS.rules if rule in rules]


@pytest.mark.filterwarnings("ignore")  # deprecated operations warn, whatever casts them
@pytest.mark.parametrize("inputs", [FULL, LOW])
@pytest.mark.parametrize("key", keys("low"))
def test_low_operations_give_the_low_dtype_and_gradients_of_their_inputs_dtype(key, inputs):
    function, *tree = call_of(key)
    outputs, gradients = run(o1(function), cast_floats(tree, [inputs]))
    assert set(outputs) == {LOW}
    assert gradients
    assert all(gradient == leaf == inputs for gradient, leaf in gradients)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", [FULL, LOW])
@pytest.mark.parametrize("key", keys("full"))
def test_full_operations_give_what_plain_torch_gives_in_float32(key, inputs):
    function, *tree = call_of(key)
    plain, plain_gradients = run(function, cast_floats(tree, [FULL]))
    outputs, gradients = run(o1(function), cast_floats(tree, [inputs]))
    assert outputs == plain
    assert LOW not in outputs
    assert len(gradients) == len(plain_gradients)
    assert all(gradient == leaf for gradient, leaf in gradients)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", [(LOW, FULL), (FULL, LOW)])
@pytest.mark.parametrize("key", keys("promote"))
def test_promoting_operations_widen_mixed_inputs(key, order):
    function, *tree = call_of(key, least=2)
    plain, plain_gradients = run(function, cast_floats(tree, [FULL]))
    outputs, gradients = run(o1(function), cast_floats(tree, order))
    assert outputs == plain
    assert len(gradients) == len(plain_gradients)
    assert all(gradient == leaf for gradient, leaf in gradients)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", keys("promote"))
def test_promoting_operations_leave_low_inputs_low(key):
    function, *tree = call_of(key)
    outputs, _ = run(o1(function), cast_floats(tree, [LOW]))
    assert FULL not in outputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", [(LOW, FULL), (FULL, LOW)])
@pytest.mark.parametrize("key", keys("match"))
def test_in_place_operations_write_into_a_tensor_of_any_dtype(key, order):
    function, *tree = call_of(key, least=2)
    args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, cast_floats(tree, order))
    result = o1(function)(*args, **kwargs)
    assert result is args[0]
    assert result.dtype == order[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", keys("refuse"))
def test_in_place_operations_that_need_float32_are_refused_on_low_tensors(key):
    function, *tree = call_of(key)
    (x, *args), kwargs = cast_floats(tree, [LOW])
    before = x.detach().clone()
    x = x.detach()
    with pytest.raises(NotImplementedError, match=rf"{key}: .*float32.*x.{key[:-1]}\(...\)"):
        o1(function)(x, *args, **kwargs)
    assert torch.equal(x, before)
    full = x.float()
    assert o1(function)(full, *args, **kwargs) is full
    assert full.dtype == FULL


def test_every_rule_of_the_table_is_tested_here():
    rules = {rule for _, rule in APEX_OPS.rules}
    assert rules == {"low", "full", "promote", "match", "refuse", "banned"}  # banned: test_op_cast.py
