"""Rules that run on whole tensors (AdamP), compiled: the reference's numbers, whatever is projected or skipped."""

import pytest
import torch

from npuamp_fn import ScaledGrads, flatten, fused_update, optim
from npuamp_fn.kernels import compiled
from npuamp_fn.tree import tree_leaves
from tests.kernels.test_compiled import SIZES, assert_same_numbers, bits, make_tree, run

SHAPES = [*SIZES, (1, 300), (300, 1), (64, 33), (2, 3, 3, 3), (0, 4), (4, 0)]


def adamp(**options):
    return optim.adamp(1e-2, weight_decay=0.1, **options)


def updated(tree, grads, kernel, optimizer=None, *, finite=None, steps=3, donate=True, half=None):
    """Take some steps with the same gradients; return parameters by name, and every tensor of parameters and state."""
    params32 = flatten(tree)
    optimizer = optimizer or adamp()
    opt = fused_update(optim.with_master_weights(optimizer) if half else optimizer, donate=donate, kernel=kernel)
    params = params32.cast(half).map(torch.clone)
    per_tensor = finite is not None and finite.dim() == 1
    state = opt.init(params, master=params32 if half else None, count_per_tensor=per_tensor)
    given = params.layout.pack(grads, half)
    for _ in range(steps):
        out = given if finite is None else ScaledGrads(given, torch.tensor(0.25), torch.tensor(0.0), (), finite, ())
        params, state = opt.update(out, state, params)
    return params.unflatten(), [leaf for leaf in tree_leaves((params, state)) if isinstance(leaf, torch.Tensor)]


def plain_adamp(param, grad, steps, lr=1e-2, decay=0.1, delta=0.1, wd_ratio=0.1, eps=1e-8):
    """AdamP from its paper, in float64, with the numbers that betas (0.9, 0.999) give."""
    p, g = param.double().clone(), grad.double()
    m, v, projected = torch.zeros_like(p), torch.zeros_like(p), []
    for step in range(1, steps + 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u, ratio = m / ((v / (1 - 0.999**step)).sqrt() + eps), 1.0
        for rows in (p.shape[0], 1) if p.dim() > 1 else ():
            flat_p, flat_g, flat_u = (x.reshape(rows, -1) for x in (p, g, u))
            cosine = torch.nn.functional.cosine_similarity(flat_g, flat_p, dim=1, eps=0).abs()
            if cosine.max() < delta / flat_p.shape[1] ** 0.5:
                unit = flat_p / flat_p.norm(dim=1, keepdim=True)
                u = (flat_u - unit * (unit * flat_u).sum(dim=1, keepdim=True)).reshape(p.shape)
                ratio, how = wd_ratio, "rows" if rows > 1 else "whole"
                projected.append(how)
                break
        p = p * (1 - lr * decay * ratio) - lr / (1 - 0.9**step) * u
    return p.float(), projected


def orthogonal(param, per_row):
    """A gradient without a component along the weights: of each row, or only of the whole tensor."""
    grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(7))
    rows = param.shape[0] if per_row else 1
    p, g = param.reshape(rows, -1).double(), grad.reshape(rows, -1).double()
    return (g - (g * p).sum(1, keepdim=True) / (p * p).sum(1, keepdim=True) * p).float().reshape(param.shape)


@pytest.mark.parametrize("shape", [(24, 40), (5, 406), (4, 3, 3, 3), (1, 64)])
def test_each_projection_happens_where_the_paper_says(shape):
    tree = {"none": torch.ones(shape), **{name: make_tree([shape])["0"] for name in ("rows", "whole")}, "vector": None}
    tree["vector"] = torch.linspace(-1, 1, 40)
    grads = {
        "none": torch.ones(shape),
        "rows": orthogonal(tree["rows"], per_row=True),
        "whole": orthogonal(tree["whole"], per_row=False),
        "vector": torch.ones(40),
    }
    got, _ = updated(tree, grads, "compiled")
    seen = {}
    for name, value in got.items():
        expected, seen[name] = plain_adamp(tree[name], grads[name], steps=3)
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-6)
    assert seen["none"] == seen["vector"] == []
    assert set(seen["rows"]) == {"rows" if shape[0] > 1 else "whole"}
    assert set(seen["whole"]) == {"whole"}


@pytest.mark.parametrize(
    ("half", "donate"),
    [(None, True), (None, False), pytest.param(torch.float16, True, marks=pytest.mark.slow), (torch.bfloat16, False)],
)
def test_every_size_agrees_with_the_reference(half, donate):
    assert_same_numbers(*(run(adamp(delta=0.9), kernel, SHAPES, half, donate) for kernel in ("compiled", "reference")))


