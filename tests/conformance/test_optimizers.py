"""What every optimizer promises. A new one in ``npuamp_fn.optim`` is found and tested without being listed here."""

import inspect
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from npuamp_fn import FlatTree, ScaledGrads, flatten, fused_update, kernels, load_state_dict, optim, state_dict
from npuamp_fn.kernels.rule import HyperValues, RowSegments
from npuamp_fn.tree import tree_leaves, tree_map, tree_structure

SIZES = (0, 1, 15, 16, 17, 255, 256, 257)


def makes_optimizers(function):
    signature = inspect.signature(function)
    return signature.return_annotation == "Optimizer" and all(
        parameter.default is not parameter.empty for parameter in signature.parameters.values()
    )


FACTORIES = {
    name: getattr(optim, name)
    for name in optim.__all__
    if inspect.isfunction(getattr(optim, name)) and makes_optimizers(getattr(optim, name))
}
# Beside the defaults, whatever an optimizer has of these: decay and momentum bring in more of the rule's text.
EXTRA = {"weight_decay": 0.1, "momentum": 0.9, "amsgrad": True, "centered": True, "maximize": True}
OPTIMIZERS = {}
for _name, _factory in FACTORIES.items():
    _extra = {key: value for key, value in EXTRA.items() if key in inspect.signature(_factory).parameters}
    OPTIMIZERS[_name] = _factory(lr=0.05)
    OPTIMIZERS[f"{_name}-{'-'.join(_extra)}"] = _factory(lr=0.05, **_extra)

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
leaves_and_flat = pytest.mark.parametrize("flat", [False, True], ids=["leaves", "flat"])


