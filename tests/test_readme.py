"""The code in README.md and docs/ runs, and does what the text around it says."""

import re
from pathlib import Path

import pytest
import torch

from npuamp_fn.apex import amp

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/how-to-choose.md", "docs/gotchas.md", "docs/o1.md")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def run_blocks(page):
    """Run a page's Python blocks one after the other and return the names that each left behind."""
    names, after = {}, []
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(block, page, "exec"), names)
        after.append(dict(names))
    return after


def test_readme_code_trains_functionally_and_through_amp(capsys):
    functional, per_sample, legacy = run_blocks("README.md")
    assert functional["params"].buffers[0].dtype == torch.float32
    assert functional["opt_state"].count == len(functional["batches"])
    assert functional["loss_scale"].value == 2.0**15
    first = functional["loss_fn"](functional["flatten"](functional["functionalize"](functional["model"]).params),
                                  *functional["batches"][0])  # fmt: skip
    assert functional["loss_fn"](functional["params"], *functional["batches"][0]) < first
    assert per_sample["norms"].shape == (16,)
    assert per_sample["norms"].dtype == torch.float32
    model, optimizer = legacy["model"], legacy["optimizer"]
    assert model[0].weight.dtype == torch.float16
    assert {master.dtype for master in amp.master_params(optimizer)} == {torch.float32}
    assert "keeping static loss scale 128" not in capsys.readouterr().out  # no step was skipped


def test_form_b_of_how_to_choose_keeps_half_parameters_and_float32_masters():
    (names,) = run_blocks("docs/how-to-choose.md")
    assert names["params"].buffers[0].dtype == torch.bfloat16
    assert names["out"].grads.buffers[0].dtype == torch.bfloat16
    master = names["opt_state"].master.buffers[0]
    assert master.dtype == torch.float32
    assert torch.equal(names["params"].buffers[0], master.bfloat16())
    assert not torch.equal(master, names["master"].buffers[0])


def test_the_o1_page_gives_the_dtypes_it_names():
    names = run_blocks("docs/o1.md")[-1]
    dtypes = [names[name].dtype for name in ("scores", "weights", "gradient")]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
