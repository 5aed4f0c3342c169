"""Nothing that works without O1 breaks under it: torch's own operator database, run plainly and under cast_ops.

A tenth of the entries runs in `make test`, all of them in `make test-slow`.
`python tests/conformance/test_op_db.py` runs all and prints the counts of docs/o1.md.
"""

import collections
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from npuamp_fn import APEX_OPS, cast_ops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the database uses deprecated names of torch itself
    from torch.testing._internal.common_methods_invocations import op_db

LOW, FULL = torch.float16, torch.float32
o1 = cast_ops(APEX_OPS, LOW)

UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
ILL_CONDITIONED = ("linalg_pinv_singular",)  # it is given a @ b.mT, whose rank changes when rounded to half

REFUSED_ON_HALF = {
    "nn_functional_binary_cross_entropy": "banned, with advice",
    "nn_functional_rrelu": "no half kernel on CPU in training mode",
    "sparse_sampled_addmm": "no half kernel on CPU, and torch does not let others override it",
    "_upsample_bilinear2d_aa": "no half kernel on CPU; private, F.interpolate runs in float32",
}

ENTRIES = {op.formatted_name: op for op in op_db if FULL in op.dtypes}


TENTH = [pytest.param(name, marks=pytest.mark.slow if index % 10 else ()) for index, name in enumerate(ENTRIES)]


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def copied(tree, dtype=None):
    """Copy the tensors of a tree; float32 ones (except 0-dim scalars of a schedule) to another dtype."""

    def one(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        target = dtype if dtype is not None and leaf.dtype == FULL else leaf.dtype
        return leaf.detach().clone().to(target).requires_grad_(leaf.requires_grad)

    return tree_map(one, tree)


def run(function, tree):
    """Call a function on a tree of arguments and differentiate what it returns.

    Returns:
        The outputs, the gradients (``None`` where there are none), and whether there is a derivative.
    """
    args, kwargs = tree
    torch.manual_seed(0)
    outputs = tensors(function(*args, **kwargs))
    differentiable = [out for out in outputs if out.requires_grad]
    leaves = [leaf for leaf in tensors(tree) if leaf.requires_grad]
    if not differentiable or not leaves:
        return outputs, [], True
    ones = [torch.ones_like(out) for out in differentiable]
    try:
        return outputs, torch.autograd.grad(differentiable, leaves, ones, allow_unused=True), True
    except (RuntimeError, NotImplementedError):
        return outputs, [], False


def samples(op):
    """Give the float32 samples that run plainly: their arguments, and what the plain run made of a copy."""
    try:
        found = list(op.sample_inputs("cpu", FULL, requires_grad=op.supports_autograd))
    except RuntimeError:  # needs another device
        return
    for sample in found:
        tree = [sample.input, *sample.args], sample.kwargs
        given = copied(tree)
        try:
            yield tree, given, *run(op.op, given)
        except Exception:  # what fails plainly says nothing about O1
            continue


def rule_of(op):
    """Return the table's rule, ``None`` without one, ``"inside"`` for Python code whose operations have their own."""
    try:
        return APEX_OPS.get(op.op)
    except TypeError:
        return "inside"


def check_close(ours, plain, exact, what):
    """Compare up to half precision of the largest element, or up to float32's: even plain runs may differ by that."""
    ours, plain = (x.detach().to_dense() if x.layout != torch.strided else x.detach() for x in (ours, plain))
    relative = 1e-5 if exact else 2e-2
    if plain.is_floating_point() or plain.is_complex():
        finite = plain.abs()[plain.isfinite()]
        tolerance = {"rtol": relative, "atol": relative * max(finite.max().item() if len(finite) else 0.0, 1e-2)}
        ours = ours.to(plain.dtype)
    else:
        tolerance = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours, plain, equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance)


