"""The machines: their constants, each with its unit, its source, and whether it was documented, measured, fitted or guessed.

No constant belongs to a kernel, a tile or a symbol. Cycles are those of the shader clock.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from vllm_rocm_ops.core import arch as archs

KINDS = ("documented", "measured", "fitted", "guessed")
MOST_FITTED = 15  # constants of a machine

_ISA = "AMD Instinct MI300 (CDNA3) ISA"
_COISSUE = "tingqli/pyhip docs/mfma-valu-coissue.md@581ed656, MI308X"
_FIFO = "tingqli/pyhip attn_4wave/tools/vmem-fifo.md@38db46cf, MI308X"
_LATENCY = "tingqli/pyhip docs/mem_latency.md@f4adf8be, MI308X"
_CHASE = "RRZE-HPC/gpu-benches@1038c5d gpu-latency, MI300X at 2092 MHz"
_STREAM = "RRZE-HPC/gpu-benches@1038c5d gpu-stream, MI300X"
_CACHE = "RRZE-HPC/gpu-benches@1038c5d gpu-cache, MI300X"
_BANDWIDTH = "tingqli/pyhip attn_4wave/tools/vmem-bandwidth.md@38db46cf, MI308X"
_TRITON = "facebookexperimental/triton AMDLatencyModel.h@0d3d8f74, MI350X"
_TRACES = "tinygrad/tinygrad@a9069c17 extra/sqtt, MI350X"
_GLUON = "ROCm's gluon tutorials docs/tcp_bound_tile_model.md@41a37bc8, MI355X"
_LOADED = "ROCm's gluon tutorials kernels/gemm@eb0f5ebe, MI300X"
_FORMOCAST = "2.0 to 3.0: ROCm/rocm-libraries tensilelite/formocast_simulator.cpp@02c9982c and aiter's shortest kernels"
_SLOW = "1420 to 1480 in the slow state: tingqli/pyhip docs/attn_gemm_optimization.md@bc013ed7, MI308X"
_GLUON_COISSUE = "ROCm's gluon tutorials attention/mfma_coissue_scheduling.md@82b7a3a3, MI355X"
_GLUON_LDS = "ROCm's gluon tutorials docs/lds_throughput.md@62624bf8, MI355X"
_GLUON_HBM = "ROCm's gluon tutorials, 256 workgroups, MI350X or MI355X"


class Constant(NamedTuple):
    """A number of the model."""

    value: float
    unit: str
    kind: str
    source: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """A product. `machine[name]` is the value of a constant."""

    name: str
    constants: dict[str, Constant]

    @property
    def arch(self) -> archs.Arch:
        """Its architecture, with its number of compute units."""
        return archs.named(self.name)

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def but(self, name: str | None = None, **constants: Constant | float) -> Machine:
        """This machine with other constants; a mere number changes the value alone."""
        changed = dict(self.constants)
        for key, new in constants.items():
            changed[key] = new if isinstance(new, Constant) else changed[key]._replace(value=float(new))
        return dataclasses.replace(self, name=name or self.name, constants=changed)


CALIBRATION = json.loads(Path(__file__).with_name("calibration.json").read_text())
"""What tests/timing/calibrate.py found: the fitted constants, and how far predictions are from published times."""


def _fitted(name: str, unit: str, on: str = "published decode times") -> Constant:
    return Constant(CALIBRATION["fitted"][name], unit, "fitted", f"tests/timing/calibrate.py on {on}")


_CONSTANTS = {
    # Issue
    "issue": Constant(4, "cycles from an instruction of a wave to its next", "documented", _ISA),
    "valu": Constant(4, "cycles of the vector ALU, 64 lanes on 16", "measured", _COISSUE),
    "wide_valu": Constant(8, "cycles of an instruction on 64-bit numbers", "guessed", "half the rate, as " + _ISA),
    "transcendental": Constant(16, "cycles of the vector ALU", "measured", _COISSUE),
    "matrix_issue": Constant(4, "cycles that a matrix instruction keeps the vector ALU", "measured", _COISSUE),
    "packed_after_matrix": Constant(
        8, "cycles from the end of a wave's matrix instruction to a packed one of it", "measured", _COISSUE
    ),
    "crossing": Constant(
        5, "cycles to fetch an 8-byte instruction that crosses an 8-byte boundary, 4 others", "measured", _COISSUE
    ),
    "fetch_ahead": Constant(12, "cycles that the fetch of a wave may be ahead", "guessed", "three instructions"),
    "fetch_new_line": Constant(
        0, "cycles for 64 bytes of code that the wave has not had, with a warm cache", "guessed", "the fetch is ahead"
    ),
    "branch": Constant(16, "cycles of a taken branch", "measured", _TRACES),
    "barrier": _fitted(
        "barrier",
        "cycles from the last wave's arrival to the next instruction",
        "one traced kernel, tests/timing/traced.py",
    ),
    "salu_latency": Constant(4, "cycles to a scalar result", "guessed", "as long as its issue"),
    "valu_latency": Constant(
        4, "cycles to a vector result", "documented", "LLVM's scheduling model of gfx940: one pass"
    ),
    "matrix_chain": Constant(2, "cycles more to an accumulator of the next matrix instruction", "measured", _TRITON),
    "matrix_latency": Constant(12, "cycles more to a result for others", "documented", "LLVM's wait states of gfx940"),
    # LDS
    "lds_latency": Constant(48, "cycles to the first data of an LDS read", "measured", _LATENCY),
    "lds_wave_bytes": Constant(64, "bytes per cycle between LDS and a SIMD", "measured", _LATENCY),
    "lds_queue": Constant(
        8, "LDS instructions of a SIMD that wait", "measured", "gluon-tutorials docs/lds_throughput.md"
    ),
    # Vector memory, up to L1
    "vmem_issue": Constant(4, "cycles to issue a load while there is room", "measured", _FIFO),
    "vmem_queue": Constant(16, "vector memory instructions of a compute unit before L1 has them", "measured", _FIFO),
    "vmem_bytes": Constant(64, "bytes per cycle and compute unit, address and data", "measured", _FIFO),
    "vmem_in_flight": Constant(32768, "bytes that a compute unit awaits", "measured", _GLUON),
    "l1_bytes": Constant(32768, "bytes", "documented", "CDNA3 white paper"),
    "l1_latency": Constant(116, "cycles", "measured", _CHASE),
    # Caches and HBM
    "l2_latency": Constant(212, "cycles", "measured", _CHASE),
    "wave_latency": _fitted("wave_latency", "cycles beyond L1 that a wave's data take more than a lane's"),
    "mall_latency": Constant(116, "ns beyond L2", "measured", "455 cycles: " + _CHASE),
    "hbm_latency": Constant(318, "ns beyond L2", "measured", "877 cycles: " + _CHASE),
    "l2_bandwidth": Constant(27000, "GB/s of all XCDs", "measured", _CACHE),
    "mall_bandwidth": _fitted("mall_bandwidth", "GB/s; 5400 to 11900 measured"),
    "hbm_bandwidth": Constant(4200, "GB/s of reads", "measured", _STREAM),
    "mall_bytes": Constant(256 << 20, "bytes", "documented", "CDNA3 white paper"),
    "scalar_latency": Constant(48, "cycles of the scalar cache", "measured", "caps-tum/mt4g@4cc5566, MI300X"),
    "scalar_l2": Constant(172, "cycles of a scalar load that L2 has", "measured", "caps-tum/mt4g@4cc5566, MI300X"),
    # Launch
    "xcds": Constant(8, "dies with an L2 each", "documented", "CDNA3 white paper"),
    "engines": Constant(4, "shader engines of an XCD, which start blocks in turn", "documented", "CDNA3 white paper"),
    "dispatch": Constant(14.7, "cycles from a block to the next of its engine", "measured", _TRACES),
    "dispatch_wave": Constant(5, "cycles more for each further wave of a block", "guessed", "registers are set"),
    "first_instruction": Constant(100, "cycles from a wave's start, with a warm cache", "guessed", "684 when cold"),
    "start": _fitted("start", "us of a kernel before its first block and after its last"),
    "clock": Constant(2100, "MHz where memory bounds", "documented", "AMD Instinct MI300X data sheet"),
    "profiled": Constant(2.5, "us of a kernel in a profiler beyond its blocks", "measured", _FORMOCAST),
    "matrix_clock": Constant(1500, "MHz where matrix instructions bound; 1280 to 1550", "measured", _LOADED),
    "matrix_load": Constant(
        0.5, "of the cycles with matrix instructions, from where that clock is", "guessed", "a half"
    ),
}

MI300X = Machine("MI300X", _CONSTANTS)
MI308X = MI300X.but(
    "MI308X",
    clock=Constant(1800, "MHz", "measured", _BANDWIDTH),
    matrix_clock=Constant(1460, "MHz where matrix instructions bound", "measured", _SLOW),
    hbm_bandwidth=Constant(4273, "GB/s", "measured", _BANDWIDTH),
)


def _as_guess(constant: Constant, products: str) -> Constant:
    """A constant of other products, for one on which nobody measured it."""
    return constant._replace(kind="guessed", source=f"as of {products}: {constant.source}")


def _like(machine: Machine, name: str, kinds: tuple[str, ...], products: str, **constants: Constant) -> Machine:
    """A product with the constants of another, those of these kinds as guesses, and with its own."""
    guessed = {key: _as_guess(each, products) for key, each in machine.constants.items() if each.kind in kinds}
    return machine.but(name, **(guessed | constants))


MI325X = _like(
    MI300X,
    "MI325X",
    ("fitted",),
    "MI300X, whose compute dies it has",
    hbm_bandwidth=Constant(4750, "GB/s of reads", "guessed", "the part of 6000 that MI300X reads of its 5300"),
    clock=Constant(2100, "MHz where memory bounds", "documented", "AMD Instinct MI325X data sheet"),
    matrix_clock=_as_guess(MI300X.constants["matrix_clock"], "MI300X, which may take less power"),
)
MI355X = _like(
    MI300X,
    "MI355X",
    ("fitted", "measured"),
    "MI300X and MI308X",
    matrix_issue=Constant(8, "cycles that a matrix instruction keeps the vector ALU", "measured", _GLUON_COISSUE),
    packed_after_matrix=Constant(
        12, "cycles from the end of a wave's matrix instruction to a packed one of it", "measured", _GLUON_COISSUE
    ),
    lds_wave_bytes=Constant(128, "bytes per cycle between LDS and a SIMD", "measured", _GLUON_LDS),
    lds_queue=MI300X.constants["lds_queue"],
    branch=MI300X.constants["branch"],
    matrix_chain=MI300X.constants["matrix_chain"],
    vmem_in_flight=MI300X.constants["vmem_in_flight"],
    dispatch=MI300X.constants["dispatch"],
    hbm_bandwidth=Constant(6440, "GB/s of reads", "measured", _GLUON_HBM),
    clock=Constant(2400, "MHz", "documented", "AMD Instinct MI355X data sheet"),
    xcds=Constant(8, "dies with an L2 each", "documented", "AMD Instinct MI355X data sheet"),
)
MACHINES = {machine.name: machine for machine in (MI300X, MI308X, MI325X, MI355X)}
COMPARED = MI300X.name  # the product whose decode times were compared with predictions


def named(name: str) -> Machine:
    """The machine of a product's name; case does not matter. Raises ValueError."""
    if name.upper() not in MACHINES:
        raise ValueError(f"a timing model exists of {', '.join(MACHINES)}, got {name}")
    return MACHINES[name.upper()]
