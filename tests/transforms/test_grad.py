"""Gradients of any tree: equal to torch's, higher orders right, graph-free exactly when they may be."""

import functools
import inspect
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, hessian, jacrev, jvp, vmap

from npuamp_fn import (
    DynamicLossScale,
    GradFn,
    NoOpLossScale,
    flatten,
    grad,
    grad_and_value,
    scaled_grad,
    with_loss_scaling,
)
from npuamp_fn.transforms.scaling import as_grad_fn
from npuamp_fn.tree import struct, tree_leaves, tree_map, tree_structure


class Pair(NamedTuple):
    first: Any
    second: Any


@struct(static=("name",))
class Box:
    content: Any
    name: str


def params():
    gen = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(3, 2, generator=gen),
        "pair": Pair(torch.randn(2, generator=gen), torch.tensor(1.5)),
        "box": Box([torch.randn(2, generator=gen)], "name"),
    }


def loss_fn(p, x, scale=1.0):
    hidden = torch.tanh(x @ p["w"] + p["pair"].first) * p["box"].content[0]
    return (hidden * p["pair"].second).square().sum() * scale


X = torch.linspace(-1, 1, 12).view(4, 3)


def assert_equal_trees(a, b):
    assert tree_structure(a) == tree_structure(b)
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        if isinstance(y, torch.Tensor):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        else:
            assert x is y


# values


def test_equals_torch_func_and_autograd():
    expected = torch.func.grad(loss_fn)(params(), X)
    assert_equal_trees(grad(loss_fn)(params(), X), expected)
    leaves, treedef = torch_pytree.tree_flatten(params())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    autograd = torch.autograd.grad(loss_fn(torch_pytree.tree_unflatten(leaves, treedef), X), leaves)
    assert_equal_trees(grad(loss_fn)(params(), X), torch_pytree.tree_unflatten(autograd, treedef))


def test_values_aux_and_keywords_come_in_torch_funcs_order():
    grads, value = grad_and_value(loss_fn)(params(), X, scale=3.0)
    assert_equal_trees(grads, torch.func.grad(loss_fn)(params(), X, scale=3.0))
    assert torch.equal(value, loss_fn(params(), X, scale=3.0))

    def with_aux(p, x):
        return loss_fn(p, x), x.sum()

    grads, aux = grad(with_aux, has_aux=True)(params(), X)
    assert torch.equal(aux, X.sum())
    grads, (value, aux) = grad_and_value(with_aux, has_aux=True)(params(), X)
    assert torch.equal(value, loss_fn(params(), X))
    assert_equal_trees(grads, torch.func.grad(loss_fn)(params(), X))


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (1, 0), (-1, 0)])
def test_argnums_select_and_order_gradients(argnums):
    def f(a, b):
        return (a["x"] * b).sum() + b.square().sum()

    args = ({"x": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, 4.0]))
    ours = grad(f, argnums)(*args)
    by_number = [{"x": args[1]}, args[0]["x"] + 2 * args[1]]
    expected = tuple(by_number[n] for n in argnums) if isinstance(argnums, tuple) else by_number[argnums]
    assert_equal_trees(ours, expected)
    assert_equal_trees(with_loss_scaling(grad(f, argnums))(NoOpLossScale.create(), *args).grads, expected)


def test_leaves_that_cannot_be_differentiated_have_gradient_none():
    tree = {"w": torch.tensor(2.0), "n": 3, "i": torch.tensor([1]), "none": None, "s": "text", "b": torch.tensor(True)}

    def f(p):
        assert (p["n"], p["none"], p["s"], p["i"].dtype) == (3, None, "text", torch.int64)
        return p["w"] ** p["n"]

    expected = {"w": torch.tensor(12.0), "n": None, "i": None, "none": None, "s": None, "b": None}
    assert_equal_trees(grad(f)(tree), expected)
    assert_equal_trees(with_loss_scaling(grad(f))(DynamicLossScale.create(), tree).grads, expected)


def test_static_fields_and_empty_containers_survive():
    grads = grad(lambda p: p["box"].content[0].sum())({"box": Box([torch.ones(2)], "kept"), "empty": {}, "list": []})
    assert grads["box"].name == "kept"
    assert (grads["empty"], grads["list"]) == ({}, [])


