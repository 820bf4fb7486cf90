"""Test public facts of MI300X: streams, events and barriers, with the model's results in the committed file."""

from __future__ import annotations

import pytest
from marks import full
from timing_study import events, microbenchmarks

from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.timing.hierarchy import L2, MALL

pytestmark = full
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


MISSED = {"1 KiB of a wave in flight"}  # beyond the band; notes.md says why


def test_facts_are_within_the_band_of_calls_that_stream(results):
    assert {found.condition for found in results if not found.passes} == MISSED


def test_microbenchmarks_beyond_their_limits_are_told(results, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(microbenchmarks, "public", lambda machine: results)
    (tmp_path / microbenchmarks.FILE).write_text(
        "gpu,test,instruction,condition,value\nMI308X (gfx942),lds_throughput,ds_read_b128,one wave,99\n"
    )
    assert microbenchmarks.main([str(tmp_path)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("microbenchmarks: ")
    assert "  lds_throughput ds_read_b128, one wave: measured 99" in "\n".join(others)


def test_a_die_releases_for_one_block_after_the_other():
    one, two, all_of = (events.release(MACHINE, count) for count in (1, 2, events.of_die(MACHINE)))
    assert two == 2 * one and all_of == 38 * one == 38 * events.trip(MACHINE, MALL)
    assert events.hop(MACHINE, L2, blocks=38) - events.hop(MACHINE, L2) == pytest.approx(37 * one)
    assert events.barrier_us(MACHINE) * MACHINE["clock"] == pytest.approx(events.hop(MACHINE, MALL) + 37 * one)


def test_no_trip_beside_a_stream_is_shorter_than_its_loads():
    busy, idle = events.Stream(1.0, 1000.0), events.Stream(0.1, 1.0)
    assert events.trip(MACHINE, L2, busy) == events.trip(MACHINE, MALL, busy) == 1000
    assert events.trip(MACHINE, L2, idle) == MACHINE["l2_latency"]
    trips = 2 * (
        1 + 1 / 2 + 1 + 1
    )  # a release, half an atomic, a poll and half the time between two, an acquire; there and back
    more = events.round_trip_us(MACHINE, MALL, busy) - events.round_trip_us(MACHINE, MALL, events.Stream(1.0, 900.0))
    assert more * MACHINE["clock"] == pytest.approx(100 * trips)


def test_an_event_within_a_die_is_shorter():
    assert events.round_trip_us(MACHINE, L2) < events.round_trip_us(MACHINE, MALL)
    assert events.round_trip_us(MACHINE, MALL) == pytest.approx(2 * events.hop(MACHINE, MALL) / MACHINE["clock"])


def test_a_stream_takes_the_bandwidth_that_was_asked_for():
    found = events.stream(MACHINE, 4, 1.64)
    assert found.bandwidth == pytest.approx(1.64, rel=0.05)
    assert found.load > MACHINE["hbm_latency"] * MACHINE["clock"] / 1e3
