"""An update cut into two stages must do what the whole one does, and be cut only where that is so."""

import contextlib
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from npuamp_fn import ScaledGrads, flatten, fused_update, optim
from npuamp_fn.kernels import compiled, realize
from npuamp_fn.kernels.stages import cut
from npuamp_fn.tree import tree_leaves

SIZES = [(), (0,), (1,), (15,), (16,), (17,), (256,), (257,), (0, 3), (40, 30)]
was_cut = []


def trace(fun, example):
    return make_fx(lambda *tensors: fun(*tensors), tracing_mode="symbolic")(*example)


def compile_eagerly(what, fun, example, **options):
    """Do all that ``compile_once`` does to a graph, and run the graphs as they are."""
    module = trace(fun, example)
    stages = cut(module)
    was_cut.append(stages is not None)
    for graph in stages or [module]:
        realize.materialize_scalars(graph)
    if stages is None:
        return module
    first, second = stages
    return lambda *tensors: second(*tensors, *first(*tensors))


eager_kernel = functools.cache(compiled._kernel.__wrapped__)


@contextlib.contextmanager
def eager_graphs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compile_once", compile_eagerly)
        patch.setattr(compiled, "_kernel", eager_kernel)
        yield


def make_tree(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {str(i): torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def with_hyper(opt, **values):
    return opt.replace(hyper=type(opt.hyper)(**{**opt.hyper, **values}))


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bits(tensor):
    return tensor.clone().reshape(-1).view(torch.uint8)


def run(optimizer, kernel, shapes, half=None, donate=True, vectors=False, flags=(True, False, True)):
    """Take a step per flag and return every tensor of parameters and state; a False one must change no bit."""
    master = flatten(make_tree(shapes, 0))
    params = master.cast(half).map(torch.clone)
    opt = fused_update(optim.with_master_weights(optimizer) if half else optimizer, donate=donate, kernel=kernel)
    if vectors:
        generator = torch.Generator().manual_seed(9)
        lr, decay = (torch.rand(len(shapes), generator=generator) for _ in range(2))
        opt = with_hyper(opt, lr=0.1 * lr, weight_decay=decay * (decay > 0.3))
    state = opt.init(params, master=master) if half else opt.init(params)
    if vectors:
        state = state._replace(count=torch.arange(len(shapes), dtype=torch.int32))
    for step, flag in enumerate(flags):
        grads = params.layout.pack(make_tree(shapes, step + 1), half)
        if not flag:
            grads = grads.map(lambda g: torch.full_like(g, torch.nan))
        finite = torch.full((len(shapes),) if vectors else (), flag)
        before = [bits(tensor) for tensor in tensors_of((params, state.slots, state.master))]
        out = ScaledGrads(grads, torch.tensor(0.5), torch.tensor(0.0), (), finite, ())
        params, state = opt.update(out, state, params)
        after = tensors_of((params, state.slots, state.master))
        assert flag or all(torch.equal(a, bits(b)) for a, b in zip(before, after, strict=True))
    return tensors_of((params, state))


def assert_same_numbers(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        tolerance = 2e-6 if a.dtype == torch.float32 else torch.finfo(a.dtype).eps if a.is_floating_point() else 0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vectors", [False, True])
@settings(max_examples=15, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), min_size=1, max_size=6))
def test_two_stages_agree_with_the_reference_on_any_layout(shapes, half, vectors):
    optimizer = optim.lamb(1e-2, weight_decay=0.1)
    with eager_graphs():
        staged = run(optimizer, "compiled", shapes, half, vectors=vectors)
    assert was_cut[-1]
    assert_same_numbers(staged, run(optimizer, "reference", shapes, half, vectors=vectors))


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.lamb(1e-2, weight_decay=0.1, eps=0.0),  # what is left in padding must not count
        optim.lamb(1e-2, weight_decay=0.1, decoupled_decay=False),
        optim.lamb(1e-2, nvlamb=False, record_norms=True, norm_clamp=(0.0, 10.0)),
        optim.lamb(1e-2, bias_correction=False, grad_averaging=False),
    ],
    ids=["eps 0", "decay in the gradient", "recorded norms", "without correction"],
)
def test_variants_agree_with_the_reference(optimizer):
    with eager_graphs():
        staged = run(optimizer, "compiled", SIZES)
    assert was_cut[-1]
    assert_same_numbers(staged, run(optimizer, "reference", SIZES))


def plain_lamb(param, grad, mean, square, step, lr, decay):
    """Return parameter and moments after a step of LAMB with the default betas and eps, in float64."""
    mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
    move = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * param
    ratio = param.norm() / move.norm() if param.norm() > 0 and move.norm() > 0 else 1.0
    return param - lr * ratio * move, mean, square