AUXES = [None, "text", 3, {"a": 1, "t": torch.tensor(2.0)}, (), [torch.tensor(1), None], Box(torch.ones(1), "n")]


@pytest.mark.parametrize("aux", AUXES, ids=lambda aux: type(aux).__name__)
@pytest.mark.parametrize("graph_free", [False, True])
def test_aux_may_be_anything(aux, graph_free):
    def f(x):
        return x * x, aux

    x = torch.tensor(3.0)
    if graph_free:
        out = with_loss_scaling(grad(f, has_aux=True))(NoOpLossScale.create(), x)
        value, found = out.grads, out.aux
    else:
        value, found = grad(f, has_aux=True)(x)
    assert value.item() == 6.0
    assert tree_structure(found) == tree_structure(aux)
    for new, old in zip(tree_leaves(found), tree_leaves(aux), strict=True):
        assert torch.equal(new, old) if isinstance(old, torch.Tensor) else new is old


def test_complex_leaves_follow_torchs_convention():
    z = torch.tensor([1 + 2j, 3 - 1j])

    def f(p):
        return (p["z"].abs() ** 2).sum() + (p["z"] * (1 - 1j)).real.sum() + p["w"]

    tree = {"z": z, "w": torch.tensor(1.0)}
    expected = torch.func.grad(f)(tree)
    assert_equal_trees(grad(f)(tree), expected)
    torch.testing.assert_close(expected["z"], 2 * z + (1 + 1j))
    out = with_loss_scaling(grad(f))(DynamicLossScale.create(2.0**10), tree)
    assert out.grads["z"].dtype == torch.complex64
    torch.testing.assert_close(out.grads["z"], expected["z"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_their_leaf(dtype):
    grads = grad(lambda p: (p["w"].float() * 2).sum())({"w": torch.ones(2, dtype=dtype)})
    assert grads["w"].dtype == dtype


def test_unused_leaves_and_constant_losses_have_zero_gradients():
    tree = {"used": torch.ones(2), "unused": torch.ones(3).half()}
    for gradient in (grad, lambda f: lambda *a: with_loss_scaling(grad(f))(NoOpLossScale.create(), *a).grads):
        out = gradient(lambda p: p["used"].sum())(tree)
        assert torch.equal(out["unused"], torch.zeros(3, dtype=out["unused"].dtype))
        constant = gradient(lambda p: torch.tensor(3.0))(tree)
        assert torch.equal(constant["used"], torch.zeros(2))


_leaf = st.one_of(st.none(), st.integers(0, 3), st.floats(-2, 2, width=32).map(torch.tensor), st.just("s"))
_trees = st.recursive(
    _leaf,
    lambda c: st.one_of(
        st.lists(c, max_size=3), st.dictionaries(st.sampled_from("abc"), c, max_size=3), st.builds(Pair, c, c)
    ),
    max_leaves=8,
)


@given(_trees)
@settings(max_examples=60, deadline=None)
def test_any_tree(tree):
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return

    def f(p):
        found = [leaf for leaf in tree_leaves(p) if isinstance(leaf, torch.Tensor)]
        return sum((i + 1) * leaf**3 for i, leaf in enumerate(found))

    count = iter(range(1, len(tensors) + 1))
    expected = tree_map(lambda x: 3 * next(count) * x**2 if isinstance(x, torch.Tensor) else None, tree)
    for found in (grad(f)(tree), with_loss_scaling(grad(f))(DynamicLossScale.create(2.0**8), tree).grads):
        assert tree_structure(found) == tree_structure(expected)
        for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if b is None:
                assert a is None
            else:
                torch.testing.assert_close(a, b)


# higher orders and composition


def test_second_order_is_right():
    cube = lambda x: x**3  # noqa: E731
    assert grad(grad(cube))(torch.tensor(2.0)).item() == 12.0
    assert grad(grad(grad(cube)))(torch.tensor(2.0)).item() == 6.0
    assert grad(torch.func.grad(cube))(torch.tensor(2.0)).item() == 12.0
    assert torch.func.grad(grad(cube))(torch.tensor(2.0)).item() == 12.0


def penalty_loss(gradient):
    """A loss with the squared norm of its input gradient in it."""

    def loss(p, x):
        inner = gradient(lambda x: (torch.tanh(x @ p["w"])).sum())(x)
        return inner.square().sum() + p["w"].square().sum()

    return loss


def test_gradient_penalty_inside_the_loss():
    p, x = {"w": torch.randn(3, 2, dtype=torch.float64)}, torch.randn(4, 3, dtype=torch.float64)
    expected = torch.func.grad(penalty_loss(torch.func.grad))(p, x)["w"]
    torch.testing.assert_close(grad(penalty_loss(grad))(p, x)["w"], expected)
    scaled = with_loss_scaling(grad(penalty_loss(grad)))(DynamicLossScale.create(2.0**10), p, x)
    torch.testing.assert_close(scaled.grads["w"], expected)
    with_torch = with_loss_scaling(torch.func.grad(penalty_loss(torch.func.grad)))(NoOpLossScale.create(), p, x)
    torch.testing.assert_close(with_torch.grads["w"], expected)
    eps = 1e-6  # finite differences, independent of any autograd
    loss = penalty_loss(grad)
    for i, j in [(0, 0), (2, 1)]:
        step = torch.zeros_like(p["w"])
        step[i, j] = eps
        numeric = (loss({"w": p["w"] + step}, x) - loss({"w": p["w"] - step}, x)) / (2 * eps)
        assert numeric.item() == pytest.approx(expected[i, j].item(), rel=1e-5)


def test_gradient_penalty_by_plain_autograd_inside_the_loss():
    p, x = {"w": torch.randn(3, 2)}, torch.randn(4, 3)

    def loss(p, x):
        x = x.detach().requires_grad_()
        (inner,) = torch.autograd.grad(torch.tanh(x @ p["w"]).sum(), x, create_graph=True)
        return inner.square().sum() + p["w"].square().sum()

    out = with_loss_scaling(grad(loss))(DynamicLossScale.create(2.0**8), p, x)
    torch.testing.assert_close(out.grads["w"], torch.func.grad(penalty_loss(torch.func.grad))(p, x)["w"])


def test_inner_gradients_are_not_scaled():
    # MAML: only the outermost loss is multiplied.
    def inner(w, x):
        return ((w - x) ** 2).sum()

    def outer(w, x):
        adapted = w - 0.1 * grad(inner)(w, x)
        return ((adapted - 2 * x) ** 2).sum()

    w, x = torch.randn(3), torch.randn(3)
    expected = torch.func.grad(outer)(w, x)
    out = with_loss_scaling(grad(outer))(DynamicLossScale.create(2.0**12), w, x)
    torch.testing.assert_close(out.grads, expected)
    torch.testing.assert_close(expected, 2 * 0.8 * (0.8 * w + 0.2 * x - 2 * x))


def test_captured_parameters_keep_their_graph():
    captured = torch.tensor(3.0, requires_grad=True)
    out = grad(lambda x: captured * x**2)(torch.tensor(2.0))
    assert out.requires_grad
    (second,) = torch.autograd.grad(out, captured)
    assert second.item() == 4.0


def test_composes_with_jvp_jacrev_hessian_and_vmap():
    f = lambda x: (x**3).sum()  # noqa: E731
    x, t = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])
    value, tangent = jvp(grad(f), (x,), (t,))
    torch.testing.assert_close(value, 3 * x**2)
    torch.testing.assert_close(tangent, 6 * x * t)
    torch.testing.assert_close(jacrev(grad(f))(x), torch.diag(6 * x))
    torch.testing.assert_close(hessian(f)(x), jacrev(grad(f))(x))
    batch = torch.randn(5, 2)
    torch.testing.assert_close(vmap(grad(f))(batch), 3 * batch**2)
    torch.testing.assert_close(vmap(jacrev(grad(f)))(batch), torch.diag_embed(6 * batch))


