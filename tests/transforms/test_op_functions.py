"""User functions under O1: every argument in the promised dtype, gradients in the caller's, the last rule counts."""

import inspect
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import vmap

from npuamp_fn import APEX_OPS, cast_ops, float_function, grad, half_function, promote_function
from npuamp_fn.transforms.op_cast import disable_casts

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
o1 = cast_ops(APEX_OPS, HALF)
DECORATORS = {"half": (half_function, HALF), "float": (float_function, FULL)}


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


@pytest.mark.parametrize(("decorator", "expected"), DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("given", [HALF, FULL])
def test_args_kwargs_and_nested_containers_arrive_in_the_promised_dtype(decorator, expected, given):
    seen = {}

    @decorator
    def mine(x, items, *, named, options):
        seen["dtypes"] = [x.dtype, items[0].dtype, items[1][0].dtype, named.dtype, options["deep"].first.dtype]
        seen["types"] = type(items), type(items[1]), type(options["deep"])
        seen["rest"] = items[2].dtype, options["double"].dtype, options["name"]
        return x

    x = torch.ones(2, dtype=given)
    o1(mine)(
        x,
        [x, (x,), torch.arange(2)],
        named=x,
        options={"deep": Pair(x, None), "double": x.double(), "name": "mine"},
    )
    assert seen["dtypes"] == [expected] * 5
    assert seen["types"] == (list, tuple, Pair)
    assert seen["rest"] == (torch.int64, DOUBLE, "mine")


def test_promote_function_widens_mixtures_only():
    @promote_function
    def mine(x, items):
        return x.dtype, items[0].dtype

    half, full = torch.ones(2, dtype=HALF), torch.ones(2)
    assert o1(mine)(half, [full]) == (FULL, FULL)
    assert o1(mine)(half, [half]) == (HALF, HALF)
    assert o1(mine)(half, [half.double()]) == (HALF, DOUBLE)


@pytest.mark.parametrize("decorator", [half_function, float_function, promote_function])
def test_outside_the_transform_and_where_casts_are_disabled_nothing_changes(decorator):
    @decorator
    def mine(x, y):
        """Keep me."""
        return x.dtype, y.dtype

    args = torch.ones(2, dtype=HALF), torch.ones(2)
    assert mine(*args) == (HALF, FULL)

    def disabled(*args):
        with disable_casts():
            return mine(*args)

    assert o1(disabled)(*args) == (HALF, FULL)
    assert mine.__name__ == "mine"
    assert list(inspect.signature(mine).parameters) == ["x", "y"]


def make_function(expected):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert x.dtype == expected
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            assert g.dtype == x.dtype == expected
            return 2 * x * g

    return Square


@pytest.mark.parametrize(("decorator", "expected"), DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("given", [HALF, FULL])
def test_a_custom_autograd_function_sees_its_dtype_forward_and_backward(decorator, expected, given):
    """Reported against apex: arguments are not cast, or backward returns the wrong dtype."""
    square = decorator(make_function(expected).apply)
    x = torch.full((2,), 3.0, dtype=given, requires_grad=True)
    out = o1(square)(x)
    assert out.dtype == expected
    out.sum().backward()
    assert x.grad.dtype == given
    assert torch.equal(x.grad, torch.full((2,), 6.0, dtype=given))


def test_methods_static_methods_and_class_methods():
    class Layer(nn.Module):
        scale = 2.0

        @half_function
        def method(self, x):
            assert isinstance(self, Layer)
            return x

        @staticmethod
        @half_function
        def inner_static(x):
            return x

        @half_function
        @staticmethod
        def outer_static(x):
            return x

        @classmethod
        @half_function
        def inner_class(cls, x):
            assert cls is Layer
            return x

        @half_function
        @classmethod
        def outer_class(cls, x):
            assert cls is Layer
            return x

    layer = Layer()
    for name in ("method", "inner_static", "outer_static", "inner_class", "outer_class"):
        assert o1(getattr(layer, name))(torch.ones(2)).dtype == HALF, name
        assert getattr(layer, name)(torch.ones(2)).dtype == FULL, name


def test_a_float_function_computes_in_float32_inside_too():
    weight = torch.full((2, 2), 1.0001)

    @float_function
    def exact(x):
        return x @ weight

    out = o1(exact)(torch.ones(2, 2))
    assert out.dtype == FULL
    assert torch.equal(out, torch.ones(2, 2) @ weight)  # in half 1.0001 is 1


def test_inside_a_half_function_operations_follow_the_table():
    @half_function
    def mine(x):
        return x @ x, (x @ x).softmax(-1)

    assert [out.dtype for out in o1(mine)(torch.ones(2, 2))] == [HALF, FULL]


def test_the_last_decorator_counts():
    def mine(x):
        return x.dtype

    assert o1(half_function(float_function(mine)))(torch.ones(2)) == HALF
    assert o1(float_function(half_function(mine)))(torch.ones(2).half()) == FULL


def test_a_table_changes_the_rule_of_a_decorated_function_at_the_next_call():
    @half_function
    def mine(x):
        return x.dtype

    x = torch.ones(2)
    assert o1(mine)(x) == HALF
    assert cast_ops(APEX_OPS.full(mine), HALF)(mine)(x.half()) == FULL
    assert cast_ops(APEX_OPS.full(mine).low(mine), HALF)(mine)(x) == HALF


ALMOST_ONE = torch.full((1, 2, 2), 1.0001)


def test_a_users_rule_beats_the_built_in_one_without_rounding_through_half():
    """Reported against apex: a float registration of a half operation is rounded through half."""
    expected = torch.bmm(ALMOST_ONE, ALMOST_ONE)
    table = APEX_OPS.full("torch.bmm")
    for product in (lambda: torch.bmm(ALMOST_ONE, ALMOST_ONE), lambda: ALMOST_ONE.bmm(ALMOST_ONE)):
        assert torch.equal(cast_ops(table, HALF)(product)(), expected)
        out = cast_ops(table.low("torch.bmm"), HALF)(product)()
        assert (out.dtype, out[0, 0, 0].item()) == (HALF, 2.0)
    assert torch.equal(o1(float_function(torch.bmm))(ALMOST_ONE, ALMOST_ONE), expected)
    assert o1(half_function(torch.softmax))(ALMOST_ONE, -1).dtype == HALF


@pytest.mark.parametrize("op", ["torch.acos", "torch.nn.functional.conv2d", "torch.nn.functional.gelu"])
@pytest.mark.parametrize(("edit", "expected"), [("low", HALF), ("full", FULL)])
def test_any_operation_can_be_pinned_against_the_built_in_lists(op, edit, expected):
    function = eval(op)
    args = (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1)) if "conv" in op else (torch.full((2,), 0.5),)
    assert cast_ops(getattr(APEX_OPS, edit)(op), HALF)(function)(*args).dtype == expected


def test_custom_operators_can_be_registered():
    @torch.library.custom_op("npuamp_fn_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(2)
    for key in (twice, torch.ops.npuamp_fn_tests.twice, torch.ops.npuamp_fn_tests.twice.default):
        table = APEX_OPS.low(key)
        assert cast_ops(table, HALF)(torch.ops.npuamp_fn_tests.twice.default)(x).dtype == HALF
    assert cast_ops(APEX_OPS.low(twice), HALF)(twice)(x).dtype == HALF
    assert o1(twice)(x).dtype == FULL


@pytest.mark.parametrize(("decorator", "expected"), DECORATORS.values(), ids=DECORATORS)
def test_under_grad_vmap_and_compile(decorator, expected):
    seen = []

    def body(w, x):
        seen.append((w.dtype, x.dtype))
        return (w * x).sum()

    mine = decorator(body)
    w, x = torch.full((2,), 0.3), torch.full((3, 2), 1.5)
    ours = vmap(grad(o1(lambda w, x: mine(w, x).float())), in_dims=(None, 0))(w, x)
    assert ours.dtype == FULL
    assert torch.equal(ours, x)
    assert seen[-1] == (expected, expected)
    fn = o1(mine)
    compiled = torch.compile(lambda w, x: fn(w, x), fullgraph=True, backend="aot_eager")
    assert compiled(w, x[0]).dtype == fn(w, x[0]).dtype
    assert torch.equal(compiled(w, x[0]), fn(w, x[0]))


def test_what_is_no_function_is_a_type_error():
    with pytest.raises(TypeError, match="half_function: expected a function, found 3 of type int"):
        half_function(3)
