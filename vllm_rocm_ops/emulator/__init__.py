"""Runs compiled gfx942 and gfx950 code objects on the CPU, checks every access, and counts.

    emulator = Emulator("gfx942")
    with launch.executor(emulator):
        ops.rms_norm(x, weight, 1e-6)
    emulator.last.lds_conflict_cycles

A device holds the programs of code objects; a program is a kernel whose instructions are bound to functions on waves
(instructions/); a scheduler runs one launch of it. memory.py has bounds, accesses.py and lds.py have races, events.py has waits,
sanitizer.py has registers. vllm_rocm_ops/docs/emulator.md says how to run kernels of one's own.

What it checks, as subclasses of `EmulatorError` that name kernel, instruction, block, wave and lane: see errors.py.
`Emulator(arch, seed=n)` runs waves one by one in a random order, which finds more; `races=False` leaves races to luck.

`Devices` are several GPUs, or several queues of one, whose launches run at the same time: devices.py, words.py.

Blocks may be on dies whose L2 caches are not coherent: coherence.py has the rules for what blocks pass to each other.

What it does not see: the caches of scalars and instructions, the s_nop that some instruction pairs need (but for M0, whose
write must not stand right before a read), halves of a register of which only the other half was written. It rounds to nearest
even and keeps f16 and f64 denormals, whatever MODE says.
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
