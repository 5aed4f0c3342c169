"""The examples, in a tiny configuration: what `make demo` claims."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "steps": 40,
    "short": 40,
    "warmup": 4,
    "lr": 1e-2,
    "eval_every": 10,
    "eval_batches": 2,
    "growth_interval": 15,
}


@pytest.fixture(scope="module")
def train_gpt():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("train_gpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def records(train_gpt, folder):
    names = ("float32", "bfloat16", "apex", "float16")
    return dict(zip(names, train_gpt.main(train_gpt.Config(**TINY), folder), strict=True))


def test_every_run_learns(records):
    for record in records.values():
        assert len(record.losses) == TINY["steps"]
        assert all(math.isfinite(loss) for loss in (*record.losses, *record.held_out.values()))
        assert record.held_out[40] < record.held_out[10] - 0.2


def test_functional_and_apex_o2_are_the_same_mathematics(records):
    assert records["apex"].losses == records["bfloat16"].losses  # bit for bit
    assert records["apex"].held_out == records["bfloat16"].held_out


def test_bfloat16_follows_float32(records):
    assert records["bfloat16"].held_out[40] == pytest.approx(records["float32"].held_out[40], rel=0.02)


def test_float16_steps_that_overflow_are_skipped_and_halve_the_scale(records):
    record = records["float16"]
    assert record.scales[0] == 2.0**24
    assert record.applied[0] is False
    assert all(record.applied[-5:])
    for now, following, applied in zip(record.scales, record.scales[1:], record.applied, strict=False):
        assert (following < now) != applied
        assert following in ((now, 2 * now) if applied else (now / 2,))
    for name in ("float32", "bfloat16", "apex"):
        assert all(records[name].applied)
        assert set(records[name].scales) == {1.0}


def test_bytes_that_live_from_step_to_step(records, train_gpt):
    parameters = sum(p.numel() for p in train_gpt.GPT(train_gpt.Config(**TINY)).parameters())
    per_parameter = {name: round(record.persistent_bytes / parameters, 1) for name, record in records.items()}
    assert per_parameter == {"float32": 12.0, "bfloat16": 14.0, "apex": 14.0, "float16": 14.0}


def test_report_is_written(records, folder):
    report = json.loads((folder / "demo.json").read_text())
    assert [run["losses"] for run in report["runs"]] == [record.losses for record in records.values()]
    row = report["summary"][records["float16"].name]
    assert row["skipped_steps"] == records["float16"].applied.count(False) > 0
    assert row["held_out_loss"] == records["float16"].held_out[40]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_emulated_dtype_takes_fewer_steps_and_says_so(train_gpt, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt.demo_report, "has_arithmetic", lambda dtype: dtype != torch.float16)
    config = train_gpt.Config(**{**TINY, "steps": 8, "short": 3, "eval_every": 4})
    *others, float16 = train_gpt.main(config, tmp_path)
    assert [len(record.losses) for record in others] == [8, 8, 8]
    assert list(float16.held_out) == [3]
    assert list(others[0].held_out) == [3, 4, 8]  # float32's loss after as many steps, to compare with
    assert "O2 float16: this machine only emulates it, so it took 3 steps" in capsys.readouterr().out


def test_held_out_text_is_not_trained_on(train_gpt):
    train, held_out = train_gpt.source_text()
    assert train.dtype == held_out.dtype == torch.uint8
    assert int(train.max()) < 128
    assert bytes(held_out[:200].tolist()) not in bytes(train.tolist())
