"""Test the emulator's matrix instructions: layouts lane by lane, semantics against numpy, names against the assembler."""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from assembly import build_module
from marks import full

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.decode import decode
from vllm_rocm_ops.emulator.errors import EmulatorError
from vllm_rocm_ops.emulator.formats import E2M1, E4M3FN, Format, eight_bit
from vllm_rocm_ops.emulator.instructions import matrix
from vllm_rocm_ops.emulator.instructions.matrix import MATRIX, MatrixInstruction
from vllm_rocm_ops.emulator.instructions.matrix_layouts import Layout
from vllm_rocm_ops.emulator.objects import CodeObject
from vllm_rocm_ops.emulator.waves import LANES

ISA = Path(__file__).parents[1] / "data" / "isa" / "gfx942.txt"

build = build_module()
MIXED = ("e4m3fn", "e5m2", "e2m3", "e3m2", "e2m1")
ARCH_CASES = [(name, arch) for name, instruction in MATRIX.items() for arch in instruction.archs]


# gfx942 layouts: AMD's matrix instruction calculator


@cache
def calculator() -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Return every instruction's facts, of which the last is a hash of its layouts, and some layouts by operand."""
    facts, *layouts = re.sub(r"^#.*\n", "", ISA.read_text(), flags=re.MULTILINE).strip().split("\n\n")
    parsed: dict[str, dict[str, str]] = {}
    for layout in layouts:
        names, text = layout.split("\n", 1)
        operand, *mnemonics = names.split()
        for mnemonic in mnemonics:
            parsed.setdefault(mnemonic, {})[operand] = text
    return {row.split()[0]: row.split()[1:] for row in facts.split("\n")}, parsed


def column_name(first: int, bits: int) -> str:
    """Return the calculator's name for bits of an operand's registers: v1, v0[15:8] or v[3:2]."""
    register, low = divmod(first, 32)
    if bits > 32:
        return f"v[{register + 1}:{register}]"
    return f"v{register}" if bits == 32 else f"v{register}[{low + bits - 1}:{low}]"


