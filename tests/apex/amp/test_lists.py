"""apex's operation lists: every way to edit a list edits the table that O1 follows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npuamp_fn.apex import amp
from npuamp_fn.apex.amp.lists.editable import OperationList
from npuamp_fn.apex.amp.registry import _tables, operation_table


@pytest.fixture(autouse=True)
def clean():
    table = _tables[0]
    yield
    _tables[0] = table


@pytest.fixture
def full():
    return OperationList(F, "full")


def rule(name):
    return operation_table().get(f"torch.nn.functional.{name}")


@pytest.mark.parametrize(
    "remove",
    [
        lambda names: names.pop(names.index("gelu")),
        lambda names: names.remove("gelu"),
        lambda names: names.__delitem__(names.index("gelu")),
        lambda names: names.__setitem__(names.index("gelu"), "hardtanh"),
        lambda names: names.__setitem__(slice(None), [name for name in names if name != "gelu"]),
        lambda names: names.clear(),
    ],
    ids=["pop", "remove", "del", "replace", "slice", "clear"],
)
def test_a_name_that_leaves_the_list_is_left_alone(full, remove):
    assert rule("gelu") == "full"
    remove(full)
    assert "gelu" not in full
    assert rule("gelu") is None
    assert rule("softmax") == ("full" if "softmax" in full else None)


@pytest.mark.parametrize(
    "add",
    [
        lambda names: names.append("hardtanh"),
        lambda names: names.insert(1, "hardtanh"),
        lambda names: names.extend(iter(["hardtanh"])),
        lambda names: names.__iadd__(["hardtanh"]),
        lambda names: names.__setitem__(0, "hardtanh"),
        lambda names: names.__setitem__(slice(2, 4), iter(["hardtanh"])),
    ],
    ids=["append", "insert", "extend", "iadd", "replace", "slice"],
)
def test_a_name_that_comes_into_the_list_gets_its_rule(full, add):
    plain = list(full)
    add(full)
    add(plain)
    assert full == plain
    assert rule("hardtanh") == "full"


def test_pop_returns_the_last_name(full):
    last = full[-1]
    assert full.pop() == last
    assert last not in full


def test_a_name_that_another_list_took_over_keeps_that_rule(full):
    OperationList(F, "low").append("gelu")
    full.remove("gelu")
    assert rule("gelu") == "low"


def test_appending_once_more_counts_as_the_last_registration(full):
    OperationList(F, "low").append("gelu")
    full.append("gelu")
    assert rule("gelu") == "full"


def test_an_unknown_name_is_refused_and_nothing_changes(full):
    names, table = list(full), operation_table()
    with pytest.raises(ValueError, match="No function named no_such"):
        full[1:4] = ["hardtanh", "no_such"]
    assert (list(full), operation_table()) == (names, table)


def test_models_follow_from_the_next_call_on(full):
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model(torch.ones(1, 2))
    full.pop(full.index("gelu"))
    model(torch.ones(1, 2))
    assert seen == [torch.float32, torch.float16]


@pytest.mark.parametrize("name", ["sigmoid", "binary_cross_entropy"])
def test_binary_cross_entropy_names_an_opt_out_that_scripts_of_apex_have(name):
    class Net(nn.Linear):
        def forward(self, x):
            return F.binary_cross_entropy(torch.sigmoid(super().forward(x)), torch.ones(1, 1))

    model, _ = amp.initialize(Net(2, 1), [], opt_level="O1", verbosity=0)
    with pytest.raises(NotImplementedError, match=r"amp.register_float_function\(torch.nn.functional, 'binary_cross"):
        model(torch.ones(1, 2))
    amp.register_float_function(torch if name == "sigmoid" else F, name)
    assert model(torch.ones(1, 2)).dtype == torch.float32
