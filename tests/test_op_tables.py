"""Operation tables are values: edited into new ones, keyed by name and by function, printable, picklable."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npuamp_fn import APEX_OPS, O1, OpTable, Policy, half_function
from npuamp_fn.op_names import functions_of, name_of

# The lists of apex.amp, in its own words (torch, torch.Tensor and torch.nn.functional taken together).
APEX_LISTS = {
    "low": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu addmm addmv "
        "addr matmul mm mv addbmm baddbmm bmm rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell"
    ),
    "full": (
        "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm "
        "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
        "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
        "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss acos "
        "asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum "
        "var renorm cpu"
    ),
    "promote": "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne sub cat stack",
    "refuse": (
        "acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ pow_ cumprod_ cumsum_ "
        "renorm_"
    ),
    "banned": "binary_cross_entropy",
}


@pytest.mark.parametrize(("rule", "names"), APEX_LISTS.items())
def test_the_apex_table_has_all_lists_of_apex(rule, names):
    assert {name: APEX_OPS.get(name) for name in names.split()} == dict.fromkeys(names.split(), rule)


def test_no_operation_stands_under_two_rules():
    rules = {}
    for key, rule in APEX_OPS.rules:
        for function in functions_of(key):
            assert rules.setdefault(id(function), rule) == rule, key


def test_every_name_of_the_apex_table_is_an_operation_of_torch():
    assert [key for key in APEX_OPS if name_of(key) != key or not functions_of(key)] == []


def test_a_name_stands_for_function_method_and_operator():
    bmm = [torch.bmm, Tensor.bmm]
    assert [APEX_OPS.full("torch.bmm").get(op) for op in (*bmm, "bmm", "torch.Tensor.bmm")] == ["full"] * 4
    assert APEX_OPS.get(Tensor.__matmul__) == APEX_OPS.get(Tensor.__rmatmul__) == "low"
    assert APEX_OPS.get(F.softmax) == APEX_OPS.get(Tensor.softmax) == APEX_OPS.get(torch.special.softmax) == "full"
    assert APEX_OPS.get(torch.linalg.norm) == APEX_OPS.get("torch.linalg.norm") == "full"
    assert (APEX_OPS.get(Tensor.pow_), APEX_OPS.get(Tensor.pow)) == ("refuse", "full")


def test_edits_leave_the_original_alone_and_the_last_one_counts():
    before = dict(APEX_OPS.rules)
    edited = APEX_OPS.full("torch.bmm").low(torch.bmm, "acos").promote("torch.fmod").without("torch.exp")
    assert [edited.get(op) for op in ("bmm", "acos", "fmod", "exp")] == ["low", "low", "promote", None]
    assert dict(APEX_OPS.rules) == before
    assert edited.name == edited.low("exp").name == "apex-edited"


def test_an_edit_that_changes_nothing_is_the_table_itself():
    assert APEX_OPS.low("torch.mm") is APEX_OPS


def test_tables_are_values():
    one, two = (OpTable("mine").low("mm").full("exp") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != one.without("exp")
    assert pickle.loads(pickle.dumps(APEX_OPS)) == copy.deepcopy(APEX_OPS) == APEX_OPS
    with pytest.raises(AttributeError, match="cannot assign"):
        APEX_OPS.name = "other"


def test_a_table_reads_like_a_mapping():
    table = OpTable("mine").low("mm").full("exp")
    assert list(table) == ["mm", "exp"]
    assert len(table) == 2
    assert torch.mm in table
    assert torch.bmm not in table
    with pytest.raises(KeyError, match=r"'mine-edited' has no rule for 'bmm'; it is left alone"):
        table["bmm"]


def test_a_table_prints_every_operation_under_its_rule():
    words = str(APEX_OPS).split()
    assert words[:3] == ["apex", "low", "addbmm"]
    assert sorted(words[1:]) == sorted([*{rule for _, rule in APEX_OPS.rules}, *APEX_OPS])
    assert repr(OpTable("mine").low("mm", "bmm")) == "<OpTable 'mine-edited': 2 low>"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("torch.bmmm", "torch.bmm"), ("soft_max", "torch.softmax"), ("torch.nn.functional.liner", "functional.linear")],
)
def test_an_unknown_name_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"unknown operation '{name}'; nearest: \[.*{nearest}"):
        APEX_OPS.low(name)


def test_a_plain_python_function_is_no_key_and_the_message_says_what_to_do():
    with pytest.raises(TypeError, match="decorate it with half_function"):
        APEX_OPS.low(lambda x: x)
    with pytest.raises(ValueError, match=r"'apex' has no rule for 'torch.relu'"):
        APEX_OPS.without("torch.relu")


def test_decorated_functions_and_custom_operators_are_keys():
    @half_function
    def mine(x):
        return x

    table = OpTable("mine").full(mine).low(torch.ops.aten.cos)
    assert table.get(mine) == "full"
    assert table.get(torch.ops.aten.cos) == "low"


def test_torch_function_under_a_decorator_is_the_operation():
    assert OpTable("mine").full(half_function(torch.bmm)).get("bmm") == "full"


def test_widened_runs_in_float32_what_the_table_runs_low():
    assert (APEX_OPS.widened.get("mm"), APEX_OPS.widened.get("exp"), APEX_OPS.widened.get("add")) == (
        "full",
        "full",
        "promote",
    )
    assert APEX_OPS.widened.widened == APEX_OPS.widened


@settings(max_examples=30, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.sampled_from("low full promote".split()), st.sampled_from(["mm", "exp", "fmod"])), max_size=6
    )
)
def test_of_many_edits_of_one_operation_the_last_counts(edits):
    table = APEX_OPS
    for rule, name in edits:
        table = getattr(table, rule)(f"torch.{name}")
    expected = {"mm": "low", "exp": "full", "fmod": None} | {name: rule for rule, name in edits}
    assert {name: table.get(name) for name in expected} == expected
    untouched = set(dict(APEX_OPS.rules).items()) - {("mm", "low"), ("exp", "full")}
    assert untouched <= set(table.rules)


# --- the low dtype of a policy ---------------------------------------------------------------------------------------


def test_o1_leaves_arguments_alone_and_runs_operations_in_float16():
    assert (O1.params, O1.compute, O1.output, O1.ops, O1.low) == (None, None, torch.float32, APEX_OPS, torch.float16)
    assert Policy(None, None, torch.float32, ops=APEX_OPS) == O1


def test_with_half_swaps_the_low_dtype_of_o1_and_survives_its_string():
    half = O1.with_half(torch.bfloat16)
    assert half.low == torch.bfloat16
    assert Policy.parse(str(half)) == half != O1
    assert Policy.parse(str(O1)) == O1
    assert Policy.parse("output=f32, ops=apex, low=bf16") == half


def test_without_operations_there_is_no_low_dtype():
    assert O1.replace(ops=None) == Policy(output=torch.float32)
    with pytest.raises(TypeError, match=r"Policy\(low=...\): expected .* together with a table"):
        Policy(low=torch.float16)
    with pytest.raises(TypeError, match=r"found low=torch.float32"):
        Policy(ops=APEX_OPS, low=torch.float32)


def test_an_edited_table_cannot_be_read_from_a_string_and_the_error_says_why():
    with pytest.raises(ValueError, match=r"'apex-edited'; known: \['apex'\].*policy.replace\(ops=table\)"):
        Policy.parse(str(O1.replace(ops=APEX_OPS.full("mm"))))
