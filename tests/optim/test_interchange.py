"""State dicts go from and to torch.optim in the middle of training, and training goes on as if it had not moved."""

import pytest
import torch

from npuamp_fn import flatten, optim

SHAPES = {"w": (5, 7), "b": (7,), "s": ()}
CASES = {
    "sgd": (optim.sgd(0.1, 0.9, 0.3), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "adam": (optim.adam(0.1, amsgrad=True), torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "adamw": (optim.adamw(0.1), torch.optim.AdamW, {"lr": 0.1}),
    "adadelta": (optim.adadelta(), torch.optim.Adadelta, {}),
    "adagrad": (optim.adagrad(0.1, 0.1), torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rmsprop": (
        optim.rmsprop(0.1, momentum=0.9, centered=True),
        torch.optim.RMSprop,
        {"lr": 0.1, "momentum": 0.9, "centered": True},
    ),
}


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def torch_steps(optimizer, params, seeds):
    for seed in seeds:
        for name, grad in draw(seed).items():
            params[name].grad = grad
        optimizer.step()


def our_steps(optimizer, state, params, seeds):
    for seed in seeds:
        grads = draw(seed)
        grads = params.layout.pack(grads) if hasattr(params, "layout") else grads
        params, state = optimizer.update(grads, state, params)
    return params, state


@pytest.mark.parametrize("flat", [False, True], ids=["leaves", "flat"])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_training_moves_from_torch_and_back(case, before, flat):
    ours, cls, options = CASES[case]
    params = {name: value.requires_grad_() for name, value in draw(0).items()}
    theirs = cls(params.values(), **options)
    torch_steps(theirs, params, range(before))
    saved = theirs.state_dict()

    moved = {name: value.detach().clone() for name, value in params.items()}
    moved = flatten(moved) if flat else moved
    state = optim.from_torch_state(ours, saved["state"], moved)
    moved, state = our_steps(ours, state, moved, range(10, 13))

    again = {name: v.clone().requires_grad_() for name, v in (moved.unflatten() if flat else moved).items()}
    back = cls(again.values(), **options)
    back.load_state_dict({"state": optim.to_torch_state(ours, state, moved), "param_groups": saved["param_groups"]})
    torch_steps(back, again, range(20, 23))
    torch_steps(theirs, params, [10, 11, 12, 20, 21, 22])
    for name in SHAPES:
        assert torch.equal(again[name], params[name]), name


def test_fresh_momentum_goes_to_torch_as_none_so_that_dampening_spares_the_first_step():
    ours, cls, options = CASES["sgd"]
    params = draw(0)
    entries = optim.to_torch_state(ours, ours.init(params), params)
    assert entries[0]["momentum_buffer"] is None
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    theirs = cls(leaves.values(), **options)
    theirs.load_state_dict({"state": entries, "param_groups": theirs.state_dict()["param_groups"]})
    torch_steps(theirs, leaves, [1])
    ours_after, _ = our_steps(ours, ours.init(params), params, [1])
    for name in SHAPES:
        assert torch.equal(ours_after[name], leaves[name])


def test_steps_that_differ_become_counts_per_tensor():
    params = draw(0)
    entries = {"w": {"step": torch.tensor(4.0), "exp_avg": torch.ones(5, 7)}, 1: {"step": 2}}
    state = optim.from_torch_state(optim.adam(), entries, params)
    assert state.count.tolist() == [4, 2, 0]
    assert state.count.dtype == torch.int32
    assert torch.equal(state.slots["exp_avg"]["w"], torch.ones(5, 7))
    assert torch.equal(state.slots["exp_avg"]["b"], torch.zeros(7))
    assert [entry["step"].item() for entry in optim.to_torch_state(optim.adam(), state, params).values()] == [4, 2, 0]


def test_values_per_tensor_come_back():
    params = flatten(draw(0))
    optimizer = optim.novograd(0.1)
    params, state = our_steps(optimizer, optimizer.init(params), params, range(2))
    entries = optim.to_torch_state(optimizer, state, params)
    assert entries[2]["exp_avg_sq"].shape == ()
    back = optim.from_torch_state(optimizer, entries, params)
    assert torch.equal(back.slots["exp_avg_sq"][0], state.slots["exp_avg_sq"][0])
    assert torch.equal(back.slots["exp_avg"].buffers[0], state.slots["exp_avg"].buffers[0])


def test_foreign_entries_are_refused_by_name():
    params = draw(0)
    with pytest.raises(ValueError, match=r"entries \['head', 7\] belong to no parameter: .* 0 to 2 or paths like"):
        optim.from_torch_state(optim.adam(), {"head": {}, 7: {}}, params)
    with pytest.raises(ValueError, match=r"`b`: exp_avg: expected shape \(7,\), found \(8,\)"):
        optim.from_torch_state(optim.adam(), {1: {"exp_avg": torch.ones(8)}}, params)
