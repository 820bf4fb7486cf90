"""Test the report on a calibration: its statistics by hand, and that the committed ones match its points."""

from __future__ import annotations

import math

import pytest

from timing import calibrate, report
from timing.report import Case
from vllm_rocm_ops.timing import machines

FOUND = calibrate.read()
CASES = [Case(*row) for row in FOUND["points"]]


def case(us: float, predicted: float, half: str = "fit", **more) -> Case:
    return Case("kind", "kernel", 1, 1, 0, half, us, predicted, 1.0, 1)._replace(**more)


def test_the_committed_report_is_that_of_the_committed_points():
    assert FOUND["classes"] == report.classes(CASES)
    assert FOUND["baselines"] == report.baselines(CASES, machines.MI300X["hbm_bandwidth"])
    assert FOUND["same_shape"] == report.ranks(CASES, same_shape=True)
    assert calibrate.written(FOUND) == {path: path.read_text() for path in (calibrate.CALIBRATION, calibrate.EVIDENCE)}


def test_the_model_is_nearer_than_the_median_of_its_class():
    for kind, halves in FOUND["classes"].items():
        assert halves["held out"]["median"] < FOUND["baselines"]["median of the class"][kind]["held out"]["median"]


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


def test_the_regression_finds_a_time_of_its_form_and_is_fitted_to_its_half_alone():
    def us(blocks, k, megabytes):
        return 2 + 0.5 * blocks + 0.01 * blocks * k / 128 + 0.2 * megabytes

    cases = [
        case(us(*which), 1.0, half, blocks=which[0], k=which[1], megabytes=which[2])
        for half, chosen in (("fit", range(6)), ("held out", range(6, 9)))
        for which in [(1 + n % 4, 128 * (n * n + 1), 10.0 + n**3 % 7) for n in chosen]
    ]
    found = report.baselines(cases, 4000.0)
    assert found["regression per kernel"]["kind"]["held out"]["largest"] < 1e-3
    wrong = [each._replace(us=9 * each.us) if each.half == "held out" else each for each in cases]
    assert report.baselines(wrong, 4000.0)["regression per kernel"]["kind"]["held out"]["median"] == pytest.approx(8.0)


def test_simpler_models_by_hand():
    cases = [case(us, us, megabytes=8.0) for us in (1.0, 5.0, 10.0)]
    found = report.baselines(cases, 4000.0)
    assert found["bytes / bandwidth + 2.5 us"]["kind"]["fit"]["largest"] == pytest.approx(4.5 - 1)
    assert found["median of the class"]["kind"]["fit"]["median"] == pytest.approx(1.0)


def test_sensitivity_says_how_far_predictions_move():
    def predicted(machine):
        return [machine["hbm_bandwidth"], 100 + machine["start"]]

    machine = machines.MI300X.but(hbm_bandwidth=4000, start=0)
    found = report.sensitivity(machine, {"hbm_bandwidth": (3900, 9000, 100), "start": (0, 3, 1)}, predicted)
    assert found["hbm_bandwidth"]["more"] == {"to": 4800, "median": round(math.sqrt(1.2) - 1, 3), "largest": 0.2}
    assert found["hbm_bandwidth"]["less"]["to"] == 3900
    assert found["start"] == {"value": 0.0, "more": {"to": 1, "median": 0.005, "largest": 0.01}}
