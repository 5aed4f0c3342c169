"""The pytree facade agrees with torch's own, keeps every field, and names the first differing path."""

import collections
import dataclasses
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from npuamp_fn import DynamicLossScale, NoOpLossScale, ScaledGrads, StaticLossScale, flatten
from npuamp_fn.tree import (
    check_patterns,
    check_same_structure,
    matches,
    struct,
    take_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


torch_pytree.register_dataclass(Point)


@struct(static=("interval", "name"))
class Counter:
    value: Any
    children: Any
    interval: int
    name: str


class Keyless:
    """A container that was registered with torch without key paths."""

    def __init__(self, items):
        self.items = items


torch_pytree.register_pytree_node(
    Keyless, lambda k: (list(k.items), None), lambda items, _: Keyless(list(items)), serialized_type_name="test.Keyless"
)

_leaf = st.one_of(
    st.none(), st.integers(-3, 3), st.text(max_size=2), st.booleans(), st.builds(torch.tensor, st.integers(0, 9))
)
_key = st.one_of(st.text(alphabet="abxyz.", min_size=1, max_size=3), st.integers(0, 5))


def _containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(_key, children, max_size=3),
        st.dictionaries(_key, children, max_size=3).map(collections.OrderedDict),
        st.dictionaries(_key, children, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.lists(children, max_size=3).map(lambda items: collections.deque(items, maxlen=4)),
        st.builds(Pair, children, children),
        st.builds(Point, children, children),
        st.builds(Counter, children, children, st.integers(0, 9), st.text(max_size=3)),
    )


zoo = st.recursive(_leaf, _containers, max_leaves=10)


def _same(a, b):
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


@given(zoo)
@settings(max_examples=100, deadline=None)
def test_leaves_order_and_paths_are_those_of_torch(tree):
    leaves, treedef = tree_flatten(tree)
    expected, spec = torch_pytree.tree_flatten(tree)
    assert _same(leaves, expected)
    assert _same(tree_leaves(tree), expected)
    assert tree_structure(tree) == spec
    paths = [path for path, _ in torch_pytree.tree_flatten_with_path(tree)[0]]
    assert len(tree_paths(tree)) == len(paths)
    for ours, theirs in zip(tree_paths(tree), paths, strict=True):
        assert ours == ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", None)))) for k in theirs)
    again = tree_unflatten(treedef, leaves)
    assert torch_pytree.tree_structure(again) == spec
    assert _same(torch_pytree.tree_leaves(again), expected)


@given(zoo)
@settings(max_examples=100, deadline=None)
def test_map_keeps_the_structure_and_applies_to_every_leaf(tree):
    mapped = tree_map(lambda leaf: (leaf,), tree)
    expected = torch_pytree.tree_map(lambda leaf: (leaf,), tree)
    assert torch_pytree.tree_structure(mapped) == torch_pytree.tree_structure(expected)
    assert _same(tree_leaves(mapped), torch_pytree.tree_leaves(expected))


@given(zoo, st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_is_leaf_stops_where_torch_stops(tree, chosen):
    def is_leaf(node):
        return isinstance(node, (Point, Counter)) and (isinstance(node, Point) or node.interval == chosen)

    assert _same(tree_flatten(tree, is_leaf)[0], torch_pytree.tree_flatten(tree, is_leaf)[0])


def test_is_leaf_that_stops_at_one_dataclass_does_not_hide_the_next():
    tree = [Point(1, 2), Point(3, 4)]
    leaves = tree_flatten(tree, lambda node: isinstance(node, Point) and node.x == 1)[0]
    assert leaves == [tree[0], 3, 4]


def test_dictionaries_keep_insertion_order_and_none_is_a_leaf():
    tree = {"z": 1, "a": None, "m": collections.OrderedDict(y=2, b=3)}
    assert tree_leaves(tree) == [1, None, 2, 3]
    assert tree_paths(tree) == ["z", "a", "m.y", "m.b"]


@pytest.mark.parametrize("empty", [{}, [], (), collections.OrderedDict(), {"a": {}, "b": []}])
def test_empty_containers_survive(empty):
    leaves, treedef = tree_flatten(empty)
    assert leaves == []
    assert tree_paths(empty) == []
    rebuilt = tree_unflatten(treedef, [])
    assert rebuilt == empty
    assert type(rebuilt) is type(empty)


def test_container_types_survive_a_map():
    tree = collections.defaultdict(list, a=Pair(1, [2]), b=collections.deque([3], maxlen=2))
    mapped = tree_map(lambda x: x + 1, tree)
    assert type(mapped) is collections.defaultdict
    assert mapped.default_factory is list
    assert mapped["a"] == Pair(2, [3])
    assert type(mapped["a"]) is Pair
    assert mapped["b"].maxlen == 2


def test_class_registered_without_key_paths_gets_numbered_paths():
    tree = {"k": Keyless([1, {"a": 2}]), "p": Point(3, 4)}
    assert tree_leaves(tree) == [1, 2, 3, 4]
    assert tree_paths(tree) == ["k.0", "k.1.a", "p.x", "p.y"]
    assert flatten({"k": Keyless([torch.ones(2)])}).layout.paths == ("k.0",)


# structs


def _structs():
    scale = DynamicLossScale.create(
        4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7, hysteresis=2, min_scale=2.0, max_scale=64.0
    )
    return [
        NoOpLossScale.create(),
        StaticLossScale.create(8.0),
        scale,
        Counter(torch.ones(1), {"a": 2}, 5, "n"),
        flatten({"w": torch.ones(3), "n": 1}),
    ]


@pytest.mark.parametrize("value", _structs(), ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("registry", ["torch", "optree", "facade"])
def test_structs_keep_every_field_in_both_registries(value, registry):
    if registry == "torch":
        leaves, treedef = torch_pytree.tree_flatten(value)
        again = torch_pytree.tree_unflatten(leaves, treedef)
    elif registry == "optree":
        leaves, treedef = optree.tree_flatten(value, none_is_leaf=True, namespace="torch")
        again = optree.tree_unflatten(treedef, leaves)
    else:
        leaves, treedef = tree_flatten(value)
        again = tree_unflatten(treedef, leaves)
    assert type(again) is type(value)
    for field in dataclasses.fields(value):
        old, new = getattr(value, field.name), getattr(again, field.name)
        assert new is old or new == old, field.name


def test_static_fields_survive_jit_like_maps():
    # jmp's min_loss_scale fell back to its default at every tree_map.
    scale = DynamicLossScale.create(4.0, min_scale=2.0**-20)
    mapped = torch_pytree.tree_map(lambda x: x.clone(), scale)
    assert mapped.min_scale == 2.0**-20
    assert mapped.growth_interval == scale.growth_interval


def test_struct_leaves_have_key_paths():
    scale = DynamicLossScale.create()
    names = ["value", "good_steps", "bad_steps_left"]
    assert tree_paths({"scale": scale}) == [f"scale.{name}" for name in names]
    keys = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path([scale])[0]]
    assert keys == [f"[0].{name}" for name in names]


def test_structs_are_frozen_and_unflatten_takes_placeholders():
    counter = Counter(1, 2, 3, "n")
    with pytest.raises(dataclasses.FrozenInstanceError):
        counter.value = 2
    treedef = tree_flatten(counter)[1]
    marker = object()
    assert tree_unflatten(treedef, [marker, marker]).value is marker


def test_static_fields_are_part_of_the_structure():
    assert tree_structure(Counter(1, 2, 3, "n")) == tree_structure(Counter(5, 6, 3, "n"))
    assert tree_structure(Counter(1, 2, 3, "n")) != tree_structure(Counter(1, 2, 4, "n"))
    with pytest.raises(ValueError, match="structures differ"):
        tree_map(lambda a, b: a, Counter(1, 2, 3, "n"), Counter(1, 2, 4, "n"))


def test_static_name_that_is_no_field_is_refused():
    with pytest.raises(TypeError, match=r"static names \['intervall'\] are not fields; fields are \['value'\]"):

        @struct(static=("intervall",))
        class Wrong:
            value: int


def test_named_tuple_of_results_is_a_tree_with_paths():
    out = ScaledGrads({"w": 1}, 2, 3, (), 4, NoOpLossScale.create())
    assert tree_paths(out) == ["grads.w", "inv_scale", "value", "finite"]


# inside compiled regions


def _double(tree):
    return tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, tree)


def _zoo_of_tensors():
    one = torch.ones(2)
    return {
        "z": one,
        "a": [None, (one + 1,)],
        "o": collections.OrderedDict(b=one + 2, a=3),
        "d": collections.defaultdict(list, k=one + 3),
        "n": Pair(one + 4, 7),
        "s": Counter(one + 5, {"q": one + 6}, 4, "n"),
        "p": Point(one + 7, one + 8),
        "f": flatten({"w": one + 9}),
    }


def test_trees_made_outside_work_inside_a_compiled_region():
    def step(tree):
        return _double(tree), tree_paths(tree), len(tree_leaves(tree))

    tree = _zoo_of_tensors()
    out, paths, count = torch.compile(step, fullgraph=True, backend="aot_eager")(tree)
    assert paths == tree_paths(tree)
    assert count == len(tree_leaves(tree))
    assert torch_pytree.tree_structure(out) == torch_pytree.tree_structure(tree)
    for new, old in zip(tree_leaves(out), tree_leaves(_double(tree)), strict=True):
        assert torch.equal(new, old) if isinstance(old, torch.Tensor) else new == old
    assert out["s"].interval == 4


def test_trees_made_inside_a_compiled_region_come_out_right():
    def step(x):
        tree = {"b": [x, None], "a": Pair(x + 1, 3), "s": Counter(x + 2, (), 9, "in")}
        return _double(tree)

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(torch.ones(2))
    expected = step(torch.ones(2))
    assert list(out) == ["b", "a", "s"]
    assert torch.equal(out["b"][0], expected["b"][0])
    assert out["b"][1] is None
    assert torch.equal(out["a"].first, torch.full((2,), 4.0))
    assert (out["s"].interval, out["s"].name) == (9, "in")


# messages


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        ({"a": 1}, {"b": 1}, "grads: structures differ: expected leaf `a`, found `b`"),
        ({"a": 1, "b": 2}, {"a": 1}, r"missing leaf `b` \(expected 2 leaves, found 1\)"),
        ({"a": 1}, {"a": 1, "c": 2}, r"unexpected leaf `c` \(expected 1 leaves, found 2\)"),
        ({"a": {"w": 1, "b": 2}}, {"a": {"w": 1, "c": 2}}, r"expected leaf `a.b`, found `a.c`"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "expected leaf `a`, found `b`"),
        ([1, 2], (1, 2), "structures differ: at the root: expected a list, found a tuple"),
        (Point(1, 2), {"x": 1, "y": 2}, "at the root: expected a Point, found a dict"),
        ({"a": [1, [2]]}, {"a": [1, (2,)]}, r"at `a\.1`: expected a list, found a tuple"),
        ({"c": Counter(1, 2, 3, "n")}, {"c": Counter(1, 2, 4, "n")}, "at `c`: Counter: expected 3, found 4"),
        ({"e": {}}, {"e": []}, "at `e`: expected a dict, found a list"),
        ({"e": 1, "f": ()}, {"e": 1, "f": None}, "unexpected leaf `f`"),
        (
            {"p": flatten({"w": torch.ones(2), "b": torch.ones(1)})},
            {"p": flatten({"w": torch.ones(2), "b": torch.ones(3)})},
            "at `p`: FlatTree: layouts differ, first at `b`: expected Segment",
        ),
        (
            {"p": flatten({"w": torch.ones(2)})},
            {"p": flatten({"w": torch.ones(2), "b": torch.ones(3)})},
            "at `p`: FlatTree: layouts differ, first at `b`: expected 1 tensors, found 2",
        ),
    ],
)
def test_structure_errors_name_the_first_differing_path(expected, actual, message):
    with pytest.raises(ValueError, match=message):
        check_same_structure(expected, actual, "grads")