def draw(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    tree = {str(size): randn(size) for size in SIZES}
    tree["scalar"] = randn()
    tree["matrix"] = randn(9, 31)
    tree["transposed"] = randn(6, 50).t()
    tree["channels_last"] = randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    tree["empty_rows"] = randn(3, 0)
    return tree


def problem(seed, flat, dtype=torch.float32):
    """Return parameters with an integer beside them, and gradients, as trees or flat."""
    params, grads = (
        {"float": draw(seed, dtype), "step": torch.tensor(7)},
        {"float": draw(seed + 1, dtype), "step": None},
    )
    if not flat:
        return params, grads
    params = flatten(params)
    return params, params.layout.pack(grads)


def widened(params, fn):
    if isinstance(params, FlatTree):
        return FlatTree((fn(params.buffers[0]),), params.rest, params.layout)
    return tree_map(lambda leaf: fn(leaf) if leaf.is_floating_point() else leaf, params)


def some_steps(optimizer, params, steps=3, seed=100):
    state = optimizer.init(params)
    for step in range(steps):
        grads = {"float": draw(seed + step), "step": None}
        params, state = optimizer.update(
            params.layout.pack(grads) if isinstance(params, FlatTree) else grads, state, params
        )
    return params, state


def scaled(grads, finite, inv_scale=1.0):
    one = torch.ones(())
    return ScaledGrads(grads, torch.tensor(inv_scale), one, (), torch.as_tensor(finite), one)


def tensors(*trees):
    return [leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copies(*trees):
    return [tensor.clone() for tensor in tensors(*trees)]


def same_bits(left, right):
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and same_storage_bits(a, b) for a, b in zip(left, right, strict=True)
    )


def same_storage_bits(a, b):  # NaN equals itself, and -0.0 is not 0.0
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_the_suite_finds_the_optimizers_by_itself():
    design = "sgd adam adamw adamp bert_adam adadelta adagrad lamb lars novograd rmsprop rmsprop_tf"
    assert set(design.split()) <= set(FACTORIES)
    assert "chain" not in FACTORIES


@every_optimizer
@leaves_and_flat
def test_structure_shapes_dtypes_and_arguments_stay(optimizer, flat):
    params, grads = problem(0, flat)
    state = optimizer.init(params)
    before = copies(params, grads, state)
    new, new_state = optimizer.update(grads, state, params)
    assert same_bits(before, tensors(params, grads, state))
    assert tree_structure(new) == tree_structure(params)
    assert tree_structure(new_state) == tree_structure(state)
    for a, b in zip(tensors(new, new_state), tensors(params, state), strict=True):
        assert (a.dtype, a.shape, a.device, a.requires_grad) == (b.dtype, b.shape, b.device, False)
    assert new_state.count.item() == 1
    assert not same_bits(tensors(params), tensors(new))
    if not flat:
        assert new["step"] is params["step"]
        assert new["float"]["channels_last"].stride() == params["float"]["channels_last"].stride()


@every_optimizer
def test_flat_equals_leaf_by_leaf(optimizer):
    leaves, leaf_state = some_steps(optimizer, problem(0, False)[0])
    flat, flat_state = some_steps(optimizer, problem(0, True)[0])
    sums = {"lamb", "lars", "novograd"} & {optimizer.rule.name}  # float32 sums in another order
    tolerance = {"rtol": 2e-6, "atol": 2e-7} if sums else {"rtol": 0, "atol": 0}
    per_tensor = {slot.name for slot in optimizer.rule.slots if slot.per == "tensor"}
    for slot in optimizer.rule.slots:
        if slot.name in per_tensor:
            expected = torch.stack(tree_leaves(leaf_state.slots[slot.name]["float"]))
            torch.testing.assert_close(flat_state.slots[slot.name][0], expected, **tolerance)
        else:
            found = flat_state.slots[slot.name].unflatten()
            torch.testing.assert_close(found["float"], leaf_state.slots[slot.name]["float"], **tolerance)
    torch.testing.assert_close(flat.unflatten()["float"], leaves["float"], **tolerance)


@every_optimizer
@leaves_and_flat
def test_skipped_step_changes_no_bit(optimizer, flat):
    params, state = some_steps(optimizer, problem(0, flat)[0])
    _, grads = problem(5, flat)
    for bad in tensors(grads):
        bad[torch.rand(bad.shape) < 0.5] = float("nan")
        bad[torch.rand(bad.shape) < 0.5] = float("inf")
    for optim_ in (optimizer, optimizer.replace(donate=True)):
        before = copies(params, state)
        new, new_state = optim_.update(scaled(grads, False), state, params)
        assert same_bits(before, tensors(new, new_state))


@every_optimizer
@leaves_and_flat
def test_donated_equals_pure_in_the_same_memory(optimizer, flat):
    params, grads = problem(0, flat)
    state = optimizer.init(params)
    expected = optimizer.update(grads, state, params)
    pointers = [tensor.data_ptr() for tensor in tensors(params, state.slots)]
    before = copies(grads)
    new, new_state = optimizer.replace(donate=True).update(grads, state, params)
    assert same_bits(tensors(*expected), tensors(new, new_state))
    assert same_bits(before, tensors(grads))
    assert pointers == [tensor.data_ptr() for tensor in tensors(new, new_state.slots)]


@every_optimizer
@leaves_and_flat
def test_donated_state_that_is_not_rebound_is_the_new_one(optimizer, flat):
    params, state = problem(0, flat)[0], optimizer.init(problem(0, flat)[0])
    kept, kept_state = problem(0, flat)[0], optimizer.init(problem(0, flat)[0])
    for seed, finite in ((1, True), (2, False), (3, True)):
        grads = scaled(problem(seed, flat)[1], finite)
        params, state = optimizer.update(grads, state, params)
        optimizer.replace(donate=True).update(grads, kept_state, kept)
    assert kept_state.count.dtype == torch.int32
    assert kept_state.count.item() == 2
    assert same_bits(tensors(params, state), tensors(kept, kept_state))


@every_optimizer
@leaves_and_flat
def test_vmap_equals_a_loop(optimizer, flat):
    members = [problem(seed, flat) for seed in (0, 10, 20)]
    if not flat:
        members = [({"float": p["float"]}, {"float": g["float"]}) for p, g in members]
    starts = [some_steps(optimizer, p, 1) if flat else (p, optimizer.init(p)) for p, _ in members]
    expected = [optimizer.update(g, s, p) for (p, s), (_, g) in zip(starts, members, strict=True)]

    def stack(*trees):
        return tree_map(lambda *leaves: torch.stack(leaves) if leaves[0] is not None else None, *trees)

    def strip(tree):
        return FlatTree(tree.buffers, (None,) * len(tree.rest), tree.layout) if isinstance(tree, FlatTree) else tree

    batched = [stack(*(strip(tree) for tree in trees)) for trees in zip(*starts, strict=True)]
    grads = stack(*(strip(g) for _, g in members))
    in_dims = tuple(
        tree_map(lambda leaf: 0 if leaf is not None else None, tree) for tree in (grads, batched[1], batched[0])
    )
    found = vmap(optimizer.update, in_dims=in_dims, out_dims=(in_dims[2], in_dims[1]))(grads, batched[1], batched[0])
    for index, single in enumerate(expected):
        own = [tensor[index] for tensor in tensors(*found)]
        single = tuple(strip(tree) for tree in single)
        for a, b in zip(own, tensors(*single), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "flat"), [(name, flat) for name in OPTIMIZERS for flat in (True, False) if flat or "-" in name]
)
def test_compiled_step_equals_eager_bitwise_and_compiles_once(name, flat):
    torch._dynamo.reset()
    optimizer = OPTIMIZERS[name]
    params, grads = [{name: draw(seed)[name] for name in ("17", "matrix")} for seed in (0, 1)]
    if flat:
        params = flatten(params)
        grads = params.layout.pack(grads)
    state = optimizer.init(params)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compiled = torch.compile(optimizer.update, backend=backend, fullgraph=True)
    for finite in (True, False, True, True):
        out = scaled(grads, finite, 0.5)
        expected, expected_state = optimizer.update(out, state, params)
        new, new_state = compiled(out, state, params)
        assert same_bits(tensors(expected, expected_state), tensors(new, new_state))
        params, state = expected, expected_state
    assert len(graphs) == 1
    assert state.count.item() == 3


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the update read a tensor's value on the host")
        return func(*args, **(kwargs or {}))


