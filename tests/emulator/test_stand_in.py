"""An H200 in the timing model: which calls are measured, which half is fitted, how traces of gfx942 stand for its launches."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import ops
from vllm_rocm_ops.bench import experts
from vllm_rocm_ops.families.rowwise import RowConfig
from vllm_rocm_ops.families.skinny_gemm import SkinnyConfig
from vllm_rocm_ops.launch import Launch
from vllm_rocm_ops.timing import configurations, launch_time, machines, stand_in
from vllm_rocm_ops.timing.hierarchy import NOTHING_SHARED
from vllm_rocm_ops.timing.trace import Access, Block, Instr

POINTS = configurations.points()


def point_of(name: str) -> configurations.Point:
    return next(point for point in POINTS if point.name == name)


def test_half_of_each_kind_is_held_out_by_a_hash_of_the_call():
    hidden = configurations.held_out(POINTS)
    assert len({point.name for point in POINTS}) == len(POINTS) > 80
    assert [point.digest for point in POINTS] == sorted(point.digest for point in POINTS)
    for kind in {point.kind for point in POINTS}:
        of_kind = [point for point in POINTS if point.kind == kind]
        kept = [point for point in of_kind if point.name in hidden]
        assert len(kept) == len(of_kind) // 2 and of_kind[-len(kept) :] == kept
    assert configurations.held_out(list(reversed(POINTS))) == hidden


def test_tokens_go_to_all_experts_in_turn_in_calls_one_after_another():
    a = ops.fused_experts.Arguments(
        *point_of("fused_experts mixtral-8x7b-tp2 1").case.make("meta", torch.Generator(), torch.float8_e4m3fn)
    )
    a = a._replace(topk_ids=torch.zeros(3, 2, dtype=torch.int32), w1=torch.empty(8, 2, 2, device="meta"))
    ids = [configurations.in_turn(a, number)[a._fields.index("topk_ids")] for number in (0, 1)]
    assert ids[0].tolist() == [[0, 1], [2, 3], [4, 5]] and ids[1].tolist() == [[6, 7], [0, 1], [2, 3]]
    assert ids[0].dtype == torch.int32


class Timer:
    """A clock whose times are those of a random number generator."""

    device, arch, unit = "cpu", archs.named("sm_90"), "us"

    def calls(self, bytes_of_call: int) -> int:
        return 2

    def prepare(self, call, sets):
        self.sets = len(sets)
        return call

    def samples(self, prepared):
        chance = random.Random(1)
        return {config: [10.0 + place + chance.random() for _ in range(15)] for place, config in enumerate(prepared)}


def test_all_configurations_of_a_call_are_measured(monkeypatch):
    point, timer = point_of("silu_and_mul 16x7168"), Timer()
    monkeypatch.setattr("vllm_rocm_ops.kernel_arguments.parameters", lambda path, symbol: ())
    monkeypatch.setattr("vllm_rocm_ops.launch.built", lambda module, arch: module)
    line = configurations.measure(point, timer)
    of = RowConfig(128, 1), RowConfig(256, 1), RowConfig(512, 1)  # and not the general kernel
    assert list(line["us"]) == [str(config) for config in of] and line["chosen"] == str(of[0]) and timer.sets == 2
    assert [int(us) for us in line["us"].values()] == [10, 11, 12] and 0 < line["spread"] < 0.1
    share = experts.Share(8, 8, 2, 256, 128)
    small = configurations._case("small", configurations._experts, 4, share, experts.BLOCKS)
    configurations.measure(configurations.Point("experts", ops.fused_experts, small), timer)
    assert timer.sets == configurations.EXPERT_CALLS


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "lds", "held"),
    [(32, 0, 1024, 0, 2), (32, 0, 32, 0, 32), (33, 0, 1024, 0, 1), (128, 0, 256, 0, 2), (127, 1024, 256, 100000, 2),
     (127, 1024, 256, 120000, 1), (16, 0, 96, 0, 21)],
)  # fmt: skip
def test_what_a_multiprocessor_holds(monkeypatch, registers, shared, threads, lds, held):
    monkeypatch.setitem(stand_in.REGISTERS, "k", [registers, shared])
    assert stand_in.held(Launch("m", "k", (1, 1, 1), (threads, 1, 1), {}, lds)) == held


def test_what_runs_on_an_h200_is_traced_with_its_grid_and_held_blocks():
    point = point_of("unquantized_gemm 1x256x7168")
    (one,) = stand_in.works(point, SkinnyConfig(rows=16, split_k=24, blocks=384))
    assert (one.grid, one.held, one.most, len(one.chosen)) == (384, 3, 3, 3)
    assert one.moved[0] > one.moved[1] > 0.8 * 256 * 7168 * 2  # arguments are in no cache, partial sums are
    found = launch_time.of_work(stand_in.MACHINE, one)
    assert launch_time.of_work(stand_in.MACHINE.but(start=stand_in.MACHINE["start"] + 1), one).us == pytest.approx(
        found.us + 1
    )
    slow = stand_in.MACHINE.but(hbm_bandwidth=400, mall_bandwidth=400)
    assert launch_time.of_work(slow, one).us > one.moved[0] / 400e3
    for name, more in (("atomic", 5000), ("matrix_cycles", 50)):
        other = stand_in.MACHINE.but(**{name: stand_in.MACHINE[name] + more})
        assert launch_time.of_work(other, one).us > found.us + 1, name
    row = stand_in.Row(point, "x", 3.0, [one, one])
    assert row.predicted(stand_in.MACHINE) == 2 * found.us
    assert stand_in._traced(RowConfig(224, 4)) == RowConfig(256, 4)


def test_where_a_block_has_half_the_threads_waves_run_twice_between_barriers():
    def load(at: int) -> tuple:
        return Instr("vmem", 8 * at, 8), Access(tuple(range(8 * at, 8 * at + 8)), 1024)

    loads = [load(at) for at in range(stand_in.LOADS + 1)]
    write, read = Instr("lds", 400, 8), Instr("lds", 408, 8)
    end = Instr("end", 500, 4), None
    waves = [
        [*loads, (write, Access((), 64, 1, True)), end],
        [load(90), (read, Access((), 64, 1, False, (0, len(loads)))), end],
    ]
    work = launch_time.Work(1, 1, 1, [Block(0, waves)], NOTHING_SHARED, frozenset(), (0.0, 0.0), 1.0)
    one, other = stand_in.in_two_turns(work).chosen[0].waves
    assert len(one) == 2 * len(loads) + 2 and len(other) == 3 and other[0] == load(90)
    assert [access.bytes for _, access in one[: 2 * len(loads)]] == [512] * 2 * len(loads)
    assert [access.lines for _, access in one[: len(loads)]] == [access.lines[:4] for _, access in loads]
    assert {line for _, access in one[:-2] for line in access.lines} == set(range(8 * len(loads)))
    assert other[1][1].after == (0, 2 * len(loads)) and one[2 * len(loads)][0] is write


def test_a_reduced_trace_takes_as_long():
    point = point_of("fused_add_rms_norm 16x7168")
    whole = []
    original = stand_in._reduced
    stand_in._reduced = lambda one: whole.append(one) or original(one)
    try:
        (less,) = stand_in.works(point, RowConfig(448, 2))
    finally:
        stand_in._reduced = original
    assert launch_time.of_work(stand_in.MACHINE, whole[0]) == launch_time.of_work(stand_in.MACHINE, less)
    assert len(less.shared.chip) <= len(whole[0].shared.chip)


def test_other_grids_are_refused(monkeypatch):
    op = ops.silu_and_mul
    plan = op.plan

    def other(config, out, a, arch):
        return [one._replace(grid=(1, 1, 1)) if arch is stand_in.H200 else one for one in plan(config, out, a, arch)]

    monkeypatch.setattr(op, "plan", other)
    with pytest.raises(ValueError, match="the grids differ"):
        stand_in.works(point_of("silu_and_mul 16x7168"), RowConfig(128, 1))


def test_predictions_are_judged_by_what_the_choice_loses():
    found = stand_in.judged(
        [("a", 10.0, 11.0), ("a", 12.0, 10.0), ("a", 10.5, 12.0), ("b", 20.0, 20.0), ("b", 30.0, 40.0)]
    )
    assert (found.calls, found.configurations) == (2, 5)
    assert found.regret == pytest.approx(1.2**0.5) and found.largest_regret == pytest.approx(1.2)
    assert (found.pairs, found.in_order) == (3, 1)  # 10 to 12, 10.5 to 12, 20 to 30
    assert found.median == pytest.approx(0.1335, abs=1e-3) and found.p90 == pytest.approx(0.2877, abs=1e-3)
    assert found.any == pytest.approx(((1.2 * 1.05) ** (1 / 3) * 1.5**0.5) ** 0.5)


def test_the_record_has_what_the_model_needs():
    assert set(stand_in.MACHINE.constants) == set(machines.MI300X.constants)
    fitted = [name for name, one in stand_in.MACHINE.constants.items() if one.kind == "fitted"]
    assert sorted(fitted) == sorted(stand_in.STEPS) and len(fitted) <= machines.MOST_FITTED
    assert all(one.kind in machines.KINDS for one in stand_in.MACHINE.constants.values())
    assert "H200" not in machines.MACHINES  # no prediction of a call is one of it
    assert dataclasses.is_dataclass(stand_in.MACHINE) and stand_in.MACHINE.arch.compute_units == 132
    written = stand_in.RESULT.read_text()
    classes = json.loads(written)["classes"]
    assert stand_in.text_of(json.loads(written)) == written, "as judge --write leaves it"
    assert set(classes) == {point.kind for point in POINTS} | {"all"}
    hidden = configurations.held_out(POINTS)
    for kind, of in classes.items():
        named = {point.name for point in POINTS if kind in (point.kind, "all")}
        assert (of["fit"]["calls"], of["held out"]["calls"]) == (len(named - hidden), len(named & hidden))
