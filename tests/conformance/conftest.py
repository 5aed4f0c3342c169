"""Write docs/compatibility.md from the outcomes of the composition matrix."""

import pathlib

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "compatibility.md"
INTRODUCTION = """# What composes with what

Written by `make compatibility` from the outcomes of `tests/conformance/test_composition.py`; do not edit by hand.

Every cell runs the transform (row) under a precision level (column), in eager mode and inside
`torch.compile(fullgraph=True, backend="aot_eager")`, and compares values and dtypes with the same computation
written out in plain torch with explicit casts.
"""


def pytest_addoption(parser):
    parser.addoption("--write-compatibility", action="store_true", help="write docs/compatibility.md")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and item.originalname in ("test_composes", "test_refuses_what_could_not_be_scaled"):
        parameters = item.callspec.params
        key = (parameters["case"], parameters.get("level"), parameters.get("how"))
        item.config.stash.setdefault(OUTCOMES, {})[key] = report.passed
    return report


OUTCOMES = pytest.StashKey[dict]()


def pytest_sessionfinish(session):
    if session.config.getoption("--write-compatibility"):
        outcomes = session.config.stash.get(OUTCOMES, {})
        PAGE.write_text(page(outcomes))


def page(outcomes):
    cells = {key: passed for key, passed in outcomes.items() if key[1]}
    rows = list(dict.fromkeys(case for case, _, _ in cells))
    columns = list(dict.fromkeys((level, how) for _, level, how in cells))
    lines = [INTRODUCTION, "| | " + " | ".join(f"{level} {how}" for level, how in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for case in rows:
        marks = ["yes" if cells[case, level, how] else "**no**" for level, how in columns]
        lines.append(f"| `{case}` | " + " | ".join(marks) + " |")
    lines.append("\nRefused, with a TypeError that shows what to write instead:\n")
    lines += [f"- `{case}`" for case, level, _ in outcomes if not level]
    return "\n".join(lines) + "\n"
