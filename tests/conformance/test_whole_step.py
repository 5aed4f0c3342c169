"""The whole functional step: eager and compiled bitwise equal in one graph, nothing moves on overflow, no host sync."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from npuamp_fn import (
    O2,
    DynamicLossScale,
    FlatTree,
    Policy,
    batch_norm_paths,
    cast_policy,
    flatten,
    functionalize,
    fused_update,
    grad,
    optim,
    tree_where,
    with_loss_scaling,
)
from npuamp_fn.tree import tree_leaves, tree_map, tree_paths, tree_structure


class Case(NamedTuple):
    form: str  # "a": float32 parameters, cast inside the loss; "b": half parameters with masters in the state
    kernel: str
    donate: bool
    defer: bool
    clip: bool
    flat: bool = True
    norm: bool = False


class Run(NamedTuple):
    params: Any
    opt_state: Any
    loss_scale: Any
    buffers: Any


def label(case):
    words = [
        f"form {case.form}",
        case.kernel,
        "donated" if case.donate else "pure",
        "deferred" if case.defer else "unscaled",
    ]
    more = ["clipped"] * case.clip + ["leaves"] * (not case.flat) + ["batch norm"] * case.norm
    return "-".join(words + more)


ALL = [Case(*choice) for choice in itertools.product("ab", ("reference", "aten"), *[(False, True)] * 4, (True,))]
# Every pair of choices appears: the smallest covering array. One case has a batch norm, one a plain tree.
COMPILED = [
    Case("a", "reference", False, False, False),
    Case("b", "aten", False, True, False),
    Case("b", "reference", True, True, True, norm=True),
    Case("b", "reference", True, False, True),
    Case("a", "aten", True, True, False),
    Case("a", "aten", False, False, True),
    Case("b", "aten", True, True, True, flat=False),
]
# Loss scale 2**10, growth every 2 clean steps: clean, growth, overflow, clean, growth, clean.
FACTORS = [1.0, 1.0, 1e30, 1.0, 1.0, 1.0]
SCALES = [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11]
OVERFLOW = FACTORS.index(1e30)
HALF = torch.float16


def model(norm):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 40, bias=not norm), nn.BatchNorm1d(40) if norm else None, nn.Tanh(), nn.Linear(40, 1)]
    return nn.Sequential(*filter(None, layers))


def build(case):
    """Return the step function and the state before the first step; nothing is shared between two calls."""
    net = model(case.norm)
    apply, params, buffers = functionalize(net)
    keep = batch_norm_paths(net)
    full = flatten(params, keep=keep) if case.flat else params

    def loss_fn(params, buffers, x, y, factor):
        leaves = params.unflatten() if case.flat else params
        out, new = apply(leaves, buffers, x)
        return F.mse_loss(out.float(), y) * factor, new

    wrapped = cast_policy(O2.with_half(HALF).replace(keep=keep))(loss_fn) if case.form == "a" else loss_fn
    grad_fn = with_loss_scaling(grad(wrapped, has_aux=True), defer_unscale=case.defer)
    optimizer = optim.adamw(1e-2, weight_decay=0.1)
    if case.clip:
        optimizer = optim.chain(optim.clip_by_global_norm(0.05), optimizer)
    if case.form == "b":
        params = Policy(params=HALF, keep=keep).cast_params(full)
        optimizer = optim.with_master_weights(optimizer)
    else:
        params = tree_map(torch.clone, full)
    optimizer = fused_update(optimizer, donate=case.donate, kernel=case.kernel)
    opt_state = optimizer.init(params, master=full) if case.form == "b" else optimizer.init(params)
    x_dtype = HALF if case.form == "b" else torch.float32

    def step(run, x, y, factor):
        out = grad_fn(run.loss_scale, run.params, run.buffers, x.to(x_dtype), y, factor)
        params, opt_state = optimizer.update(out, run.opt_state, run.params)
        new = Run(params, opt_state, out.loss_scale, tree_where(out.finite, out.aux, run.buffers))
        return new, (out.value, out.finite)

    scale = DynamicLossScale.create(2.0**10, growth_interval=2)
    return step, Run(own(params), own(opt_state), scale, own(buffers))


def own(tree):
    """Give a kept leaf that form b shares with the full-precision parameters memory of its own."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def batches():
    generator = torch.Generator().manual_seed(1)
    for factor in FACTORS:
        x = torch.randn(16, 6, generator=generator)
        yield x, x.sum(1, keepdim=True), torch.tensor(factor)


def simulate(step, run):
    """Return copies of the state before the first and after every step, and what each step reported."""
    states, reports = [own(run)], []
    for batch in batches():
        run, report = step(run, *batch)
        states.append(own(run))
        reports.append(report)
    return states, reports


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def assert_bitwise(a, b, what):
    assert tree_structure(a) == tree_structure(b), what
    for path, x, y in zip(tree_paths(a), tree_leaves(a), tree_leaves(b), strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device), f"{what}: {path}"
            assert torch.equal(bits(x), bits(y)), f"{what}: {path}"
        else:
            assert x is y or x == y, f"{what}: {path}"