def test_each_tensor_moves_as_it_would_alone_with_its_own_rate_decay_and_count():
    shapes, lrs, decays, counts = [(3,), (300,), (20, 30)], [0.1, 0.2, 0.3], [0.0, 0.1, 0.01], [0, 5, 9]
    params = flatten(make_tree(shapes, 0))
    opt = with_hyper(
        fused_update(optim.lamb(), donate=True, kernel="compiled"),
        lr=torch.tensor(lrs, dtype=torch.float64),
        weight_decay=torch.tensor(decays, dtype=torch.float64),
    )
    state = opt.init(params)._replace(count=torch.tensor(counts, dtype=torch.int32))
    expected = {name: (p.double(), 0 * p.double(), 0 * p.double()) for name, p in params.unflatten().items()}
    expected = {name: tuple(x.clone() for x in values) for name, values in expected.items()}
    finite = torch.tensor([True, True, False])
    for step in range(3):
        grads = make_tree(shapes, step + 1)
        out = ScaledGrads(params.layout.pack(grads, None), torch.tensor(0.5), torch.tensor(0.0), (), finite, ())
        params, state = opt.update(out, state, params)
        for index, name in enumerate("01"):
            grad = 0.5 * grads[name].double()
            count = counts[index] + step + 1
            expected[name] = plain_lamb(expected[name][0], grad, *expected[name][1:], count, lrs[index], decays[index])
    trees = (params, state.slots["exp_avg"], state.slots["exp_avg_sq"])
    for name, values in expected.items():
        for tree, value in zip(trees, values, strict=True):
            torch.testing.assert_close(tree.unflatten()[name].double(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("half", "vectors"),
    [(None, False), (torch.bfloat16, True), pytest.param(torch.float16, False, marks=pytest.mark.slow)],
)
def test_compiled_stages_agree_with_the_reference_and_with_a_pure_update(half, vectors):
    optimizer = optim.lamb(1e-2, weight_decay=0.1)
    staged = run(optimizer, "compiled", SIZES, half, vectors=vectors)
    assert_same_numbers(staged, run(optimizer, "reference", SIZES, half, vectors=vectors))
    assert_same_numbers(staged, run(optimizer, "compiled", SIZES, half, donate=False, vectors=vectors))


def total(x, lengths):
    sums = torch.segment_reduce(x.sum(1).double(), "sum", lengths=lengths, unsafe=True)
    return sums.sum().float()


def lamb_like(g, p, m, v, lengths, a, b):
    new_m, new_v = 0.5 * m + g, 0.9 * v + g * g
    step = new_m / (new_v.sqrt() + 1)
    return (m, new_m), (v, new_v), (p, p - total(step * step, lengths) * step)


def skipped_by_one_flag(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    return (m, torch.where(a, new_m, m)), (p, torch.where(a, p - total(new_m, lengths) * new_m, p))


def choosing_by_value(g, p, m, v, lengths, a, b):
    new_m = torch.where(g > 0, g, m)  # the rule's own choice: later uses must see what was chosen
    return (m, new_m), (p, p - total(new_m, lengths) * new_m)


def a_slot_made_from_another(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    new_v = torch.maximum(v, new_m)
    return (v, new_v), (m, new_m), (p, p - total(new_v, lengths) * new_v * new_m)


def an_exchange_after_the_sums(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    return (m, new_m), (v, total(new_m, lengths) * p), (p, total(new_m, lengths) * v)


def skipped_by_two_flags(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    return (m, torch.where(a, new_m, m)), (p, torch.where(b, p - total(new_m, lengths) * new_m, p))


def a_slot_rounded_first(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m.float() + g
    return (m, new_m.to(m.dtype)), (p, p - total(new_m, lengths) * new_m)


def a_slot_rounded_when_written(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m.float() + g
    return (m, new_m), (p, p - total(new_m, lengths) * new_m)


def an_old_slot_after_the_sums(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    return (m, new_m), (p, p - total(new_m, lengths) * m)


def a_norm_of_a_norm(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    return (m, new_m), (p, p - total(new_m * total(new_m, lengths), lengths) * new_m)


def nothing_finished_before_the_sums(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g * total(g, lengths)
    return (m, new_m), (p, p - new_m)


def element_wise(g, p, m, v, lengths, a, b):
    new_m = 0.5 * m + g
    return (m, new_m), (p, p - new_m)


def in_place(fun):
    def update(*tensors):
        for target, value in fun(*tensors):
            target.copy_(value)
        return [tensors[4] + 0]

    return update


def arguments(flags=(True, True), slot=torch.float32):
    generator = torch.Generator().manual_seed(0)
    g, p, m, v = (torch.rand(5, 256, generator=generator) for _ in range(4))
    return [g, p, m.to(slot), v, torch.tensor([2, 2, 1]), *map(torch.tensor, flags)]


@pytest.mark.parametrize("flags", [(True, True), (False, True)])
@pytest.mark.parametrize(
    "fun",
    [lamb_like, skipped_by_one_flag, choosing_by_value, a_slot_made_from_another, an_exchange_after_the_sums],
    ids=lambda fun: fun.__name__,
)
def test_cut_where_slots_are_finished_before_the_sums(fun, flags):
    first, second = cut(trace(in_place(fun), arguments()))
    staged, whole = arguments(flags), arguments(flags)
    (count,) = second(*staged, *first(*staged))
    in_place(fun)(*whole)
    assert torch.equal(count, staged[4])
    for a, b in zip(staged, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        skipped_by_two_flags,
        an_old_slot_after_the_sums,
        a_norm_of_a_norm,
        nothing_finished_before_the_sums,
        element_wise,
    ],
    ids=lambda fun: fun.__name__,
)
def test_not_cut_where_one_graph_is_right(fun):
    assert cut(trace(in_place(fun), arguments())) is None


@pytest.mark.parametrize("fun", [a_slot_rounded_first, a_slot_rounded_when_written], ids=lambda fun: fun.__name__)
def test_not_cut_where_a_slot_would_be_read_back_rounded(fun):
    assert cut(trace(in_place(fun), arguments(slot=torch.bfloat16))) is None
    assert cut(trace(in_place(fun), arguments())) is not None


def test_the_second_stage_reads_no_gradient():
    stages = cut(trace(in_place(lamb_like), arguments()))
    gradients = [next(node for node in stage.graph.nodes if node.op == "placeholder") for stage in stages]
    assert [len(gradient.users) > 0 for gradient in gradients] == [True, False]