def test_per_sample_gradients_equal_a_loop():
    per_sample = vmap(grad(loss_fn), in_dims=(None, 0))(params(), X)
    for index, x in enumerate(X):
        single = grad(loss_fn)(params(), x)
        for a, b in zip(tree_leaves(per_sample), tree_leaves(single), strict=True):
            torch.testing.assert_close(a[index], b)


def test_gradient_functions_compile():
    compiled = torch.compile(grad_and_value(loss_fn), fullgraph=True, backend="aot_eager")
    grads, value = compiled(params(), X)
    expected, loss = grad_and_value(loss_fn)(params(), X)
    assert_equal_trees(grads, expected)
    assert torch.equal(value, loss)


def test_functional_call_of_a_module():
    model = torch.nn.Linear(3, 1)
    tree = {name: p.detach() for name, p in model.named_parameters()}
    grads = grad(lambda p: functional_call(model, p, (X,)).square().mean())(tree)
    model(X).square().mean().backward()
    torch.testing.assert_close(grads["weight"], model.weight.grad)


# as values


def test_gradient_functions_are_values():
    g = grad(loss_fn, (0, 1), True)
    assert (g.fun, g.argnums, g.has_aux, g.with_value) == (loss_fn, (0, 1), True, False)
    assert grad_and_value(loss_fn).with_value is True
    assert g == GradFn(loss_fn, (0, 1), True, False)
    assert hash(g) == hash(grad(loss_fn, (0, 1), True))
    assert str(inspect.signature(grad(loss_fn))) == "(p, x, scale=1.0)"
    assert inspect.unwrap(grad(loss_fn)) is loss_fn


