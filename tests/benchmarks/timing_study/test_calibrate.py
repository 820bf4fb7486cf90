"""Test a calibration: its points, its fit, and its report, by hand and as committed."""

from __future__ import annotations

import math

import pytest
from marks import full
from timing_study import calibrate, points, report
from timing_study.report import Case

from vllm_rocm_ops.timing import launch_time, machines
from vllm_rocm_ops.timing.trace import LINE, Access, Block, Instr, Recording

pytestmark = full
MACHINE = machines.MI300X
FOUND = calibrate.read()
CASES = [Case(*row) for row in FOUND["points"]]


def case(us: float, predicted: float, half: str = "fit", **more) -> Case:
    return Case("kind", "kernel", 1, 1, 0, half, us, predicted, 1.0, 1)._replace(**more)


def test_the_committed_report_is_that_of_the_committed_points():
    assert FOUND["classes"] == report.classes(CASES)
    assert FOUND["same_shape"] == report.ranks(CASES, same_shape=True)
    assert calibrate.written(FOUND) == {path: path.read_text() for path in (calibrate.CALIBRATION, calibrate.EVIDENCE)}


def test_errors_are_quantiles_of_the_ratio_either_way():
    found = report.errors([case(10, 11), case(11, 10), case(10, 15), case(2, 2)])
    assert (found["points"], found["median"], found["p90"], found["largest"]) == (4, 0.1, 0.5, 0.5)
    assert (found["median_above_5us"], found["median_us_below_5us"]) == (0.1, 0.0)


def test_only_times_that_are_apart_are_ranked():
    cases = [case(10, 1), case(10.9, 9), case(20, 5)]
    assert report.ranks(cases) == {"pairs": 2, "right": 1}
    other = case(20, 5, kernel="other")
    assert report.ranks([*cases[:1], other], same_shape=True) == {"pairs": 1, "right": 1}
    for unlike in (other._replace(m=2), other._replace(kind="other"), case(20, 5)):
        assert report.ranks([*cases[:1], unlike], same_shape=True)["pairs"] == 0


def test_sensitivity_says_how_far_predictions_move():
    def predicted(machine):
        return [machine["hbm_bandwidth"], 100 + machine["start"]]

    machine = machines.MI300X.but(hbm_bandwidth=4000, start=0)
    found = report.sensitivity(machine, {"hbm_bandwidth": (3900, 9000, 100), "start": (0, 3, 1)}, predicted)
    assert found["hbm_bandwidth"]["more"] == {"to": 4800, "median": round(math.sqrt(1.2) - 1, 3), "largest": 0.2}
    assert found["hbm_bandwidth"]["less"]["to"] == 3900
    assert found["start"] == {"value": 0.0, "more": {"to": 1, "median": 0.005, "largest": 0.01}}


def written(folder, rows):
    lines = ["source,gpu,op,kernel,dtype,M,N,K,extra,us,timing,note"]
    lines += [f"s,MI300X,{op},{kernel},d,{m},64,,,{us},t," for op, kernel, m, us in rows]
    (folder / points.FILE).write_text("\n".join(lines))
    return folder


def every_class(us):
    return [
        (op, kernel, m, us + m) for op, kernels in points.CLASSES.values() for kernel in kernels for m in range(1, 8)
    ]


def test_half_of_the_times_are_held_out_whatever_they_are(tmp_path):
    found = points.read(written(tmp_path, every_class(10)))
    assert [sum(p.kernel == "hfrk_swiglu" and p.held_out is held for p in found) for held in (False, True)] == [4, 3]
    assert all((point.us is None) == point.held_out for point in found)
    others = points.read(written(tmp_path, every_class(99)))
    assert {point[:5] for point in found if point.held_out} == {point[:5] for point in others if point.held_out}
    assert all(point.us is not None for point in points.read(tmp_path, held_out=True))


def test_points_need_their_file_and_all_classes(tmp_path):
    with pytest.raises(ValueError, match="must hold peer_measurements.csv"):
        points.read(tmp_path)
    with pytest.raises(ValueError, match="must have rows of gemv"):
        points.read(written(tmp_path, [row for row in every_class(1) if row[0] != "gemv"]))


def loads(wave: int, count: int) -> list:
    """Return the steps of a wave that loads `count` KiB of its own, eight at a time."""
    first, steps = (7 << 29) + 8 * count * wave, []
    for n in range(count):
        steps.append((Instr("vmem", 8 * n, 8), Access(tuple(range(first + 8 * n, first + 8 * n + 8)), 8 * LINE)))
        if n % 8 == 7:
            steps.append((Instr("wait", 8 * n, 4, vm=0), None))
    return [*steps, (Instr("end", 8 * count, 4), None)]


def test_a_fit_finds_the_constants_and_takes_no_held_out_point():
    truth = MACHINE.but(start=1.0, wave_latency=300, mall_bandwidth=6000)
    recorded = {}
    for grid, count in ((38, 8), (304, 32), (608, 16)):
        blocks = [Block(n, [loads(4 * n + wave, count) for wave in range(4)]) for n in range(16)]
        each = Recording("streaming", grid, 8, blocks, frozenset())
        point = points.Point("kind", f"{grid}", grid, count, 0, False, launch_time.predict(truth, each).us)
        recorded[point] = each
    found = calibrate.fit(MACHINE, recorded)
    assert max(map(abs, calibrate.errors(found, recorded).values())) < 0.06
    held = {point._replace(held_out=True): each for point, each in recorded.items()}
    with pytest.raises(AssertionError):
        calibrate.fit(MACHINE, held)


def test_calibration_is_that_of_the_machine():
    fitted = {name: constant.value for name, constant in MACHINE.constants.items() if constant.kind == "fitted"}
    assert fitted == machines.CALIBRATION["fitted"] and set(fitted) == set(calibrate.FITTED)
    for halves in machines.CALIBRATION["classes"].values():
        assert set(halves) == {"fit", "held out"} and sum(half["points"] for half in halves.values()) > 4


def test_calibrating_without_files_says_what_is_missing(tmp_path, capsys):
    assert calibrate.main([str(tmp_path), str(tmp_path), "--check"]) == 2
    assert "must hold peer_measurements.csv" in capsys.readouterr().err
