"""Every benchmark runs on small sizes and returns findings that the report can show."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import report, step, timing
from benchmarks.timing import Bar, Finding, Run, Setup, alternate, compare

TINY = Setup(elements=2_000, tensors=4, rounds=2, threads=1, patience=2, seconds=0.0)
TINY_GPT = step.Shape(layers=1, width=8, heads=2, vocabulary=8, context=4, batch=2)
ARGUMENTS = {"operation_casts": (TINY_GPT,), "step_eager": (TINY_GPT,), "step_compiled": (TINY_GPT, "eager")}
NEEDS_COMPILER = {"small_tensors", "kernel_startup"}  # Inductor's time, whatever the size
UNITS = {"time", "rate", "seconds", "bytes per parameter", "relative"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in NEEDS_COMPILER else n for n in command.BENCHMARKS]
)
@pytest.mark.filterwarnings("ignore")  # what peers do is their own affair
def test_every_benchmark_returns_findings_that_can_be_shown(name):
    benchmark = command.BENCHMARKS[name]
    setup = replace(TINY, rounds=1) if name == "import_time" else TINY  # each round is a process
    findings = benchmark(setup, *ARGUMENTS.get(name, ()))
    assert findings
    for finding in findings:
        assert finding.unit in UNITS
        assert finding.value is None or finding.value > 0
        assert finding.value is not None or finding.note
    row = json.loads(json.dumps(report.entry(name, benchmark, findings, TINY)))
    assert set(row) == {"row", "work", "date", "setup", "findings"}
    assert {"ours", "theirs", "value", "limit", "unit", "low", "high", "milliseconds", "met"} <= set(row["findings"][0])
    report.show([row])


def test_memory_at_o2_is_sixteen_bytes_per_parameter_and_padding():
    setup = Setup(elements=2 * 384 * 170, tensors=2)  # 255 whole rows of the flat buffer each: no padding
    for finding in command.BENCHMARKS["memory"](setup):
        assert finding.value == pytest.approx(16.0, abs=0.01)


def test_runs_take_turns_and_are_prepared_before_every_call():
    calls = []
    runs = [Run(n, lambda n=n: calls.append(n), prepare=lambda n=n: calls.append(f"prepare {n}")) for n in "ab"]
    rounds = alternate(runs, TINY)
    assert len(rounds) == TINY.rounds
    assert calls[-4:] == ["prepare a", "a", "prepare b", "b"]


def test_ratios_are_taken_within_a_round_and_against_the_best_peer(monkeypatch):
    rounds = [
        timing.Round({"ours": 1.0, "slow": 8.0, "fast": 2.0}, 0.0),
        timing.Round({"ours": 3.0, "slow": 9.0, "fast": 4.0}, 0.0),
        timing.Round({"ours": 1.0, "slow": 9.0, "fast": 4.0}, 0.5),
    ]
    monkeypatch.setattr(timing, "alternate", lambda runs, setup: rounds)
    runs = [Run("ours", int, 20.0), Run("slow", int), Run("fast", int, 40.0)]
    time, rate = compare(runs, [Bar("ours", ("slow", "fast"), 0.5), Bar("ours", ("fast",), 1.5, "rate")], TINY)
    assert (time.theirs, time.value, time.low, time.high, time.met) == ("fast", 0.5, 0.25, 0.75, True)
    assert (rate.value, rate.met, rate.milliseconds) == (1.0, False, (1000.0, 4000.0))


def test_busy_rounds_give_way_to_quiet_ones(monkeypatch):
    loads = iter([0.5, 0.0, 0.9, 0.0, 0.7])
    monkeypatch.setattr(timing.Load, "others", lambda self: next(loads))
    assert [r.others for r in alternate([Run("a", int)], TINY)] == [0.0, 0.0]


def test_a_machine_that_is_never_quiet_is_marked_in_the_table(monkeypatch):
    monkeypatch.setattr(timing.Load, "others", lambda self: 1.25)
    (finding,) = compare([Run("a", int), Run("b", int)], [Bar("a", ("b",), 1e9)], TINY)
    row = report.entry("x", alternate, [finding], TINY)
    assert report._cells(row["findings"][0])[-1] == "met, others 1.2 cores"


def test_a_missing_peer_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, optax = command.BENCHMARKS["functional_libraries"](TINY)
    assert (optax.value, optax.note, optax.met) == (None, "jax, optax not installed", None)


def test_the_page_gets_the_figures_between_its_marks_and_nothing_else_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    finding = Finding("ours", "theirs", "time", 0.5, 0.4, 0.4, 0.6, (1.0, 2.0))
    results = {
        "machine": report.machine({"copy": 40.0, "read": 25.0}),
        "rows": {"x": report.entry("x", alternate, [finding], TINY)},
    }
    report.write_page(page, results)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| ours | theirs | 1 / 2 | 0.500 | 0.4-0.6 | <= 0.4 | not met |" in text


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="expected the lines"):
        report.write_page(page, {})
