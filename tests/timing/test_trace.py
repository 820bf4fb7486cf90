"""Test the emulator's traces of waves for the timing model, and that tracing changes nothing else."""

from __future__ import annotations

import pytest
import torch
from assembly import LOAD_POINTERS, Kernel, assemble

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.program import Program
from vllm_rocm_ops.emulator.scheduler import Scheduler
from vllm_rocm_ops.timing import launch_time, machines, trace
from vllm_rocm_ops.timing.compute_unit import ComputeUnit
from vllm_rocm_ops.timing.hierarchy import L2, MALL, Memory

MACHINE = machines.MI300X
LOOP = (
    LOAD_POINTERS
    + """
  s_lshl_b32 s3, s2, 8
  v_lshlrev_b32 v1, 4, v0
  v_lshl_add_u32 v1, s3, 4, v1
  s_mov_b32 s9, 3
again:
  global_load_dwordx4 v[4:7], v1, s[4:5]
  s_sub_u32 s9, s9, 1
  s_cmp_lg_u32 s9, 0
  s_cbranch_scc1 again
  s_waitcnt vmcnt(0)
  v_lshlrev_b32 v2, 4, v0
  ds_write_b128 v2, v[4:7]
  s_waitcnt lgkmcnt(0)
  s_barrier
  v_lshlrev_b32 v3, 5, v0
  v_and_b32 v3, 0xff0, v3
  ds_read_b128 v[8:11], v3
  s_waitcnt lgkmcnt(0)
  global_store_dwordx4 v1, v[8:11], s[6:7]"""
)
WAITS = (
    "s_waitcnt vmcnt(37) lgkmcnt(5)\n s_nop 6\n s_setprio 2\n v_pk_add_f32 v[2:3], v[4:5], v[6:7]\n v_exp_f32 v2, v0"
)
FLAG = """
  v_mov_b32 v1, 0
  v_mov_b32 v2, 0
  v_readfirstlane_b32 s8, v0
  ds_write_b32 v1, v2
  s_waitcnt lgkmcnt(0)
  s_barrier
  s_cmp_eq_u32 s8, 0
  s_cbranch_scc1 writer
reader:
  ds_read_b32 v3, v1
  s_waitcnt lgkmcnt(0)
  v_readfirstlane_b32 s9, v3
  s_cmp_lg_u32 s9, 0
  s_cbranch_scc1 done
  s_sleep 1
  s_branch reader
writer:
  s_movk_i32 s10, 50
count:
  s_nop 7
  s_sub_u32 s10, s10, 1
  s_cmp_lg_u32 s10, 0
  s_cbranch_scc1 count
  v_mov_b32 v2, 1
  ds_write_b32 v1, v2
done:
  s_nop 0"""
"""A wave polls LDS until another has written it, without a barrier."""
KERNELS = [Kernel("loop", LOOP, lds=4096), Kernel("waits", WAITS), Kernel("flag", FLAG, pointers=0, lds=256)]


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    return assemble(KERNELS, "gfx942", tmp_path_factory.mktemp("trace"))


def launch(blocks=3):
    x = torch.arange(blocks * 1024, dtype=torch.int32)
    arguments = trace.aligned(x), trace.aligned(torch.zeros_like(x))
    return Launch("", "loop", (blocks, 1, 1), (256, 1, 1), arguments)


def test_a_trace_has_the_instructions_that_ran(code):
    emulator = trace.RecordingEmulator("gfx942")
    recording = trace.record(emulator, code, launch(), [0, 2])
    assert (recording.name, recording.grid, recording.held) == ("loop", 3, 8)
    assert [block.number for block in recording.blocks] == [0, 2]
    steps = [step for block in recording.blocks for wave in block.waves for step in wave]
    assert len(steps) == sum(emulator.last.instructions.values())
    wave = recording.blocks[1].waves[3]
    addresses = [instr.address for instr, _ in wave]
    loads = [n for n, (instr, access) in enumerate(wave) if instr.kind == "vmem" and not access.store]
    assert len(loads) == 3 and len({addresses[n] for n in loads}) == 1
    jumps = [n for n, (instr, _) in enumerate(wave[:-1]) if addresses[n + 1] != addresses[n] + instr.size]
    assert [wave[n][0].kind for n in jumps] == ["branch", "branch"]
    assert wave[-1][0].kind == "end"


