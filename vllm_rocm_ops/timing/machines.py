"""Define the machines' constants, each with its unit, its source, and its kind: documented, measured, fitted or guessed.

No constant is specific to a kernel, tile or symbol. Cycles are of the shader clock.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from vllm_rocm_ops.core import archs

KINDS = ("documented", "measured", "fitted", "guessed")
MAX_FITTED = 15  # fitted constants per machine

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
    """A constant of the model."""

    value: float
    unit: str
    kind: str
    source: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """A product. `machine[name]` is a constant's value."""

    name: str
    constants: dict[str, Constant]

    @property
    def arch(self) -> archs.Arch:
        """Return its architecture, with its number of compute units."""
        return archs.named(self.name)

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def but(self, name: str | None = None, **constants: Constant | float) -> Machine:
        """Return this machine with other constants; a plain number changes only the value."""
        changed = dict(self.constants)
        for key, new in constants.items():
            changed[key] = new if isinstance(new, Constant) else changed[key]._replace(value=float(new))
        return dataclasses.replace(self, name=name or self.name, constants=changed)


CALIBRATION = json.loads(Path(__file__).with_name("calibration.json").read_text())
"""The output of serving_benchmarks/timing_study/calibrate.py: fitted constants, and errors against published times."""


def _fitted(name: str, unit: str, on: str = "published decode times") -> Constant:
    return Constant(CALIBRATION["fitted"][name], unit, "fitted", f"timing_study/calibrate.py on {on}")


_CONSTANTS = {
    # Issue
    "issue": Constant(4, "cycles between instructions of a wave", "documented", _ISA),
    "valu": Constant(4, "cycles of the vector ALU, 64 lanes on 16", "measured", _COISSUE),
    "wide_valu": Constant(8, "cycles per 64-bit instruction", "guessed", "half the rate, as " + _ISA),
    "transcendental": Constant(16, "cycles of the vector ALU", "measured", _COISSUE),
    "matrix_issue": Constant(4, "cycles a matrix instruction occupies the vector ALU", "measured", _COISSUE),
    "packed_after_matrix": Constant(
        8, "cycles from a wave's matrix instruction's end to its packed instruction", "measured", _COISSUE
    ),
    "crossing": Constant(
        5, "cycles to fetch an 8-byte instruction across an 8-byte boundary; 4 otherwise", "measured", _COISSUE
    ),
    "fetch_ahead": Constant(12, "cycles of instruction prefetch", "guessed", "three instructions"),
    "fetch_new_line": Constant(
        0, "cycles per new 64-byte code line of a wave, with a warm cache", "guessed", "prefetch hides it"
    ),
    "branch": Constant(16, "cycles of a taken branch", "measured", _TRACES),
    "barrier": _fitted(
        "barrier",
        "cycles from the last wave's arrival to the next instruction",
        "one traced kernel, timing_study/traced.py",
    ),
    "salu_latency": Constant(4, "cycles to a scalar result", "guessed", "equal to its issue"),
    "valu_latency": Constant(
        4, "cycles to a vector result", "documented", "LLVM's scheduling model of gfx940: one pass"
    ),
    "matrix_chain": Constant(2, "more cycles to the accumulator of the next matrix instruction", "measured", _TRITON),
    "matrix_latency": Constant(
        12, "more cycles to a result for other instructions", "documented", "LLVM's wait states of gfx940"
    ),
    # LDS
    "lds_latency": Constant(48, "cycles to the first data of an LDS read", "measured", _LATENCY),
    "lds_wave_bytes": Constant(64, "bytes per cycle between LDS and a SIMD", "measured", _LATENCY),
    "lds_queue": Constant(8, "queued LDS instructions per SIMD", "measured", "gluon-tutorials docs/lds_throughput.md"),
    # Vector memory, up to L1
    "vmem_issue": Constant(4, "cycles to issue a load while the queue has room", "measured", _FIFO),
    "vmem_queue": Constant(16, "vector memory instructions of a compute unit queued before L1", "measured", _FIFO),
    "vmem_bytes": Constant(64, "bytes per cycle and compute unit, address and data", "measured", _FIFO),
    "vmem_in_flight": Constant(32768, "bytes in flight per compute unit", "measured", _GLUON),
    "l1_bytes": Constant(32768, "bytes", "documented", "CDNA3 white paper"),
    "l1_latency": Constant(116, "cycles", "measured", _CHASE),
    # Caches and HBM
    "l2_latency": Constant(212, "cycles", "measured", _CHASE),
    "wave_latency": _fitted("wave_latency", "more cycles beyond L1 for a wave's data than for a lane's"),
    "mall_latency": Constant(116, "ns beyond L2", "measured", "455 cycles: " + _CHASE),
    "hbm_latency": Constant(318, "ns beyond L2", "measured", "877 cycles: " + _CHASE),
    "l2_bandwidth": Constant(27000, "GB/s over all XCDs", "measured", _CACHE),
    "mall_bandwidth": _fitted("mall_bandwidth", "GB/s; 5400 to 11900 measured"),
    "hbm_bandwidth": Constant(4200, "GB/s of reads", "measured", _STREAM),
    "mall_bytes": Constant(256 << 20, "bytes", "documented", "CDNA3 white paper"),
    "scalar_latency": Constant(48, "cycles of the scalar cache", "measured", "caps-tum/mt4g@4cc5566, MI300X"),
    "scalar_l2": Constant(172, "cycles of a scalar load that hits L2", "measured", "caps-tum/mt4g@4cc5566, MI300X"),
    # Launch
    "xcds": Constant(8, "dies, each with an L2", "documented", "CDNA3 white paper"),
    "engines": Constant(4, "shader engines per XCD, which start blocks in turn", "documented", "CDNA3 white paper"),
    "dispatch": Constant(14.7, "cycles between blocks of an engine", "measured", _TRACES),
    "dispatch_wave": Constant(5, "more cycles per further wave of a block", "guessed", "register initialization"),
    "first_instruction": Constant(100, "cycles from a wave's start, with a warm cache", "guessed", "684 when cold"),
    "start": _fitted("start", "us of a kernel before its first and after its last block"),
    "clock": Constant(2100, "MHz when memory-bound", "documented", "AMD Instinct MI300X data sheet"),
    "profiled": Constant(2.5, "us that a profiler adds to a kernel's blocks", "measured", _FORMOCAST),
    "matrix_clock": Constant(1500, "MHz when matrix-bound; 1280 to 1550", "measured", _LOADED),
    "matrix_load": Constant(
        0.5, "fraction of cycles with matrix instructions above which matrix_clock holds", "guessed", "a half"
    ),
}

