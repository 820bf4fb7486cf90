"""Decode kernels into `Instruction`s with tinygrad's CDNA tables, which are generated from AMD's XML.

Register codes extend the ISA's source operand codes: 0-127 SGPRs and specials, 128-255 constants, 256-511 VGPRs, 512-767 AGPRs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import FixedBitField, Reg

VCC, M0, EXEC, NO_ADDRESS, LITERAL = 106, 124, 126, 127, 255
VGPR, AGPR = 256, 512
# Field names in assembly order.
_ORDER = (
    "vdst sdst sdata vdata addr vaddr data data0 data1 src0 vsrc0 ssrc0 src1 vsrc1 ssrc1 src2 sbase saddr srsrc soffset"
)
_ORDER = {name: position for position, name in enumerate(_ORDER.split())}
_SCALE_PREFIX = 0xD3AC  # upper half of the first dword of V_MFMA_SCALE (CDNA4 ISA, VOP3PX2)
_SKIPPED = ("VOP", "DS", "FLAT", "GLOBAL", "SCRATCH", "MUBUF")
_LITERAL_MNEMONICS = ("v_fmamk_", "v_fmaak_", "v_madmk_", "v_madak_")


@dataclass(frozen=True)
class Operand:
    """A register range or constant: the code of its first dword, its dwords, and its number format (`F32`, `PK2_F16`)."""

    code: int
    dwords: int
    format: str
    bits: int

    @property
    def registers(self) -> tuple[int, ...]:
        """Return the codes of its registers; none for a constant."""
        return () if 128 <= self.code < 256 else tuple(range(self.code, self.code + self.dwords))

    def __str__(self) -> str:
        code, last = self.code, self.code + self.dwords - 1
        for base, letter, end in ((0, "s", 102), (VGPR, "v", 512), (AGPR, "a", 768)):
            if base <= code < end and (code >= VGPR or code < 102):
                first, last = code - base, last - base
                return f"{letter}{first}" if first == last else f"{letter}[{first}:{last}]"
        return repr(Reg(code, self.dwords)).lower()


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction. `fields` are the raw bit fields other than operands (modifiers, offsets, immediates)."""

    address: int
    size: int
    mnemonic: str
    encoding: str  # SOP1 ... VOP3P, DS, GLOBAL
    variant: str  # "", "DPP16" or "SDWA"
    operands: dict[str, Operand]
    fields: dict[str, int]
    words: bytes = field(repr=False)

    @cached_property
    def text(self) -> str:
        """Return the disassembly."""
        parts = [str(self.operands[name]) for name in sorted(self.operands, key=_ORDER.__getitem__)]
        if "literal" in self.fields:
            parts = [f"{self.fields['literal']:#x}" if part in ("lit", "src[255]") else part for part in parts]
        shown = {k: v for k, v in self.fields.items() if v and k not in ("literal", "vsrc0", "error")}
        words = [self.mnemonic, ", ".join(parts), *(f"{k}:{v:#x}" for k, v in shown.items())]
        return " ".join(filter(None, words))

    @cached_property
    def counted_as(self) -> tuple[str, str, int, int]:
        """Return what determines its class and cycles: mnemonic, encoding, and a matrix instruction's formats."""
        return self.mnemonic, self.encoding, self.fields.get("cbsz", 0), self.fields.get("blgp", 0)

    @property
    def sources(self) -> list[Operand]:
        """Return the src operands in order."""
        names = (("src0", "vsrc0", "ssrc0"), ("src1", "vsrc1", "ssrc1"), ("src2",))
        return [self.operands[n] for group in names for n in group if n in self.operands]


_known: dict[bytes, Instruction] = {}  # by the instruction's bytes


def _decode(data: bytes, address: int) -> Instruction:
    for size in (4, 8, 16):  # the first dword determines the size, so no key is a prefix of another instruction
        if known := _known.get(data[:size]):
            return replace(known, address=address)
    instruction = _decode_new(data, address)
    if instruction.size < 16 and int.from_bytes(data[2:4], "little") == _SCALE_PREFIX:
        return instruction  # cut off: its key would be a prefix
    return _known.setdefault(instruction.words, instruction)


