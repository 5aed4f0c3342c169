"""State dicts: everything a training run holds survives a file; wrong entries are all listed, nothing is changed."""

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from npuamp_fn import (
    DynamicLossScale,
    FlatTree,
    NoOpLossScale,
    StaticLossScale,
    flatten,
    functionalize,
    grad,
    load_state_dict,
    optim,
    state_dict,
    with_loss_scaling,
)
from npuamp_fn.tree import tree_leaves, tree_map, tree_structure


class Train(NamedTuple):
    params: Any
    opt_state: Any
    loss_scale: Any
    buffers: Any
    epoch: Any


def run_state(flat, half, steps=2):
    """Return the state of a short run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
    apply, params, buffers = functionalize(model.to(memory_format=torch.channels_last))
    optimizer = optim.with_master_weights(optim.adamw(1e-2)) if half else optim.adamw(1e-2)
    params = flatten(params) if flat else params
    if half:
        params = params.cast(torch.bfloat16, keep=("1.*",)) if flat else tree_map(lambda p: p.bfloat16(), params)
    state, scale = optimizer.init(params), DynamicLossScale.create(8.0, growth_interval=1)

    def loss_fn(params, x):
        leaves = params.unflatten(torch.float32) if flat else tree_map(lambda p: p.float(), params)
        out, new = apply(leaves, buffers, x)
        return out.square().mean(), new

    for _ in range(steps):
        out = with_loss_scaling(grad(loss_fn, has_aux=True))(scale, params, torch.randn(4, 1, 4, 4))
        params, state = optimizer.update(out, state, params)
        scale, buffers = out.loss_scale, out.aux
    return Train(params, state, scale, buffers, torch.tensor(3))


def assert_equal_trees(a, b):
    assert tree_structure(a) == tree_structure(b)
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert torch.equal(x, y)
        else:
            assert x == y


FORMS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("flat", "half"), FORMS)
def test_a_run_survives_a_file_that_loads_with_weights_only(tmp_path, flat, half):
    state = run_state(flat, half)
    torch.save(state_dict(state), tmp_path / "run.pt")
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    assert all(type(name) is str and type(value) is torch.Tensor for name, value in loaded.items())
    template = run_state(flat, half, steps=0)
    again = load_state_dict(template, loaded)
    assert_equal_trees(again, state)
    assert again.loss_scale.growth_interval == 1
    assert template.opt_state.count.item() == 0  # the template is not changed
    assert again.opt_state.count.item() == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # a single process is the intent
@pytest.mark.parametrize(("flat", "half"), FORMS)
def test_a_run_survives_a_distributed_checkpoint(tmp_path, flat, half):
    import torch.distributed.checkpoint as dcp

    state = run_state(flat, half)
    dcp.save(state_dict(state), checkpoint_id=tmp_path, no_dist=True)
    template = run_state(flat, half, steps=0)
    target = {name: torch.empty_like(value) for name, value in state_dict(template).items()}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert_equal_trees(load_state_dict(template, target), state)


def test_names_are_the_paths_of_leaves_also_inside_flat_buffers():
    tree = {"params": flatten({"layer": {"w": torch.ones(2)}, "b": torch.ones(3)}), "epoch": torch.tensor(1)}
    saved = state_dict(tree)
    assert list(saved) == ["params.layer.w", "params.b", "epoch"]
    assert saved["params.b"].shape == (3,)
    assert list(state_dict(DynamicLossScale.create())) == ["value", "good_steps", "bad_steps_left"]
    assert state_dict(NoOpLossScale.create()) == {}


def test_flat_and_plain_trees_read_each_others_files():
    params = {"w": torch.randn(2, 3).t(), "b": torch.randn(3)}
    flat = flatten(params)
    assert list(state_dict(flat)) == list(state_dict(params))
    from_plain = load_state_dict(flatten(tree_map(torch.zeros_like, params)), state_dict(params))
    assert torch.equal(from_plain.buffers[0], flat.buffers[0])
    assert type(from_plain) is FlatTree
    from_flat = load_state_dict(tree_map(torch.zeros_like, params), state_dict(flat))
    assert torch.equal(from_flat["w"], params["w"])


def test_loaded_tensors_share_no_memory_with_the_file_or_the_template():
    saved = {"w": torch.ones(2), "f.a": torch.ones(3)}
    template = {"w": torch.zeros(2), "f": flatten({"a": torch.zeros(3)})}
    out = load_state_dict(template, saved)
    out["w"].fill_(5.0)
    out["f"].buffers[0].fill_(5.0)
    assert torch.equal(saved["w"], torch.ones(2))
    assert torch.equal(saved["f.a"], torch.ones(3))
    assert torch.equal(template["w"], torch.zeros(2))
    assert not template["f"].buffers[0].any()


def test_what_is_no_tensor_comes_from_the_template():
    template = {"w": torch.zeros(1), "name": "adam", "none": None, "n": 3}
    out = load_state_dict(template, {"w": torch.ones(1)})
    assert (out["w"].item(), out["name"], out["none"], out["n"]) == (1.0, "adam", None, 3)


def test_rest_of_a_flat_tree_and_absent_buffers():
    flat = flatten({"w": torch.ones(2), "steps": torch.tensor(4), "h": torch.ones(2).half(), "n": 1})
    saved = state_dict(flat)
    assert set(saved) == {"w", "steps", "h"}
    out = load_state_dict(
        flatten({"w": torch.zeros(2), "steps": torch.tensor(0), "h": torch.ones(2).half(), "n": 1}), saved
    )
    assert out.unflatten()["steps"].item() == 4
    masters = FlatTree((None, flat.buffers[1].float()), (None, None), flat.layout)
    assert set(state_dict(masters)) == {"h"}
    assert load_state_dict(masters, state_dict(masters)).buffers[0] is None


def test_container_types_and_static_fields_come_from_the_template():
    template = collections.OrderedDict(s=StaticLossScale.create(2.0), d=DynamicLossScale.create(4.0, growth_interval=7))
    out = load_state_dict(template, {k: v + 1 for k, v in state_dict(template).items()})
    assert type(out) is collections.OrderedDict
    assert out["s"].value.item() == 3.0
    assert out["d"].growth_interval == 7


def test_values_are_detached():
    saved = {"w": torch.ones(2, requires_grad=True)}
    out = load_state_dict({"w": torch.zeros(2)}, saved)
    assert out["w"].requires_grad is False


# errors


def test_all_problems_are_listed_and_nothing_is_changed():
    flat = flatten({"w": torch.zeros(2), "b": torch.zeros(3)})
    template = {
        "params": flat,
        "count": torch.tensor(0, dtype=torch.int32),
        "x": torch.zeros(1),
        "none": torch.zeros(1),
    }
    before = {name: value.clone() for name, value in state_dict(template).items()}
    wrong = {
        "params.w": torch.ones(3),
        "count": torch.tensor(1),
        "x": [1.0],
        "none": None,
        "extra": torch.ones(1),
    }
    with pytest.raises(ValueError, match="load_state_dict: nothing was loaded") as caught:
        load_state_dict(template, wrong)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "missing `params.b`",
        "unexpected `extra`",
        "`params.w`: expected torch.float32 of shape (2,), found torch.float32 of shape (3,)",
        "`count`: expected torch.int32 of shape (), found torch.int64 of shape ()",
        "`x`: expected a tensor, found list",
        "`none`: expected a tensor, found NoneType",
    ]
    for name, value in state_dict(template).items():
        assert torch.equal(value, before[name])


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(ValueError, match=r"two leaves have the path `a.b`; rename a key that contains a dot"):
        state_dict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_arguments_the_wrong_way_round_are_recognised():
    with pytest.raises(TypeError, match=r"expected a dictionary of tensors .* found FlatTree; the order is"):
        load_state_dict({"w": torch.ones(1)}, flatten({"w": torch.ones(1)}))
