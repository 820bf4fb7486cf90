"""Define the matrix instructions of gfx942 and gfx950 (V_MFMA, V_MFMA_SCALE, V_SMFMAC) as pure functions on registers.

`MATRIX[mnemonic]` fully describes an instruction. Shape, blocks and formats follow from the mnemonic, as the ISA defines them. The table
below adds the cycles per chip, which also tell where it exists. Register counts, layouts and semantics follow from these. A new
instruction is a new row.

Sources
- Cycles: "Execution cycles" of AMD's matrix instruction calculator for gfx942; CDNA4 ISA, tables 28 and 33, for gfx950. A pass is four
  cycles (section 7.6).
- Layouts: matrix_layouts.py.
- Modifiers: CDNA4 ISA, section 7.1.6 (CBSZ, ABID, BLGP), 7.2 (block scales), 7.5 (sparse indices).

Arithmetic: products are exact; they and C are summed in float64, and the sum is rounded once, to nearest even. For fp8 the float64 sum
is exact too, so the result is correctly rounded in any order. The hardware is slightly less accurate, which AMD does not document: Xie
et al., "MMA-Sim" (arXiv:2511.10909), probed an MI300X and found that 8 products of f16 or bf16, or 16 of fp8, are aligned to the largest
and truncated to 24 fraction bits, then added to C and rounded. By their model a sum of 512 random f16 16x16x16 products has 1.5 times the
emulator's error against float64, and 0.6 times the error of a chain of f32 FMAs: what passes here within an f32 tolerance passes on
hardware. f32 and f64 inputs are chained FMAs in the order of k, as they also found (here f64 uses extended precision, not an exact FMA).
Subnormals are kept: for inputs below 32 bits, for C and for D, the ISA says so whatever MODE is (section 7.4); for f32 inputs MODE
decides, and the default of HIP kernels keeps them. NaN results are 0x7FC00000.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..decode import VGPR, Instruction, Operand
from ..errors import EmulatorError, UnsupportedInstruction
from ..formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, decode_e8m0, decode_registers, eight_bit
from ..operands import check_allocated, read_scalar, register, words
from ..waves import LANES
from .float import fma
from .matrix_layouts import Layout, input_layout, lane_groups, output_layout

SCALE_BLOCK = 32  # values along k that share one e8m0 scale

# mnemonic, cycles on gfx942 and on gfx950; "-" if the chip lacks the instruction. `f8` stands for fp8 and bf8.
_TABLE = """
v_mfma_f32_32x32x1_2b_f32         64 64
v_mfma_f32_16x16x1_4b_f32         32 32
v_mfma_f32_4x4x1_16b_f32           8  8
v_mfma_f32_32x32x2_f32            64 64
v_mfma_f32_16x16x4_f32            32 32
v_mfma_f32_32x32x4_xf32           32  -
v_mfma_f32_16x16x8_xf32           16  -
v_mfma_f64_16x16x4_f64            32 64
v_mfma_f64_4x4x4_4b_f64           16 32
v_mfma_f32_32x32x4_2b_f16         64 64
v_mfma_f32_16x16x4_4b_f16         32 32
v_mfma_f32_4x4x4_16b_f16           8  8
v_mfma_f32_32x32x8_f16            32 32
v_mfma_f32_16x16x16_f16           16 16
v_mfma_f32_32x32x16_f16            - 32
v_mfma_f32_16x16x32_f16            - 16
v_mfma_f32_32x32x4_2b_bf16        64 64
v_mfma_f32_16x16x4_4b_bf16        32 32
v_mfma_f32_4x4x4_16b_bf16          8  8
v_mfma_f32_32x32x8_bf16           32 32
v_mfma_f32_16x16x16_bf16          16 16
v_mfma_f32_32x32x16_bf16           - 32
v_mfma_f32_16x16x32_bf16           - 16
v_mfma_i32_32x32x4_2b_i8          64 64
v_mfma_i32_16x16x4_4b_i8          32 32
v_mfma_i32_4x4x4_16b_i8            8  8
v_mfma_i32_32x32x16_i8            32 32
v_mfma_i32_16x16x32_i8            16 16
v_mfma_i32_32x32x32_i8             - 32
v_mfma_i32_16x16x64_i8             - 16
v_mfma_f32_32x32x16_f8_f8         32 32
v_mfma_f32_16x16x32_f8_f8         16 16
v_mfma_f32_32x32x64_f8f6f4         - 32
v_mfma_f32_16x16x128_f8f6f4        - 16
v_mfma_scale_f32_32x32x64_f8f6f4   - 32
v_mfma_scale_f32_16x16x128_f8f6f4  - 16
v_smfmac_f32_32x32x16_f16         32 32
v_smfmac_f32_16x16x32_f16         16 16
v_smfmac_f32_32x32x32_f16          - 32
v_smfmac_f32_16x16x64_f16          - 16
v_smfmac_f32_32x32x16_bf16        32 32
v_smfmac_f32_16x16x32_bf16        16 16
v_smfmac_f32_32x32x32_bf16         - 32
v_smfmac_f32_16x16x64_bf16         - 16
v_smfmac_i32_32x32x32_i8          32 32
v_smfmac_i32_16x16x64_i8          16 16
v_smfmac_i32_32x32x64_i8           - 32
v_smfmac_i32_16x16x128_i8          - 16
v_smfmac_f32_32x32x32_f8_f8       32 32
v_smfmac_f32_16x16x64_f8_f8       16 16
v_smfmac_f32_32x32x64_f8_f8        - 32
v_smfmac_f32_16x16x128_f8_f8       - 16
"""

# Formats that CBSZ (for A) and BLGP (for B) select in the f8f6f4 instructions: CDNA4 ISA, section 7.1.5.
_F8F6F4 = (E4M3FN, E5M2, E2M3, E3M2, E2M1)
_BITS = {"f64": 64, "f32": 32, "xf32": 32, "i32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8}
_ACCUMULATOR = {"f32": np.float32, "i32": np.int32, "f64": np.float64}


_NAME = re.compile(
    r"v_(?P<kind>mfma|mfma_scale|smfmac)_(?P<c_format>[a-z]+\d+)_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)"
    r"(?:_(?P<blocks>\d+)b)?_(?P<a_format>f8f6f4|[a-z]+\d+)(?:_(?P<b_format>[a-z]+\d+))?"
)


@dataclass(frozen=True, eq=False)
class MatrixInstruction:
    """A matrix instruction: D[b] = A[b] B[b] + C[b] for `blocks` blocks of m x k times k x n."""

    mnemonic: str
    kind: str
    c_format: str
    m: int
    n: int
    k: int
    blocks: int
    a_format: str
    b_format: str
    _cycles: dict[str, int]

    @classmethod
    def parse(cls, mnemonic: str, cycles: dict[str, int]) -> MatrixInstruction:
        """Parse a mnemonic; `cycles` by chip."""
        parts = _NAME.fullmatch(mnemonic).groupdict()
        parts["b_format"] = parts["b_format"] or parts["a_format"]
        parts |= {name: int(parts[name] or 1) for name in ("m", "n", "k", "blocks")}
        return cls(mnemonic, **parts, _cycles=cycles)

    @property
    def archs(self) -> tuple[str, ...]:
        """Return the chips that have it."""
        return tuple(self._cycles)

    @property
    def sparse(self) -> bool:
        """True if A holds two of every four values along k, selected by an index."""
        return self.kind == "smfmac"

    @property
    def scaled(self) -> bool:
        """True if A and B have one e8m0 scale per 32 values along k."""
        return self.kind == "mfma_scale"

    @property
    def flops(self) -> int:
        """Return its FLOPs, with the zeros of a sparse A, as AMD counts them."""
        return 2 * self.m * self.n * self.k * self.blocks

    def cycles(self, arch: str, cbsz: int = 0, blgp: int = 0) -> int:
        """Return the cycles it occupies the matrix core; f8f6f4 takes twice as long if A or B has 8 bits."""
        eight = self.a_format == "f8f6f4" and min(cbsz, blgp) < 2
        return self._cycles[arch] * (2 if eight else 1)

    # Layouts

    @lru_cache  # noqa: B019 - instructions live as long as the module
    def a_layout(self, cbsz: int = 0) -> Layout:
        """Return the layout of A; k counts the stored values, half of all if A is sparse."""
        bits = self._bits(self.a_format, cbsz)
        return input_layout(self.m, self.blocks, self.k // 2 if self.sparse else self.k, bits)

    @lru_cache  # noqa: B019
    def b_layout(self, blgp: int = 0) -> Layout:
        """Return the layout of B."""
        return input_layout(self.n, self.blocks, self.k, self._bits(self.b_format, blgp))

    @cached_property
    def d_layout(self) -> Layout:
        """Return the layout of C and D."""
        return output_layout(self.m, self.n, self.blocks, _BITS[self.c_format])

    def index_shift(self, cbsz: int = 0, abid: int = 0) -> int:
        """Return where a lane's 2-bit indices begin in its index register (CDNA4 ISA, 7.5); index n belongs to item n of A."""
        width = 2 * self.a_layout().items
        return 0 if cbsz & 3 else abid % (32 // width) * width

    @staticmethod
    def _bits(format: str, selector: int) -> int:
        return _F8F6F4[selector].bits if format == "f8f6f4" else _BITS[format]

    # Semantics

    def execute(
        self,
        a: np.ndarray,
        b: np.ndarray,
        c: np.ndarray,
        *,
        arch: str,
        cbsz: int = 0,
        abid: int = 0,
        blgp: int = 0,
        index: np.ndarray | None = None,
        scale_a: np.ndarray | None = None,
        scale_b: np.ndarray | None = None,
        op_sel: int = 0,
        op_sel_hi: int = 0,
        saturate: bool = False,
    ) -> np.ndarray:
        """Compute D's registers from A's, B's and C's, all uint32[..., 64 lanes, dwords] with leading batch axes.

        A and B may have extra registers. `index` is the index register of a sparse instruction. `scale_a` and `scale_b` are the scale
        registers of a scaled one, uint32[..., 64]; {op_sel_hi, op_sel} select the byte of a scale, bit 0 for A and bit 1 for B.
        `saturate` is FP16_OVFL of MODE: overflow gives the largest number.
        """
        if arch not in self._cycles:
            raise ValueError(f"{self.mnemonic}: arch must be {' or '.join(self.archs)}, got {arch}")
        a_layout, b_layout = self._permuted(cbsz, abid, blgp)
        a = self._matrix(a, a_layout, self.a_format, cbsz, arch)
        b = self._matrix(b, b_layout, self.b_format, blgp, arch)
        c = self._accumulator(c)
        if self.scaled:
            a = a * self._scales(scale_a, self.m, op_sel & 1 | (op_sel_hi & 1) << 1)
            b = b * self._scales(scale_b, self.n, op_sel >> 1 & 1 | op_sel_hi & 2)
        if self.c_format == "f64":
            a, b, c = (matrix * (-1.0 if blgp >> n & 1 else 1.0) for n, matrix in enumerate((a, b, c)))
        with np.errstate(all="ignore"):
            if self.sparse:
                d = self._sparse_product(a, b, index, self.index_shift(cbsz, abid)) + c
            elif self.a_format in ("f32", "f64"):
                d = self._chain(a, b, c)
            else:
                d = np.matmul(a, b.swapaxes(-1, -2)) + c
            return self._registers(d, saturate)

    def check_modifiers(self, cbsz: int = 0, abid: int = 0, blgp: int = 0) -> None:
        """Raise ValueError for modifiers that the hardware does not define."""
        self._permuted(cbsz, abid, blgp)

    @lru_cache  # noqa: B019
    def _permuted(self, cbsz: int, abid: int, blgp: int) -> tuple[Layout, Layout]:
        """Return the layouts of A and B after the lane broadcasts of CBSZ, ABID and BLGP."""
        if self.sparse or self.a_format == "f8f6f4" or self.c_format == "f64":
            if self.sparse and blgp or max(cbsz, blgp) >= len(_F8F6F4) and self.a_format == "f8f6f4":
                raise ValueError(f"{self.mnemonic}: cbsz and blgp must name a format, got cbsz={cbsz} blgp={blgp}")
            return self.a_layout(cbsz), self.b_layout(blgp)
        a, b = self.a_layout(), self.b_layout()
        if cbsz:
            # The ISA (7.1.6.1) and AMD's calculator agree on a broadcast to all blocks only: one repeats groups of lanes, the other
            # each block. Compilers emit no partial broadcast by themselves.
            if 1 << cbsz != self.blocks or abid >= self.blocks:
                raise ValueError(
                    f"{self.mnemonic}: cbsz must be 0 or broadcast a block to all {self.blocks}, got {cbsz}:{abid}"
                )
            size = LANES >> cbsz
            a = a.through(np.arange(LANES) % size + size * abid)
        if blgp:
            if self.blocks == 1 and self.a_format != "f32":  # "BLGP bits supported: False" in the calculator
                raise ValueError(f"{self.mnemonic}: blgp must be 0, got {blgp}")
            b = b.through(lane_groups(blgp))
        return a, b

    def _matrix(self, registers: np.ndarray, layout: Layout, format: str, selector: int, arch: str) -> np.ndarray:
        """Return the float64 matrix [..., block, row, k] in an input operand's registers."""
        if registers.shape[-2] != LANES or registers.shape[-1] < layout.dwords:
            wanted = f"[{LANES}, {layout.dwords}]"
            raise ValueError(f"{self.mnemonic}: an operand must be {wanted} dwords, got {list(registers.shape[-2:])}")
        registers = np.ascontiguousarray(registers[..., : layout.dwords], dtype=np.uint32)
        if format == "f8f6f4":
            items = _F8F6F4[selector]
        else:
            items = eight_bit(format, arch) if format in ("fp8", "bf8") else format
        values = decode_registers(registers, items)
        return values.reshape(*values.shape[:-2], -1).take(layout.gather, axis=-1)

    def _accumulator(self, registers: np.ndarray) -> np.ndarray:
        layout = self.d_layout
        if registers.shape[-2:] != (LANES, layout.dwords):
            wanted = f"[{LANES}, {layout.dwords}]"
            raise ValueError(f"{self.mnemonic}: c must be {wanted} dwords, got {list(registers.shape[-2:])}")
        values = np.ascontiguousarray(registers, dtype=np.uint32).view(_ACCUMULATOR[self.c_format])
        return values.reshape(*values.shape[:-2], -1).take(layout.gather, axis=-1).astype(np.float64)

    def _chain(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Chain FMAs in the order of k, each rounded to the accumulator's format."""
        a, b = a[..., :, None, :], b[..., None, :, :]
        if self.c_format == "f64":
            for k in range(self.k):
                c = (a[..., k].astype(np.longdouble) * b[..., k] + c).astype(np.float64)
            return c
        a, b, c = (matrix.astype(np.float32) for matrix in (a, b, c))
        for k in range(self.k):
            c = fma(a[..., k], b[..., k], c)
        return c

    def _sparse_product(self, a: np.ndarray, b: np.ndarray, index: np.ndarray, shift: int) -> np.ndarray:
        """Compute A B for a sparse A: each stored value multiplies the value of B that its index names."""
        layout = self.a_layout()
        index = np.asarray(index, dtype=np.uint32).reshape(*a.shape[:-3], LANES, 1) >> np.uint32(shift)
        chosen = index >> np.arange(0, 2 * layout.items, 2, dtype=np.uint32) & np.uint32(3)
        if np.any(chosen[..., 0::2] >= chosen[..., 1::2]):
            *_, lane, pair = np.argwhere(chosen[..., 0::2] >= chosen[..., 1::2])[0]
            got = chosen.reshape(-1, LANES, layout.items // 2, 2)[:, lane, pair].tolist()[0]
            raise ValueError(f"{self.mnemonic}: indices of a pair must ascend, got {got} in lane {lane}, pair {pair}")
        k = chosen.reshape(*chosen.shape[:-2], -1)[..., layout.gather[0]] + 4 * (np.arange(self.k // 2) // 2)
        # [..., i, stored k, j]: b is [..., block 0, j, k].
        selected = np.take_along_axis(b.swapaxes(-1, -2), k.astype(np.int64)[..., None], axis=-2)
        return np.matmul(a[..., 0, :, None, :], selected).swapaxes(-2, -3)

    def _scales(self, registers: np.ndarray, rows: int, byte: int) -> np.ndarray:
        """Return [..., 1, row, k] scales: lane row + rows * block of k holds the scale of (row, block) (CDNA4 ISA, 7.2.1)."""
        codes = np.asarray(registers, dtype=np.uint32) >> np.uint32(8 * byte) & np.uint32(0xFF)
        factors = decode_e8m0(codes).reshape(*codes.shape[:-1], 1, self.k // SCALE_BLOCK, rows).swapaxes(-1, -2)
        return np.repeat(factors, SCALE_BLOCK, axis=-1)

    def _registers(self, d: np.ndarray, saturate: bool) -> np.ndarray:
        """Round D and lay it out in registers."""
        flat = d.reshape(*d.shape[:-3], -1).take(self.d_layout.scatter, axis=-1)
        if self.c_format == "i32":
            if saturate:
                flat = np.clip(flat, -(1 << 31), (1 << 31) - 1)
            words = flat.astype(np.int64).astype(np.uint32)
        else:
            number = _ACCUMULATOR[self.c_format]
            flat = flat.astype(number, order="C")
            if saturate:
                largest = np.finfo(number).max
                np.clip(flat, -largest, largest, out=flat)
            flat[np.isnan(flat)] = np.nan
            words = flat.view(np.uint32)
        return words.reshape(*d.shape[:-3], LANES, self.d_layout.dwords)


def _instructions():
    for row in _TABLE.split("\n")[1:-1]:
        mnemonic, *cycles = row.split()
        cycles = {arch: int(cell) for arch, cell in zip(("gfx942", "gfx950"), cycles, strict=True) if cell != "-"}
        pairs = [f"_{a}_{b}" for a in ("fp8", "bf8") for b in ("fp8", "bf8")] if mnemonic.endswith("_f8_f8") else [""]
        for pair in pairs:
            yield MatrixInstruction.parse(mnemonic.removesuffix("_f8_f8") + pair, cycles)


MATRIX: dict[str, MatrixInstruction] = {instruction.mnemonic: instruction for instruction in _instructions()}


# Binding


def bind(ins: Instruction, program) -> Callable:
    """Return a function on waves for one decoded instruction. EXEC has no effect on it (CDNA4 ISA, 7.1.2)."""
    instruction = MATRIX.get(ins.mnemonic)
    if instruction is None or program.arch not in instruction.archs:
        raise UnsupportedInstruction(f"{ins.text}: {program.arch} has no such instruction")
    if "src0" not in ins.operands:  # xf32, known to the decoding tables by name only
        raise UnsupportedInstruction(f"{ins.text}: its operands cannot be decoded")
    options = {name: ins.fields.get(name, 0) for name in ("cbsz", "abid", "blgp")}
    try:
        instruction.check_modifiers(**options)
    except ValueError as error:
        raise UnsupportedInstruction(str(error)) from error
    a, b, last = (ins.operands[name] for name in ("src0", "src1", "src2"))
    destination = ins.operands["vdst"]
    reads = {"a": _registers(a, program), "b": _registers(b, program)}
    if instruction.sparse:
        reads |= {"c": _registers(destination, program), "index": _registers(last, program)}
    else:
        reads["c"] = _registers(last, program) if last.code >= VGPR else _constant(last, ins, instruction)
    if instruction.scaled:
        options |= {"op_sel": ins.fields["opsel"], "op_sel_hi": ins.fields["opsel_hi"]}
        for name, code in (("scale_a", "scale_src0"), ("scale_b", "scale_src1")):
            reads[name] = _scale(Operand(ins.fields[code], 1, "B32", 32), ins, program)
    check_allocated(destination, program)
    first = register(destination.code)

    def run(w) -> None:
        sources = {name: source(w) for name, source in reads.items()}
        try:
            d = instruction.execute(**sources, arch=program.arch, saturate=program.saturate, **options)
        except ValueError as error:
            raise w.scheduler.error(EmulatorError, ins, w, 0, None, str(error)) from error
        for n in range(destination.dwords):
            w.U[first + n][...] = d[..., n]

    return run


def _registers(operand: Operand, program) -> Callable:
    check_allocated(operand, program)
    first, count = register(operand.code), operand.dwords
    return lambda w: words(w, first, count)


def _constant(operand: Operand, ins: Instruction, instruction: MatrixInstruction) -> Callable:
    """Return an inline constant for every element of C."""
    value = read_scalar(operand, ins, _ACCUMULATOR[instruction.c_format])
    count = instruction.d_layout.items
    return lambda w: np.ascontiguousarray(np.broadcast_to(value(w), (w.count, LANES, count))).view(np.uint32)


def _scale(operand: Operand, ins: Instruction, program) -> Callable:
    """Return a reader of a scale register. The ISA also allows constants (7.2.1); LLVM's assembler emits VGPRs only."""
    if operand.code < VGPR:
        raise UnsupportedInstruction(f"{ins.text}: a scale must be a VGPR, got {operand}")
    registers = _registers(operand, program)
    return lambda w: registers(w)[..., 0]