class Counter:
    """A compiler backend that counts its graphs."""

    def __init__(self, backend="aot_eager"):
        self.graphs, self.backend = 0, backend

    def __call__(self, module, example_inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(module, example_inputs)


# eager and compiled


@pytest.mark.parametrize("case", COMPILED, ids=label)
def test_compiled_step_is_one_graph_and_bitwise_equal_to_eager(case):
    torch._dynamo.reset()
    expected, reports = simulate(*build(case))
    step, run = build(case)
    counter = Counter()
    states, compiled_reports = simulate(torch.compile(step, fullgraph=True, backend=counter), run)
    assert counter.graphs == 1
    assert [report[1].item() for report in reports] == [factor == 1.0 for factor in FACTORS]
    assert [state.loss_scale.value.item() for state in expected[1:]] == SCALES
    for index, (a, b) in enumerate(zip(states, expected, strict=True)):
        assert_bitwise(a, b, f"after step {index - 1}")
    assert_bitwise(compiled_reports, reports, "reports")


def test_compiled_pairs_of_choices_are_complete():
    for i, j in itertools.combinations(range(5), 2):
        pairs = {(case[i], case[j]) for case in COMPILED}
        assert pairs == {(case[i], case[j]) for case in ALL}


def test_step_under_inductor_agrees_within_rounding():
    # Stated tolerance: fused float16 arithmetic keeps intermediates in float32, so gradients differ by float16
    # roundings; after six steps of size 1e-2 parameters differ by less than 5 % of one step.
    torch._dynamo.reset()
    case = Case("b", "reference", False, True, True)
    expected, _ = simulate(*build(case))
    step, run = build(case)
    counter = Counter("inductor")
    states, reports = simulate(torch.compile(step, fullgraph=True, backend=counter), run)
    assert counter.graphs == 1
    assert [report[1].item() for report in reports] == [factor == 1.0 for factor in FACTORS]
    assert [state.loss_scale.value.item() for state in states[1:]] == SCALES
    master, reference = states[-1].opt_state.master.buffers[0], expected[-1].opt_state.master.buffers[0]
    torch.testing.assert_close(master, reference, rtol=0.0, atol=5e-4)
    assert_bitwise(
        (states[OVERFLOW + 1].params, states[OVERFLOW + 1].opt_state),
        (states[OVERFLOW].params, states[OVERFLOW].opt_state),
        "overflow under Inductor",
    )


# eager


@pytest.mark.parametrize("case", ALL, ids=label)
def test_overflow_step_leaves_everything_bit_identical(case):
    states, reports = simulate(*build(case))
    assert [report[1].item() for report in reports] == [factor == 1.0 for factor in FACTORS]
    assert [state.loss_scale.value.item() for state in states[1:]] == SCALES
    before, after = states[OVERFLOW], states[OVERFLOW + 1]
    for name in ("params", "opt_state", "buffers"):
        assert_bitwise(getattr(after, name), getattr(before, name), name)
    assert after.opt_state.count.item() == before.opt_state.count.item() == OVERFLOW
    assert after.opt_state.count.dtype == torch.int32
    assert after.loss_scale.value.item() == before.loss_scale.value.item() / 2
    moved = [
        not torch.equal(x, y)
        for x, y in zip(tree_leaves(states[-1].params), tree_leaves(after.params), strict=True)
        if isinstance(x, torch.Tensor) and x.numel() > 0
    ]
    assert all(moved)
    assert states[-1].opt_state.count.item() == len(FACTORS) - 1


def without(case, **changes):
    return case._replace(**changes)


@pytest.mark.parametrize("case", [case for case in ALL if case.donate], ids=label)
def test_donated_equals_pure_and_keeps_its_storages(case):
    pure, _ = simulate(*build(without(case, donate=False)))
    step, run = build(case)
    addresses = storages(run.params, run.opt_state)
    states = [own(run)]
    for batch in batches():
        run, _ = step(run, *batch)
        assert storages(run.params, run.opt_state) == addresses
        states.append(own(run))
    for index, (a, b) in enumerate(zip(states, pure, strict=True)):
        assert_bitwise(a, b, f"after step {index - 1}")


def storages(params, state):
    leaves = tree_leaves((params, state.slots, state.master))
    return [leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("case", [case for case in ALL if not case.donate], ids=label)
def test_pure_step_mutates_nothing(case):
    step, run = build(case)
    before = own(run)
    step(run, *next(batches()))
    assert_bitwise(run, before, "arguments")


@pytest.mark.parametrize("case", [case for case in ALL if not case.donate and not case.defer], ids=label)
def test_kernels_and_deferral_agree(case):
    expected, _ = simulate(*build(case))
    for other in (without(case, defer=True), without(case, kernel="reference")):
        states, _ = simulate(*build(other))
        for a, b in zip(tree_leaves(states[-1]), tree_leaves(expected[-1]), strict=True):
            if isinstance(b, torch.Tensor):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("form", ["a", "b"])
def test_state_is_stable_from_step_to_step(form):
    states, _ = simulate(*build(Case(form, "reference", False, True, True)))
    for state in states[1:]:
        assert tree_structure(state) == tree_structure(states[0])
        for new, old in zip(tree_leaves(state), tree_leaves(states[0]), strict=True):
            if isinstance(old, torch.Tensor):
                assert (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device)
                assert new.requires_grad is False


def test_forms_a_and_b_follow_the_same_curve():
    # Both hold float32 weights and compute in half; they differ in the dtype gradients arrive in.
    a, _ = simulate(*build(Case("a", "reference", False, False, False, norm=True)))
    b, _ = simulate(*build(Case("b", "reference", False, False, False, norm=True)))
    torch.testing.assert_close(a[-1].params.buffers[0], b[-1].opt_state.master.buffers[0], rtol=0.0, atol=1e-3)
    assert torch.equal(b[-1].params.buffers[0], b[-1].opt_state.master.buffers[0].to(HALF))
    assert [buffer.dtype for buffer in b[-1].params.buffers] == [HALF, torch.float32]


# no host synchronisation


class NoSync(TorchDispatchMode):
    """Fail on every operator that brings a tensor's value to the host."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"host synchronisation: {func}"
        return func(*args, **(kwargs or {}))


def test_the_detector_detects():
    for sync in (lambda x: x.item(), bool, float, lambda x: x.nonzero(), lambda x: torch.equal(x, x)):
        with pytest.raises(AssertionError, match="host synchronisation"), NoSync():
            sync(torch.tensor(1.0))


@pytest.mark.parametrize("case", ALL, ids=label)
def test_no_step_synchronises_with_the_host(case):
    step, run = build(case)
    inputs = list(batches())
    with NoSync():
        for batch in inputs:
            run, _ = step(run, *batch)
    assert run.loss_scale.value.item() == SCALES[-1]


# donation is refused where it could do harm


def donating(params):
    optimizer = fused_update(optim.adamw(1e-2), donate=True)
    return optimizer, optimizer.init(tree_map(lambda p: p.detach().clone(), params))


@pytest.mark.parametrize("flat", [False, True])
def test_donation_under_transforms_is_refused(flat):
    params = {"w": torch.ones(3, 4)}
    params = flatten(params) if flat else params
    optimizer, state = donating(params)
    ones = tree_map(torch.ones_like, params)
    message = r"donated tensors cannot be updated in place under vmap, grad or jvp; use .*donate=False"
    stacked = tree_map(lambda leaf: torch.stack([leaf] * 2), (params, state, ones))
    with pytest.raises(TypeError, match=message):
        vmap(lambda p, s, g: optimizer.update(g, s, p))(*stacked)
    with pytest.raises(TypeError, match=message):
        torch.func.grad(lambda p: sum(leaf.sum() for leaf in tree_leaves(optimizer.update(ones, state, p)[0])))(params)
    assert all(torch.equal(leaf, torch.ones_like(leaf)) for leaf in tree_leaves(params["w"] if not flat else ones))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"w": torch.ones(3, requires_grad=True)}, "donated tensor `params.w` needs gradients: detach it"),
        (lambda: {"a": torch.ones(2), "w": torch.ones(1).expand(3)}, "`params.w` is expanded, so that elements share"),
        (
            lambda: dict(zip(("v", "w"), [torch.ones(3)] * 2, strict=True)),
            "`params.w` shares memory with `params.v`: clone one of them",
        ),
    ],
)
def test_donation_of_unsuitable_tensors_is_refused_and_changes_nothing(make, message):
    params = make()
    optimizer, state = donating(params)
    before = own(state)
    grads = tree_map(lambda p: torch.ones(p.shape), params)
    with pytest.raises(TypeError, match=message):
        optimizer.update(grads, state, params)
    assert all(torch.equal(p, torch.ones_like(p)) for p in params.values())
    assert_bitwise(state, before, "state")
    pure, _ = optimizer.replace(donate=False).update(grads, state, tree_map(lambda p: p.detach(), params))
    assert not torch.equal(pure["w"], torch.ones(3))


def test_donated_state_that_shares_memory_with_the_parameters_is_refused():
    params = flatten({"w": torch.ones(3)})
    optimizer, state = donating(params)
    shared = state._replace(slots={**state.slots, "exp_avg": FlatTree(params.buffers, (), params.layout)})
    with pytest.raises(TypeError, match=r"donated tensor `slots.exp_avg.*` shares memory with `params"):
        optimizer.update(params, shared, params)
