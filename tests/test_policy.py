"""Policies: strings read back, half dtypes swap, bad values are refused, keep patterns reach every kind of tree."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from npuamp_fn import APEX_OPS, O0, O1, O2, O3, Policy, batch_norm_paths, cast_policy, flatten, functionalize

_dtypes = st.sampled_from([None, torch.float32, torch.float16, torch.bfloat16])
_patterns = st.text(alphabet="abz019._*[]=' ", min_size=1, max_size=8).map(str.strip).filter(bool)
_policies = st.builds(
    Policy, _dtypes, _dtypes, _dtypes, st.sampled_from([None, APEX_OPS]), st.lists(_patterns, max_size=3).map(tuple)
)


@given(_policies)
@settings(max_examples=300, deadline=None)
def test_a_policy_is_read_back_from_its_string(policy):
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


@given(_policies)
@settings(max_examples=100, deadline=None)
def test_a_policys_repr_is_python(policy):
    policy = policy.replace(ops=None)
    assert eval(repr(policy), {"Policy": Policy, "torch": torch}) == policy


@pytest.mark.parametrize(
    "text",
    [
        "params=f32,compute=f16,output=f32",
        " params = f32 , compute = float16 ,output=float32, ",
        "output=f32, compute=f16, params=f32",
    ],
)
def test_spaces_short_names_and_order_do_not_matter(text):
    # jmp's parser refused the space its own examples had.
    assert Policy.parse(text) == O2


def test_none_and_keep_and_tables_parse():
    assert Policy.parse("") == Policy()
    assert Policy.parse("params=None, compute=bf16") == Policy(compute=torch.bfloat16)
    assert Policy.parse("compute=f16, keep= *.norm.* | head.* ").keep == ("*.norm.*", "head.*")
    assert Policy.parse("output=f32, ops=apex") == O1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params=f32=c", "unknown dtype 'f32=c'; known: .*'float32', 'float16', 'bfloat16', 'f32', 'f16', 'bf16'"),
        ("compute=f", "unknown dtype 'f'; known"),
        ("compute=float64", "unknown dtype 'float64'"),
        ("compute", "expected `key=value` once each, found 'compute'"),
        ("compute=f16, compute=f16", "once each"),
        ("compute=", "expected `key=value`"),
        ("weights=f16", "unknown key 'weights'; known: params, compute, output, ops"),
        ("ops=apexx", r"unknown operation table 'apexx'; known: \['apex'"),
    ],
)
def test_parse_errors_list_what_is_known(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


def test_parse_of_no_string_is_refused():
    with pytest.raises(TypeError, match="expected a string, found 3 of type int"):
        Policy.parse(3)


@pytest.mark.parametrize("pattern", ["a,b", "a|b", "", " a", "a "])
def test_patterns_that_could_not_be_read_back_are_refused(pattern):
    with pytest.raises(ValueError, match=r"Policy\(keep=...\): found"):
        Policy(keep=(pattern,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": torch.float64}, r"Policy\(compute=...\): expected .* found torch.float64"),
        ({"params": "float16"}, r"Policy\(params=...\): expected .* found 'float16'"),
        ({"output": 16}, r"Policy\(output=...\)"),
        ({"keep": "*.norm.*"}, r"write keep=\('\*.norm.\*',\)"),
        ({"keep": (1,)}, "expected patterns, found 1 of type int"),
    ],
)
def test_wrong_types_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Policy(**arguments)


def test_policies_are_frozen_hashable_values():
    assert Policy(torch.float32, torch.float16, torch.float32) == O2
    assert len({O0, O1, O2, O3, Policy.parse(str(O2))}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        O2.compute = torch.bfloat16
    assert Policy(keep=["a", "b"]).keep == ("a", "b")  # a list is made hashable


def test_levels_have_the_dtypes_of_apex():
    f32, f16 = torch.float32, torch.float16
    assert (O0.params, O0.compute, O0.output) == (f32, f32, f32)
    assert (O1.params, O1.compute, O1.output) == (None, None, f32)
    assert O1.ops == APEX_OPS
    assert (O2.params, O2.compute, O2.output) == (f32, f16, f32)
    assert (O3.params, O3.compute, O3.output) == (f16, f16, f32)


@pytest.mark.parametrize("policy", [O2, O3])
def test_with_half_swaps_every_half_dtype_and_takes_effect(policy):
    # mpx's setter of the half dtype changed nothing.
    swapped = policy.replace(keep=("n.*",)).with_half(torch.bfloat16)
    assert torch.float16 not in (swapped.params, swapped.compute, swapped.output)
    assert swapped.compute == torch.bfloat16
    assert swapped.output == torch.float32
    assert swapped.keep == ("n.*",)
    assert swapped.with_half(torch.float16) == policy.replace(keep=("n.*",))
    assert cast_policy(policy.with_half(torch.bfloat16))(lambda x: (x.dtype,))(torch.ones(1)) == (torch.bfloat16,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, "bfloat16", None])
def test_with_half_refuses_what_is_no_half(dtype):
    with pytest.raises(TypeError, match=r"with_half: expected torch.float16 or torch.bfloat16, found"):
        O2.with_half(dtype)


def test_cast_params_uses_the_storage_dtype_and_keep():
    params = {"w": torch.ones(2), "norm.weight": torch.ones(2).half(), "steps": torch.arange(2), "none": None}
    out = O3.replace(keep=("norm.*",)).cast_params(params)
    assert out["w"].dtype == torch.float16
    assert out["norm.weight"].dtype == torch.float32
    assert out["steps"] is params["steps"]
    assert O1.cast_params(params)["w"] is params["w"]


def test_cast_params_reaches_the_paths_of_a_flat_tree():
    flat = flatten({"w": torch.ones(2), "norm.weight": torch.ones(2)})
    out = O3.replace(keep=("norm.*",)).cast_params(flat).unflatten()
    assert (out["w"].dtype, out["norm.weight"].dtype) == (torch.float16, torch.float32)
    with pytest.raises(ValueError, match=r"Policy.keep: pattern 'nrom.\*' matches no leaf; nearest: \['norm.weight'"):
        O3.replace(keep=("nrom.*",)).cast_params(flat)


def _net():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.SyncBatchNorm(2)),
        nn.InstanceNorm2d(2, affine=True),
        nn.LayerNorm(2),
    )


def test_batch_norm_paths_are_those_of_apex():
    # apex keeps affine batch norms only; instance and layer norms go half.
    assert batch_norm_paths(_net()) == ("1.*", "2.1.*")
    assert batch_norm_paths(nn.BatchNorm1d(3)) == ("*",)
    assert batch_norm_paths(nn.Linear(2, 2)) == ()


def test_batch_norm_paths_select_the_parameters_of_a_functionalized_module():
    net = _net()
    params = functionalize(net).params
    policy = O3.replace(keep=batch_norm_paths(net))
    kept = {name for name, p in policy.cast_params(params).items() if p.dtype == torch.float32}
    assert kept == {"1.weight", "1.bias", "2.1.weight", "2.1.bias"}
    flat_kept = {n for n, p in policy.cast_params(flatten(params)).unflatten().items() if p.dtype == torch.float32}
    assert flat_kept == kept