def check_float32_inputs(op):
    """Check every float32 sample of an entry against the plain run; return how many there were."""
    count, rule = 0, rule_of(op)
    for tree, plain_given, plain, plain_grads, differentiable in samples(op):
        count += 1
        given = copied(tree)
        outputs, grads, ours_differentiable = run(o1(op.op), given)
        assert ours_differentiable or not differentiable, "lost its derivative"
        assert len(outputs) == len(plain)
        for mine, theirs in zip(tensors(given), tensors(plain_given), strict=True):
            check_close(mine, theirs, True, "inputs are modified as in the plain run, or not at all")
        exact = rule not in ("low", "inside")  # float32 inputs are what the rule wants, or there is none
        for ours, theirs in zip(outputs, plain, strict=True):
            allowed = (
                {"low": {LOW}, "inside": {LOW, FULL}}.get(rule, {FULL}) if theirs.dtype == FULL else {theirs.dtype}
            )
            assert ours.dtype in allowed
            if op.name not in UNINITIALIZED and op.formatted_name not in ILL_CONDITIONED:
                check_close(ours, theirs, exact, "output")
        for ours, theirs in zip(grads, plain_grads, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert ours.dtype == theirs.dtype
                if op.formatted_name not in ILL_CONDITIONED:
                    check_close(ours, theirs, exact, "gradient")
    return count


def check_half_inputs(op):
    """Run every sample with half instead of float32 inputs, as if they came out of a layer; return how many."""
    count = 0
    for tree, _, _, _, differentiable in samples(op):
        count += 1
        outputs, _, ours_differentiable = run(o1(op.op), copied(tree, LOW))
        assert ours_differentiable or not differentiable, "lost its derivative"
        assert outputs is not None
    return count


def check_in_place(op):
    """Run the in-place form on float32 samples plainly and under O1; return how many there were."""
    count = 0
    for tree, *_ in samples(op):
        results = []
        for function in (op.inplace_variant, o1(op.inplace_variant)):
            args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, copied(tree))
            torch.manual_seed(0)
            try:
                results.append((function(*args, **kwargs), args[0]))
            except (RuntimeError, TypeError):
                if not results:  # not in place plainly either: the result is larger or of another dtype
                    break
                raise
        if len(results) == 2:
            count += 1
            (_, plain), (result, mine) = results
            assert result is mine
            check_close(mine, plain, rule_of(op) not in ("low", "inside"), "in place")
            assert mine.dtype == plain.dtype
    return count


@pytest.mark.filterwarnings("ignore")  # many operations warn, under O1 or not
@pytest.mark.parametrize("name", TENTH)
def test_every_float32_sample_runs_as_plainly_with_the_dtypes_of_the_table(name):
    check_float32_inputs(ENTRIES[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENTH)
def test_every_sample_runs_on_half_inputs_too(name):
    if name not in REFUSED_ON_HALF:
        check_half_inputs(ENTRIES[name])
        return
    with pytest.raises((RuntimeError, NotImplementedError)):
        check_half_inputs(ENTRIES[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENTH)
def test_every_in_place_form_stays_in_place(name):
    if ENTRIES[name].inplace_variant is not None:
        check_in_place(ENTRIES[name])


def main():
    """Print the counts that docs/o1.md publishes."""
    warnings.simplefilter("ignore")
    totals = collections.defaultdict(collections.Counter)
    for name, op in ENTRIES.items():
        jobs = {"float32 inputs": check_float32_inputs}
        if name not in REFUSED_ON_HALF:
            jobs["half inputs"] = check_half_inputs
        if op.inplace_variant is not None:
            jobs["in place, float32"] = check_in_place
        for what, check in jobs.items():
            count = check(op)
            totals[what].update(entries=1, samples=count, empty=count == 0)
        totals["float32 inputs"][f"rule: {rule_of(op)}"] += 1
    for what, counts in totals.items():
        print(what, dict(counts))  # noqa: T201


if __name__ == "__main__":
    main()