def test_map_over_several_trees_refuses_another_structure():
    with pytest.raises(ValueError, match="expected leaf `w`, found `v`"):
        tree_map(lambda a, b: a + b, {"w": 1}, {"v": 1})


def test_map_over_a_none_and_a_tensor_gets_both():
    pairs = tree_map(lambda a, b: (a, b), {"w": None, "b": 1}, {"w": 2, "b": None})
    assert pairs == {"w": (None, 2), "b": (1, None)}


@given(st.text(alphabet="ab.*", max_size=6), st.text(alphabet="ab.", max_size=6))
@settings(max_examples=300, deadline=None)
def test_patterns_match_as_a_regular_expression_does(pattern, path):
    import re

    expression = ".*".join(re.escape(piece) for piece in pattern.split("*"))
    assert matches(path, pattern) == (re.fullmatch(expression, path, re.DOTALL) is not None)


def test_unmatched_pattern_names_the_nearest_paths():
    with pytest.raises(ValueError, match=r"keep: pattern 'heat.weight' matches no leaf; nearest: \['head.weight'"):
        check_patterns(["*.bias", "heat.weight"], ["body.bias", "head.weight", "zzz"], "keep")


def test_taken_leaves_can_be_put_back():
    tree = {"w": torch.ones(1), "n": 3, "p": Point(torch.zeros(1), None)}
    taken, frame = take_leaves(tree, torch.is_tensor)
    assert len(taken) == 2
    again = frame.put(taken)
    assert again["w"] is tree["w"]
    assert again["n"] == 3
    assert again["p"] == tree["p"]
    assert frame.put(["a", "b"], blank=True) == {"w": "a", "n": None, "p": Point("b", None)}
