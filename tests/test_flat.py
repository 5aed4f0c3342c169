"""Flat storage: every tree round-trips, padding stays zero, gradients arrive flat, layouts are constants."""

import collections
import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from npuamp_fn import O2, FlatTree, cast_policy, flatten, functionalize
from npuamp_fn.flat import ROW


def assert_same_leaf(new, old, strides=True):
    if not isinstance(old, torch.Tensor):
        assert new is old
        return
    assert new.dtype == old.dtype
    assert new.shape == old.shape
    assert new.device == old.device
    assert torch.equal(new.nan_to_num(7.0), old.nan_to_num(7.0)) if old.is_floating_point() else torch.equal(new, old)
    if strides and old.numel() > 0:
        for size, a, b in zip(old.shape, new.stride(), old.stride(), strict=True):
            assert size < 2 or a == b


def assert_same_tree(new, old, strides=True):
    assert torch_pytree.tree_structure(new) == torch_pytree.tree_structure(old)
    for a, b in zip(torch_pytree.tree_leaves(new), torch_pytree.tree_leaves(old), strict=True):
        assert_same_leaf(a, b, strides)


def padding_of(flat):
    """Return the elements of every buffer that belong to no tensor."""
    found = []
    for bucket, buffer in zip(flat.layout.buckets, flat.buffers, strict=True):
        mask = torch.ones(buffer.shape[-1], dtype=torch.bool)
        for index in bucket.segments:
            segment = flat.layout.segments[index]
            mask[segment.offset : segment.offset + segment.size] = False
        found.append(buffer[..., mask])
    return found


# what a leaf can be

_floats = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


@st.composite
def _tensors(draw):
    dtype = draw(_floats)
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    if x.numel() and draw(st.booleans()):  # bit patterns that a careless copy would change
        x.view(-1)[0] = draw(st.sampled_from([float("inf"), float("-inf"), -0.0, float("nan")]))
    kind = draw(st.sampled_from(["plain", "permuted", "large"]))
    if kind == "permuted":
        return x.permute(draw(st.permutations(range(x.dim()))))
    if kind == "large":
        return torch.arange(draw(st.sampled_from([255, 256, 257, 600]))).to(dtype)
    return x


_others = st.sampled_from([None, 3, "text", True, torch.tensor(5), torch.ones(2, dtype=torch.complex64)])
_trees = st.recursive(
    st.one_of(_tensors(), _others),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.sampled_from("abcd"), children, max_size=3),
        st.dictionaries(st.sampled_from("abcd"), children, max_size=3).map(collections.OrderedDict),
        st.tuples(children, children),
    ),
    max_leaves=8,
)


@given(_trees)
@settings(max_examples=150, deadline=None)
def test_unflatten_inverts_flatten_bitwise_with_strides(tree):
    flat = flatten(tree)
    assert_same_tree(flat.unflatten(), tree)
    for padding in padding_of(flat):
        assert not padding.any()
    for bucket, buffer in zip(flat.layout.buckets, flat.buffers, strict=True):
        assert (buffer.dtype, buffer.device) == (bucket.dtype, bucket.device)
        assert buffer.shape == (bucket.size,)
        assert bucket.size % ROW == 0
    segments = flat.segments()
    assert list(segments) == list(flat.layout.paths)
    assert sum(view.numel() for view in segments.values()) == flat.layout.size


@given(_trees)
@settings(max_examples=50, deadline=None)
def test_original_dtypes_come_back_after_a_cast(tree):
    halves = flatten(tree, torch.bfloat16)
    for buffer in halves.buffers:
        assert buffer.dtype in (torch.bfloat16, torch.float64)
    restored = halves.unflatten("original")
    for new, old in zip(torch_pytree.tree_leaves(restored), torch_pytree.tree_leaves(tree), strict=True):
        if isinstance(old, torch.Tensor) and old.is_floating_point():
            expected = old if old.dtype == torch.float64 else old.to(torch.bfloat16).to(old.dtype)
            assert_same_leaf(new, expected, strides=False)
        else:
            assert new is old


