"""Casts and cast_policy: every container, only what should change, nothing copied that fits."""

import collections
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from npuamp_fn import (
    O2,
    O3,
    FlatTree,
    Policy,
    batch_norm_paths,
    cast,
    cast_like,
    cast_policy,
    flatten,
    full_precision,
    functionalize,
    grad,
)
from npuamp_fn.tree import struct, tree_leaves


class Batch(NamedTuple):
    image: Any
    label: Any


@struct(static=("name",))
class Box:
    content: Any
    name: str


def dtypes(tree):
    return [leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in tree_leaves(tree)]


f16, bf16, f32, f64, i64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64


def everything():
    one = torch.ones(2)
    return {
        "f32": one,
        "f16": one.half(),
        "bf16": one.bfloat16(),
        "f64": one.double(),
        "int": torch.arange(2),
        "bool": torch.tensor([True]),
        "complex": torch.ones(1, dtype=torch.complex64),
        "none": None,
        "number": 1.5,
        "text": "t",
    }


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_cast_changes_float32_and_halves_only(dtype):
    tree = everything()
    out = cast(tree, dtype)
    assert [out[name].dtype for name in ("f32", "f16", "bf16")] == [dtype] * 3
    for name in ("f64", "int", "bool", "complex", "none", "number", "text"):
        assert out[name] is tree[name], name


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_what_fits_already_is_not_copied(dtype):
    x = torch.ones(3, dtype=dtype)
    assert cast({"x": [x]}, dtype)["x"][0] is x
    tree = everything()
    assert cast(tree, None) is tree


@pytest.mark.parametrize("dtype", [torch.int32, "float16", torch.complex64])
def test_cast_to_what_is_no_float_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=r"cast: dtype: expected a floating-point torch\.dtype or None, found"):
        cast({"w": torch.full((2,), 0.5)}, dtype)


def test_cast_keeps_container_types():
    x = torch.ones(1)
    tree = collections.OrderedDict(
        n=Batch(x, 3),
        d=collections.defaultdict(list, k=x),
        s=Box([x, (x,)], "name"),
        f=flatten({"w": x}),
        q=collections.deque([x], maxlen=3),
    )
    out = cast(tree, f16)
    assert type(out) is collections.OrderedDict
    assert type(out["n"]) is Batch
    assert (type(out["d"]), out["d"].default_factory) == (collections.defaultdict, list)
    assert (type(out["s"]), out["s"].name, type(out["s"].content[1])) == (Box, "name", tuple)
    assert type(out["f"]) is FlatTree
    assert out["q"].maxlen == 3
    assert dtypes(out) == [f16, int, f16, f16, f16, f16, f16]


def test_cast_like_takes_dtypes_leaf_by_leaf():
    tree = {"a": torch.ones(2), "b": torch.ones(2), "n": 3, "i": torch.arange(2)}
    like = {"a": torch.ones(1).half(), "b": torch.ones(1), "n": torch.ones(1).half(), "i": torch.ones(1).half()}
    out = cast_like(tree, like)
    assert dtypes(out) == [f16, f32, int, i64]
    assert out["b"] is tree["b"]
    with pytest.raises(ValueError, match="missing leaf `i`"):
        cast_like(tree, {"a": 1, "b": 2, "n": 3})


def test_policy_casts_arguments_keywords_and_containers_and_the_output():
    seen = {}

    @cast_policy(O2)
    def forward(params, batch, *rest, mask=None, extra=None):
        seen["inside"] = dtypes([params, batch, rest, mask, extra])
        return {"out": params["w"] * batch.image, "aux": Batch(rest[0], "text"), "box": Box(rest[0], "n")}

    x = torch.ones(2)
    out = forward({"w": x}, Batch(x, torch.arange(2)), x, 7, mask=torch.tensor([True]), extra=Box([x, None], "n"))
    assert seen["inside"] == [f16, f16, i64, f16, int, torch.bool, f16, type(None)]
    # mpx left dictionary results uncast.
    assert dtypes(out) == [f32, f32, str, f32]
    assert type(out["aux"]) is Batch
    assert out["box"].name == "n"


