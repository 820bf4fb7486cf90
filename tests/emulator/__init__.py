"""Runs compiled gfx942 and gfx950 code objects on the CPU, checks every access, and counts.

emulator = Emulator("gfx942")
with launch.executor(emulator):
    ops.rms_norm(x, weight, 1e-6)
print(emulator.last)
"""

from .emulator import Emulator
from .errors import *
from .objects import CodeObject

__all__ = ["CodeObject", "Emulator"]