def calculator_text(layout: Layout, operand: str, sparse: bool) -> str:
    """Return a layout as the calculator prints it.

    In a sparse operand, a pair of items stands for four places along k.
    """
    items, blocks = 2 if sparse else 1, layout.lane.shape[0]
    columns = range(0, layout.items, items)
    cells: dict[tuple[int, int], list[str]] = {}
    for block, row, k in np.ndindex(layout.lane.shape):
        place = f"{4 * (k // 2)}-{4 * (k // 2) + 3}" if sparse else k
        cell = f"{place},{row}" if operand == "B" else f"{row},{place}"  # the layout of B is [block, j, k]
        cell += f".{block}" if blocks > 1 else ""
        lane, item = int(layout.lane[block, row, k]), int(layout.item[block, row, k])
        # The items of a pair are consecutive along k.
        found = cells.setdefault((lane, item // items), [])
        found += [cell] if item % items == k % items else ["out of order"]
    lines = [
        " ".join("/".join(dict.fromkeys(cells.get((lane, column // items), ["nothing"]))) for column in columns)
        for lane in range(LANES)
    ]
    names = (column_name(column * layout.bits, items * layout.bits) for column in columns)
    return "\n".join((" ".join(names), *lines))


def layouts_of(instruction: MatrixInstruction) -> dict[str, Layout]:
    """Return the layouts of an instruction's operands, and of the index if A is sparse."""
    a = instruction.a_layout()
    layouts = {"A": a, "B": instruction.b_layout(), "D": instruction.d_layout}
    return layouts | ({"index": Layout(a.lane, a.item, 2)} if instruction.sparse else {})


def texts_of(instruction: MatrixInstruction, layouts: dict[str, Layout]) -> dict[str, str]:
    """Return an instruction's layouts as the calculator prints them."""
    return {
        operand: calculator_text(layout, operand, instruction.sparse and operand in ("A", "index"))
        for operand, layout in layouts.items()
    }


def hash_of(texts: dict[str, str]) -> str:
    """Return the hash of an instruction's layouts, as the file has it."""
    text = "\n\n".join(f"{operand}\n{text}" for operand, text in texts.items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("mnemonic", [name for name, found in MATRIX.items() if "gfx942" in found.archs])
def test_gfx942_layouts_are_the_calculators(mnemonic):
    facts, texts = calculator()
    found = texts_of(MATRIX[mnemonic], layouts_of(MATRIX[mnemonic]))
    for operand, text in texts.get(mnemonic, {}).items():
        assert found[operand].split("\n") == text.split("\n"), operand
    assert hash_of(found) == facts[mnemonic][-1]


@pytest.mark.parametrize("operand", ["A", "B", "D", "index"])
def test_a_wrong_lane_does_not_pass_the_comparison(operand):
    """Swapping two lanes, or two items of one lane, of any layout is seen."""
    for name in ("v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_4x4x4_16b_f16", "v_smfmac_f32_32x32x32_fp8_fp8"):
        layouts = layouts_of(MATRIX[name])
        if operand not in layouts:
            continue
        texts, layout = texts_of(MATRIX[name], layouts), layouts[operand]
        swap = np.arange(LANES)
        swap[[5, 40]] = swap[[40, 5]]
        swapped = texts_of(MATRIX[name], layouts | {operand: layout.through(swap)})
        different = [pair[0] != pair[1] for pair in zip(*(t[operand].split("\n") for t in (texts, swapped)))]
        assert [line for line, differs in enumerate(different) if differs] == [
            1 + 5,
            1 + 40,
        ]  # after the columns' names
        item = np.where(layout.lane == 17, layout.item ^ 1, layout.item)
        for wrong in (layout.through(swap), replace(layout, item=item)):
            changed = hash_of(texts_of(MATRIX[name], layouts | {operand: wrong}))
            assert changed != hash_of(texts) == calculator()[0][name][-1]


@full
def test_layouts_are_there_of_the_instructions_that_kernels_use():
    used = set()
    for path in (launch.CODE / "gfx942").glob("*.co"):
        code = CodeObject(path)
        for kernel in code.kernels.values():
            instructions = decode(bytes(code.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry)
            used |= {instruction.mnemonic for instruction in instructions} & MATRIX.keys()
    there = {name for name, texts in calculator()[1].items() if texts.keys() == layouts_of(MATRIX[name]).keys()}
    missing = {name: texts_of(MATRIX[name], layouts_of(MATRIX[name])) for name in used - there}
    assert not missing, "append these, whose hashes are right:\n\n" + "\n\n".join(
        f"{operand} {name}\n{text}" for name, of_name in missing.items() for operand, text in of_name.items()
    )
    assert used == calculator()[1].keys(), "no kernel uses the others"


def test_gfx942_cycles_and_registers_are_the_calculators():
    facts = calculator()[0]
    assert set(facts) == {name for name, instruction in MATRIX.items() if "gfx942" in instruction.archs}
    for name, expected in facts.items():
        instruction = MATRIX[name]
        layouts = instruction.a_layout(), instruction.b_layout(), instruction.d_layout
        assert [instruction.cycles("gfx942"), *(layout.dwords for layout in layouts)] == [int(n) for n in expected[:-1]]


# gfx950 layouts: the tables of the CDNA4 ISA document


# Sections 7.1.5.1 and 7.5.1.3: for each run of registers, the first k held by lanes 0-15, 16-31, 32-47 and 48-63.
CDNA4_TABLES = [
    ("v_mfma_f32_16x16x128_f8f6f4", "e2m1", {(0, 3): (0, 32, 64, 96)}),
    ("v_mfma_f32_32x32x64_f8f6f4", "e2m1", {(0, 3): (0, 0, 32, 32)}),
    ("v_mfma_f32_16x16x128_f8f6f4", "e2m3", {(0, 2): (0, 32, 64, 96), (3, 5): (16, 48, 80, 112)}),
    ("v_mfma_f32_32x32x64_f8f6f4", "e3m2", {(0, 2): (0, 0, 32, 32), (3, 5): (16, 16, 48, 48)}),
    ("v_mfma_f32_16x16x128_f8f6f4", "e4m3fn", {(0, 3): (0, 16, 32, 48), (4, 7): (64, 80, 96, 112)}),
    ("v_mfma_f32_32x32x64_f8f6f4", "e5m2", {(0, 3): (0, 0, 16, 16), (4, 7): (32, 32, 48, 48)}),
    ("v_mfma_f32_16x16x32_bf16", None, {(0, 3): (0, 8, 16, 24)}),
    ("v_mfma_f32_32x32x16_bf16", None, {(0, 3): (0, 0, 8, 8)}),
    ("v_mfma_i32_16x16x64_i8", None, {(0, 3): (0, 16, 32, 48)}),
    ("v_mfma_i32_32x32x32_i8", None, {(0, 3): (0, 0, 16, 16)}),
    ("v_smfmac_f32_16x16x64_bf16", None, {(0, 3): (0, 8, 16, 24), (4, 7): (32, 40, 48, 56)}),
    ("v_smfmac_f32_32x32x32_bf16", None, {(0, 3): (0, 0, 8, 8), (4, 7): (16, 16, 24, 24)}),
    ("v_smfmac_i32_16x16x128_i8", None, {(0, 3): (0, 16, 32, 48), (4, 7): (64, 80, 96, 112)}),
    ("v_smfmac_f32_32x32x64_fp8_fp8", None, {(0, 3): (0, 0, 16, 16), (4, 7): (32, 32, 48, 48)}),
]


@pytest.mark.parametrize(
    "mnemonic, format, table", CDNA4_TABLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_gfx950_inputs_are_those_of_the_cdna4_isa(mnemonic, format, table):
    instruction = MATRIX[mnemonic]
    selector = MIXED.index(format) if format else 0
    layouts = [(instruction.b_layout(selector), instruction.n)]
    if not instruction.sparse:  # the tables above show the B of the sparse ones
        layouts.append((instruction.a_layout(selector), instruction.m))
    for layout, rows in layouts:
        seen = 0
        for (first, last), starts in table.items():
            items = (last - first + 1) * 32 // layout.bits
            for lane, item in itertools.product(range(LANES), range(items)):
                x = 0, lane % rows, starts[lane // 16] + item
                assert (layout.lane[x], layout.item[x]) == (lane, first * 32 // layout.bits + item)
                seen += 1
        assert seen == layout.lane.size


@pytest.mark.parametrize("mnemonic", ["v_smfmac_f32_16x16x64_f16", "v_smfmac_f32_16x16x128_fp8_fp8"])
def test_gfx950_sparse_pairs_registers_as_measured(mnemonic):
    """One-hot probes on an MI355X showed which item of B meets which item of A.

    With the first two of four places selected, item a of lane group g of A met item 16 * (g // 2) + 4 * (a % 8 // 2) +
    a % 2 of lane group 2 * (g % 2) + a // 8 of B for fp8; half the items for f16 (public bring-up notes of a gfx950
    kernel).
    """
    instruction = MATRIX[mnemonic]
    half = instruction.a_layout().items // 2
    a_layout, b_layout = instruction.a_layout(), instruction.b_layout()
    for stored in range(instruction.k // 2):
        group, a = a_layout.lane[0, 0, stored] // 16, a_layout.item[0, 0, stored]
        dense = 4 * (stored // 2) + stored % 2
        expected = 2 * half * (group // 2) + 4 * (a % half // 2) + a % 2, 2 * (group % 2) + a // half
        assert (b_layout.item[0, 0, dense], b_layout.lane[0, 0, dense] // 16) == expected


def test_gfx950_cycles_are_those_of_the_cdna4_isa():
    """CDNA4 ISA, tables 28 and 33: 32x32 takes 32, 16x16 takes 16, except with k below the core's width, and f64."""
    f8f6f4 = MATRIX["v_mfma_scale_f32_16x16x128_f8f6f4"], MATRIX["v_mfma_f32_32x32x64_f8f6f4"]
    for cbsz, blgp in itertools.product(range(5), repeat=2):
        slow = 2 if cbsz < 2 or blgp < 2 else 1
        assert [instruction.cycles("gfx950", cbsz, blgp) for instruction in f8f6f4] == [16 * slow, 32 * slow]
    rates = {
        name: instruction.flops / instruction.cycles("gfx950")
        for name, instruction in MATRIX.items()
        if "gfx950" in instruction.archs
    }
    # The ISA's peak rates, in flops per cycle and matrix core: 1024 for f16, twice as high for 8 bits and for sparse.
    assert rates["v_mfma_f32_16x16x32_f16"] == rates["v_mfma_f32_32x32x16_bf16"] == 1024
    assert rates["v_mfma_i32_16x16x64_i8"] == rates["v_smfmac_f32_16x16x64_f16"] == 2048
    assert rates["v_smfmac_f32_32x32x64_fp8_bf8"] == 4096 and rates["v_mfma_f64_16x16x4_f64"] == 32


# Semantics


def decoded(format: str, selector: int, arch: str) -> Format | str:
    """Return the number format of an operand."""
    if format == "f8f6f4":
        return matrix._F8F6F4[selector]
    return eight_bit(format, arch) if format in ("fp8", "bf8") else format


def pack(values: np.ndarray, layout: Layout, format: Format | str) -> np.ndarray:
    """Return the registers of a matrix, packed bit by bit, independently of how `execute` unpacks them."""
    plain = {"f32": (np.float32, np.uint32), "f64": (np.float64, np.uint64), "i32": (np.int32, np.uint32)}
    plain |= {"xf32": plain["f32"], "i8": (np.int8, np.uint8), "f16": (np.float16, np.uint16)}
    if isinstance(format, Format):
        codes = format.encode(values.astype(np.float32))
    elif format == "bf16":
        codes = values.astype(np.float32).view(np.uint32) >> 16
    else:
        number, word = plain[format]
        codes = values.astype(number).view(word)
    registers = [0] * LANES
    for x in np.ndindex(values.shape):
        registers[layout.lane[x]] |= int(codes[x]) << (int(layout.item[x]) * layout.bits)
    words = [[register >> 32 * n & 0xFFFFFFFF for n in range(layout.dwords)] for register in registers]
    return np.array(words, dtype=np.uint32)


def unpack(registers: np.ndarray, layout: Layout, format: str) -> np.ndarray:
    """Return the accumulator matrix of registers."""
    number = {"f32": np.float32, "f64": np.float64, "i32": np.int32}[format]
    return np.ascontiguousarray(registers).view(number)[layout.lane, layout.item]


def draw(rng: np.random.Generator, shape: tuple, format: Format | str) -> np.ndarray:
    """Return random values that the format represents exactly."""
    if format == "i8":
        return rng.integers(-128, 128, shape)
    values = rng.standard_normal(shape)
    if format == "f64":
        return values
    if format == "i32":
        return rng.integers(-(1 << 20), 1 << 20, shape)
    if isinstance(format, Format):
        return format.values[format.encode(values.astype(np.float32))].astype(np.float64)
    keep = {"f32": 0xFFFFFFFF, "xf32": 0xFFFFE000, "f16": 0xFFFFE000, "bf16": 0xFFFF0000}[format]
    return (values.astype(np.float32).view(np.uint32) & np.uint32(keep)).view(np.float32).astype(np.float64)


class Case:
    """Random operands of one instruction, their registers, and the float64 result."""

    def __init__(self, mnemonic: str, arch: str, cbsz: int = 0, abid: int = 0, blgp: int = 0, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.instruction = instruction = MATRIX[mnemonic]
        self.options = {"arch": arch, "cbsz": cbsz, "abid": abid, "blgp": blgp}
        blocks, m, n, k = instruction.blocks, instruction.m, instruction.n, instruction.k
        mixed = instruction.a_format == "f8f6f4"
        a_format = decoded(instruction.a_format, cbsz, arch)
        b_format = decoded(instruction.b_format, blgp, arch)
        stored = draw(rng, (blocks, m, k // 2 if instruction.sparse else k), a_format)
        self.b = draw(rng, (blocks, n, k), b_format)
        self.c = draw(rng, (blocks, m, n), instruction.c_format)
        a_layout, b_layout = instruction.a_layout(cbsz if mixed else 0), instruction.b_layout(blgp if mixed else 0)
        self.registers = (
            pack(stored, a_layout, a_format),
            pack(self.b, b_layout, b_format),
            pack(self.c, instruction.d_layout, instruction.c_format),
        )
        self.a = stored
        if instruction.sparse:
            self.a = self._expand(rng, stored, a_layout)
        if instruction.scaled:
            self._scale(rng)
        product = np.einsum("bik,bjk->bij", self.a, self.b)
        self.magnitude = np.einsum("bik,bjk->bij", np.abs(self.a), np.abs(self.b)) + np.abs(self.c)
        self.expected = product + self.c

    def _expand(self, rng: np.random.Generator, stored: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the full A for random indices in the selected set, with wrong ones in the other sets."""
        instruction, pairs = self.instruction, np.array(list(itertools.combinations(range(4), 2)))
        chosen = pairs[rng.integers(0, 6, stored.shape[:2] + (stored.shape[2] // 2,))].reshape(stored.shape)
        full = np.zeros(stored.shape[:2] + (instruction.k,))
        words = [0xEEEEEEEE] * LANES
        shift = instruction.index_shift(self.options["cbsz"], self.options["abid"])
        for x in np.ndindex(stored.shape):
            lane, at = layout.lane[x], shift + 2 * int(layout.item[x])
            words[lane] = words[lane] & ~(3 << at) | int(chosen[x]) << at
            full[x[0], x[1], x[2] // 2 * 4 + chosen[x]] = stored[x]
        self.options["index"] = np.array(words, dtype=np.uint32)
        return full

    def _scale(self, rng: np.random.Generator) -> None:
        """Return random scales in the second byte for A and the third for B, with noise in the other bytes."""
        instruction = self.instruction
        for operand, rows, byte in (("a", instruction.m, 1), ("b", instruction.n, 2)):
            exponent = rng.integers(117, 137, (rows, instruction.k // 32))
            words = rng.integers(0, 1 << 32, LANES, dtype=np.uint32) & ~np.uint32(0xFF << 8 * byte)
            for row, block in np.ndindex(exponent.shape):
                words[row + rows * block] |= np.uint32(exponent[row, block] << 8 * byte)
            self.options[f"scale_{operand}"] = words
            scaled = getattr(self, operand) * np.repeat(np.ldexp(1.0, exponent - 127), 32, axis=1)
            setattr(self, operand, scaled)
        self.options |= {"op_sel": 0b01, "op_sel_hi": 0b10}

    def run(self, **changed) -> np.ndarray:
        """Return D as `execute` computes it."""
        d = self.instruction.execute(*self.registers, **self.options | changed)
        assert d.dtype == np.uint32 and d.shape == self.registers[2].shape
        return unpack(d, self.instruction.d_layout, self.instruction.c_format)

    def check(self, d: np.ndarray) -> None:
        """Check integers exactly, and floats within the accumulator's rounding of the operands' magnitude."""
        if self.instruction.c_format == "i32":
            assert np.array_equal(d, self.expected)
        else:
            steps = self.instruction.k if self.instruction.a_format in ("f32", "f64") else 1
            assert np.all(np.abs(d - self.expected) <= steps * np.finfo(d.dtype).eps * self.magnitude)


@pytest.mark.parametrize("mnemonic, arch", ARCH_CASES)
def test_random_matrices_match_numpy(mnemonic, arch):
    case = Case(mnemonic, arch)
    case.check(case.run())


@pytest.mark.parametrize("mnemonic", [name for name, found in MATRIX.items() if found.a_format == "f8f6f4"])
def test_f8f6f4_formats_mix(mnemonic):
    for cbsz, blgp in itertools.product(range(5), repeat=2):
        case = Case(mnemonic, "gfx950", cbsz=cbsz, blgp=blgp, seed=cbsz * 5 + blgp)
        case.check(case.run())


@pytest.mark.parametrize("mnemonic, arch", ARCH_CASES)
def test_one_hot_operands_reach_one_element(mnemonic, arch):
    """With one 1 in A and one in B, D[i][j] is 1 if they have the same k, and all else is 0."""
    instruction = MATRIX[mnemonic]
    rng = np.random.default_rng(2)
    a_format, b_format = (decoded(f, 0, arch) for f in (instruction.a_format, instruction.b_format))
    options = {"arch": arch}
    if instruction.sparse:
        options["index"] = np.full(LANES, 0x44444444, np.uint32)  # the first two places of every four
    if instruction.scaled:
        options |= {"scale_a": np.full(LANES, 127, np.uint32), "scale_b": np.full(LANES, 127, np.uint32)}
    c = np.zeros((LANES, instruction.d_layout.dwords), np.uint32)
    a, b, places = [], [], []
    for stored in range(instruction.k // 2 if instruction.sparse else instruction.k):
        k = 4 * (stored // 2) + stored % 2 if instruction.sparse else stored
        block, i, j = (int(rng.integers(size)) for size in (instruction.blocks, instruction.m, instruction.n))
        other = (k + 1) % instruction.k
        for b_k in {k, other}:
            a_matrix = np.zeros(instruction.a_layout().lane.shape)
            b_matrix = np.zeros(instruction.b_layout().lane.shape)
            a_matrix[block, i, stored] = b_matrix[block, j, b_k] = 1
            a.append(pack(a_matrix, instruction.a_layout(), a_format))
            b.append(pack(b_matrix, instruction.b_layout(), b_format))
            places.append((block, i, j) if b_k == k else None)
    if instruction.sparse:
        options["index"] = np.tile(options["index"], (len(a), 1))
    if instruction.scaled:
        options |= {name: np.tile(options[name], (len(a), 1)) for name in ("scale_a", "scale_b")}
    batch = instruction.execute(np.array(a), np.array(b), np.tile(c, (len(a), 1, 1)), **options)
    for d, place in zip(batch, places, strict=True):
        expected = np.zeros((instruction.blocks, instruction.m, instruction.n))
        if place:
            expected[place] = 1
        assert np.array_equal(unpack(d, instruction.d_layout, instruction.c_format), expected)


@pytest.mark.parametrize(
    "mnemonic", [name for name, found in MATRIX.items() if found.blocks > 1 and found.c_format != "f64"]
)
def test_broadcast_of_a_block_of_a(mnemonic):
    """CDNA4 ISA, 7.1.6.1: with CBSZ = log2(blocks), all blocks use block ABID of A."""
    blocks = MATRIX[mnemonic].blocks
    for abid in (0, blocks - 1):
        case = Case(mnemonic, "gfx942")
        d = case.run(cbsz=blocks.bit_length() - 1, abid=abid)
        case.a = np.broadcast_to(case.a[abid], case.a.shape)
        case.magnitude = np.einsum("bik,bjk->bij", np.abs(case.a), np.abs(case.b)) + np.abs(case.c)
        case.expected = np.einsum("bik,bjk->bij", case.a, case.b) + case.c
        case.check(d)


@pytest.mark.parametrize("blgp", range(8))
def test_lane_group_permutation_of_b(blgp):
    """CDNA4 ISA, table 29, on an instruction whose B is one register: lane l reads the value of lane `source`."""
    source = [
        *(lambda l: l, lambda l: l % 32, lambda l: l % 32 + 32, lambda l: (l + 16) % 64),
        *(lambda l: l % 16, lambda l: l % 16 + 16, lambda l: l % 16 + 32, lambda l: l % 16 + 48),
    ][blgp]
    case = Case("v_mfma_f32_16x16x1_4b_f32", "gfx942")
    a, b, c = case.registers
    moved = b[[source(lane) for lane in range(LANES)]]
    plain = case.instruction.execute(a, moved, c, arch="gfx942")
    assert np.array_equal(case.instruction.execute(a, b, c, arch="gfx942", blgp=blgp), plain)


def test_f64_blgp_negates():
    case = Case("v_mfma_f64_16x16x4_f64", "gfx942")
    for blgp in range(8):
        signs = [-1 if blgp >> n & 1 else 1 for n in range(3)]
        expected = signs[0] * signs[1] * np.einsum("bik,bjk->bij", case.a, case.b) + signs[2] * case.c
        assert np.allclose(case.run(blgp=blgp), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "mnemonic, sets",
    [
        ("v_smfmac_f32_16x16x32_f16", 4),
        ("v_smfmac_f32_32x32x32_fp8_bf8", 2),
        ("v_smfmac_f32_16x16x64_bf16", 2),
        ("v_smfmac_i32_32x32x64_i8", 1),
    ],
)
def test_abid_chooses_the_set_of_indices(mnemonic, sets):
    """CDNA4 ISA, 7.5: the index register holds all sets that fit; any CBSZ selects the first."""
    arch = MATRIX[mnemonic].archs[0]
    for abid in range(sets):
        case = Case(mnemonic, arch, abid=abid, seed=abid)
        case.check(case.run())
        if abid:
            assert not np.array_equal(case.run(abid=0), case.run())
    case = Case(mnemonic, arch)
    assert np.array_equal(case.run(cbsz=1, abid=sets - 1), case.run())


def test_zeros_of_a_sparse_a_hide_infinities_of_b():
    case = Case("v_smfmac_f32_16x16x32_f16", "gfx942")
    case.b[0, 0, 2] = np.inf
    registers = pack(case.b, case.instruction.b_layout(), "f16")
    case.registers = case.registers[0], registers, case.registers[2]
    case.options["index"] = np.full(LANES, 0x44444444, np.uint32)
    assert np.isfinite(case.run()).all()
    case.options["index"] = np.full(LANES, 0x88888888, np.uint32)
    assert np.isinf(case.run()[0, :, 0]).all()


def test_fp8_bytes_mean_what_the_arch_says():
    instruction = MATRIX["v_mfma_f32_16x16x32_fp8_fp8"]
    ones = np.full((LANES, 2), 0x38383838, np.uint32)  # 1.0 in e4m3fn, 0.5 in e4m3fnuz
    c = np.zeros((LANES, 4), np.uint32)
    for arch, expected in (("gfx942", 32 * 0.25), ("gfx950", 32.0)):
        assert np.all(instruction.execute(ones, ones, c, arch=arch).view(np.float32) == expected)
    minus_zero = np.full((LANES, 2), 0x80808080, np.uint32)
    assert np.isnan(instruction.execute(minus_zero, ones, c, arch="gfx942").view(np.float32)).all()
    assert np.all(instruction.execute(minus_zero, ones, c, arch="gfx950") == 0)


def test_subnormals_nan_and_overflow():
    instruction = MATRIX["v_mfma_f32_16x16x16_f16"]
    tiny, largest = np.full((LANES, 2), 0x00010001, np.uint32), np.full((LANES, 2), 0x7BFF7BFF, np.uint32)
    one, infinity = np.full((LANES, 2), 0x3C003C00, np.uint32), np.full((LANES, 2), 0x7C007C00, np.uint32)
    zero = np.zeros((LANES, 4), np.uint32)
    run = partial(instruction.execute, arch="gfx942")
    assert np.all(run(tiny, one, zero).view(np.float32) == 16 * 2.0**-24)
    assert np.all(run(tiny * 0, one, np.full((LANES, 4), 1, np.uint32)) == 1)  # a subnormal C stays
    assert np.all(run(infinity, tiny * 0, zero) == 0x7FC00000)
    nearly = np.full((LANES, 4), 0x7F7FFFFF, np.uint32)
    assert np.all(run(largest, largest, nearly) == nearly)  # far below half a step of C
    huge = MATRIX["v_mfma_f32_16x16x16_bf16"]
    most = np.full((LANES, 2), 0x7F7F7F7F, np.uint32)
    assert np.all(huge.execute(most, most, zero, arch="gfx942").view(np.float32) == np.inf)
    assert np.all(huge.execute(most, most, zero, arch="gfx942", saturate=True) == 0x7F7FFFFF)


def test_i32_wraps_or_saturates():
    instruction = MATRIX["v_mfma_i32_16x16x32_i8"]
    a = np.full((LANES, 2), 0x7F7F7F7F, np.uint32)
    c = np.full((LANES, 4), 0x7FFFFFFF, np.uint32)
    assert np.all(instruction.execute(a, a, c, arch="gfx942") == 0x7FFFFFFF + 32 * 127 * 127)
    assert np.all(instruction.execute(a, a, c, arch="gfx942", saturate=True) == 0x7FFFFFFF)


def test_e8m0_nan_reaches_its_block_only():
    case = Case("v_mfma_scale_f32_16x16x128_f8f6f4", "gfx950")
    case.options["scale_a"][3 + 16 * 2] |= 0xFF << 8  # row 3, k 64..95
    d = case.run()
    assert np.isnan(d[0, 3]).all() and np.isfinite(np.delete(d[0], 3, axis=0)).all()


def test_batches_of_waves():
    for mnemonic in ("v_mfma_f32_32x32x8_f16", "v_smfmac_f32_16x16x64_fp8_bf8", "v_mfma_scale_f32_32x32x64_f8f6f4"):
        arch = MATRIX[mnemonic].archs[0]
        cases = [Case(mnemonic, arch, seed=seed) for seed in range(3)]
        stacked = [np.stack(operand) for operand in zip(*(case.registers for case in cases), strict=True)]
        arrays = [name for name, value in cases[0].options.items() if isinstance(value, np.ndarray)]
        options = cases[0].options | {name: np.stack([case.options[name] for case in cases]) for name in arrays}
        d = cases[0].instruction.execute(*stacked, **options)
        for case, wave in zip(cases, d, strict=True):
            assert np.array_equal(wave, case.instruction.execute(*case.registers, **case.options))


@pytest.mark.parametrize(
    "mnemonic, options, message",
    [
        ("v_mfma_f32_16x16x32_f16", {"arch": "gfx942"}, "arch must be gfx950, got gfx942"),
        ("v_mfma_f32_32x32x4_xf32", {"arch": "gfx950"}, "arch must be gfx942, got gfx950"),
        ("v_mfma_f32_16x16x16_f16", {"blgp": 1}, "blgp must be 0, got 1"),
        ("v_mfma_f32_16x16x16_f16", {"cbsz": 1}, "cbsz must be 0 or broadcast a block to all 1"),
        ("v_mfma_f32_4x4x4_16b_f16", {"cbsz": 2}, "cbsz must be 0 or broadcast a block to all 16"),
        ("v_mfma_f32_16x16x128_f8f6f4", {"arch": "gfx950", "cbsz": 5}, "cbsz and blgp must name a format"),
        (
            "v_smfmac_f32_16x16x32_f16",
            {"index": np.full(LANES, 0x41, np.uint32)},
            r"must ascend, got \[1, 0\] in lane 0, pair 0",
        ),
    ],
)
def test_what_the_hardware_does_not_define_is_an_error(mnemonic, options, message):
    instruction = MATRIX[mnemonic]
    layouts = instruction.a_layout(), instruction.b_layout(), instruction.d_layout
    registers = [np.zeros((LANES, layout.dwords), np.uint32) for layout in layouts]
    with pytest.raises(ValueError, match=f"{mnemonic}: .*{message}"):
        instruction.execute(*registers, **{"arch": "gfx942"} | options)
    with pytest.raises(ValueError, match="operand must be"):
        instruction.execute(registers[0][:, :0], *registers[1:], arch=instruction.archs[0])


# Names and operands: LLVM's assembler writes what the decoder reads


def registers(first: int, count: int) -> str:
    """Return a VGPR range as the assembler writes it."""
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


def assembly(instruction: MatrixInstruction, cbsz: int = 0, blgp: int = 0) -> str:
    """Return one instruction in assembler text: A from v0, B from v40, C and D in v80, then the index or the scales."""
    a, b, d = instruction.a_layout(cbsz), instruction.b_layout(blgp), instruction.d_layout
    a, b, d = (registers(first, layout.dwords) for first, layout in ((0, a), (40, b), (80, d)))
    last = "v120" if instruction.sparse else d
    scales = ", v121, v122" if instruction.scaled else ""
    modifiers = f" cbsz:{cbsz}" * (cbsz > 0) + f" blgp:{blgp}" * (blgp > 0)
    return f"{instruction.mnemonic} {d}, {a}, {b}, {last}{scales}{modifiers}"


def assemble(folder: Path, arch: str, lines: list[str]):
    """Return the decoded instructions of assembler text."""
    source, output = folder / "matrix.s", folder / f"{arch}.co"
    source.write_text("\n".join([".text", *lines, ""]))
    build.compile_source(source, arch, output)
    (text,) = (section for section in CodeObject(output)._sections if section["name"] == ".text")
    code = output.read_bytes()[text["offset"] : text["offset"] + text["size"]]
    return [found for found in decode(code, 0) if found.mnemonic != "s_nop"]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_assembler_and_the_decoder_know_every_instruction(arch, tmp_path):
    known = [instruction for instruction in MATRIX.values() if arch in instruction.archs]
    found = assemble(tmp_path, arch, [line for instruction in known for line in (assembly(instruction), "s_nop 0")])
    assert [instruction.mnemonic for instruction in found] == [instruction.mnemonic for instruction in known]
    for instruction, decoded_one in zip(known, found, strict=True):
        if instruction.a_format == "xf32":  # the decoding tables have its name only
            continue
        layouts = {"src0": instruction.a_layout(), "src1": instruction.b_layout(), "vdst": instruction.d_layout}
        dwords = {name: decoded_one.operands[name].dwords for name in layouts}
        assert dwords == {name: layout.dwords for name, layout in layouts.items()}


class Registers:
    """A wave's state as far as matrix instructions use it: 256 VGPRs and 256 AGPRs of two waves."""

    count = 2

    def __init__(self):
        self.U = list(np.zeros((512, self.count, LANES), np.uint32))

    def put(self, first: int, words: np.ndarray) -> None:
        for n in range(words.shape[-1]):
            self.U[first + n][...] = words[..., n]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_decoded_instructions_execute_on_registers(arch, tmp_path):
    program = SimpleNamespace(arch=arch, saturate=False, allocates=lambda code: True)
    known = [
        instruction for instruction in MATRIX.values() if arch in instruction.archs and instruction.a_format != "xf32"
    ]
    lines, cases = [], []
    for n, instruction in enumerate(known):
        sets = 32 // (2 * instruction.a_layout().items) if instruction.sparse else 1
        cases.append(Case(instruction.mnemonic, arch, abid=sets - 1, seed=n))
        abid = f" abid:{sets - 1}" if sets > 1 else ""
        op_sel = " op_sel:[1,0,0] op_sel_hi:[0,1,0]" if instruction.scaled else ""
        lines += [assembly(instruction) + abid + op_sel, "s_nop 0"]
    for case, decoded_one in zip(cases, assemble(tmp_path, arch, lines), strict=True):
        wave = Registers()
        a, b, c = case.registers
        for first, words in ((0, a), (40, b), (80, c)):
            wave.put(first, words)
        for first, name in ((120, "index"), (121, "scale_a"), (122, "scale_b")):
            wave.put(first, case.options.get(name, np.zeros(LANES, np.uint32))[:, None])
        matrix.bind(decoded_one, program)(wave)
        expected = case.instruction.execute(a, b, c, **case.options)
        actual = np.stack(wave.U[80 : 80 + c.shape[-1]], axis=-1)
        assert np.array_equal(actual, np.stack([expected] * wave.count)), case.instruction.mnemonic


def test_accumulation_registers_constants_and_mode(tmp_path):
    """The operands are AGPRs, an inline constant as C, and FP16_OVFL."""
    lines = [
        "v_mfma_f32_16x16x32_fp8_fp8 a[8:11], a[0:1], v[40:41], 1.0",
        "v_mfma_i32_16x16x32_i8 v[8:11], v[0:1], a[40:41], -3",
        "v_mfma_f64_16x16x4_f64 v[8:15], v[0:1], v[40:41], 0.5",
    ]
    found = assemble(tmp_path, "gfx942", lines)
    cases = [Case(one.mnemonic, "gfx942") for one in found]
    places = [(256, 40, 264, 1.0), (0, 296, 8, -3), (0, 40, 8, 0.5)]
    for saturate, (case, decoded_one, (a, b, d, c)) in itertools.product(
        (False, True), zip(cases, found, places, strict=True)
    ):
        wave = Registers()
        wave.put(a, case.registers[0])
        wave.put(b, case.registers[1])
        program = SimpleNamespace(arch="gfx942", saturate=saturate, allocates=lambda code: True)
        matrix.bind(decoded_one, program)(wave)
        words = np.stack(wave.U[d : d + case.instruction.d_layout.dwords], axis=-1)[1]
        case.expected = np.einsum("bik,bjk->bij", case.a, case.b) + c
        case.check(unpack(words, case.instruction.d_layout, case.instruction.c_format))


def test_the_decoder_reads_as_many_registers_as_the_formats_need(tmp_path):
    cases = [
        (MATRIX[name], cbsz, blgp) for name in MATRIX if "f8f6f4" in name for cbsz in range(5) for blgp in range(5)
    ]
    found = assemble(tmp_path, "gfx950", [line for case in cases for line in (assembly(*case), "s_nop 0")])
    for (instruction, cbsz, blgp), decoded_one in zip(cases, found, strict=True):
        a, b = instruction.a_layout(cbsz), instruction.b_layout(blgp)
        assert [decoded_one.operands[name].dwords for name in ("src0", "src1")] == [a.dwords, b.dwords]
        assert (decoded_one.fields["cbsz"], decoded_one.fields["blgp"]) == (cbsz, blgp)


# Kernels: compiled from clang's builtins, run by the emulator. Each lane loads what the comment of its layout says,
# so the layouts are stated a second time, as a kernel's author would.


KERNELS = """
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef int i32x2 __attribute__((ext_vector_type(2)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef short i16x4 __attribute__((ext_vector_type(4)));
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void
#define LANE __builtin_amdgcn_workitem_id_x()

// D[16 x 16]: lane holds column lane % 16, rows 4 * (lane / 16) ...
template <typename V, typename T>
__attribute__((device)) void store16(T* d, V v) {
  for (int i = 0; i < 4; ++i) d[(LANE / 16 * 4 + i) * 16 + LANE % 16] = v[i];
}
// D[32 x 32]: lane holds column lane % 32, rows 4 * (lane / 32) + 8 * (v / 4) ...
template <typename T>
__attribute__((device)) void store32(T* d, f32x16 v) {
  for (int i = 0; i < 16; ++i) d[(LANE / 32 * 4 + i / 4 * 8 + i % 4) * 32 + LANE % 32] = v[i];
}

// a [16][32], b [16][32] fp8
KERNEL fp8(const char* a, const char* b, float* d) {
  int at = LANE % 16 * 32 + LANE / 16 * 8;
  store16(d, __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(*(long*)(a + at), *(long*)(b + at), f32x4(1), 0, 0, 0));
}
// a [32][8], b [32][8] bf16; twice, so that the second adds to the first
KERNEL bf16(const short* a, const short* b, float* d) {
  int at = LANE % 32 * 8 + LANE / 32 * 4;
  i16x4 x = *(i16x4*)(a + at), y = *(i16x4*)(b + at);
  f32x16 once = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, f32x16(0), 0, 0, 0);
  store32(d, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, once, 0, 0, 0));
}
// a [16][32], b [16][32] i8, in accumulation registers
KERNEL i8_agpr(const char* a, const char* b, int* d) {
  int at = LANE % 16 * 32 + LANE / 16 * 8;
  i32x4 acc = {0, 0, 0, 0};
  long x = *(long*)(a + at), y = *(long*)(b + at);
  asm volatile("v_mfma_i32_16x16x32_i8 %0, %1, %2, %0\\n s_nop 15\\n s_nop 15" : "+a"(acc) : "a"(x), "v"(y));
  store16(d, acc);
}
// a [16][32] stored of [16][64], b [16][64] fp8, index [16][4] of 16 bits
KERNEL sparse(const char* a, const char* b, const unsigned short* index, float* d) {
  i32x2 x = *(i32x2*)(a + LANE % 16 * 32 + LANE / 16 * 8);
  i32x4 y = *(i32x4*)(b + LANE % 16 * 64 + LANE / 16 * 16);
  int which = index[LANE % 16 * 4 + LANE / 16] << 16;
  store16(d, __builtin_amdgcn_smfmac_f32_16x16x64_fp8_fp8(x, y, f32x4(0), which, 0, 1));
}
#if __gfx950__
// a [16][128], b [16][128] fp8, their scales [16][4]
KERNEL mxfp8(const char* a, const char* b, const unsigned char* a_scale, const unsigned char* b_scale, float* d) {
  int at = LANE % 16 * 128 + LANE / 16 * 16, scale = LANE % 16 * 4 + LANE / 16;
  i32x8 x, y;
  x.lo = *(i32x4*)(a + at), x.hi = *(i32x4*)(a + at + 64);
  y.lo = *(i32x4*)(b + at), y.hi = *(i32x4*)(b + at + 64);
  int x_scale = a_scale[scale] << 8, y_scale = b_scale[scale] << 24;
  store16(d, __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, f32x4(0), 0, 0, 1, x_scale, 3, y_scale));
}
// a [32][64] fp4, low nibble first, its scales [32][2]; b [32][64] fp8, unscaled
KERNEL mxfp4(const char* a, const char* b, const unsigned char* a_scale, float* d) {
  i32x8 x = 0, y;
  x.lo = *(i32x4*)(a + LANE % 32 * 32 + LANE / 32 * 16);
  y.lo = *(i32x4*)(b + LANE % 32 * 64 + LANE / 32 * 16), y.hi = *(i32x4*)(b + LANE % 32 * 64 + LANE / 32 * 16 + 32);
  int x_scale = a_scale[LANE % 32 * 2 + LANE / 32];
  store32(d, __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(x, y, f32x16(0), 4, 0, 0, x_scale, 0, 0x7f7f7f7f));
}
// a [16][128], b [16][128] fp4 without scales, twice in a row
KERNEL fp4_twice(const char* a, const char* b, float* d) {
  int at = LANE % 16 * 64 + LANE / 16 * 16;
  i32x8 x = 0, y = 0;
  x.lo = *(i32x4*)(a + at), y.lo = *(i32x4*)(b + at);
  f32x4 once = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, f32x4(0), 4, 4, 0, 0, 0, 0);
  store16(d, __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, once, 4, 4, 0, 0, 0, 0));
}
// a [16][32], b [16][32] f16
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
KERNEL f16(const _Float16* a, const _Float16* b, float* d) {
  int at = LANE % 16 * 32 + LANE / 16 * 8;
  store16(d, __builtin_amdgcn_mfma_f32_16x16x32_f16(*(f16x8*)(a + at), *(f16x8*)(b + at), f32x4(0), 0, 0, 0));
}
#endif
"""


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def device(request, tmp_path_factory):
    """Return a function that launches one wave of a kernel above in the emulator, by symbol and arguments."""
    folder = tmp_path_factory.mktemp("code")
    (folder / request.param).mkdir()
    source = folder / "matrix.hip"
    source.write_text(KERNELS)
    build.compile_source(source, request.param, folder / request.param / "matrix.co")
    emulator = Emulator(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "CODE", folder)

        def run(symbol: str, *args: torch.Tensor) -> None:
            emulator.launch(launch.Launch("matrix", symbol, (1, 1, 1), (LANES, 1, 1), args), (args[-1],))
            cycles = sum(MATRIX[one].cycles(request.param, *FORMATS.get(symbol, ())) for one in BUILTINS[symbol])
            assert emulator.last.matrix_cycles == cycles

        yield request.param, run


# The instructions that the kernels above compile to, and their formats if CBSZ and BLGP name them.
FORMATS = {"mxfp4": (4, 0), "fp4_twice": (4, 4)}
BUILTINS = {
    "fp8": ["v_mfma_f32_16x16x32_fp8_fp8"],
    "bf16": ["v_mfma_f32_32x32x8_bf16"] * 2,
    "i8_agpr": ["v_mfma_i32_16x16x32_i8"],
    "sparse": ["v_smfmac_f32_16x16x64_fp8_fp8"],
    "mxfp8": ["v_mfma_scale_f32_16x16x128_f8f6f4"],
    "mxfp4": ["v_mfma_scale_f32_32x32x64_f8f6f4"],
    "fp4_twice": ["v_mfma_f32_16x16x128_f8f6f4"] * 2,
    "f16": ["v_mfma_f32_16x16x32_f16"],
}


def test_builtins_become_instructions_of_the_table(device):
    arch, _ = device
    code = CodeObject(launch.code_object("matrix", arch))
    for name, kernel in code.kernels.items():
        found = decode(bytes(code.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry)
        assert [one.mnemonic for one in found if one.mnemonic in MATRIX] == BUILTINS[name]
    assert set(code.kernels) == {name for name, found in BUILTINS.items() if arch in MATRIX[found[0]].archs}


@pytest.mark.parametrize("device", ["gfx950"], indirect=True)
def test_a_scaled_instruction_that_was_cut_off_decodes_afterwards(device):
    """Its first half alone has another meaning, which decoding does not keep."""
    code = CodeObject(launch.code_object("matrix", "gfx950"))
    kernel = code.kernels["mxfp8"]
    found = decode(bytes(code.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry)
    whole = next(one for one in found if one.encoding == "VOP3PX2")
    assert decode(whole.words[:8], 0)[0].size == 8
    assert decode(whole.words, 0)[0].mnemonic == whole.mnemonic


def random_codes(rng: np.random.Generator, shape: tuple, format: Format) -> tuple[torch.Tensor, np.ndarray]:
    """Return random bytes (pairs of nibbles) of a format, and their values."""
    codes = format.encode(rng.standard_normal(shape).astype(np.float32)).astype(np.uint8)
    stored = codes[..., 0::2] | codes[..., 1::2] << 4 if format.bits == 4 else codes
    return torch.from_numpy(stored), format.values[codes].astype(np.float64)


def close(d: torch.Tensor, expected: np.ndarray) -> bool:
    return np.allclose(d.numpy(), expected, rtol=1e-6, atol=1e-5)


def test_fp8_kernel(device):
    arch, run = device
    rng = np.random.default_rng(0)
    (a, a_values), (b, b_values) = (random_codes(rng, (16, 32), eight_bit("fp8", arch)) for _ in range(2))
    d = torch.empty(16, 16)
    run("fp8", a, b, d)
    assert close(d, a_values @ b_values.T + 1)


def test_bf16_kernel(device):
    _, run = device
    a, b = (torch.randn(32, 8, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2))
    d = torch.empty(32, 32)
    run("bf16", a, b, d)
    assert close(d, 2 * (a.double() @ b.double().T).numpy())


def test_i8_kernel_with_accumulation_registers(device):
    _, run = device
    a, b = (
        torch.randint(-128, 128, (16, 32), generator=torch.Generator().manual_seed(n)).to(torch.int8) for n in range(2)
    )
    d = torch.empty(16, 16, dtype=torch.int32)
    run("i8_agpr", a, b, d)
    assert torch.equal(d, a.int() @ b.int().T)


def test_sparse_kernel(device):
    arch, run = device
    rng = np.random.default_rng(1)
    format = eight_bit("fp8", arch)
    (a, a_values), (b, b_values) = random_codes(rng, (16, 32), format), random_codes(rng, (16, 64), format)
    chosen = np.array(list(itertools.combinations(range(4), 2)))[rng.integers(0, 6, (16, 16))]  # [row, four of k, 2]
    full = np.zeros((16, 16, 4))
    np.put_along_axis(full, chosen, a_values.reshape(16, 16, 2), axis=2)
    nibbles = chosen[..., 0] | chosen[..., 1] << 2
    index = (nibbles.reshape(16, 4, 4) << np.array([0, 4, 8, 12])).sum(-1).astype(np.uint16).view(np.int16)
    d = torch.empty(16, 16)
    run("sparse", a, b, torch.from_numpy(index), d)
    assert close(d, full.reshape(16, 64) @ b_values.T)


def test_a_wrong_sparse_index_names_the_instruction(device):
    _, run = device
    zeros = [torch.zeros(shape, dtype=torch.uint8) for shape in ((16, 32), (16, 64))]
    index = torch.full((16, 4), 0x4444, dtype=torch.int16)
    index[3, 2] = 0x4441
    with pytest.raises(
        EmulatorError, match=r"sparse\+0x\w+ `v_smfmac_f32_16x16x64_fp8_fp8 .*got \[1, 0\] in lane 35, pair 0"
    ):
        run("sparse", *zeros, index, torch.empty(16, 16))


def random_scales(rng: np.random.Generator, rows: int, blocks: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return e8m0 scales, and their factors for each row's values."""
    codes = rng.integers(120, 134, (rows, blocks)).astype(np.uint8)
    return torch.from_numpy(codes), np.repeat(np.ldexp(1.0, codes.astype(int) - 127), 32, axis=1)


gfx950 = pytest.mark.parametrize("device", ["gfx950"], indirect=True)


@gfx950
def test_mxfp8_kernel(device):
    _, run = device
    rng = np.random.default_rng(2)
    (a, a_values), (b, b_values) = (random_codes(rng, (16, 128), eight_bit("fp8", "gfx950")) for _ in range(2))
    (a_scale, a_factors), (b_scale, b_factors) = (random_scales(rng, 16, 4) for _ in range(2))
    d = torch.empty(16, 16)
    run("mxfp8", a, b, a_scale, b_scale, d)
    assert np.allclose(d.numpy(), (a_values * a_factors) @ (b_values * b_factors).T, rtol=1e-6, atol=1e-2)


@gfx950
def test_mxfp4_by_fp8_kernel(device):
    _, run = device
    rng = np.random.default_rng(3)
    (a, a_values), (b, b_values) = random_codes(rng, (32, 64), E2M1), random_codes(rng, (32, 64), E4M3FN)
    a_scale, a_factors = random_scales(rng, 32, 2)
    d = torch.empty(32, 32)
    run("mxfp4", a, b, a_scale, d)
    assert close(d, (a_values * a_factors) @ b_values.T)


@gfx950
def test_consecutive_unscaled_f8f6f4_kernel(device):
    _, run = device
    rng = np.random.default_rng(4)
    (a, a_values), (b, b_values) = (random_codes(rng, (16, 128), E2M1) for _ in range(2))
    d = torch.empty(16, 16)
    run("fp4_twice", a, b, d)
    assert close(d, 2 * a_values @ b_values.T)


@gfx950
def test_wide_f16_kernel(device):
    _, run = device
    a, b = (torch.randn(16, 32, generator=torch.Generator().manual_seed(n)).half() for n in range(2))
    d = torch.empty(16, 16)
    run("f16", a, b, d)
    assert close(d, (a.double() @ b.double().T).numpy())
