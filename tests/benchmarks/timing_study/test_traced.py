"""Test kernels with published traces: counting and fitting of cycles, and the errors that docs/timing.md states."""

from __future__ import annotations

import pytest
from marks import full
from timing_study import calibrate, traced
from timing_study.traced import Traced

from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.timing.trace import Block, Instr, Recording

pytestmark = full
FOUND = calibrate.read()["traced"]
COLUMNS = "assembly,wall_cycles_per_tile_at_1800MHz,att_critical_cycles_per_tile"


def looping(body: list[str], turns: int = 24) -> Recording:
    """Return two blocks of four waves that run a loop."""
    once = [(Instr(kind, 64 + 4 * n, 4), None) for n, kind in enumerate([*body, "branch"])]
    wave = [(Instr("salu", 60, 4), None), *once * turns]
    return Recording("looping", 320, 2, [Block(n, [wave] * 4) for n in range(2)], frozenset())


def test_a_tile_takes_its_share_of_what_both_blocks_issue():
    found = looping(["valu", "salu"] * 100)
    assert traced.loop(found.blocks[0]) == 64
    turn = 200 * machines.MI308X["issue"] + machines.MI308X["branch"]
    assert traced.cycles(machines.MI308X, found) == pytest.approx(turn / 2 / traced.TILES, rel=0.03)


def test_the_barrier_is_that_of_the_kernel():
    found = looping([*["valu"] * 4, "barrier"])
    for barrier in (40.0, 60.0):
        cycles = traced.cycles(machines.MI308X.but(barrier=barrier), found)
        assert traced.fit_barrier(machines.MI308X, Traced("x", cycles), found) == barrier


def test_a_kernel_without_a_trace_has_its_wall_time_less_what_others_have_more(tmp_path):
    (tmp_path / traced.FILE).write_text(f"{COLUMNS}\na/one.s,1010,1000\n,900,890\nb/two.s,1010,\n")
    assert traced.read(tmp_path) == [Traced("one", 1000.0), Traced("two", pytest.approx(1000.0))]


def test_missing_trace_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="must hold gfx942_traced_asm.csv"):
        traced.read(tmp_path)
    with pytest.raises(ValueError, match=r"must hold one\.co"):
        traced.recording(tmp_path, Traced("one", 1.0))


def test_the_committed_kernels_are_near_their_traces_and_priorities_are_the_fastest():
    low, high, _ = calibrate.FITTED["barrier"]
    assert len(FOUND) == 4 and low <= machines.CALIBRATION["fitted"]["barrier"] <= high
    assert all("setprio" in min(FOUND, key=lambda name: FOUND[name][which]) for which in ("trace", "predicted"))
    assert all(abs(each["predicted"] / each["trace"] - 1) < 0.05 for each in FOUND.values())