@every_optimizer
@leaves_and_flat
def test_update_does_not_wait_for_the_device(optimizer, flat):
    params, grads = problem(0, flat)
    schedule = optimizer.replace(hyper=optim.Hyper(**{**optimizer.hyper, "lr": optim.schedules.cosine(0.1, 10)}))
    for candidate in (optimizer, schedule):
        state = candidate.init(params)
        with NoHostSync():
            candidate.update(scaled(grads, True), state, params)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@leaves_and_flat
def test_arithmetic_is_float32_whatever_the_storage(optimizer, dtype, flat):
    params, grads = problem(0, flat, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    wide_params = widened(params, lambda x: x.to(wide))
    expected, expected_state = optimizer.update(grads, optimizer.init(wide_params), wide_params)
    new, state = optimizer.update(grads, optimizer.init(params), params)
    assert {t.dtype for t in tensors(state.slots)} <= {wide}
    for a, b in zip(tensors(new), tensors(expected), strict=True):
        if b.is_floating_point():
            assert a.dtype == dtype
            assert torch.equal(a, b.to(dtype))
    assert same_bits(tensors(state), tensors(expected_state))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@leaves_and_flat
def test_master_weights_carry_the_float32_run(optimizer, dtype, flat):
    half, _ = problem(0, flat, dtype)
    params = widened(half, lambda x: x.float() * 1.0001)
    master = optim.with_master_weights(optimizer)
    state, plain = master.init(half, params), optimizer.init(params)
    for seed in range(3):
        _, grads = problem(seed, flat, dtype)
        half, state = master.update(grads, state, half)
        params, plain = optimizer.update(grads, plain, params)
    masters = tensors(state.master)
    expected = [t for t in tensors(params) if t.is_floating_point()]
    assert same_bits(masters, expected)
    assert same_bits([t for t in tensors(half) if t.is_floating_point()], [t.to(dtype) for t in expected])
    assert same_bits(tensors(state.slots), tensors(plain.slots))


@every_optimizer
def test_kind_of_lr_does_not_matter(optimizer):
    params, grads = problem(0, True)
    kinds = [0.05, np.float64(0.05), torch.tensor(0.05, dtype=torch.float64), lambda count: 0.05]
    results = []
    for lr in kinds:
        candidate = optimizer.replace(hyper=optim.Hyper(**{**optimizer.hyper, "lr": lr}))
        new, state = candidate.update(grads, candidate.init(params), params)
        results.append(new.buffers[0])
        assert new.buffers[0].dtype == torch.float32
        assert {t.dtype for t in tensors(state.slots)} <= {torch.float32}
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[3])
    torch.testing.assert_close(results[2], results[0], rtol=2e-7, atol=2e-7)


@every_optimizer
@leaves_and_flat
def test_state_and_optimizer_survive_saving(optimizer, flat):
    params, state = some_steps(optimizer, problem(0, flat)[0])
    template = optimizer.init(params)
    loaded = load_state_dict(template, state_dict(state))
    assert same_bits(tensors(loaded), tensors(state))
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert hash(optimizer) == hash(optimizer.replace())


