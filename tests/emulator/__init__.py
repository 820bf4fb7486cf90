"""Runs compiled gfx942 and gfx950 code objects on the CPU, checks every access, and counts.

    emulator = Emulator("gfx942")
    with launch.executor(emulator):
        ops.rms_norm(x, weight, 1e-6)
    emulator.last.lds_conflict_cycles

What it checks, as subclasses of `EmulatorError` that name kernel, instruction, block, wave and lane: see errors.py.
`Emulator(arch, seed=n)` runs waves one by one in a random order, which finds more; `races=False` leaves races to luck.

What it does not see: caches (memory is coherent, so that a missing cache write-back or invalidation stays unseen), the
strength of atomics (each counts as acquire and release), the s_nop that some instruction pairs need (but for M0, whose write
must not stand right before a read), halves of a register of which only the other half was written. It rounds to nearest even
and keeps f16 and f64 denormals, whatever MODE says.
"""

from .emulator import Emulator
from .errors import *
from .objects import CodeObject

__all__ = ["CodeObject", "Emulator"]
