"""Inside a compiled region, large flat buffers are updated in one pass and tested in one read."""

import pytest
import torch

from npuamp_fn import DynamicLossScale, ScaledGrads, flatten, fused_update, grad, optim, with_loss_scaling
from npuamp_fn.kernels import WORTH_COMPILING, reduce
from npuamp_fn.tree import tree_leaves, tree_map

SIZE = WORTH_COMPILING


class Recorder:
    """The aot_eager backend, keeping what it was given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, example_inputs):
        self.graphs.append(module.graph)
        return torch._dynamo.lookup_backend("aot_eager")(module, example_inputs)

    @property
    def targets(self):
        return [getattr(node.target, "__name__", str(node.target)) for graph in self.graphs for node in graph.nodes]


@pytest.fixture
def recorder():
    torch._dynamo.reset()
    return Recorder()


def values(size, scale=1.0):
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(size))


def tensors(*trees):
    return [leaf.clone() for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_update_is_the_rules_text_with_its_coefficients_computed_once(recorder, half):
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=0.1))
    optimizer = optim.with_master_weights(optimizer) if half else optimizer

    def start(kernel):
        master = flatten({"w": values(SIZE), "b": values(300)})
        params = master.cast(half) if half else master
        opt = fused_update(optimizer, donate=True, kernel=kernel)
        return opt, params, opt.init(params, master=master) if half else opt.init(params)

    opt, params, state = start("auto")
    update = torch.compile(lambda out, state, params: opt.update(out, state, params), backend=recorder, fullgraph=True)
    oracle, expected, expected_state = start("reference")
    grads = params.layout.pack({"w": values(SIZE, 3.0), "b": values(300, 5.0)}, half)
    for finite in (True, False, True):
        out = ScaledGrads(grads, torch.tensor(0.5), torch.tensor(0.0), (), torch.tensor(finite), ())
        before = tensors(params, state)
        params, state = update(out, state, params)
        expected, expected_state = oracle.update(out, expected_state, expected)
        if not finite:
            assert all(map(torch.equal, tensors(params, state), before))
    for new, old in zip(tensors(params, state), tensors(expected, expected_state), strict=True):
        assert new.dtype == old.dtype
        torch.testing.assert_close(new, old, rtol=1e-5 if new.dtype != half else 1e-2, atol=1e-6)
    (graph,) = recorder.graphs
    assert "fused_adam_" not in recorder.targets
    powers = [node for node in graph.nodes if "pow" in str(node.target)]
    assert len(powers) == 2
    for node in powers:
        while "as_strided" not in str(node.target):  # on the way to the elements, a stop in memory
            (node,) = node.users
            assert node.meta["example_value"].dim() == 0


def test_finite_test_and_norm_come_from_one_read(recorder):
    params = flatten({"w": values(SIZE)})
    grad_fn = with_loss_scaling(grad(lambda p, x: (p.buffers[0] * x).sum()), defer_unscale=True)
    compiled = torch.compile(grad_fn, backend=recorder, fullgraph=True)
    scale = DynamicLossScale.create(2.0**10)
    for x, finite in ((2.0, True), (1e30, True), (float("inf"), False)):
        out = compiled(scale, params, torch.tensor(x))
        assert out.finite.item() is finite
        assert out.norm.dtype == torch.float32
        if finite:
            assert abs(out.norm.double() / (x * SIZE**0.5) - 1) < 1e-5
    assert "aminmax" not in recorder.targets


def test_norms_can_be_differentiated_and_batched(recorder):
    flat = flatten({"w": values(SIZE)})
    direction = flat.buffers[0].double() / flat.buffers[0].double().norm()

    @torch.compile(backend=recorder, fullgraph=True)
    def both(flat):
        members = tree_map(lambda buffer: torch.stack([buffer, 2 * buffer]), flat)
        return torch.func.grad(reduce.global_norm)(flat), torch.func.vmap(reduce.global_norm)(members)

    slope, norms = both(flat)
    torch.testing.assert_close(slope.buffers[0].double(), direction, rtol=1e-5, atol=1e-9)
    exact = flat.buffers[0].double().norm()
    torch.testing.assert_close(norms.double(), torch.stack([exact, 2 * exact]), rtol=1e-5, atol=0.0)
    leaf = flat.map(lambda buffer: buffer.clone().requires_grad_())
    reduce.global_norm(leaf).backward()
    torch.testing.assert_close(leaf.buffers[0].grad.double(), direction, rtol=1e-5, atol=1e-9)