def test_large_tensors_recompute_their_step_with_the_same_numbers(monkeypatch):
    kept = run(adamp(delta=0.9), "compiled", SHAPES)
    monkeypatch.setattr(compiled, "_KEPT", 0)
    assert_same_numbers(run(adamp(delta=0.9), "compiled", SHAPES), kept)


def test_donated_and_pure_updates_are_equal_to_the_bit():
    tree, grads = make_tree(SHAPES), make_tree(SHAPES, seed=1)
    donated, pure = (updated(tree, grads, "compiled", donate=donate)[1] for donate in (True, False))
    for a, b in zip(donated, pure, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_a_skipped_step_changes_no_bit_also_with_projections_of_nan(half):
    tree = make_tree(SHAPES)
    tree["11"][0, 0] = -0.0
    nan = {name: torch.full_like(value, torch.nan) for name, value in tree.items()}
    _, before = updated(tree, nan, "compiled", finite=torch.tensor(False), steps=0, half=half)
    _, after = updated(tree, nan, "compiled", finite=torch.tensor(False), steps=2, half=half)
    for a, b in zip(after, before, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_per_tensor_learning_rates_counts_and_activity():
    shapes = [(8, 20), (6,), (3, 4)]
    tree, grads = make_tree(shapes), make_tree(shapes, seed=1)
    optimizer = adamp()
    optimizer = optimizer.replace(hyper=optim.Hyper(**{**optimizer.hyper, "lr": torch.tensor([0.1, 0.2, 0.3])}))
    active = torch.tensor([True, True, False])
    got, state = updated(tree, grads, "compiled", optimizer, finite=active)
    expected, expected_state = updated(tree, grads, "reference", optimizer, finite=active)
    for name in tree:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-6)
    assert torch.equal(got["2"], tree["2"])
    scaled = {name: 0.25 * value for name, value in grads.items()}
    alone, _ = plain_adamp(tree["1"], scaled["1"], steps=3, lr=0.2)
    torch.testing.assert_close(got["1"], alone, rtol=1e-5, atol=1e-6)
    assert_same_numbers(state, expected_state)


def test_gradients_in_another_memory_order_are_read_as_what_they_are():
    tree = {"w": torch.randn(12, 20), "c": torch.randn(4, 3, 5, 5)}
    grads = {"w": torch.randn(20, 12).T, "c": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)}
    outcomes = []
    for kernel in ("compiled", "reference"):
        opt = fused_update(adamp(), kernel=kernel)
        outcomes.append(opt.update(grads, opt.init(tree), tree)[0])
    for name in tree:
        torch.testing.assert_close(outcomes[0][name], outcomes[1][name], rtol=1e-6, atol=1e-6)


def test_a_state_of_other_shapes_is_refused_and_nothing_is_written():
    params = {"w": torch.ones(40, 30)}
    opt = fused_update(adamp(), donate=True, kernel="compiled")
    state = opt.init({"w": torch.ones(4, 3)})
    with pytest.raises(ValueError, match=r"`w` has shape \(40, 30\) but its exp_avg \(4, 3\)"):
        opt.update({"w": torch.ones(40, 30)}, state, params)
    assert torch.equal(params["w"], torch.ones(40, 30))


def test_channels_last_weights_fall_back_to_the_reference_and_the_message_says_why():
    params = flatten({"c": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)})
    opt = fused_update(adamp(), kernel="compiled")
    with pytest.raises(ValueError, match=r"`c` is not contiguous, and adamp runs on whole tensors"):
        opt.update(params, opt.init(params), params)
    opt = opt.replace(kernel="auto")
    new, _ = opt.update(params, opt.init(params), params)
    expected, _ = plain_adamp(params.unflatten()["c"], params.unflatten()["c"], steps=1)
    torch.testing.assert_close(new.unflatten()["c"], expected, rtol=1e-5, atol=1e-6)


def test_kernels_compiled_on_one_thread_run_on_all_later(monkeypatch):
    graph = pytest.importorskip("torch._inductor.graph")
    sources = []
    monkeypatch.setattr(graph.GraphLowering, "save_output_code", staticmethod(sources.append))
    assert torch.get_num_threads() == 1
    compiled._kernel.cache_clear()
    run(adamp(), "compiled", [(4, 300)])
    (source,) = [source for source in sources if "cpp_pybinding(" in source]
    assert "#pragma omp parallel\n" in source
    assert "num_threads(" not in source
