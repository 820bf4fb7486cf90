"""Public facts of MI300X: streams, events and barriers, as the committed file has what the model says of them."""

from __future__ import annotations

import pytest

from vllm_rocm_ops.timing import events, machines, microbenchmarks
from vllm_rocm_ops.timing.hierarchy import L2, MALL

MACHINE = machines.MI300X


@pytest.fixture(scope="module")
def results():
    return list(microbenchmarks.public(MACHINE))


def test_the_committed_file_has_what_the_model_says(results):
    for row, found in zip(microbenchmarks.FACTS, results, strict=True):
        assert row["now"] == float(f"{found.predicted:.3g}"), row["condition"]


def test_every_fact_has_a_source_and_a_range():
    for row in microbenchmarks.FACTS:
        assert row["source"] and row["unit"] in ("us", "TB/s") and 0 < row["least"] <= row["most"]


def test_of_a_range_the_nearest_end_counts(results):
    for row, found in zip(microbenchmarks.FACTS, results, strict=True):
        assert row["least"] <= found.measured <= row["most"]
        assert found.error == 0 if row["least"] <= found.predicted <= row["most"] else found.error != 0
        assert found.passes is (abs(found.error) <= microbenchmarks.BAND)


def test_an_event_within_a_die_is_shorter():
    assert events.round_trip_us(MACHINE, L2) < events.round_trip_us(MACHINE, MALL)
    assert events.round_trip_us(MACHINE, MALL) == pytest.approx(2 * events.hop(MACHINE, MALL) / MACHINE["clock"])


def test_a_stream_takes_the_bandwidth_that_was_asked_for():
    found = events.stream(MACHINE, 4, 1.64)
    assert found.bandwidth == pytest.approx(1.64, rel=0.05)
    assert found.load > MACHINE["hbm_latency"] * MACHINE["clock"] / 1e3