def _special_tree():
    base = torch.randn(6, 8)
    return {
        "conv": torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
        "volume": torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        "transposed": torch.randn(3, 4).t(),
        "sliced": base[:, ::2],
        "offset": base[2:4, 1:3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "half": torch.randn(5).half(),
        "double": torch.randn(300, dtype=torch.float64),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "phase": torch.ones(2, dtype=torch.complex64),
        "nothing": None,
        "name": "adam",
    }


def test_sliced_and_expanded_leaves_become_contiguous_and_dense_ones_keep_their_strides():
    tree = _special_tree()
    out = flatten(tree).unflatten()
    assert_same_tree(out, tree, strides=False)
    for name in ("conv", "volume", "transposed"):
        assert out[name].stride() == tree[name].stride()
        assert not out[name].is_contiguous()
    for name in ("sliced", "offset", "expanded"):
        assert out[name].is_contiguous()
    assert out["conv"].is_contiguous(memory_format=torch.channels_last)


def test_leaves_are_bucketed_by_dtype_and_never_promoted():
    flat = flatten(_special_tree())
    assert [bucket.dtype for bucket in flat.layout.buckets] == [torch.float32, torch.float16, torch.float64]
    assert [buffer.dtype for buffer in flat.buffers] == [torch.float32, torch.float16, torch.float64]
    assert [type(leaf).__name__ for leaf in flat.rest] == ["Tensor", "Tensor", "Tensor", "NoneType", "str"]


def test_meta_device_gets_its_own_buffer():
    tree = {"a": torch.ones(3), "b": torch.ones(2, 2, device="meta"), "c": torch.ones(4, device="meta")}
    flat = flatten(tree)
    assert [(bucket.device.type, bucket.size) for bucket in flat.layout.buckets] == [("cpu", ROW), ("meta", 2 * ROW)]
    out = flat.unflatten()
    assert (out["b"].device.type, out["b"].shape) == ("meta", (2, 2))
    assert torch.equal(out["a"], tree["a"])


def test_tree_without_float_leaves_has_no_buffers():
    flat = flatten({"n": 1, "none": None, "i": torch.arange(2)})
    assert flat.buffers == ()
    assert flat.unflatten()["n"] == 1
    assert flatten({}).unflatten() == {}


def test_fake_tensors_are_laid_out_without_asking_for_an_address():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        flat = flatten({"a": torch.ones(3, 2), "b": torch.ones(3, 2)})
    assert flat.buffers[0].shape == (2 * ROW,)


def test_padding_costs_whole_rows():
    flat = flatten({"a": torch.ones(1), "b": torch.ones(256), "c": torch.ones(257)})
    assert [segment.offset for segment in flat.layout.segments] == [0, 256, 512]
    assert flat.buffers[0].shape == (4 * ROW,)
    assert flat.layout.size == 1 + 256 + 257


def test_views_write_into_the_buffer():
    flat = flatten({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
    flat.unflatten()["b"].fill_(3.0)
    flat.segments()["w"].fill_(2.0)
    assert torch.equal(flat.buffers[0][ROW : ROW + 2], torch.full((2,), 3.0))
    assert torch.equal(flat.unflatten()["w"], torch.full((2, 2), 2.0))


def test_segments_exclude_padding_and_keep_batch_dimensions():
    flat = flatten({"w": torch.ones(2, 3), "h": torch.ones(4).half()})
    assert {path: view.shape for path, view in flat.segments().items()} == {"w": (6,), "h": (4,)}
    stacked = flat.map(lambda buffer: torch.stack([buffer, buffer * 2]))
    assert stacked.segments()["w"].shape == (2, 6)


# aliases


def test_tied_weights_are_an_error_that_names_both_paths():
    w = torch.ones(3)
    with pytest.raises(ValueError, match=r"`embed` and `head.weight` are the same tensor.*tie=True"):
        flatten({"embed": w, "head": {"weight": w}})
    with pytest.raises(ValueError, match="are the same tensor"):
        flatten({"embed": w, "head": w[:]})  # another tensor object over the same elements


def test_tied_weights_are_stored_once_and_stay_tied():
    w = torch.randn(3, 4)
    flat = flatten({"embed": w, "head": w[:], "b": torch.ones(2)}, tie=True)
    assert flat.layout.paths == ("embed", "b")
    assert flat.layout.size == 14
    out = flat.unflatten()
    assert torch.equal(out["embed"], w)
    out["embed"].fill_(5.0)
    assert torch.equal(out["head"], torch.full((3, 4), 5.0))
    grads = torch.func.grad(lambda p: (p.unflatten()["embed"] * 2 + p.unflatten()["head"] * 3).sum())(flat)
    assert torch.equal(grads.segments()["embed"], torch.full((12,), 5.0))


def test_transposed_view_of_the_same_memory_was_silently_untied():
    w = torch.ones(3, 4)
    for tie in (False, True):
        with pytest.raises(ValueError, match="`w` and `wt` are different views of the same memory"):
            flatten({"w": w, "wt": w.t()}, tie=tie)


def test_disjoint_views_of_one_buffer_are_no_aliases():
    flat = flatten({"a": torch.ones(3), "b": torch.zeros(3)})
    again = flatten(flat.unflatten())
    assert torch.equal(again.buffers[0], flat.buffers[0])
    qkv = torch.randn(6, 2)
    assert_same_tree(flatten(dict(zip("qkv", qkv.chunk(3), strict=True))).unflatten()["q"], qkv[:2])


# gradients


def _loss(tree, x):
    hidden = torch.tanh(x @ tree["w"].to(x.dtype) + tree["b"].to(x.dtype))
    return (hidden * tree["c"].to(x.dtype).mean()).square().sum() + 0.0 * tree["unused"].sum()


def _params():
    gen = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(5, 3, generator=gen).t().contiguous().t(),
        "b": torch.randn(3, generator=gen).half(),
        "c": torch.randn(2, 3, 2, 2, generator=gen).to(memory_format=torch.channels_last),
        "unused": torch.randn(4, generator=gen),
        "n": 7,
    }


def test_gradient_of_a_flat_tree_is_flat_and_equals_the_gradients_per_leaf():
    params, x = _params(), torch.randn(4, 5)
    flat = flatten(params)
    grads = torch.func.grad(lambda p: _loss(p.unflatten(), x))(FlatTree(flat.buffers, (), _no_rest(flat)))
    tensors = {name: value for name, value in params.items() if name != "n"}
    expected = torch.func.grad(_loss)(tensors, x)
    assert type(grads) is FlatTree
    out = grads.unflatten()
    for name, gradient in expected.items():
        assert out[name].dtype == params[name].dtype
        assert torch.equal(out[name], gradient), name
    for padding in padding_of(grads):
        assert not padding.any()


def _no_rest(flat):
    return flatten({name: value for name, value in flat.unflatten().items() if name != "n"}).layout


def test_flatten_is_differentiable():
    w, b = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    flat = flatten({"w": w, "b": b})
    (flat.buffers[0].square().sum()).backward()
    assert torch.equal(w.grad, 2 * w.detach())
    assert torch.equal(b.grad, 2 * b.detach())


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_backward_of_unflatten_is_one_cat():
    flat = flatten({f"w{i}": torch.randn(3, i + 1) for i in range(20)})
    buffer = flat.buffers[0].requires_grad_()
    leaves = FlatTree((buffer,), flat.rest, flat.layout).unflatten()
    loss = sum(leaf.square().sum() for leaf in leaves.values())
    with _Count() as count:
        torch.autograd.grad(loss, buffer)
    assert count.calls["cat"] == 1
    assert count.calls["slice_backward"] == 0
    assert count.calls["select_backward"] == 0


def test_leading_batch_dimensions_are_kept():
    params = {"w": torch.randn(2, 3).t(), "b": torch.randn(3)}
    flat = flatten(params)
    stacked = flat.map(lambda buffer: torch.stack([buffer, 2 * buffer, 3 * buffer]))
    out = stacked.unflatten()
    assert out["w"].shape == (3, 3, 2)
    assert torch.equal(out["w"][1], 2 * params["w"])
    assert out["w"].stride()[1:] == params["w"].stride()
    sums = torch.vmap(lambda p: p.unflatten()["w"].sum() + p.unflatten()["b"].sum())(stacked)
    total = params["w"].sum() + params["b"].sum()
    torch.testing.assert_close(sums, torch.stack([total, 2 * total, 3 * total]))


def test_flatten_under_vmap_gives_one_buffer_per_member():
    params = {"w": torch.randn(4, 2, 3), "b": torch.randn(4, 3)}
    flat = torch.vmap(flatten)(params)
    assert flat.buffers[0].shape == (4, 2 * ROW)
    assert_same_tree(flat.unflatten(), params, strides=False)


# casts and kept leaves


def test_kept_leaves_get_a_buffer_of_their_own_laid_out_last():
    tree = {"norm.weight": torch.ones(3), "w": torch.ones(4), "norm.bias": torch.zeros(3)}
    flat = flatten(tree, torch.bfloat16, keep=("norm.*",))
    assert [buffer.dtype for buffer in flat.buffers] == [torch.bfloat16, torch.float32]
    assert [len(bucket.segments) for bucket in flat.layout.buckets] == [1, 2]
    assert {name: leaf.dtype for name, leaf in flat.unflatten().items()} == {
        "norm.weight": torch.float32,
        "w": torch.bfloat16,
        "norm.bias": torch.float32,
    }
    full = flatten(tree, keep=("norm.*",))
    assert full.cast(torch.float16, keep=("norm.*",)).buffers[1] is full.buffers[1]
    with pytest.raises(ValueError, match=r"pattern 'nrm.\*' matches no leaf"):
        flatten(tree, keep=("nrm.*",))


def test_cast_returns_the_same_buffers_when_the_dtype_fits():
    flat = flatten({"w": torch.ones(3), "d": torch.ones(2, dtype=torch.float64)})
    assert all(a is b for a, b in zip(flat.cast(torch.float32).buffers, flat.buffers, strict=True))
    assert flat.cast(None) is flat
    halves = flat.cast(torch.float16)
    assert [buffer.dtype for buffer in halves.buffers] == [torch.float16, torch.float64]
    assert halves.layout is flat.layout


def _mixed():
    w = torch.randn(3, 4)
    return flatten({"a": w, "tied": w, "n.w": torch.randn(2, 3).t(), "c": torch.ones(300).half(), "i": 4}, tie=True)


def test_keeping_a_part_of_a_buffer_keeps_values_ties_batch_and_original_dtypes():
    # It used to go through the tree: tied weights were refused, batch dimensions became part of the shapes, and
    # dtype="original" gave the buffer's dtype.
    flat = _mixed().cast(torch.float32)
    cast = flat.cast(torch.bfloat16, keep=("n.*",))
    out = cast.unflatten()
    assert out["n.w"].dtype == torch.float32
    assert out["a"].dtype == out["c"].dtype == torch.bfloat16
    assert torch.equal(out["n.w"], flat.unflatten()["n.w"])
    assert out["n.w"].stride() == flat.unflatten()["n.w"].stride()
    assert out["tied"].data_ptr() == out["a"].data_ptr()
    assert out["i"] == 4
    assert cast.unflatten("original")["c"].dtype == torch.float16
    stacked = flat.map(lambda buffer: torch.stack([buffer, buffer])).cast(torch.bfloat16, keep=("n.*",))
    assert stacked.unflatten()["a"].shape == (2, 3, 4)
    assert stacked.unflatten()["n.w"].dtype == torch.float32
    assert not any(padding.any() for padding in padding_of(stacked))


def test_keep_pattern_for_another_argument_does_not_break_a_partly_kept_flat_tree():
    flat = flatten({"w": torch.ones(2), "norm": torch.ones(2)})
    policy = O2.replace(keep=("norm", "shift"))

    @cast_policy(policy)
    def forward(params, other):
        tree = params.unflatten()
        return tuple(str(x.dtype) for x in (tree["w"], tree["norm"], other["shift"], other["x"]))

    found = forward(flat, {"shift": torch.ones(1), "x": torch.ones(1)})
    assert found == ("torch.float16", "torch.float32", "torch.float32", "torch.float16")


def test_absent_buffers_unflatten_to_none_also_when_partly_kept():
    flat = flatten({"a": torch.ones(2), "b": torch.ones(2), "h": torch.ones(2).half()})
    only = FlatTree((None, flat.buffers[1]), flat.rest, flat.layout)
    assert only.unflatten()["a"] is None
    cast = only.cast(torch.bfloat16, keep=("a",)).unflatten()
    assert cast["a"] is None
    assert cast["b"] is None
    assert cast["h"].dtype == torch.bfloat16


def test_unflatten_refuses_what_is_no_dtype():
    with pytest.raises(TypeError, match=r"expected a torch\.dtype, \"original\" or None, found 'half'"):
        flatten({"a": torch.ones(1)}).unflatten("half")
    assert flatten({"a": torch.ones(1)}).unflatten(torch.float16)["a"].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, 16])
