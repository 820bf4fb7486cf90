"""Count the instructions, memory traffic, bank conflicts and cycles of a launch. Counts are emulated, and not times.

Issue cycles: a SIMD issues one instruction of a wave every 4 cycles. 64 lanes pass its 16-lane ALU in 4 cycles, in 16 for
transcendental and in 8 for 64-bit instructions; a matrix instruction takes its own cycles (instructions/matrix.py). Dependencies,
waits and other waves are not modeled.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from .instructions.matrix import MATRIX
from .lds import BANKS

_TRANSCENDENTAL = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_sin", "v_cos")
_CONTROL = ("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc", "s_call")


def instruction_class(ins) -> str:
    """Return salu, smem, branch, wait, barrier, valu, transcendental, matrix, global, scratch or lds."""
    return _class_of(ins.mnemonic, ins.encoding)


@functools.cache
def _class_of(name: str, encoding: str) -> str:
    if name.startswith(_CONTROL):
        return "branch"
    if name.startswith(("s_waitcnt", "s_nop", "s_sleep")):
        return "wait"
    if name == "s_barrier":
        return "barrier"
    if encoding in ("SMEM", "SCRATCH"):
        return encoding.lower()
    if encoding in ("GLOBAL", "FLAT", "MUBUF", "MTBUF"):
        return "global"
    if encoding == "DS":
        return "lds"
    if name.startswith(("v_mfma", "v_smfmac")):
        return "matrix"
    if name.startswith("v_"):
        return "transcendental" if name.startswith(_TRANSCENDENTAL) else "valu"
    return "salu"


def _distinct(values: np.ndarray) -> int:
    """Return the number of distinct values; np.unique takes several times as long."""
    values = np.sort(values, axis=None)
    return len(values) and 1 + int(np.count_nonzero(values[1:] != values[:-1]))


class Traffic:
    """Count what the blocks of a launch move, by region name."""

    def __init__(self, waves: int):
        self.bytes_stored: Counter = Counter()
        self._waits = np.zeros(waves, np.int64)
        self._in_flight: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(waves, np.int64))
        self._lines: dict[str, list[np.ndarray]] = {}  # region -> block << 40 | 128-byte line, per access

    def load(self, region: str, offsets: np.ndarray, blocks: np.ndarray) -> None:
        """Count a load at these byte offsets of a region, each for its block."""
        self._lines.setdefault(region, []).append(blocks << 40 | offsets >> 7)

    def store(self, region: str, bytes_stored: int) -> None:
        """Count a store."""
        self.bytes_stored[region] += bytes_stored

    def wait(self, waves: np.ndarray, before: list, after: list) -> None:
        """Count a wait of these waves for memory, with the events in flight before and after it."""
        self._waits[waves] += 2
        for event in (*before, *after):
            self._in_flight[event.region][waves] += event.size

    def bytes_in_flight(self, region: str) -> float:
        """Return the bytes of a region that waves have in flight while they wait for memory, summed over waves.

        Per wave it is the mean of before and after, averaged over its waits.
        """
        return float((self._in_flight[region] / np.maximum(self._waits, 1)).sum())

    def lines_loaded(self, region: str) -> int:
        """Return the number of distinct 128-byte lines that each block loads from a region, summed over blocks."""
        return _distinct(np.concatenate(self._lines[region])) if region in self._lines else 0


@dataclass
class Counters:
    """Sum counts over all waves of a launch."""

    arch: str
    instructions: Counter = field(default_factory=Counter)  # by class
    mnemonics: Counter = field(default_factory=Counter)
    bytes_loaded: int = 0
    bytes_stored: int = 0
    lines_64: int = 0  # distinct 64-byte lines per access, summed
    lines_128: int = 0
    lds_accesses: int = 0
    lds_cycles: int = 0
    lds_conflict_cycles: int = 0  # beyond the cycles of conflict-free accesses
    matrix_cycles: int = 0
    issue_cycles: int = 0
    barriers: int = 0  # per block
    loads_in_flight: int = 0  # maximum per wave
    bytes_in_flight: Counter = field(default_factory=Counter)  # maximum bytes of them per wave, by region
    traffic: Traffic | None = None  # if requested
    _patterns: dict = field(default_factory=dict, repr=False)  # lines and cycles of earlier access patterns

    def vector_access(self, ins, w, addresses: np.ndarray, size: int, inside: np.ndarray | None = None) -> None:
        """Count a global access of the active lanes at 1-d `addresses`.

        `inside` tells per lane and dword whether it is within a buffer; dwords outside move nothing.
        """
        if inside is None:
            chosen, total = slice(None), len(addresses) * size
        else:
            chosen = slice(None) if inside.all() else inside.any(axis=1)
            total = int(inside.sum()) * min(size, 4)
        if "store" in ins.mnemonic:
            self.bytes_stored += total
        else:
            self.bytes_loaded += total
        if not total:
            return
        relative = addresses - (addresses[0] & ~np.uint64(127))
        if w.full and inside is None:
            key = size, relative.tobytes()
        else:
            lanes = b"" if isinstance(chosen, slice) else chosen.tobytes()
            key = size, relative.tobytes(), lanes, w.mask.tobytes()
        lines = self._patterns.get(key)
        if lines is None:
            rows, relative = w.active()[0][chosen].astype(np.int64) << 48, relative[chosen]
            ends = np.stack([relative, relative + np.uint64(size - 1)]).view(np.int64) & (1 << 47) - 1
            lines = tuple(_distinct((ends >> shift) + rows) for shift in (6, 7))
            self._patterns[key] = lines
        self.lines_64 += lines[0]
        self.lines_128 += lines[1]

    def lds_access(self, ins, w, addresses: np.ndarray, size: int) -> None:
        """Count an LDS access and its bank conflicts: 32 banks of 4 bytes on gfx942, 64 on gfx950.

        Lanes are served in groups whose data could fill all banks once: 32 lanes of 4 bytes, 16 of 8, 8 of 16 on gfx942. A group
        takes a cycle per distinct dword of the fullest bank. Groups are consecutive lanes, except for 16-byte reads on
        gfx942 (composable_kernel, "Understanding AMD GPU LDS and Bank Conflicts"). gfx950's groups are undocumented, and assumed
        to be consecutive.
        """
        banks = BANKS[self.arch]
        crossed = size == 16 and banks == 32 and "read" in ins.mnemonic
        relative = addresses - (int(addresses[0]) & -(4 * banks))
        key = ("lds", crossed, size, w.full, relative.tobytes() if w.full else (relative.tobytes(), w.mask.tobytes()))
        counted = self._patterns.get(key)
        if counted is None:
            counted = self._patterns[key] = self._bank_cycles(w, relative, size, banks, crossed)
        self.lds_accesses += w.count
        self.lds_cycles += counted[0]
        self.lds_conflict_cycles += counted[0] - counted[1]

    @staticmethod
    def _bank_cycles(w, addresses, size: int, banks: int, crossed: bool) -> tuple[int, int]:
        """Return the cycles of an access, and its cycles without conflicts."""
        rows, lanes = w.active()
        dwords = max(1, size // 4)
        group = lanes // max(1, banks // dwords)
        if crossed:  # lane quads 0 and 5, 1 and 4, 2 and 7, 3 and 6 of each half
            quad = lanes % 32 // 4
            group = lanes // 32 * 4 + np.where(quad < 4, quad, quad - 4 ^ 1)
        above_zero = 2**31  # a multiple of the banks
        words = (addresses.astype(np.int64) >> 2)[:, None] + np.arange(dwords) + above_zero
        distinct = np.unique((rows * 64 + group << 32)[:, None] + words)
        per_bank, counts = np.unique((distinct >> 32) * banks + distinct % banks, return_counts=True)
        _, first = np.unique(per_bank // banks, return_index=True)
        cycles = np.maximum.reduceat(counts, first)
        return int(cycles.sum()), len(first)

    def finish(self, code: list, counts: list[int]) -> None:
        """Add the counts that follow from each instruction's number of executions."""
        self._patterns = {}
        of_kinds: defaultdict = defaultdict(int)
        for ins, count in zip(code, counts, strict=True):
            if count:
                of_kinds[ins.counted_as] += count
        for (name, encoding, *formats), count in of_kinds.items():
            kind = _class_of(name, encoding)
            self.mnemonics[name] += count
            self.instructions[kind] += count
            cycles = {"transcendental": 16}.get(kind, 4)
            if kind == "valu" and ("_f64" in name or "_u64_u32" in name or "_i64_i32" in name):
                cycles = 8
            if kind == "matrix":
                cycles = MATRIX[name].cycles(self.arch, *formats)
                self.matrix_cycles += cycles * count
            self.issue_cycles += cycles * count