@every_optimizer
def test_each_tensor_may_have_its_own_lr_and_its_own_count(optimizer):
    # Two tensors in one buffer, one of them two steps late and with another rate, against two runs alone.
    a, b = torch.randn(300), torch.randn(7, 40)
    ga, gb = [torch.randn(300) for _ in range(4)], [torch.randn(7, 40) for _ in range(4)]

    def alone(param, grads, lr):
        single = optimizer.replace(hyper=optim.Hyper(**{**optimizer.hyper, "lr": lr}))
        params, state = {"x": param}, single.init({"x": param})
        for grad in grads:
            params, state = single.update({"x": grad}, state, params)
        return params["x"]

    expected = {"a": alone(a, ga, 0.01), "b": alone(b, gb[2:], 0.2)}
    both = optimizer.replace(hyper=optim.Hyper(**{**optimizer.hyper, "lr": torch.tensor([0.01, 0.2])}))
    for flat in (True, False):
        params = {"a": a, "b": b}
        params = flatten(params) if flat else params
        state = both.init(params, count_per_tensor=True)
        for step in range(4):
            grads = {"a": ga[step], "b": gb[step] if step >= 2 else torch.full_like(b, float("nan"))}
            grads = params.layout.pack(grads) if flat else grads
            params, state = both.update(scaled(grads, [True, step >= 2]), state, params)
        assert state.count.tolist() == [4, 2]
        found = params.unflatten() if flat else params
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-6)


@every_optimizer
def test_rule_text_traces_symbolically_over_rows_with_columns(optimizer):
    # How a compiled kernel sees a rule: rows of 256, one hyper-parameter entry and one count per tensor.
    if optimizer.rule.whole_leaves:
        pytest.skip("runs tensor by tensor in its own shape")
    rows = [1, 3]
    numbers = {name: v for name, v in optimizer.hyper.items() if isinstance(v, float)}
    rest = {name: v for name, v in optimizer.hyper.items() if name not in numbers}
    names = [slot.name for slot in optimizer.rule.slots]

    def step(grad, param, count, slots, hyper):
        segments = RowSegments(rows, torch.device("cpu"))
        values = HyperValues({**rest, **dict(zip(numbers, (segments.expand(h) for h in hyper), strict=True))})
        named = dict(zip(names, slots, strict=True))
        new, new_slots = optimizer.rule.update(grad, param, named, segments.expand(count), values, segments)
        return new, [new_slots[name] for name in names]

    shapes = [(2,) if slot.per == "tensor" else (sum(rows), 256) for slot in optimizer.rule.slots]
    example = [
        torch.randn(4, 256),
        torch.randn(4, 256),
        torch.tensor([1, 5]),
        [torch.rand(shape) + 1 for shape in shapes],
        [torch.full((2,), value, dtype=torch.float64) for value in numbers.values()],
    ]
    graph = make_fx(step, tracing_mode="symbolic")(*example)
    found = tensors(graph(*example))
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert same_bits(found, tensors(step(*example)))
    values = [node.meta.get("val") for node in graph.graph.nodes]
    assert not [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.float64 and v.numel() > 4]


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_any_layout_gives_the_numbers_of_its_leaves(shapes, seed, data):
    torch.manual_seed(seed)
    params = {}
    for index, shape in enumerate(shapes):
        order = data.draw(st.permutations(range(len(shape))))
        params[str(index)] = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    grads = {name: torch.randn(value.shape) for name, value in params.items()}
    for optimizer in (optim.adamw(0.1), optim.lamb(0.1, weight_decay=0.1), optim.novograd(0.1), optim.adamp(0.1)):
        expected, _ = optimizer.update(grads, optimizer.init(params), params)
        flat = flatten(params)
        found, state = optimizer.update(flat.layout.pack(grads), optimizer.init(flat), flat)
        torch.testing.assert_close(found.unflatten(), expected, rtol=2e-6, atol=1e-6)
        for slot in optimizer.rule.slots:
            padding = state.slots[slot.name]
            if slot.per == "element":
                assert torch.equal(flat.layout.pack(padding.unflatten()).buffers[0], padding.buffers[0])


@every_optimizer
@leaves_and_flat
def test_kernels_return_slots_in_the_order_of_the_rule(optimizer, flat):
    # Compiled kernels hand results over by position.
    for item in optimizer.choice(problem(0, flat)[0])[2]:
        (result,) = kernels.run("reference", kernels.Step(optimizer.rule, None, False), [item])
        assert list(result.slots) == list(item.slots) == [slot.name for slot in optimizer.rule.slots]


@every_optimizer
def test_every_kernel_agrees_with_the_reference(optimizer):
    params, grads = problem(0, True)
    fused = fused_update(optimizer)
    expected, _ = optimizer.update(grads, optimizer.init(params), params)
    found, _ = fused.update(grads, fused.init(params), params)
    torch.testing.assert_close(found.unflatten(), expected.unflatten(), rtol=3e-7, atol=3e-7)
