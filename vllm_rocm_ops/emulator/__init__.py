"""Run compiled gfx942 and gfx950 code objects on the CPU, check every access, and count.

    emulator = Emulator("gfx942")
    with launch.executor(emulator):
        ops.rms_norm(x, weight, 1e-6)
    emulator.last.lds_conflict_cycles

A device holds the programs of code objects. A program is a kernel with instructions bound to functions on waves (instructions/). A
scheduler runs one launch of it. Bounds are checked in memory.py, races in accesses.py and lds.py, waits in events.py, registers in
sanitizer.py. vllm_rocm_ops/docs/emulator.md explains how to run other kernels.

Faults are raised as subclasses of `EmulatorError` (errors.py) that name kernel, instruction, block, wave and lane.
`Emulator(arch, seed=n)` runs waves one by one in random order, which finds more; `races=False` disables race checks.

`Devices` are several GPUs, or several queues of one, with concurrent launches (devices.py, words.py).

Blocks may run on dies with non-coherent L2 caches: coherence.py defines how blocks may pass data.

Not modeled: scalar and instruction caches; the s_nop that some instruction pairs need (except a read of M0 right after its write);
halves of a register with only the other half written. Rounding is to nearest even and f16 and f64 denormals are kept, whatever MODE is.
"""

import sys

if sys.version_info < (3, 11):
    raise ImportError("the emulator needs Python 3.11 or newer, got " + ".".join(map(str, sys.version_info[:2])))
try:
    import numpy  # noqa: F401
    import tinygrad.renderer.amd  # noqa: F401
except ImportError as error:
    raise ImportError(f"the emulator needs {error.name}: pip install 'vllm-rocm-ops[emulator]'") from error

from .device import Emulator
from .devices import Devices
from .errors import *
from .objects import CodeObject

__all__ = ["CodeObject", "Devices", "Emulator"]
