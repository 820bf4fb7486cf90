"""Bind the instructions of a kernel, each once, to functions on waves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import errors, instructions, sanitizer
from .decode import AGPR, VGPR, Instruction, Operand, decode
from .objects import CodeObject, KernelObject


class Bound(NamedTuple):
    """An instruction ready to run."""

    run: Callable
    registers: frozenset[int]  # all that it accesses, without EXEC
    reads: frozenset[int]
    writes: frozenset[int]
    flow: dict[int, frozenset[int]] | None  # see sanitizer.data_flow
    ignores_exec: bool
    fault: str = ""  # why it cannot run


class Program:
    """A bound kernel. Per-launch state is in the scheduler, cross-launch state in the emulator."""

    trusted = False
    """True if the code is known to run on hardware: waits are not checked, and registers and LDS start as written zeros."""

    def __init__(self, code: CodeObject, name: str, arch: str):
        self.object: KernelObject = code.kernels[name]
        self.code_object, self.arch = code, arch
        self.saturate = bool(self.object.rsrc1 >> 26 & 1)
        self.base = 1 << 36  # the image is every launch's first region
        entry, size = self.object.entry, self.object.size
        self.instructions = decode(bytes(code.image[entry : entry + size]), entry)
        self.index = {ins.address: i for i, ins in enumerate(self.instructions)}
        self.bound: list[Bound | None] = [None] * len(self.instructions)  # bound when first executed
        self.space_granule = _narrowest(self.instructions, ("global", "buffer", "flat"))
        self.lds_granule = _narrowest(self.instructions, ("ds", "flat", "buffer"))

    def bind(self, ins: Instruction) -> Bound:
        """Resolve an instruction's operands once, for all its executions."""
        fault = ""
        try:
            run = instructions.bind(ins, self)
        except errors.EmulatorError as error:
            kind, fault = type(error), str(error)
        except (KeyError, AttributeError) as error:
            kind, fault = errors.UnsupportedInstruction, f"{type(error).__name__} {error}"
        place = self.index[ins.address]
        if not fault and place and not self.trusted and sanitizer.reads_m0_too_early(self.instructions[place - 1], ins):
            kind, fault = errors.MissingWait, "M0 is written just before; its read needs a wait state, such as s_nop 0"
        if fault:
            run = self._raising(kind, ins, fault)
        reads, writes = (frozenset(), frozenset()) if fault else sanitizer.effects(ins)
        ignores_exec = ins.mnemonic.startswith(("v_mfma", "v_smfmac", "v_writelane"))
        return Bound(run, reads | writes, reads, writes, sanitizer.data_flow(ins, reads, writes), ignores_exec, fault)

    def unbind(self) -> None:
        """Let the functions go, which refer to the program: a garbage collection of them takes seconds."""
        self.bound[:] = [None] * len(self.bound)

    def _raising(self, kind, ins, message: str) -> Callable:
        def run(w):
            raise w.scheduler.error(kind, ins, w, 0, None, message)

        return run

    def allocates(self, code: int) -> bool:
        """True if the kernel descriptor allocates this VGPR or AGPR."""
        if code < AGPR:
            return code - VGPR < self.object.vgprs
        return code - AGPR < self.object.agprs

    def out_of_range(self, operand: Operand) -> errors.RegisterOutOfRange:
        """Return the error for a register beyond the allocation."""
        kernel = self.object
        return errors.RegisterOutOfRange(
            f"{operand} is beyond the {kernel.vgprs} VGPRs and {kernel.agprs} AGPRs allocated"
        )

    def index_of(self, address: int) -> int:
        """Return the index of the instruction at a virtual address; a called function is decoded at its first call."""
        offset = address - self.base
        if offset not in self.index:
            spans = self.code_object.symbols.values()
            start, size = next(((start, size) for start, size in spans if start <= offset < start + size), (0, 0))
            if not size:
                raise errors.OutOfBounds(f"a jump to {address:#x}, where there is no function")
            called = decode(bytes(self.code_object.image[start : start + size]), start)
            self.index.update((ins.address, len(self.instructions) + i) for i, ins in enumerate(called))
            self.instructions += called
            self.bound += [None] * len(called)
        return self.index[offset]


def _narrowest(instructions: list[Instruction], prefixes: tuple[str, ...]) -> int:
    """Return the bytes of the narrowest access by memory instructions with these prefixes, at most 4."""
    mnemonics = {ins.mnemonic for ins in instructions if ins.mnemonic.startswith(prefixes)}
    for size, words in ((1, ("byte", "_b8", "_u8", "_i8")), (2, ("short", "_b16", "_u16", "_i16"))):
        if any(word in mnemonic for mnemonic in mnemonics for word in words):
            return size
    return 4
