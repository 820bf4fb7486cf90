"""What the emulator reports. Every error names the kernel, the instruction, and the first block, wave and lane at fault."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A fault of the kernel under test. Subclasses say which kind."""

    located = False  # whether the text names the place


class UnsupportedInstruction(EmulatorError):
    """The emulator has no semantics for this instruction, or its bytes do not decode."""


class LaunchError(EmulatorError):
    """The launch does not fit the kernel: kernarg size, block size, LDS size."""


class OutOfBounds(EmulatorError):
    """A global access outside the memory that the launch's tensors cover."""


class Misaligned(EmulatorError):
    """An address that is not a multiple of what the access needs."""


class LdsOutOfBounds(EmulatorError):
    """An LDS access beyond the block's allocation."""


class ScratchOutOfBounds(EmulatorError):
    """A scratch access beyond the lane's allocation."""


class Uninitialised(EmulatorError):
    """A read of a register, of LDS, of scratch or of memory that nothing wrote."""


class MissingWait(EmulatorError):
    """A register or LDS byte used before the s_waitcnt that its load needs."""


class LdsRace(EmulatorError):
    """Two waves touch the same LDS, at least one writing, with no barrier between."""


class GlobalRace(EmulatorError):
    """Two waves touch the same memory, at least one writing, with nothing that orders them."""


class StaleRead(EmulatorError):
    """A read of what another block stored, which may still be in the cache of that block's die, or not yet in this one's."""


class WrongEpoch(EmulatorError):
    """A word stored with another epoch than its launch has."""


class StaleWord(EmulatorError):
    """A word's value used, although its epoch is not the awaited one."""


class TornWord(EmulatorError):
    """A word that is not stored or not read as one: a value beside the epoch of another."""


class SlotOverwritten(EmulatorError):
    """A word stored before its reader has read the one before, or twice in one epoch."""


class DivergentBarrier(EmulatorError):
    """A barrier that some waves of the block never reach."""


class Deadlock(EmulatorError):
    """No wave can make progress."""


class RegisterOutOfRange(EmulatorError):
    """A register beyond what the kernel descriptor allocates."""