def test_dtypes_that_would_destroy_parameters_are_refused(dtype):
    tree = {"w": torch.full((2,), 0.5)}
    for call in (
        lambda: flatten(tree, dtype),
        lambda: flatten(tree).cast(dtype),
        lambda: flatten(tree).unflatten(dtype),
    ):
        with pytest.raises(TypeError, match=r"dtype: expected a floating-point torch\.dtype or None, found"):
            call()


def test_a_string_is_no_sequence_of_patterns():
    with pytest.raises(TypeError, match=r"expected a sequence of patterns, found the string 'w'; write \('w',\)"):
        flatten({"w": torch.ones(2)}, keep="w")


# pack and map


def test_packing_different_tensors_for_tied_leaves_kept_the_last_in_silence():
    w = torch.ones(2)
    layout = flatten({"a": w, "b": w}, tie=True).layout
    gradient = torch.full((2,), 3.0)
    assert torch.equal(layout.pack({"a": gradient, "b": gradient}).segments()["a"], gradient)
    with pytest.raises(ValueError, match="leaf `a` is stored once for several tied leaves"):
        layout.pack({"a": gradient, "b": torch.zeros(2)})


def test_pack_takes_gradients_of_any_memory_format_and_dtype():
    params = _params()
    flat = flatten(params)
    grads = {name: torch.randn(v.shape) if name != "n" else None for name, v in params.items() if name != "n"}
    packed = flat.layout.pack({**grads, "n": None})
    assert packed.layout is flat.layout
    assert packed.rest == (None,)
    for name, gradient in grads.items():
        assert torch.equal(packed.unflatten()[name], gradient), name
    halves = flat.layout.pack({**grads, "n": None}, torch.bfloat16)
    assert [buffer.dtype for buffer in halves.buffers] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("b"), r"layout: structures differ: missing leaf `b` \(expected 2 leaves, found 1\)"),
        (lambda t: t.update(extra=torch.ones(1)), r"unexpected leaf `extra` \(expected 2 leaves, found 3\)"),
        (
            lambda t: t.update(w=torch.ones(3, 2)),
            r"leaf `w`: expected a float tensor of shape \(2, 3\), found a torch.float32 tensor of shape \(3, 2\)",
        ),
        (lambda t: t.update(w=None), "leaf `w`: expected a float tensor .* found None"),
        (lambda t: t.update(b=torch.arange(3)), "leaf `b`: .* found a torch.int64 tensor"),
    ],
)
def test_pack_errors_name_the_path(change, message):
    tree = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    layout = flatten(tree).layout
    other = dict(tree)
    change(other)
    with pytest.raises(ValueError, match=message):
        layout.pack(other)