def _decode_new(data: bytes, address: int) -> Instruction:
    inst = decode_inst(data, "cdna")
    if type(inst).__name__ == "VOP3PX2" and inst._raw >> 16 & 0xFFFF != _SCALE_PREFIX:
        inst = decode_inst(data[:8], "cdna")  # an 8-byte instruction followed by an unscaled f8f6f4 one
    name = type(inst).__name__
    encoding, _, variant = name.partition("_")
    variant = next((v for v in ("DPP16", "SDWA") if v in variant), "")
    mnemonic = re.sub(r"_e(32|64)$", "", inst.op.name.lower())
    formats, bits = inst.operands, inst.op_bits
    fields, operands = {}, {}
    raw = {n: (inst._raw >> f.lo) & f.mask for n, f in inst._fields if not isinstance(f, FixedBitField)}
    for n, f in inst._fields:
        if n in ("op", "encoding") or isinstance(f, FixedBitField):
            continue
        value = getattr(inst, n)
        if not isinstance(value, Reg):
            fields[n] = raw[n]
            continue
        known = n if n in formats else {"vsrc0": "src0", "vdst": "sdst"}.get(n, n)
        if known not in formats and n != "sdst":
            continue
        format = formats[known][0].name.removeprefix("FMT_").removeprefix("NUM_") if known in formats else "M64"
        width = bits.get(known, 64)
        operands[n] = Operand(value.offset, max(1, width // 32), format, width)
    if variant:  # src0 holds the marker 249/250, vsrc0 the register
        operands.pop("src0", None)
        first = operands.pop("vsrc0", None)
        if first is not None:
            code = first.code - VGPR if fields.get("s0") else first.code
            operands["src0"] = Operand(code, first.dwords, first.format, first.bits)
        if fields.get("s1") and "vsrc1" in operands:
            second = operands["vsrc1"]
            operands["vsrc1"] = Operand(second.code - VGPR, second.dwords, second.format, second.bits)
        if "sd" in fields and not fields["sd"]:
            operands.pop("sdst")
    _use_agprs(mnemonic, encoding, name, fields, operands)
    _name_implicit(mnemonic, encoding, fields, operands)
    if mnemonic.startswith(_LITERAL_MNEMONICS):
        operands["src2"] = Operand(LITERAL, 1, operands["vdst"].format, operands["vdst"].bits)
    return Instruction(address, inst.size(), mnemonic, encoding, variant, operands, fields, data[: inst.size()])


def _name_implicit(mnemonic: str, encoding: str, fields: dict, operands: dict) -> None:
    """Add implicit operands, and give scalar destinations of vector instructions their codes."""
    vcc = Operand(VCC, 2, "M64", 64)
    if mnemonic.startswith("v_cmp"):
        operands["sdst"] = operands.pop("vdst", None) or operands.get("sdst", vcc)
    elif encoding == "VOP2" and "_co_" in mnemonic:
        operands.setdefault("sdst", vcc)
    if encoding == "VOP2" and mnemonic.startswith(("v_addc", "v_subb", "v_cndmask")):
        operands["src2"] = vcc
    if mnemonic in ("v_readlane_b32", "v_readfirstlane_b32"):
        scalar = operands.pop("vdst")
        operands["sdst"] = Operand(scalar.code - VGPR if scalar.code >= VGPR else scalar.code, 1, "B32", 32)
    if encoding in ("GLOBAL", "SCRATCH") and operands["saddr"].code == NO_ADDRESS or encoding == "FLAT":
        operands.pop("saddr", None)
    if encoding in ("GLOBAL", "FLAT"):
        operands["addr"] = Operand(operands["addr"].code, 1 if "saddr" in operands else 2, "U64", 64)
    if encoding == "SCRATCH":
        for name in ("addr", "saddr"):
            if name in operands:
                operands[name] = Operand(operands[name].code, 1, "U32", 32)
        if not fields["sve"]:
            operands.pop("addr", None)
    if encoding == "MUBUF":
        if not (fields["offen"] or fields["idxen"]):
            operands.pop("vaddr", None)
        if fields["lds"]:
            operands.pop("vdata", None)
    if encoding == "SMEM" and not fields["soffset_en"] and fields["imm"]:
        operands.pop("soffset", None)


def _use_agprs(mnemonic: str, encoding: str, name: str, fields: dict, operands: dict) -> None:
    """Move the operands named by the instruction's ACC bits into the AGPR range."""
    chosen = []
    if encoding in ("DS", "FLAT", "GLOBAL", "SCRATCH", "MUBUF", "MTBUF") and fields.pop("acc", 0):
        chosen = ["vdst", "data", "data0", "data1", "vdata"]
    elif mnemonic == "v_accvgpr_read":
        chosen = ["src0"]
    elif mnemonic in ("v_accvgpr_write", "v_accvgpr_mov_b32"):
        chosen = ["vdst"] + (["src0"] if mnemonic.endswith("mov_b32") else [])
    elif name in ("VOP3P_MFMA", "VOP3PX2"):
        acc = fields.get("acc", 0)
        chosen = ["src0"] * (acc & 1) + ["src1"] * (acc >> 1)
        if fields.get("acc_cd"):
            chosen += ["vdst", "src2"]
    for n in chosen:
        operand = operands.get(n)
        if operand is not None and VGPR <= operand.code < AGPR:
            operands[n] = Operand(operand.code + VGPR, operand.dwords, operand.format, operand.bits)


def decode(code: bytes, address: int) -> list[Instruction]:
    """Decode all of `code`. Invalid bytes become `undecodable`, which is an error only if executed."""
    instructions, offset = [], 0
    while offset + 4 <= len(code):
        window = bytes(code[offset : offset + 16]).ljust(16, b"\0")
        try:
            instruction = _decode(window, address + offset)
        except (ValueError, KeyError, RuntimeError) as error:
            instruction = Instruction(address + offset, 4, "undecodable", "", "", {}, {"error": str(error)}, window[:4])
        instructions.append(instruction)
        offset += instruction.size
    return _mark_skipped(_mark_indexed(instructions))


def _mark_indexed(instructions: list[Instruction]) -> list[Instruction]:
    """Mark the instructions under VGPR indexing (CDNA3 ISA, S_SET_GPR_IDX_ON), which compilers enable around each."""
    mode, marked = 0, []
    for instruction in instructions:
        if instruction.mnemonic == "s_set_gpr_idx_on":
            operands = dict(instruction.operands)
            mode = operands.pop("ssrc1").code & 15  # the field holds the mode, not an operand
            instruction = replace(instruction, operands=operands, fields={**instruction.fields, "gpr_idx": mode})
        elif instruction.mnemonic == "s_set_gpr_idx_off":
            mode = 0
        elif mode and instruction.encoding.startswith("VOP"):
            instruction = replace(instruction, fields={**instruction.fields, "gpr_idx": mode})
        marked.append(instruction)
    return marked


def skips(instruction: Instruction) -> dict[str, int] | None:
    """Return the SGPR and bit that an S_SETVSKIP tests, {} for its constant 0, or None for other operands."""
    source, bit = (operand.code for operand in instruction.sources)
    if not 128 <= bit < 160 or VCC + 1 < source != 128:
        return None
    return {} if source == 128 else {"vskip": source, "vskip_bit": bit - 128}


def _mark_skipped(instructions: list[Instruction]) -> list[Instruction]:
    """Mark vector and memory instructions after an S_SETVSKIP (CDNA3 ISA) with the bit that skips them, up to the next one."""
    skip, marked = {}, []
    for instruction in instructions:
        if instruction.mnemonic == "s_setvskip":
            skip = skips(instruction) or {}
        elif skip and instruction.encoding.startswith(_SKIPPED):
            instruction = replace(instruction, fields={**instruction.fields, **skip})
        marked.append(instruction)
    return marked