def test_accesses_are_those_of_the_wave(code):
    recording = trace.record(trace.RecordingEmulator("gfx942"), code, launch(), [0, 2])
    first = next(access for instr, access in recording.blocks[0].waves[0] if instr.kind == "vmem").lines[0]
    for block in recording.blocks:
        for number, wave in enumerate(block.waves):
            loads = [access for instr, access in wave if instr.kind == "vmem" and not access.store]
            stores = [access for instr, access in wave if instr.kind == "vmem" and access.store]
            assert all(len(load.lines) == 8 and load.bytes == 1024 for load in loads)
            assert len(stores) == 1 and stores[0].bytes == 1024
            assert loads[0].lines[0] - first == 32 * block.number + 8 * number
            lds = [access for instr, access in wave if instr.kind == "lds"]
            assert [access.bytes for access in lds] == [1024, 1024]
            assert lds[0].cycles == 8 and lds[1].cycles == 16  # every second 16 bytes: two-way conflicts
    assert len(recording.blocks[0].lines & recording.blocks[1].lines) == 0


def test_traced_instructions_have_kind_counts_and_registers(code):
    launched = Launch("", "waits", (1, 1, 1), (64, 1, 1), ())
    emulator = trace.RecordingEmulator("gfx942", races=False)
    program = emulator.program(code, "waits")
    instrs = [trace.decoded(ins, "gfx942") for ins in program.instructions[:5]]
    assert launched.symbol == "waits"
    assert [instr.kind for instr in instrs] == ["wait", "nop", "priority", "packed", "transcendental"]
    assert (instrs[0].vm, instrs[0].lgkm) == (37, 5)
    assert (instrs[1].count, instrs[2].count) == (6, 2)
    assert instrs[3].reads == (260, 261, 262, 263) and instrs[3].writes == (258, 259) and instrs[3].size == 8


def test_a_wave_that_waits_for_another_waits_in_time_too(code):
    """However often it polled in the emulator, it finds the value once that is written."""
    launched = Launch("", "flag", (1, 1, 1), (128, 1, 1), ())
    emulator = trace.RecordingEmulator("gfx942", races=False)
    (block,) = trace.record(emulator, code, launched, [0]).blocks
    writer, reader = block.waves
    assert emulator.last.mnemonics["ds_read_b32"] > 1
    (read,) = [n for n, (instr, _) in enumerate(reader) if instr.text.startswith("ds_read")]
    write = [n for n, (instr, _) in enumerate(writer) if instr.text.startswith("ds_write")][-1]
    assert reader[read][1].after == (0, write)
    times = {}
    machine = machines.MI300X
    unit = ComputeUnit(machine, Memory(machine), lambda *what: times.__setitem__(what[:2], what[2]))
    unit.run([block], [0.0], 1)
    assert times[1, read] > times[0, write] > times[1, read - 1] + 1000


def test_recording_changes_no_result_and_others_do_not_record(code):
    plain, recorded = launch(), launch()
    emulator = Emulator("gfx942")
    assert (Emulator.program_type, Emulator.scheduler_type) == (Program, Scheduler)
    counters = emulator.run(code, plain)
    recorder = trace.RecordingEmulator("gfx942")
    trace.record(recorder, code, recorded, [0, 1, 2])
    assert torch.equal(plain.args[1], recorded.args[1])
    assert recorder.last.mnemonics == counters.mnemonics
    assert emulator.program(code, "loop") is not recorder.program(code, "loop") and counters.lds_accesses == 24


def test_recorders_share_kernels_but_not_what_is_recorded(code):
    """One launch records a block of three that run, the other the only one that runs."""
    one, other = trace.RecordingEmulator("gfx942"), trace.RecordingEmulator("gfx942")
    assert one.program(code, "loop") is other.program(code, "loop")
    (first,) = trace.record(one, code, launch(), [0], run_all=True).blocks
    (second,) = trace.record(other, code, launch(), [1]).blocks
    assert (one.last.instructions["lds"], other.last.instructions["lds"]) == (24, 8)
    assert second.waves[0] and list(map(len, second.waves)) == list(map(len, first.waves))
    assert one.launched is other.launched is None


def test_fences_of_a_code_object_take_time(tmp_path):
    bodies = {
        "fences": "buffer_wbl2 sc1\n s_waitcnt vmcnt(0)\n buffer_inv sc1\n s_waitcnt vmcnt(0)",
        "none": "s_waitcnt vmcnt(0)",
    }
    path = assemble([Kernel(name, body) for name, body in bodies.items()], "gfx942", tmp_path)
    emulator, cycles = trace.RecordingEmulator("gfx942", races=False), {}
    for name in bodies:
        launch = Launch("", name, (1, 1, 1), (64, 1, 1), (torch.zeros(64), torch.zeros(64)))
        cycles[name] = launch_time.predict(MACHINE, trace.record(emulator, path, launch, [0])).cycles
    trips = sum(Memory(MACHINE).latency[level] for level in (MALL, L2))
    assert cycles["fences"] - cycles["none"] == pytest.approx(trips, abs=20)