MI300X = Machine("MI300X", _CONSTANTS)
MI308X = MI300X.but(
    "MI308X",
    clock=Constant(1800, "MHz", "measured", _BANDWIDTH),
    matrix_clock=Constant(1460, "MHz when matrix-bound", "measured", _SLOW),
    hbm_bandwidth=Constant(4273, "GB/s", "measured", _BANDWIDTH),
)


def _as_guess(constant: Constant, products: str) -> Constant:
    """Return a constant of other GEMMs for one without a measurement."""
    return constant._replace(kind="guessed", source=f"as of {products}: {constant.source}")


def _like(machine: Machine, name: str, kinds: tuple[str, ...], products: str, **constants: Constant) -> Machine:
    """Return a product with another's constants, of which `kinds` become guesses, and its own."""
    guessed = {key: _as_guess(each, products) for key, each in machine.constants.items() if each.kind in kinds}
    return machine.but(name, **(guessed | constants))


MI325X = _like(
    MI300X,
    "MI325X",
    ("fitted",),
    "MI300X, whose compute dies it has",
    hbm_bandwidth=Constant(4750, "GB/s of reads", "guessed", "MI300X's fraction of peak: 4200 of 5300, here of 6000"),
    clock=Constant(2100, "MHz when memory-bound", "documented", "AMD Instinct MI325X data sheet"),
    matrix_clock=_as_guess(MI300X.constants["matrix_clock"], "MI300X, which may draw less power"),
)
MI355X = _like(
    MI300X,
    "MI355X",
    ("fitted", "measured"),
    "MI300X and MI308X",
    matrix_issue=Constant(8, "cycles a matrix instruction occupies the vector ALU", "measured", _GLUON_COISSUE),
    packed_after_matrix=Constant(
        12, "cycles from a wave's matrix instruction's end to its packed instruction", "measured", _GLUON_COISSUE
    ),
    lds_wave_bytes=Constant(128, "bytes per cycle between LDS and a SIMD", "measured", _GLUON_LDS),
    lds_queue=MI300X.constants["lds_queue"],
    branch=MI300X.constants["branch"],
    matrix_chain=MI300X.constants["matrix_chain"],
    vmem_in_flight=MI300X.constants["vmem_in_flight"],
    dispatch=MI300X.constants["dispatch"],
    hbm_bandwidth=Constant(6440, "GB/s of reads", "measured", _GLUON_HBM),
    clock=Constant(2400, "MHz", "documented", "AMD Instinct MI355X data sheet"),
    xcds=Constant(8, "dies, each with an L2", "documented", "AMD Instinct MI355X data sheet"),
)
MI350X = MI355X.but(
    "MI350X",
    clock=Constant(2200, "MHz", "documented", "AMD Instinct MI350X data sheet"),
    matrix_clock=_as_guess(MI300X.constants["matrix_clock"], "MI300X; MI350X may draw 1000 W, MI355X 1400 W"),
)
MACHINES = {machine.name: machine for machine in (MI300X, MI308X, MI325X, MI350X, MI355X)}
COMPARED = MI300X.name  # the product with published decode times to compare


def named(name: str) -> Machine:
    """Return a product's machine, ignoring case. Raises ValueError."""
    if name.upper() not in MACHINES:
        raise ValueError(f"arch must be a product with a timing model ({', '.join(MACHINES)}), got {name}")
    return MACHINES[name.upper()]
