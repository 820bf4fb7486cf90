"""Define the emulator's errors. Each names the kernel, the instruction, and the first faulty block, wave and lane."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """Signal a fault of the kernel under test; subclasses tell the kind."""

    located = False  # whether the message has the location


class UnsupportedInstruction(EmulatorError):
    """Signal an instruction without semantics here, or bytes that do not decode."""


class LaunchError(EmulatorError):
    """Signal a launch that does not fit the kernel: kernarg size, block size, LDS size."""


class OutOfBounds(EmulatorError):
    """Signal a global access outside the memory of the launch's tensors."""


class Misaligned(EmulatorError):
    """Signal an address with insufficient alignment."""


class LdsOutOfBounds(EmulatorError):
    """Signal an LDS access beyond the block's allocation."""


class ScratchOutOfBounds(EmulatorError):
    """Signal a scratch access beyond the lane's allocation."""


class Uninitialized(EmulatorError):
    """Signal a read of a register, LDS, scratch or memory that was never written."""


class MissingWait(EmulatorError):
    """Signal a register or LDS byte used before the s_waitcnt that its load needs."""


class LdsRace(EmulatorError):
    """Signal LDS accesses of two waves, at least one a write, without a barrier between them."""


class GlobalRace(EmulatorError):
    """Signal memory accesses of two waves, at least one a write, without synchronization between them."""


class StaleRead(EmulatorError):
    """Signal a read of another block's store that may still be in that die's cache, or not yet in this die's."""


class WrongEpoch(EmulatorError):
    """Signal a word stored with another epoch than its launch's."""


class StaleWord(EmulatorError):
    """Signal a use of a word's value whose epoch is not the awaited one."""


class TornWord(EmulatorError):
    """Signal a word not stored or not loaded as one, so that a value meets another epoch."""


class SlotOverwritten(EmulatorError):
    """Signal a word stored before its reader has read the previous one, or twice in one epoch."""


class DivergentBarrier(EmulatorError):
    """Signal a barrier that some waves of the block never reach."""


class Deadlock(EmulatorError):
    """Signal that no wave can make progress."""


class RegisterOutOfRange(EmulatorError):
    """Signal a register beyond the kernel descriptor's allocation."""