def test_map_over_another_layout_was_silently_wrong():
    a = flatten({"w": torch.ones(2), "b": torch.ones(3)})
    b = flatten({"w": torch.ones(2), "c": torch.ones(3)})
    assert torch.equal(a.map(torch.add, a).unflatten()["b"], torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="layouts differ, first at `b`"):
        a.map(torch.add, b)


# layouts as constants


def test_layouts_of_equal_trees_are_equal_and_hash_alike():
    make = lambda extra=(): flatten({"w": torch.randn(2, 3), "b": torch.randn(3), **dict(extra)}).layout  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make({"c": torch.ones(1)})
    assert make() != flatten({"w": torch.randn(3, 2), "b": torch.randn(3)}).layout
    assert make() != flatten({"w": torch.randn(3, 2).t(), "b": torch.randn(3)}).layout
    assert make() != "layout"


def test_layout_survives_pickle_and_deepcopy():
    flat = flatten({"w": torch.randn(2, 3), "o": collections.OrderedDict(b=torch.randn(3).half())})
    hash(flat.layout)
    for again in (pickle.loads(pickle.dumps(flat.layout)), copy.deepcopy(flat.layout)):
        assert again == flat.layout
        assert hash(again) == hash(flat.layout)
    other = pickle.loads(pickle.dumps(flat))
    assert_same_tree(other.unflatten(), flat.unflatten())


