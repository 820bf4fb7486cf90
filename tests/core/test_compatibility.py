"""Test that the compatibility page covers all that the tests record.

test_repo.py tests that it is fresh.
"""

import re

import pytest
from pages import compatibility

from vllm_rocm_ops.vllm import seam


def table_below(title: str) -> list[list[str]]:
    text = compatibility.PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_every_recorded_selection_is_on_the_page():
    """Each kind of linear and of experts is shown; a row with a condition after a comma belongs to one of these kinds."""
    recorded = {what for what, _ in compatibility.answers("with") if what.startswith(("linear ", "experts "))}
    shown = {what for one in compatibility.formats.FORMATS for what in compatibility.layers_of(one).values()}
    assert shown == {what for what in recorded if "," not in what}


@pytest.mark.parametrize("name", seam.in_folder("linear") + seam.in_folder("moe"))
def test_every_seam_of_linears_and_experts_is_in_a_recorded_selection(name):
    """A recorded answer names its class, as RocmOpsInt8Linear, or its module."""
    kernel = r"\w*".join(part.capitalize() for part in name.split("_"))
    answers = {answer for of in compatibility.answers("with").values() for both in of.values() for answer in both}
    assert any(re.match(rf"RocmOps(Aiter|Routing)?{kernel} |.*\.{name}\.", answer) for answer in answers)


def test_every_quantization_that_an_engine_runs_is_on_the_page():
    run = set().union(*compatibility.flavours().values()) - {"mixed", "int4_experts"}  # two formats each
    assert run == {one.flavour for one in compatibility.formats.FORMATS if one.flavour}


@pytest.mark.parametrize("name", ["NVFP4", "INT4 with zero points"])
def test_refused_quantizations_have_rows_in_the_table(name):
    rows = [row for row in table_below("Quantization and attention") if row[0] == name]
    assert rows and all(row[-1].startswith(("refused: ", "vLLM's kernel: ")) for row in rows)


@pytest.mark.parametrize(
    ("answers", "cell"),
    [
        ([["RocmOpsX holds Y", "RocmOpsX holds Y"]] * 2, "selected"),
        ([["RocmOpsX", "AiterX"]] * 2, "selected without AITER"),
        ([["Y", "Y"]] * 2, "refused: vLLM's kernel comes first"),
        ([["Y", "Y"], ["vllm_rocm_ops.f", "vllm_rocm_ops.f"]], "selected: 0.1 not at all, 0.2 always"),
    ],
)
def test_a_cell_says_where_ours_are_taken(monkeypatch, answers, cell):
    monkeypatch.setattr(
        compatibility, "answers", lambda plugin: {("linear x", "gfx942"): dict(zip(("0.1", "0.2"), answers))}
    )
    assert compatibility.selected("linear x", "gfx942") == cell


@pytest.mark.parametrize("table", compatibility.RECORDING, ids=lambda path: path.name)
@pytest.mark.parametrize("is_in_others", [False, True], ids=["newest", "in others"])
def test_a_table_without_a_release_is_named(monkeypatch, table, is_in_others):
    """A release that a seam was tried on, or that another table has, must be a column."""
    monkeypatch.setattr(compatibility, "recorded", compatibility.recorded.__wrapped__)
    read = compatibility.read_rows
    if is_in_others:
        lacking = "0.30"
        monkeypatch.setattr(
            compatibility,
            "read_rows",
            lambda path: [{k: v for k, v in row.items() if path != table or k != lacking} for row in read(path)],
        )
    else:
        lacking = "0.99"
        monkeypatch.setattr(compatibility.seam, "load", lambda name: compatibility.seam.Seam)
        monkeypatch.setattr(compatibility.seam.Seam, "versions", ("0.30", lacking))
    message = f"{table.name} must have a column for vLLM {lacking}: copy build/{table.name}, which"
    with pytest.raises(ValueError, match=message):
        compatibility.recorded(table)


def test_a_table_without_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(compatibility, "AMD", (*compatibility.AMD, "gfx999"))
    message = "selection.csv must have rows for gfx999, which ARCHS of tests/vllm/selection.py names: copy build/"
    with pytest.raises(ValueError, match=message):
        compatibility.recorded.__wrapped__(compatibility.SELECTION)
    assert compatibility.recorded.__wrapped__(compatibility.REACH)
