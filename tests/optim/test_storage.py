"""How optimizers see parameters of several dtypes, counts of their own, and hyper-parameters by path."""

import numpy as np
import pytest
import torch

from npuamp_fn import ScaledGrads, flatten, optim

RULES = [optim.adamw(0.1), optim.lamb(0.1), optim.novograd(0.1), optim.adamp(0.1), optim.ema(optim.sgd(0.1, 0.9))]
by_rule = pytest.mark.parametrize("optimizer", RULES, ids=lambda optimizer: optimizer.rule.name)


def mixed(seed):
    """Return half weights, float32 norms and a float64 scalar, alternating so that buffers are not in leaf order."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "a": randn(5, 60, dtype=torch.bfloat16),
        "norm_a": randn(60, dtype=torch.float32),
        "b": randn(3, 4, 2, dtype=torch.bfloat16).transpose(0, 2),
        "norm_b": randn(1, dtype=torch.float32),
        "double": randn(4, 4, dtype=torch.float64),
        "c": randn(0, 3, dtype=torch.bfloat16),
    }


@by_rule
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_buffers_of_several_dtypes_equal_their_leaves(optimizer, donate):
    leafwise = optim.with_master_weights(optimizer)
    flatwise = leafwise.replace(donate=donate)
    params, flat = mixed(0), flatten(mixed(0))
    assert len(flat.buffers) == 3
    state, flat_state = leafwise.init(params), flatwise.init(flat)
    assert [buffer is None for buffer in flat_state.master.buffers] == [False, True, True]
    for seed in (1, 2):
        params, state = leafwise.update(mixed(seed), state, params)
        flat, flat_state = flatwise.update(flatten(mixed(seed)), flat_state, flat)
    found = flat.unflatten()
    for name, value in params.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=2e-6 if value.dtype != torch.bfloat16 else 8e-3, atol=2e-6)
        if value.dtype == torch.bfloat16:
            master = flat_state.master.unflatten()[name]
            assert master.dtype == torch.float32
            torch.testing.assert_close(master, state.master[name], rtol=2e-6, atol=2e-6)
        else:
            assert state.master[name] is None


@by_rule
def test_numbers_by_path_reach_the_right_tensor_of_the_right_buffer(optimizer):
    def with_lr(lr):
        return optimizer.replace(hyper=optim.Hyper(**{**optimizer.hyper, "lr": lr}))

    rates = {"norm_*": 0.5, "b": 0.01, "*": 0.1}
    choice = optim.partition({pattern: with_lr(lr) for pattern, lr in rates.items()})
    assert len(choice.groups) == 1
    params, flat, grads = mixed(0), flatten(mixed(0)), mixed(1)
    found, _ = choice.update(flatten(grads), choice.init(flat), flat)
    leaves, _ = choice.update(grads, choice.init(params), params)
    for name, lr in {"a": 0.1, "norm_a": 0.5, "b": 0.01, "norm_b": 0.5, "double": 0.1}.items():
        single = with_lr(lr)
        expected, _ = single.update(grads[name], single.init(params[name]), params[name])
        assert torch.equal(leaves[name], expected)
        torch.testing.assert_close(
            found.unflatten()[name], expected, rtol=2e-6 if expected.dtype != torch.bfloat16 else 8e-3, atol=2e-6
        )


def test_flag_per_tensor_needs_a_count_per_tensor():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    optimizer = optim.adam()
    out = ScaledGrads(params, torch.ones(()), torch.ones(()), (), torch.tensor([True, False]), None)
    with pytest.raises(ValueError, match=r"finite has shape \(2,\) .*init\(params, count_per_tensor=True\)"):
        optimizer.update(out, optimizer.init(params), params)


def test_counts_per_tensor_are_one_for_each_float_leaf():
    params = {"a": torch.ones(2), "step": torch.tensor(1), "b": torch.ones(()), "none": None}
    for tree in (params, flatten(params)):
        count = optim.adam().init(tree, count_per_tensor=True).count
        assert (count.dtype, count.tolist()) == (torch.int32, [0, 0])
    assert optim.adam().init(params).count.shape == ()


def test_numpy_scalars_become_python_numbers():
    hyper = optim.Hyper(lr=np.float32(0.5), momentum=np.float64(0.25), steps=np.int64(3))
    assert [type(value) for value in hyper.values()] == [float, float, int]


def test_parameters_with_an_empty_place_are_refused():
    flat = flatten({"a": torch.ones(2)})
    state = optim.sgd().init(flat)
    hollow = flat.__class__((None,), flat.rest, flat.layout)
    with pytest.raises(ValueError, match="expected parameters with all their buffers"):
        optim.sgd().update(hollow, state, hollow)


def test_rule_that_sums_rows_says_that_it_needs_whole_leaves():
    rule = optim.adamp(0.1).rule
    hasty = optim.adamp(0.1).replace(rule=rule.__class__("hasty", rule.update, rule.slots))
    flat = flatten({"a": torch.ones(2, 3)})
    with pytest.raises(ValueError, match=r"sums per row need tensors in their own shape: .*whole_leaves=True"):
        hasty.update(flat, hasty.init(flat), flat)