# the graph-free path


@pytest.fixture
def route(monkeypatch):
    """Record whether a call differentiates through torch.func."""
    calls = []
    original = torch.func.grad_and_value

    def recording(*args, **kwargs):
        calls.append("torch.func")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.func, "grad_and_value", recording)
    return calls


def scaled(fun=loss_fn):
    return with_loss_scaling(grad(fun))


def test_top_level_calls_use_plain_autograd(route):
    scale = DynamicLossScale.create()
    scaled()(scale, params(), X)
    scaled_grad(loss_fn)(8.0, params(), X)
    with torch.no_grad():
        scaled()(scale, params(), X)
    scaled(lambda p, x: loss_fn(p, x) + grad(lambda x: x.sum())(x).sum())(scale, params(), X)
    assert route == ["torch.func"]  # the inner gradient, of torch.func's semantics


def test_grad_itself_is_always_torch_func(route):
    grad(loss_fn)(params(), X)
    assert route == ["torch.func"]


def test_tensors_that_require_grad_take_torch_func(route):
    scale = DynamicLossScale.create()
    own = tree_map(lambda p: p.clone().requires_grad_(), params())
    scaled()(scale, own, X)
    scaled()(scale, params(), X.clone().requires_grad_())
    with_loss_scaling(grad(lambda p, *, x: loss_fn(p, x)))(scale, params(), x=X.clone().requires_grad_())
    assert route == ["torch.func"] * 3


def test_nested_in_a_transform_takes_torch_func(route):
    scale = DynamicLossScale.create()
    vmap(scaled(), in_dims=(None, None, 0))(scale, params(), X)
    torch.func.grad(lambda x: scaled()(scale, params(), x).value * x.sum())(X)
    jvp(lambda x: scaled()(scale, params(), x).value, (X,), (X,))
    assert route == ["torch.func"] * 3


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_gave_zero_gradients_in_silence(route, inside):
    scale = NoOpLossScale.create()
    expected = torch.func.grad(loss_fn)(params(), X)
    with torch.inference_mode():
        own = tree_map(torch.clone, params())
        if inside:
            assert_equal_trees(scaled()(scale, own, X).grads, expected)
    if not inside:
        assert_equal_trees(scaled()(scale, own, X).grads, expected)
    assert route == ["torch.func"]


@pytest.mark.parametrize("how", ["top level", "requires grad", "captured"])
def test_no_graph_hangs_on_the_results(how):
    captured = torch.tensor(1.0, requires_grad=how == "captured")
    p = tree_map(lambda t: t.clone().requires_grad_(how == "requires grad"), params())

    def f(p, x):
        return loss_fn(p, x) * captured, {"x": x * p["pair"].second * captured, "n": None}

    out = with_loss_scaling(grad(f, has_aux=True))(DynamicLossScale.create(), p, X)
    for leaf in tree_leaves((out.grads, out.value, out.aux, out.inv_scale, out.finite, out.loss_scale)):
        if isinstance(leaf, torch.Tensor):
            assert leaf.requires_grad is False
            assert leaf.grad_fn is None


