"""A record of an H200 for the timing model, whose blocks are traced on AMD's instructions: see stand_in.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops.arch import Arch

from .machines import MI300X, Constant, Machine

H200 = next(arch for arch in archs.ARCHS.values() if arch.wave_lanes == 32)
TRACED = dataclasses.replace(MI300X.arch, compute_units=H200.compute_units)  # whose code runs in the emulator
RESULT = Path(__file__).with_name("stand_in.json")
RESULT_OF = json.loads(RESULT.read_text())
REGISTERS = RESULT_OF["registers"]


@dataclasses.dataclass(frozen=True)
class StandIn(Machine):
    """A GPU whose blocks are traced on another."""

    @property
    def arch(self) -> Arch:
        return TRACED


_PROBE = "on an H200, stand_in.json: probe"


def _record() -> StandIn:
    none = "the H200 has nothing of this kind"
    found = RESULT_OF["fitted"]

    def fitted(name: str, unit: str) -> Constant:
        return Constant(found[name], unit, "fitted", "to the fitted half of stand_in.json")

    constants = {
        "issue": fitted("issue", "cycles from an instruction of a wave, or of two warps, to its next"),
        "valu": fitted("valu", "cycles of the vector ALU, two warps; 2.3 of FMA and 4 of integers measured"),
        "wide_valu": Constant(8, "cycles of an instruction on 64-bit numbers, two warps", "guessed", "two of integers"),
        "transcendental": Constant(16, "cycles of the vector ALU, two warps", "measured", _PROBE),
        "matrix_issue": Constant(2, "cycles that a matrix instruction keeps the vector ALU", "guessed", "two warps"),
        "matrix_cycles": fitted("matrix_cycles", "of the cycles of AMD's matrix instruction; 0.8 measured of mma"),
        "packed_after_matrix": Constant(0, "cycles", "guessed", none),
        "crossing": Constant(0, "cycles", "guessed", none),
        "fetch_ahead": Constant(1000, "cycles that the fetch of a wave may be ahead", "guessed", none),
        "fetch_new_line": Constant(0, "cycles", "guessed", none),
        "branch": fitted("branch", "cycles of a taken branch"),
        "barrier": Constant(
            39, "cycles from the last wave's arrival; 8 warps, 31 of 4 to 87 of 32", "measured", _PROBE
        ),
        "salu_latency": Constant(4, "cycles to a scalar result", "guessed", "as a vector result"),
        "valu_latency": Constant(4.6, "cycles to a vector result", "measured", _PROBE),
        "matrix_chain": Constant(0, "cycles more to an accumulator of the next", "measured", _PROBE),
        "matrix_latency": Constant(
            16, "cycles more to a result for others", "guessed", "a chain takes 12.5 an instruction of a warp"
        ),
        "lds_latency": Constant(29, "cycles to the first data of a read of shared memory", "measured", _PROBE),
        "lds_wave_bytes": Constant(128, "bytes per cycle", "documented", "CUDA programming guide: 32 banks"),
        "lds_queue": Constant(8, "instructions of a scheduler that wait", "guessed", "as on AMD"),
        "vmem_issue": Constant(2, "cycles to issue a load while there is room", "guessed", "two warps"),
        "vmem_queue": Constant(64, "vector memory instructions before L1 has them", "guessed", "no limit was seen"),
        "vmem_bytes": Constant(64, "bytes per cycle and multiprocessor", "measured", _PROBE),
        "vmem_in_flight": fitted("vmem_in_flight", "bytes that a multiprocessor awaits"),
        "l1_bytes": Constant(131072, "bytes", "guessed", "of 256 KB, beside shared memory"),
        "l1_latency": Constant(79, "cycles of 16 bytes", "measured", _PROBE),
        "l2_latency": Constant(307, "cycles of 16 bytes", "measured", _PROBE),
        "wave_latency": fitted("wave_latency", "cycles beyond L1 that a wave's data take more than a lane's"),
        "mall_latency": Constant(0, "ns beyond L2", "guessed", none),
        "atomic": fitted("atomic", "cycles that an atomic takes longer than a store, with the fences around it"),
        "hbm_latency": Constant(194, "ns beyond L2: 690 cycles", "measured", _PROBE),
        "l2_bandwidth": Constant(8900, "GB/s", "measured", _PROBE),
        "mall_bandwidth": Constant(8900, "GB/s: L2's", "measured", _PROBE),
        "hbm_bandwidth": Constant(4540, "GB/s of reads", "measured", _PROBE),
        "mall_bytes": Constant(50 << 20, "bytes: L2's", "documented", "NVIDIA H200 data sheet"),
        "scalar_latency": Constant(30, "cycles of the constant cache", "guessed", "as shared memory"),
        "scalar_l2": Constant(307, "cycles of a constant that L2 has", "guessed", "as a load"),
        "xcds": Constant(1, "dies with an L2 each", "documented", "NVIDIA H200 data sheet"),
        "engines": Constant(1, "which start blocks in turn", "guessed", "blocks of all start each 1.2 cycles"),
        "dispatch": Constant(1.2, "cycles from a block to the next", "measured", _PROBE),
        "dispatch_wave": Constant(0, "cycles more for each further wave of a block", "measured", _PROBE),
        "first_instruction": fitted("first_instruction", "cycles from a wave's start"),
        "start": fitted("start", "us of a kernel in a graph before its first block and after its last"),
        "clock": Constant(1980, "MHz", "measured", _PROBE),
        "profiled": Constant(0, "us", "guessed", none),
        "matrix_clock": Constant(1980, "MHz", "guessed", "as clock"),
        "matrix_load": Constant(1, "of the cycles", "guessed", none),
    }
    return StandIn("H200", constants)


MACHINE = _record()