def test_pickled_layout_brought_the_hash_of_another_process_along():
    code = (
        "import pickle, sys, torch\nfrom npuamp_fn import flatten\n"
        "layout = flatten({'weight': torch.ones(2)}).layout\nhash(layout)\n"
        "sys.stdout.buffer.write(pickle.dumps(layout))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    own = flatten({"weight": torch.ones(2)}).layout
    foreign = pickle.loads(done.stdout)
    assert foreign == own
    assert hash(foreign) == hash(own)
    assert len({foreign, own}) == 1


def test_compiled_step_with_a_layout_made_outside_is_one_graph_for_all_equal_layouts():
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward

    def step(params, x):
        grads = torch.func.grad(lambda p: (x @ p.unflatten()["w"] + p.unflatten()["b"]).square().sum())(params)
        return params.map(lambda p, g: p - 0.1 * g, grads)

    def make(width):
        return flatten({"w": torch.ones(3, width), "b": torch.zeros(width)})

    x = torch.randn(4, 3)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    out = compiled(make(2), x)
    assert torch.equal(out.buffers[0], step(make(2), x).buffers[0])
    assert out.layout == make(2).layout
    compiled(out, x)
    compiled(make(2), x)
    assert len(graphs) == 1
    wider = compiled(make(5), x)
    assert torch.equal(wider.buffers[0], step(make(5), x).buffers[0])
    assert len(graphs) == 2


def test_layouts_made_inside_a_compiled_region_equal_those_made_outside():
    tree = {"w": torch.randn(3, 2).t(), "norm": torch.randn(3), "h": torch.ones(2).half()}

    def step(tree):
        flat = flatten(tree)
        return flat, flat.cast(torch.bfloat16, keep=("norm",))

    eager, compiled = step(tree), torch.compile(step, fullgraph=True, backend="aot_eager")(tree)
    for a, b in zip(eager, compiled, strict=True):
        assert a.layout == b.layout
        for x, y in zip(a.buffers, b.buffers, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def test_parameters_of_a_module_round_trip():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    model = model.to(memory_format=torch.channels_last)
    params = functionalize(model).params
    assert_same_tree(flatten(params).unflatten(), params)


def test_a_module_or_a_generator_in_place_of_a_tree_is_refused():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=r"found the module Linear; write apply, params, buffers = functionalize\(module"
    ):
        flatten(module)
    with pytest.raises(TypeError, match=r"^flatten: `head`: expected a tree of tensors, found the module Linear"):
        flatten({"head": module})
    with pytest.raises(TypeError, match=r"found a generator; write list\(\.\.\.\), or dict\(module.named_parameters"):
        flatten(module.parameters())
    assert flatten(dict(module.named_parameters())).layout.paths == ("weight", "bias")
