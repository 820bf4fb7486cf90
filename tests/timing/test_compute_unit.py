"""Test the timing of the compute unit: published microbenchmarks, and each rule alone."""

from __future__ import annotations

import pytest
from timing_study import microbenchmarks

from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.timing.compute_unit import ComputeUnit
from vllm_rocm_ops.timing.hierarchy import L2, MALL, Memory, Sharing
from vllm_rocm_ops.timing.trace import Access, Block, Instr

MACHINE = machines.MI308X.but(first_instruction=0, wave_latency=0, mall_bandwidth=11900)
COISSUE = "MFMA 16x16x16 bf16 + {} ops: added cycles per group"
OTHER = "two waves of one SIMD in antiphase, {} ops per MFMA: added cycles per group"
GAP = "index of first issue gap >= {} cycles"

# tingqli/pyhip docs/mfma-valu-coissue.md, docs/mem_latency.md and attn_4wave/tools/vmem-fifo.md, on MI308X
MEASURED = [
    ("throughput", "v_mfma_f32_16x16x16_bf16", "", 16.024),
    ("throughput", "v_add_f32", "", 4.012),
    ("throughput", "v_exp_f32", "", 16.0),
    ("fetch_alignment", "v_fma_f32", "", 5.012),
    ("mfma_coissue_same_wave", "v_add_f32", COISSUE.format(3), 0.028),
    ("mfma_coissue_same_wave", "v_add_f32", COISSUE.format(4), 4.028),
    ("mfma_coissue_same_wave", "v_exp_f32", COISSUE.format(2), 20.028),
    ("mfma_coissue_same_wave", "v_pk_add_f32", COISSUE.format(1), 12.012),
    ("mfma_coissue_same_wave", "v_pk_add_f32", COISSUE.format(4), 24.013),
    ("mfma_coissue_other_wave", "v_add_f32", OTHER.format(3), -0.01),
    ("mfma_coissue_other_wave", "v_fma_f32", OTHER.format(4), 4.968),
    ("mfma_coissue_other_wave", "v_pk_add_f32", OTHER.format(3), 14.964),
    ("exp_pair_same_wave", "v_add_f32", "", 20.036),
    ("exp_pair_other_wave", "v_fma_f32", "", 20.511),
    ("bundle", "MFMA2+ALU+EXP", "2 scalar ALU", 44.051),
    ("bundle", "MFMA+ALU+MFMA+EXP", "3 scalar ALU", 36.053),
    ("lds_latency", "ds_read_b128", "no conflict, one wave", 64),
    ("lds_latency", "ds_read_b32", "all lanes one bank", 119),
    ("lds_throughput", "ds_read_b128", "one wave", 16),
    ("lds_throughput", "ds_read_b128", ">= 2 SIMDs", 8),
    ("lds_throughput", "ds_read_b32", "4-way conflict", 16),
    ("vmem_issue_gap", "96 load dwordx4", GAP.format(16), 16),
    ("vmem_issue_gap", "96 load dwordx4", GAP.format(100), 50),
    ("vmem_issue_gap", "96 store dwordx4", GAP.format(16), 1),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mi300x")
    lines = [
        "gpu,test,instruction,condition,value",
        *(f'MI308X (gfx942),{test},{name},"{condition}",{value}' for test, name, condition, value in MEASURED),
    ]
    (folder / microbenchmarks.FILE).write_text("\n".join(lines))
    return list(microbenchmarks.run(machines.MI308X, folder))


@pytest.mark.parametrize("number", range(len(MEASURED)), ids=[f"{row[0]}-{row[1]}-{row[3]}" for row in MEASURED])
def test_microbenchmarks_come_out_as_measured(results, number):
    assert results[number].measured == MEASURED[number][3]
    assert results[number].passes, results[number]


def test_microbenchmarks_need_their_file(tmp_path, capsys):
    assert microbenchmarks.main([str(tmp_path)]) == 2
    assert "must hold gfx942_issue_microbench.csv" in capsys.readouterr().err
    with pytest.raises(ValueError, match="must hold gfx942_issue_microbench.csv"):
        list(microbenchmarks.run(machines.MI308X, tmp_path))


def at(number: int) -> int:
    return 4 * number


def run(*waves, machine=MACHINE, memory: Memory | None = None, blocks: int = 1, held: int = 1):
    """Return the cycles of blocks of these waves, and the issue cycles of the instructions, by wave."""
    times: dict[int, list[float]] = {}
    unit = ComputeUnit(
        machine, memory or Memory(machine), lambda age, index, time: times.setdefault(age, []).append(time)
    )
    steps = [[(kind._replace(address=at(n)), access) for n, (kind, access) in enumerate(wave)] for wave in waves]
    cycles = unit.run([Block(n, steps) for n in range(blocks)], [0.0] * blocks, held)
    return cycles, times


VALU, BARRIER, END = (Instr("valu", 0, 4), None), (Instr("barrier", 0, 4), None), (Instr("end", 0, 4), None)


def load(first: int, count: int = 8):
    return Instr("vmem", 0, 4), Access(tuple(range(first, first + count)), 128 * count)


def wait(vm: int = 63, lgkm: int = 15):
    return Instr("wait", 0, 4, vm=vm, lgkm=lgkm), None


def test_a_barrier_waits_for_the_last_wave():
    _, times = run([BARRIER, VALU], [*[VALU] * 50, BARRIER, VALU])
    assert times[0][1] == times[1][51] == times[1][50] + MACHINE["barrier"]


def test_a_wave_that_ended_does_not_hold_a_barrier():
    _, times = run([BARRIER, VALU], [*[VALU] * 50, END])
    assert times[0][1] > times[1][50]


def test_a_wait_lets_as_many_stay_outstanding_as_it_says():
    _, times = run([load(0), load(8), load(0), wait(vm=2), VALU, wait(vm=1), VALU, wait(vm=0), VALU])
    first, second, third = times[0][4], times[0][6], times[0][8]
    assert first < second < third
    assert first > MACHINE["l2_latency"] + MACHINE["hbm_latency"] * MACHINE["clock"] / 1e3


def test_a_loaded_line_hits_in_l1():
    _, times = run([load(0), wait(vm=0), load(0), wait(vm=0), VALU])
    assert times[0][4] - times[0][2] < MACHINE["l1_latency"] + 40


def test_a_line_evicted_from_l1_hits_in_l2():
    many = [load(8 + 8 * n) for n in range(40)]
    _, times = run([load(0), *many, wait(vm=0), load(0), wait(vm=0), VALU])
    latency = times[0][-1] - times[0][-3]
    assert MACHINE["l2_latency"] <= latency < MACHINE["l2_latency"] + 40


def test_hot_inputs_come_from_infinity_cache():
    took = {}
    for hot in (False, True):
        took[hot], _ = run([load(0), wait(vm=0)], memory=Memory(MACHINE, cold=frozenset() if hot else None))
    difference = (MACHINE["hbm_latency"] - MACHINE["mall_latency"]) * MACHINE["clock"] / 1e3
    assert took[False] - took[True] == pytest.approx(difference, rel=0.1)


def test_bandwidth_is_shared_with_other_blocks():
    def took(others, shared):
        memory = Memory(MACHINE, shared)
        memory.others = others
        return run([*[load(8 * n) for n in range(200)], wait(vm=0)], memory=memory)[0]

    alone, crowded = took(1, Sharing({}, {})), took(304, Sharing({}, {}))
    bytes_each = 200 * 1024 * 304 / MACHINE["hbm_bandwidth"] * MACHINE["clock"] / 1e3
    assert crowded == pytest.approx(bytes_each, rel=0.05) and alone < crowded / 4
    everyone = dict.fromkeys(range(1600), 304.0)
    assert took(304, Sharing(dict.fromkeys(range(1600), 38.0), everyone)) < crowded / 2


def test_a_wave_with_priority_goes_first():
    def done(*start):
        other = [*[VALU] * 100, END]
        _, times = run(other, [END], [END], [END], [*start, *[VALU] * 100])
        return times[4][-1]

    assert done((Instr("priority", 0, 4, count=3), None)) < done() - 300


def test_a_matrix_instruction_goes_before_what_has_priority():
    matrix = Instr("matrix", 0, 8, cycles=16), None
    first = [(Instr("priority", 0, 4, count=3), None), *[VALU] * 60, END]
    _, times = run(first, [END], [END], [END], [*[matrix] * 10, END])
    assert times[4][9] < times[0][60] - 40


def test_a_new_line_of_code_takes_time():
    _, times = run([VALU] * 40, machine=MACHINE.but(fetch_new_line=54))
    gaps = [b - a for a, b in zip(times[0], times[0][1:], strict=False)]
    assert [n + 1 for n, gap in enumerate(gaps) if gap > 20] == [16, 32]


def test_blocks_beyond_those_held_wait():
    one, _ = run([load(0), wait(vm=0)], blocks=4, held=4)
    four, _ = run([load(0), wait(vm=0)], blocks=4, held=1)
    assert four > one + 3 * MACHINE["l1_latency"]


def test_s_nop_and_branches_take_their_cycles():
    nop = Instr("nop", 0, 4, count=3), None
    _, times = run([nop, VALU, (Instr("branch", 0, 4), None), VALU])
    assert times[0] == [4, 20, 24, 28]
    steps = [(Instr("branch", 0, 4), None), (Instr("valu", 400, 4), None)]
    moments = []
    ComputeUnit(MACHINE, Memory(MACHINE), lambda *what: moments.append(what[2])).run([Block(0, [steps])], [0.0], 1)
    assert moments[1] - moments[0] == MACHINE["branch"] + MACHINE["issue"]


def test_constants_say_where_they_come_from():
    for machine in machines.MACHINES.values():
        assert all(constant.kind in machines.KINDS and constant.source for constant in machine.constants.values())
        assert sum(c.kind == "fitted" for c in machine.constants.values()) <= machines.MAX_FITTED
        assert machine.arch.code_suffix == ".co"
    with pytest.raises(
        ValueError,
        match=r"arch must be a product with a timing model \(MI300X, MI308X, MI325X, MI350X, MI355X\), got H200",
    ):
        machines.named("H200")


@pytest.mark.parametrize(("text", "level"), [("buffer_wbl2 sc1", MALL), ("buffer_inv sc1", L2)])
def test_a_fence_in_a_wave_takes_a_trip(text, level):
    def cycles(text: str) -> float:
        steps = [(Instr("vmem", 0, 8, text=text), None), (Instr("wait", 8, 4, vm=0), None), (Instr("end", 12, 4), None)]
        return ComputeUnit(MACHINE, Memory(MACHINE)).run([Block(0, [steps])], [0.0], 1)

    more = cycles(text) - cycles("global_load_dword v0, v1, off")
    assert more == pytest.approx(Memory(MACHINE).latency[level], abs=MACHINE["issue"])
