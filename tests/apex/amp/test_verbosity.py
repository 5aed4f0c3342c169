"""``verbosity=2`` prints every cast of O1, in apex's words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from npuamp_fn import APEX_OPS
from npuamp_fn.apex import amp
from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.transforms.op_cast import OpCasts, current, disable_casts


@pytest.fixture(autouse=True)
def clean():
    yield
    _amp_state.verbosity = 1
    if getattr(_amp_state, "handle", None) is not None:
        _amp_state.handle._deactivate()


class Net(nn.Module):
    """A linear layer, whose operands are narrowed, and a normalization, whose input is widened."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 3), nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.linear(x))


def initialized(capsys, verbosity=2, model=None, **options):
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = amp.initialize(model, optimizer, opt_level="O1", verbosity=verbosity, **options)
    capsys.readouterr()  # the options
    return made


def lines(capsys):
    return capsys.readouterr().out.splitlines()


NARROWED = ["Float->Half (linear)"] * 3  # input, weight, bias


def test_every_cast_of_a_training_step_is_printed_and_nothing_else(capsys):
    model, optimizer = initialized(capsys)
    out = model(torch.randn(4, 2))
    assert lines(capsys) == [*NARROWED, "Half->Float (layer_norm)"]
    with amp.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert lines(capsys) == []


def test_what_has_the_right_dtype_is_not_printed(capsys):
    model, _ = initialized(capsys)
    model(torch.randn(4, 2).half())
    assert lines(capsys) == [*NARROWED[1:], "Half->Float (layer_norm)"]


@pytest.mark.parametrize("verbosity", [0, 1])
def test_a_lower_verbosity_prints_no_casts(capsys, verbosity):
    initialized(capsys, 2)
    model, _ = initialized(capsys, verbosity)
    assert model(torch.randn(4, 2)).dtype == torch.float32
    assert lines(capsys) == []


def test_bfloat16_is_named(capsys):
    model, _ = initialized(capsys, cast_model_type=torch.bfloat16)
    model(torch.randn(4, 2))
    assert lines(capsys) == ["Float->BFloat16 (linear)"] * 3 + ["BFloat16->Float (layer_norm)"]


def test_no_cast_no_line_where_casts_are_disabled(capsys):
    model, _ = initialized(capsys)
    with amp.disable_casts():
        model(torch.randn(4, 2))
    assert lines(capsys) == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda low, full: torch.mm(full, low), ["Float->Half (mm)"]),
        (lambda low, full: torch.mm(input=full, mat2=full), ["Float->Half (mm)"] * 2),
        (lambda low, full: F.softmax(low, dim=-1), ["Half->Float (softmax)"]),
        (lambda low, full: torch.add(low, full), ["Half->Float (add)"]),
        (lambda low, full: torch.add(low, low), []),
        (lambda low, full: torch.cat([low, full, low]), ["Half->Float (cat)"] * 2),
        (lambda low, full: low.addmm_(full, low), ["Float->Half (addmm_)"]),
        (lambda low, full: torch.relu(low), []),
    ],
    ids=["low", "keywords", "full", "promote", "alike", "sequence", "in-place", "untouched"],
)
def test_each_rule_says_what_it_cast(capsys, call, expected):
    handle = amp.init(verbose=True)
    assert handle.verbose
    low, full = torch.ones(2, 2).half(), torch.ones(2, 2)
    capsys.readouterr()
    call(low, full)
    assert lines(capsys) == expected


def test_init_is_silent_unless_asked(capsys):
    handle = amp.init()
    assert not handle.verbose
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    assert lines(capsys) == []


def test_process_wide_casts_are_printed_too(capsys):
    initialized(capsys, patch_torch_functions=True)
    assert _amp_state.handle.verbose
    F.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert lines(capsys) == ["Float->Half (linear)"] * 2


def test_decorated_functions_and_what_they_call_are_printed(capsys):
    @amp.half_function
    def blend(x, parts):
        return F.softmax(x, dim=-1) + parts["y"]

    class Calls(nn.Linear):
        def forward(self, x):
            return blend(x, {"y": x})

    model, _ = initialized(capsys, model=Calls(2, 2))
    model(torch.ones(1, 2))
    assert lines(capsys)[:3] == ["Float->Half (blend)"] * 2 + ["Half->Float (softmax)"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_recomputation_of_a_checkpoint_is_printed_again(capsys, reentrant):
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 3)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, optimizer = initialized(capsys, model=Saves())
    out = model(torch.randn(4, 2, requires_grad=True))
    assert lines(capsys) == NARROWED
    with amp.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    assert lines(capsys) == NARROWED


def test_compiled_models_cast_without_printing(capsys):
    model, _ = initialized(capsys)
    x = torch.randn(4, 2)
    expected = model(x)
    capsys.readouterr()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert lines(capsys) == []


def test_scopes_inside_report_to_the_same_unless_they_have_their_own():
    told, own = [], []
    ones = torch.ones(2, 2)
    with OpCasts(APEX_OPS, torch.float16, report=lambda name, before, after: told.append(name)) as outer:
        assert current() is outer
        with OpCasts(APEX_OPS, torch.bfloat16):
            assert torch.mm(ones, ones).dtype == torch.bfloat16
        assert told == ["mm"]
        with OpCasts(APEX_OPS, torch.float16, report=lambda name, before, after: own.append(name)):
            torch.mm(ones, ones)
        assert (told, own) == (["mm"], ["mm"])
        with disable_casts():
            torch.mm(ones, ones)
        torch.matmul(ones, ones)
    torch.mm(ones, ones)
    assert (told, own) == (["mm", "matmul"], ["mm"])
