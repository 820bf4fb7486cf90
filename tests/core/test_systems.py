"""Test that the ops, commands, files and tests exist that the page of other systems names."""

import ast
import contextlib

import pytest
from contests import __main__ as contests
from pages import systems
from pages.measurements import ROOT

from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.tools import cli

ROWS = systems.rows()


def wrong(row: systems.Row) -> list[str]:
    """Return what is wrong with a row."""
    found = []
    names = {op.name for op in op_module.registered()}
    found += [f"there is no op {name}" for name in row.ops if name not in names]
    if row.command:
        try:
            if row.command[0] == "contests":
                contests.parse_arguments(row.command[1:])
            else:
                cli.parse_arguments(row.command)
        except SystemExit:
            found.append(f"no command takes {row.ours}")
    found += [f"there is no file {path}" for path in row.where.split() if not (ROOT / path).is_file()]
    for test in row.tests.split():
        file, _, function = test.partition("::")
        functions = set()
        with contextlib.suppress(OSError):
            tree = ast.parse((ROOT / file).read_text())
            functions = {getattr(node, "name", "") for node in tree.body}
            functions |= {alias.name for node in tree.body for alias in getattr(node, "names", ())}
        if not any(name.startswith("test_") and function in ("", name) for name in functions):
            found.append(f"there is no test {test}")
    if row.state == "there":
        found += [f"{name} is missing" for name in ("where", "tests") if not getattr(row, name)]
    elif not row.why:
        found.append("why is missing")
    if row.state == "not yet":
        found += [f"{name} is there already" for name in ("ours", "where", "tests") if getattr(row, name)]
    if row.state not in systems.STATES or row.system not in systems.SYSTEMS or not row.theirs:
        found.append("the state, the system or what is theirs is not known")
    return found


def test_what_rows_name_exists(capsys):
    assert {f"{row.system} {row.theirs}": wrong(row) for row in ROWS if wrong(row)} == {}


def test_every_system_has_rows_and_every_numbered_part_one():
    assert {row.system for row in ROWS} == set(systems.SYSTEMS)
    for system, numbers in {
        "HF": [*range(1, 12), *range(20, 28)],
        "RF": [*range(1, 16), *range(20, 31)],
        "TS": range(1, 11),
        "PK": range(1, 15),
        "MX": range(1, 13),
    }.items():
        ids = {part for row in ROWS if row.system == system for part in row.ids.split()}
        assert ids == {f"{system}-{number:02}" for number in numbers}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ours": "rms_nrom"}, "there is no op rms_nrom"),
        ({"ours": "contests conv"}, "no command takes contests conv"),
        ({"ours": "bench --conv"}, "no command takes bench --conv"),
        ({"where": "csrc/ops/rms_nrom.hip"}, "there is no file csrc/ops/rms_nrom.hip"),
        ({"tests": "tests/ops/test_none.py"}, "there is no test tests/ops/test_none.py"),
        ({"tests": "tests/marks.py"}, "there is no test tests/marks.py"),
        ({"tests": "tests/ops/test_ops.py::test_none"}, "there is no test tests/ops/test_ops.py::test_none"),
        ({"tests": ""}, "tests is missing"),
        ({"state": "left out"}, "why is missing"),
        ({"state": "soon", "why": "x"}, "the state, the system or what is theirs is not known"),
        ({"state": "not yet", "why": "x"}, "ours is there already"),
    ],
)
def test_a_row_that_names_what_is_not_there_is_found(change, said, capsys):
    right = dict(vars(next(row for row in ROWS if row.theirs == "rmsnorm.py, with 1 + weight and rows of any size")))
    assert wrong(systems.Row(**right)) == [] and said in wrong(systems.Row(**(right | change)))


def test_the_page_has_every_row():
    page = systems.page()
    assert all(row.theirs in page and row.why in page for row in ROWS)
    assert "left out, because serving computes no gradients" in page
    assert all(f"not yet: {row.why}" in page for row in ROWS if row.state == "not yet")