def test_backward_frees_saved_tensors_at_top_level():
    saved = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, gradient):
            saved.append(torch.is_grad_enabled())
            return gradient

    scaled(lambda p: Probe.apply(p).square().sum())(DynamicLossScale.create(), torch.ones(3))
    assert saved == [False]  # create_graph would have enabled it


def test_both_paths_agree_bitwise():
    scale = DynamicLossScale.create(2.0**10)
    free = scaled()(scale, params(), X)
    traced = scaled()(scale, params(), X.clone().requires_grad_())
    assert_equal_trees(free.grads, traced.grads)
    assert torch.equal(free.value, traced.value)


def test_flat_gradient_is_a_flat_tree_on_both_paths():
    flat = flatten({"w": params()["w"], "b": torch.zeros(2)})
    f = lambda p, x: (x @ p.unflatten()["w"] + p.unflatten()["b"]).square().sum()  # noqa: E731
    out = scaled(f)(DynamicLossScale.create(), flat, X)
    assert out.grads.layout is flat.layout
    assert torch.equal(out.grads.buffers[0], torch.func.grad(f)(flat, X).buffers[0])


# refusals


@pytest.mark.parametrize(
    ("fun", "kwargs", "args", "message"),
    [
        (lambda x: x, {}, (torch.ones(2),), r"real floating-point loss of shape \(\), found torch.float32 of shape"),
        (lambda x: x.sum() * 1j, {}, (torch.ones(2),), "real floating-point loss .* found torch.complex64"),
        (lambda x: x.sum().long(), {}, (torch.ones(2),), "real floating-point loss .* found torch.int64"),
        (lambda x: 3.0, {}, (torch.ones(2),), "expected a scalar tensor as loss, found float"),
        (lambda x: (x.sum(), 1), {}, (torch.ones(2),), "found tuple; to return more than the loss pass has_aux=True"),
        (lambda x: x.sum(), {"has_aux": True}, (torch.ones(2),), r"to return \(loss, aux\), found Tensor"),
        (lambda x: (x.sum(), 1, 2), {"has_aux": True}, (torch.ones(2),), r"to return \(loss, aux\), found tuple"),
        (lambda x: x.sum(), {"argnums": 1}, (torch.ones(2),), "argnums=1 is out of range: the call has 1 positional"),
        (lambda x: x.sum(), {"argnums": -2}, (torch.ones(2),), "argnums=-2 is out of range"),
        (lambda x, y: x.sum(), {"argnums": (0, -2)}, (torch.ones(2), 1), r"argnums=\(0, -2\) name an argument twice"),
        (lambda n: torch.ones(()), {}, ({"n": 3, "i": torch.arange(2)},), r"no leaf of argument 0 \(dict\) is a float"),
        (lambda x: x.sum(), {}, (), "argnums=0 is out of range: the call has 0"),
    ],
)
@pytest.mark.parametrize("scale", [False, True])
def test_calls_that_make_no_sense_are_refused(fun, kwargs, args, message, scale):
    gradient = grad(fun, **kwargs)
    with pytest.raises(TypeError, match=message):
        with_loss_scaling(gradient)(NoOpLossScale.create(), *args) if scale else gradient(*args)


def test_the_same_argument_twice_gave_a_zero_gradient_in_silence():
    with pytest.raises(TypeError, match=r"argnums=\(0, 0\) name an argument twice"):
        grad(lambda a, b: a * b, argnums=(0, 0))(torch.tensor(2.0), torch.tensor(3.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "grad: expected a function, found 3 of type int"),
        ((loss_fn, [0]), r"argnums: expected an int or a tuple of ints, found \[0\]"),
        ((loss_fn, ()), r"argnums: expected an int or a tuple of ints, found \(\)"),
        ((loss_fn, True), "argnums: expected an int"),
        ((loss_fn, "p"), "argnums: expected an int"),
    ],
)
def test_gradient_functions_validate_when_they_are_made(arguments, message):
    with pytest.raises(TypeError, match=message):
        grad(*arguments)