def test_policy_without_compute_or_output_leaves_things_alone():
    x = torch.ones(1)
    assert cast_policy(Policy())(lambda a: a)(x) is x
    assert cast_policy(Policy(output=f16))(lambda a: (a, a.dtype))(x) == (torch.ones(1).half(), f32)


def test_arguments_that_fit_are_handed_over_as_they_are():
    x = torch.ones(2).half()
    got = []
    cast_policy(O2)(lambda tree: got.append(tree["x"]))({"x": x})
    assert got[0] is x


def test_the_callers_arguments_are_not_changed():
    params = {"w": torch.ones(2)}
    cast_policy(O2)(lambda p: p["w"].mul_(2))(params)
    assert torch.equal(params["w"], torch.ones(2))
    assert params["w"].dtype == f32


def test_buffers_of_functionalize_keep_their_dtype():
    apply, params, buffers = functionalize(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    seen = []

    @cast_policy(O3.replace(keep=("0.*",)))
    def forward(params, buffers, x):
        seen.append((dtypes(params), dtypes(buffers), x.dtype))
        out, new = apply(params, buffers, x)
        return out, new

    out, new = forward(params, buffers, torch.randn(4, 2))
    assert seen == [([f32, f32, f16, f16], [f32, f32, i64], f16)]
    assert out.dtype == f32
    assert dtypes(new) == [f32, f32, i64]
    assert type(new) is type(buffers)
    assert dtypes(cast({"b": buffers}, f16)) == [f32, f32, i64]


# keep


def test_keep_patterns_are_paths_inside_each_argument():
    @cast_policy(O2.replace(keep=("*.norm.*", "scale")))
    def forward(params, other, *, more):
        return dtypes(params), dtypes(other), dtypes(more)

    x = torch.ones(1)
    params = {"0": {"norm": {"weight": x.half()}, "w": x}}
    found = forward(params, {"scale": x, "shift": x}, more=[{"norm": [x]}, x])
    assert found == ([f32, f16], [f32, f16], [f32, f16])


def test_keep_on_a_flat_tree_with_buffers_of_their_own():
    tree = {"norm.w": torch.ones(2), "w": torch.ones(2)}
    flat = flatten(tree, keep=("norm.*",))

    @cast_policy(O2.replace(keep=("norm.*",)))
    def forward(params):
        leaves = params.unflatten()
        return (leaves["w"] * leaves["norm.w"]).sum(), (leaves["w"].dtype, leaves["norm.w"].dtype), params.buffers[1]

    out, inner, kept = forward(flat)
    assert inner == (f16, f32)
    assert kept is flat.buffers[1]  # aligned: nothing is copied
    assert out.dtype == f32


def test_keep_on_a_partly_kept_buffer_and_gradients_through_it():
    params = {"norm.w": torch.tensor([3.0, 4.0]), "w": torch.tensor([1.0, 2.0])}

    @cast_policy(O2.replace(keep=("norm.*",)))
    def loss(params):
        leaves = params.unflatten()
        assert (leaves["w"].dtype, leaves["norm.w"].dtype) == (f16, f32)
        return (leaves["w"] * leaves["norm.w"]).sum()

    grads = grad(loss)(flatten(params)).unflatten()
    assert torch.equal(grads["w"], params["norm.w"])
    assert torch.equal(grads["norm.w"], params["w"])
    assert grads["w"].dtype == grads["norm.w"].dtype == f32


def test_batch_norm_stays_float32_like_apex_keep_batchnorm_fp32():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    apply, params, buffers = functionalize(model)
    policy = O2.with_half(bf16).replace(keep=batch_norm_paths(model))
    inside = cast_policy(policy)(lambda p, x: {name: leaf.dtype for name, leaf in p.items()})(params, torch.ones(1))
    assert inside == {"0.weight": bf16, "0.bias": bf16, "1.weight": f32, "1.bias": f32}
    out = cast_policy(policy)(lambda p, b, x: apply(p, b, x)[0])(params, buffers, torch.randn(4, 3))
    assert out.dtype == f32
    assert bool(out.isfinite().all())


def test_pattern_that_matches_nothing_names_the_nearest_paths():
    forward = cast_policy(O2.replace(keep=("nrom.weight",)))(lambda params, x: x)
    message = r"Policy.keep: pattern 'nrom.weight' matches no leaf; nearest: \['norm.weight'"
    with pytest.raises(ValueError, match=message):
        forward({"norm.weight": torch.ones(1), "w": torch.ones(1)}, torch.ones(1))
    with pytest.raises(ValueError, match=message):
        forward(flatten({"norm.weight": torch.ones(1), "w": torch.ones(1)}), torch.ones(1))


# islands, methods, signatures


def test_full_precision_islands_nest():
    trace = []

    @full_precision
    def inner(x):
        trace.append(("inner", x.dtype))
        return deepest(x)

    @cast_policy(O2.with_half(bf16))
    def deepest(x):
        trace.append(("deepest", x.dtype))
        return x

    @cast_policy(O2)
    def outer(x):
        trace.append(("outer", x.dtype))
        y = inner(x * 2)
        trace.append(("after", y.dtype))
        return y.half() + x

    out = outer(torch.ones(2))
    assert trace == [("outer", f16), ("inner", f32), ("deepest", bf16), ("after", f32)]
    assert out.dtype == f32
    assert torch.equal(out, torch.full((2,), 3.0))


def test_full_precision_computes_what_would_overflow_in_float16():
    @cast_policy(O2)
    def forward(x):
        return full_precision(lambda v: v.square().sum())(x)

    assert forward(torch.full((4,), 1000.0)).item() == 4e6


def test_methods_can_be_decorated():
    class Model:
        def __init__(self):
            self.weight = torch.ones(2)

        @cast_policy(O2)
        def forward(self, x, scale=1.0):
            return self, x.dtype, x * scale

    model = Model()
    owner, dtype, out = model.forward(torch.ones(2), scale=3.0)
    assert owner is model
    assert dtype == f16
    assert torch.equal(out, torch.full((2,), 3.0))
    assert isinstance(Model.forward, type(cast_policy(O2)(len)))


def test_name_and_signature_survive():
    @cast_policy(O2)
    def forward(params, x, *, training: bool = False):
        return x

    assert forward.__name__ == "forward"
    assert str(inspect.signature(forward)) == "(params, x, *, training: bool = False)"
    assert inspect.unwrap(forward).__code__.co_name == "forward"
    assert forward.policy == O2


def test_gradients_arrive_in_the_dtype_of_what_was_passed_in():
    loss = cast_policy(O2)(lambda p, x: (p["w"] * x).sum())
    assert grad(loss)({"w": torch.ones(2)}, torch.ones(2))["w"].dtype == f32
    assert grad(loss)({"w": torch.ones(2).half()}, torch.ones(2))["w"].dtype == f16


@pytest.mark.parametrize("wrong", [torch.float16, "O2", lambda x: x])
def test_cast_policy_of_no_policy_says_what_to_write(wrong):
    with pytest.raises(TypeError, match=r"cast_policy: expected a Policy, found .*write `@cast_policy\(O2\)`"):
        cast_policy(wrong)


def test_policy_around_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="expected a function, found 3 of type int"):
        cast_policy(O2)(3)


def test_policy_under_vmap_and_compile():
    @cast_policy(O2.replace(keep=("n",)))
    def forward(params, x):
        return params["w"] * x + params["n"]

    params = {"w": torch.randn(3), "n": torch.randn(3)}
    x = torch.randn(4, 3)
    eager = forward(params, x)
    assert torch.equal(torch.vmap(forward, in_dims=(None, 0))(params, x), eager)
    assert torch.equal(torch.compile(forward, fullgraph=True, backend="aot_eager")(params, x), eager)
