import pytest
import torch

from npuamp_fn import ScaledGrads, explain, flatten, fused_update, load_state_dict, optim, state_dict


def draw(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (20, 30), "bias": (20,)}
    return {
        layer: {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for layer in ("body", "head")
    } | {"steps": torch.tensor(3)}


def draw_grads(seed, dtype=torch.float32):
    return {**draw(seed, dtype), "steps": None}


def pair(flat, dtype=torch.float32):
    params, grads = draw(0, dtype), draw_grads(1, dtype)
    if not flat:
        return params, grads
    params = flatten(params)
    return params, params.layout.pack(grads)


def plain(tree):
    return tree.unflatten() if hasattr(tree, "layout") else tree


def alone(optimizer, layer, name, steps=2):
    params = draw(0)[layer][name]
    state = optimizer.init(params)
    for seed in range(1, 1 + steps):
        params, state = optimizer.update(draw(seed)[layer][name], state, params)
    return params


def run(optimizer, flat, steps=2):
    params, _ = pair(flat)
    state = optimizer.init(params)
    for seed in range(1, 1 + steps):
        grads = draw_grads(seed)
        params, state = optimizer.update(params.layout.pack(grads) if flat else grads, state, params)
    return plain(params), state


flat_or_not = pytest.mark.parametrize("flat", [False, True], ids=["leaves", "flat"])
donated_or_not = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
ADAMW, DECAYED = optim.adamw(0.1, weight_decay=0.0), optim.adamw(0.2, weight_decay=0.1)
SGD, LAMB, ADAMP = optim.sgd(0.1, momentum=0.9), optim.lamb(0.1), optim.adamp(0.1)


@flat_or_not
@donated_or_not
def test_same_rule_becomes_one_call_with_numbers_per_tensor(flat, donate):
    optimizer = optim.partition({"*.bias": ADAMW, "*": DECAYED}).replace(donate=donate)
    assert len(optimizer.groups) == 1
    params, _ = run(optimizer, flat)
    for layer in ("body", "head"):
        torch.testing.assert_close(params[layer]["bias"], alone(ADAMW, layer, "bias"), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(params[layer]["weight"], alone(DECAYED, layer, "weight"), rtol=1e-6, atol=1e-7)
    flat_params = flatten(draw(0))
    (group, part), *others = optimizer.parts(flat_params)
    assert not others
    assert len(group.choice(part)[2]) == 1


@flat_or_not
@donated_or_not
def test_other_rules_each_update_their_own_part(flat, donate):
    optimizer = optim.partition({"head.*": SGD, "*.bias": LAMB, "*": ADAMP}).replace(donate=donate)
    params, states = run(optimizer, flat)
    assert torch.equal(params["head"]["weight"], alone(SGD, "head", "weight"))
    assert torch.equal(params["head"]["bias"], alone(SGD, "head", "bias"))
    torch.testing.assert_close(params["body"]["bias"], alone(LAMB, "body", "bias"), rtol=1e-6, atol=1e-7)
    assert torch.equal(params["body"]["weight"], alone(ADAMP, "body", "weight"))
    assert params["steps"].item() == 3
    assert [state.count.item() for state in states] == [2, 2, 2]
    assert list(state_dict(states[0])) == [
        "count",
        "slots.momentum_buffer.head.weight",
        "slots.momentum_buffer.head.bias",
    ]


@flat_or_not
@donated_or_not
def test_masked_leaves_the_rest_alone_bit_for_bit(flat, donate):
    params, grads = pair(flat)
    optimizer = optim.masked(optim.adamw(0.1, weight_decay=0.1), ["*.bias"]).replace(donate=donate)
    state = optimizer.init(params)
    new = plain(optimizer.update(grads, state, params)[0])
    before = draw(0)
    for layer in ("body", "head"):
        assert torch.equal(new[layer]["weight"], before[layer]["weight"])
        assert torch.equal(new[layer]["bias"], alone(optim.adamw(0.1, weight_decay=0.1), layer, "bias", 1))
    assert new["steps"].item() == 3


@flat_or_not
def test_donated_partition_writes_into_the_given_memory(flat):
    params, grads = pair(flat)
    optimizer = fused_update(optim.partition({"*.bias": SGD, "*": ADAMW}), donate=True)
    expected, _ = optim.partition({"*.bias": SGD, "*": ADAMW}).update(grads, optimizer.init(params), params)
    expected = {layer: dict(plain(expected)[layer]) for layer in ("body", "head")}
    pointer = params.buffers[0].data_ptr() if flat else params["body"]["weight"].data_ptr()
    new, _ = optimizer.update(grads, optimizer.init(params), params)
    assert (new.buffers[0] if flat else new["body"]["weight"]).data_ptr() == pointer
    for layer in ("body", "head"):
        for name, value in expected[layer].items():
            torch.testing.assert_close(plain(new)[layer][name], value, rtol=1e-6, atol=1e-7)


@flat_or_not
def test_overflow_skips_every_part(flat):
    params, grads = pair(flat)
    optimizer = optim.partition({"*.bias": SGD, "*": ADAMW})
    state = optimizer.init(params)
    params, state = optimizer.update(grads, state, params)
    out = ScaledGrads(grads, torch.tensor(float("inf")), torch.ones(()), (), torch.tensor(False), torch.ones(()))
    new, new_state = optimizer.update(out, state, params)
    for layer in ("body", "head"):
        for name in ("weight", "bias"):
            assert torch.equal(plain(new)[layer][name], plain(params)[layer][name])
    assert [s.count.item() for s in new_state] == [1, 1]


@flat_or_not
def test_clipping_outside_sees_all_gradients_and_inside_its_part(flat):
    params, grads = pair(flat)
    step = optim.sgd(1.0)
    everything = optim.chain(optim.clip_by_global_norm(1.0), optim.partition({"*.bias": step, "*": LAMB}))
    own = optim.partition({"*.bias": optim.chain(optim.clip_by_global_norm(1.0), step), "*": LAMB})
    before, flat_grads = draw(0), draw_grads(1)
    leaves = [flat_grads[layer][name].double() for layer in ("body", "head") for name in ("weight", "bias")]
    norms = [(g * g).sum() for g in leaves]
    for optimizer, norm in ((everything, sum(norms)), (own, norms[1] + norms[3])):
        new = plain(optimizer.update(grads, optimizer.init(params), params)[0])
        expected = before["body"]["bias"].double() - leaves[1] / norm.sqrt()
        torch.testing.assert_close(new["body"]["bias"].double(), expected, rtol=1e-5, atol=1e-6)


@flat_or_not
def test_partition_with_master_weights_and_value_clipping(flat):
    optimizer = optim.chain(optim.clip_by_value(0.1), optim.partition({"*.bias": optim.sgd(1.0), "*": ADAMW}))
    optimizer = optim.with_master_weights(optimizer)
    params, grads = pair(flat, torch.bfloat16)
    state = optimizer.init(params)
    new, state = optimizer.update(grads, state, params)
    start, grad = draw(0, torch.bfloat16), draw(1, torch.bfloat16)
    master = plain(state[0].master)["body"]["bias"]
    expected = start["body"]["bias"].float() - grad["body"]["bias"].float().clamp(-0.1, 0.1)
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(plain(new)["body"]["bias"], master.bfloat16())


@flat_or_not
def test_partition_compiles_and_its_state_can_be_saved(flat):
    torch._dynamo.reset()
    params, grads = pair(flat)
    optimizer = optim.partition({"*.bias": SGD, "*": ADAMW})
    state = optimizer.init(params)
    expected, expected_state = optimizer.update(grads, state, params)
    new, new_state = torch.compile(optimizer.update, backend="aot_eager", fullgraph=True)(grads, state, params)
    for layer in ("body", "head"):
        for name in ("weight", "bias"):
            assert torch.equal(plain(new)[layer][name], plain(expected)[layer][name])
    loaded = load_state_dict(state, state_dict(new_state))
    for a, b in zip(state_dict(loaded).values(), state_dict(expected_state).values(), strict=True):
        assert torch.equal(a, b)


@flat_or_not
def test_flags_per_tensor_reach_their_part(flat):
    params, grads = pair(flat)
    optimizer = optim.partition({"*.bias": SGD, "*": ADAMW})
    state = optimizer.init(params, count_per_tensor=True)
    finite = torch.tensor([True, True, False, True])  # body.weight, body.bias, head.weight, head.bias
    out = ScaledGrads(grads, torch.ones(()), torch.ones(()), (), finite, torch.ones(()))
    new, state = optimizer.update(out, state, params)
    assert [s.count.tolist() for s in state] == [[1, 1], [1, 0]]
    assert torch.equal(plain(new)["head"]["weight"], draw(0)["head"]["weight"])
    assert not torch.equal(plain(new)["body"]["weight"], draw(0)["body"]["weight"])


def test_numbers_by_path_may_be_schedules_and_tensors():
    linear = optim.schedules.linear(0.4, 0.0, 4)
    optimizer = optim.partition(
        {"*.bias": optim.sgd(torch.tensor(0.5)), "head.*": optim.sgd(linear), "*": optim.sgd(0.1)}
    )
    assert len(optimizer.groups) == 1
    for flat in (False, True):
        params, _ = run(optimizer, flat)
        grads = [draw(1), draw(2)]
        expected = draw(0)["head"]["weight"] - 0.4 * grads[0]["head"]["weight"] - 0.3 * grads[1]["head"]["weight"]
        torch.testing.assert_close(params["head"]["weight"], expected, rtol=1e-6, atol=1e-6)
        expected = draw(0)["head"]["bias"] - 0.5 * grads[0]["head"]["bias"] - 0.5 * grads[1]["head"]["bias"]
        torch.testing.assert_close(params["head"]["bias"], expected, rtol=1e-6, atol=1e-6)


def test_optimizers_that_differ_in_more_than_numbers_stay_apart():
    assert len(optim.partition({"a": optim.sgd(0.1), "b": optim.sgd(0.1, maximize=True)}).groups) == 2
    assert len(optim.partition({"a": optim.adam(), "b": optim.adamw()}).groups) == 2
    assert len(optim.partition({"a": optim.sgd(0.1), "b": optim.sgd(0.1, momentum=0.9)}).groups) == 2
    assert len(optim.partition({"a": optim.adam(0.1), "b": optim.adam(0.2, (0.5, 0.6), 1e-3, 0.1)}).groups) == 1


@flat_or_not
def test_wrong_patterns_are_named_with_the_nearest_paths(flat):
    params, _ = pair(flat)
    with pytest.raises(ValueError, match=r"pattern 'haed.\*' matches no leaf; nearest: \['head"):
        optim.partition({"haed.*": SGD, "*": ADAMW}).init(params)
    with pytest.raises(ValueError, match=r"leaf `body.weight` is matched by none of \['head.\*'\]; add a pattern"):
        optim.partition({"head.*": SGD}).init(params)
    with pytest.raises(ValueError, match=r"pattern '\*.bias' chooses nothing: earlier patterns take all"):
        optim.partition({"*": SGD, "*.bias": ADAMW}).init(params)
    with pytest.raises(ValueError, match="matches no leaf"):
        optim.masked(SGD, "tail.*").init(params)


def test_explain_tells_of_every_part():
    lines = explain(fused_update(optim.partition({"*.bias": SGD, "*": ADAMP})), flatten(draw(0))).splitlines()
    assert lines[0].startswith("sgd: kernel reference, 2 tensors in 1 float32 buffers")
    assert lines[2].startswith("adamp: kernel reference, 2 float32 tensors one by one")


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"pattern 'a': expected an optimizer, found NoneType; to leave .* masked"):
        optim.partition({"a": None})
    with pytest.raises(ValueError, match="expected at least one pattern"):
        optim.partition({})
    with pytest.raises(TypeError, match="masked: expected an optimizer, found float"):
        optim.masked(0.1, "*")
    params, optimizer = draw(0), optim.partition({"*.bias": SGD, "*": ADAMW})
    state = SGD.init(params)
    with pytest.raises(TypeError, match="a tuple of 2 optimizer states, found OptimizerState"):
        optimizer.update(params, state, params)