def test_leaves_without_gradient_are_named_under_vmap():
    tree = {"layer": {"w": torch.ones(2), "steps": 3}}
    with pytest.raises(TypeError, match=r"grad: leaf `layer.steps` \(3\) cannot be differentiated, and under vmap"):
        vmap(grad(lambda p, x: (p["layer"]["w"] * x).sum()), in_dims=(None, 0))(tree, torch.ones(3, 2))


# recognition


def test_torchs_gradient_functions_are_recognised():
    for transform, with_value in ((torch.func.grad, False), (torch.func.grad_and_value, True)):
        assert as_grad_fn(transform(loss_fn, argnums=(0, 1), has_aux=True)) == GradFn(loss_fn, (0, 1), True, with_value)
    ours = grad(loss_fn)
    assert as_grad_fn(ours) is ours


def test_in_tree_functorch_is_recognised():
    functorch = pytest.importorskip("functorch")
    with pytest.warns(FutureWarning):
        old = functorch.grad(loss_fn)
    assert as_grad_fn(old) == grad(loss_fn)


@pytest.mark.parametrize("make", [grad, torch.func.grad, torch.func.grad_and_value])
def test_partials_fill_in_arguments(make):
    def f(a, p, x, scale=1.0):
        return (a * p * x).sum() * scale

    base = make(f, argnums=1)
    bound = functools.partial(functools.partial(base, torch.tensor(2.0)), scale=3.0)
    out = with_loss_scaling(bound)(DynamicLossScale.create(), torch.tensor(1.0), torch.tensor(5.0))
    assert out.grads.item() == 30.0
    again = with_loss_scaling(bound)(DynamicLossScale.create(), torch.tensor(1.0), torch.tensor(5.0), scale=1.0)
    assert again.grads.item() == 10.0


def test_objects_whose_type_defines_loss_scaling_take_part():
    class Pipeline:
        def __loss_scaling__(self, scale, p, x):
            return {"w": p["w"] * x * scale}, (p["w"] ** 2 * x / 2).sum(), "aux"

    out = with_loss_scaling(Pipeline())(DynamicLossScale.create(4.0), {"w": torch.tensor([3.0])}, 2.0)
    assert torch.equal(out.grads["w"], torch.tensor([6.0]))
    assert (out.value.item(), out.aux, out.finite.item()) == (9.0, "aux", True)

    class Instance:
        pass

    instance = Instance()
    instance.__loss_scaling__ = lambda scale, x: None
    with pytest.raises(TypeError, match="`Instance` is not a gradient function"):
        with_loss_scaling(instance)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: loss_fn, "loss_fn"),
        (lambda: vmap(grad(loss_fn)), None),
        (lambda: vmap(torch.func.grad(loss_fn)), None),
        (lambda: jacrev(loss_fn), None),
        (lambda: torch.compile(grad(loss_fn), backend="eager"), None),
        (lambda: torch.compile(torch.func.grad(loss_fn), backend="eager"), None),
        (lambda: functools.partial(loss_fn, scale=1.0), "loss_fn"),
        (lambda: with_loss_scaling(grad(loss_fn)), None),
        (lambda: 3, "int"),
    ],
)
def test_what_is_no_gradient_function_is_refused_with_what_to_write(make, name):
    with pytest.raises(TypeError, match="is not a gradient function") as caught:
        with_loss_scaling(make())
    text = str(caught.value)
    assert name is None or f"`{name}`" in text
    for advice in ("with_loss_scaling(grad(loss_fn))", "vmap(with_loss_scaling(", "torch.compile(with_loss_scaling("):
        assert advice in text


@pytest.mark.parametrize("name", ["scale", "loss_scale"])
def test_keyword_of_the_loss_function_clashed_with_our_own_parameter(name):
    def f(p, **options):
        return p * options[name]

    p = torch.tensor(2.0)
    assert with_loss_scaling(grad(f))(DynamicLossScale.create(), p, **{name: 3.0}).grads.item() == 3.0
    assert scaled_grad(f)(8.0, p, **{name: 3.0}).grads.item() == 3.0
