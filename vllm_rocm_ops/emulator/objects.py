"""Read a linked AMDGPU code object: ELF symbols, the kernel descriptors and the metadata note.

Sources: LLVM's AMDGPUUsage, "ELF Code Object", "Code Object V5 Metadata", "Kernel Descriptor" (compute_pgm_rsrc1-3 for
GFX90A-GFX950) and "Preloaded Kernel Arguments".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .lines import Lines

_R_AMDGPU_ABS64, _R_AMDGPU_RELATIVE64 = 3, 13
_NT_AMDGPU_METADATA = 32
_SHT_SYMTAB, _SHT_RELA, _SHT_NOTE, _SHT_DYNSYM = 2, 4, 7, 11
PRELOAD_PROLOGUE = 256  # bytes
_ARCHS = {0x4C: "gfx942", 0x4F: "gfx950", 0x3F: "gfx90a"}


def msgpack(data: bytes, offset: int = 0):
    """Decode the MessagePack value at `at`, and return it with the offset after it. Metadata uses no ext types."""
    tag = data[offset]
    offset += 1

    def number(format: str):
        return struct.unpack_from(">" + format, data, offset)[0], offset + struct.calcsize(format)

    def items(count: int, offset: int):
        values = []
        for _ in range(count):
            value, offset = msgpack(data, offset)
            values.append(value)
        return values, offset

    def mapping(count: int, offset: int):
        values, offset = items(2 * count, offset)
        return dict(zip(values[::2], values[1::2], strict=True)), offset

    if tag < 0x80:
        return tag, offset
    if tag < 0x90:
        return mapping(tag & 15, offset)
    if tag < 0xA0:
        return items(tag & 15, offset)
    if tag < 0xC0:
        return data[offset : offset + (tag & 31)].decode(), offset + (tag & 31)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], offset
    if tag in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):
        size, offset = number("BHI"[tag - 0xC4 if tag < 0xD9 else tag - 0xD9])
        raw = data[offset : offset + size]
        return (raw if tag < 0xD9 else raw.decode()), offset + size
    if tag in (0xCA, 0xCB):
        return number("fd"[tag - 0xCA])
    if 0xCC <= tag <= 0xD3:
        return number("BHIQbhiq"[tag - 0xCC])
    if tag in (0xDC, 0xDD):
        return items(*number("HI"[tag - 0xDC]))
    if tag in (0xDE, 0xDF):
        return mapping(*number("HI"[tag - 0xDE]))
    if tag >= 0xE0:
        return tag - 256, offset
    raise ValueError(f"MessagePack tag must be a metadata type, got {tag:#x}")


@dataclass(frozen=True)
class KernelObject:
    """A kernel of a code object: the descriptor's fields and the metadata's statistics."""

    name: str
    entry: int  # address of the first instruction
    size: int  # bytes of code
    lds: int  # static LDS bytes
    scratch: int  # bytes per lane
    kernarg_size: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    kernarg_preload: int  # argument words that firmware preloads into SGPRs
    kernarg_preload_offset: int  # of the first preloaded word
    metadata: dict

    @property
    def preloaded_entry(self) -> int:
        """Return the entry point of firmware that preloads arguments: after 256 bytes that otherwise load them."""
        return self.entry + (PRELOAD_PROLOGUE if self.kernarg_preload else 0)

    @property
    def user_sgprs(self) -> int:
        """Return the SGPRs that a wave starts with, preloaded arguments included."""
        return self.rsrc2 >> 1 & 0x1F

    @property
    def vgprs(self) -> int:
        """Return the number of architectural VGPRs of a wave."""
        return 4 * ((self.rsrc3 & 0x3F) + 1)

    @property
    def registers(self) -> int:
        """Return the VGPRs and AGPRs of a wave in the unified register file."""
        return 8 * ((self.rsrc1 & 0x3F) + 1)

    @property
    def agprs(self) -> int:
        """Return the number of AGPRs of a wave."""
        return max(0, self.registers - self.vgprs)

    @property
    def waves_per_simd(self) -> int:
        """Return the waves that fit a SIMD's registers: 512 per lane, at most 8 waves (CDNA3 white paper)."""
        return min(8, 512 // self.registers)

    @property
    def float_mode(self) -> int:
        """Return MODE's low byte: round modes in bits 0-3, denormal modes of f32 and of f64/f16 in bits 4-7."""
        return (self.rsrc1 >> 12) & 0xFF

    @property
    def max_block(self) -> int:
        """Return the maximum number of threads in a block."""
        return self.metadata[".max_flat_workgroup_size"]

    @property
    def statistics(self) -> dict[str, int]:
        """Return the compiler's statistics: registers, spills, memory."""
        names = {
            "vgprs": ".vgpr_count",
            "agprs": ".agpr_count",
            "sgprs": ".sgpr_count",
            "vgpr_spills": ".vgpr_spill_count",
            "sgpr_spills": ".sgpr_spill_count",
            "lds": ".group_segment_fixed_size",
            "scratch": ".private_segment_fixed_size",
            "kernarg": ".kernarg_segment_size",
            "max_block": ".max_flat_workgroup_size",
        }
        return {name: self.metadata.get(key, 0) for name, key in names.items()}


class CodeObject:
    """Load a code object: `image` is its memory from address 0, `kernels` its kernels by name."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        data = self.path.read_bytes()
        if data[:4] != b"\x7fELF" or struct.unpack_from("<H", data, 18)[0] != 224:
            bundle = ", got an offload bundle: compile with --no-gpu-bundle-output" if data[:8] == b"__CLANG_" else ""
            raise ValueError(f"{path} must be an AMDGPU ELF file{bundle}")
        flags = struct.unpack_from("<I", data, 48)[0]
        if (flags & 0xFF) not in _ARCHS:
            raise ValueError(f"{path} must be compiled for one of {sorted(_ARCHS.values())}, got e_flags {flags:#x}")
        self.arch = _ARCHS[flags & 0xFF]
        self._data = data
        (phoff,) = struct.unpack_from("<Q", data, 32)
        (phnum,) = struct.unpack_from("<H", data, 56)
        loads = [struct.unpack_from("<IIQQQQQQ", data, phoff + 56 * i) for i in range(phnum)]
        loads = [
            (vaddr, data[offset : offset + filesz], memsz)
            for t, _, offset, vaddr, _, filesz, memsz, _ in loads
            if t == 1
        ]
        self.image = bytearray(max(vaddr + memsz for vaddr, _, memsz in loads))
        for vaddr, content, _ in loads:
            self.image[vaddr : vaddr + len(content)] = content

    @cached_property
    def _sections(self) -> list[dict]:
        data = self._data
        (shoff,) = struct.unpack_from("<Q", data, 40)
        shnum, shstrndx = struct.unpack_from("<HH", data, 60)
        keys = ("name", "type", "flags", "address", "offset", "size", "link", "info", "align", "entsize")
        sections = [
            dict(zip(keys, struct.unpack_from("<IIQQQQIIQQ", data, shoff + 64 * i), strict=True)) for i in range(shnum)
        ]
        strings = sections[shstrndx]["offset"]
        for section in sections:
            start = strings + section["name"]
            section["name"] = data[start : data.index(b"\0", start)].decode()
        return sections

    @cached_property
    def lines(self) -> Lines:
        """Return the source lines of instructions, if there is debug information."""
        return Lines(
            {s["name"]: self._data[s["offset"] :][: s["size"]] for s in self._sections if "debug" in s["name"]}
        )

    @cached_property
    def symbols(self) -> dict[str, tuple[int, int]]:
        """Return name -> (address, size) of every defined symbol."""
        symbols = {}
        for section in self._sections:
            if section["type"] not in (_SHT_SYMTAB, _SHT_DYNSYM):
                continue
            strings = self._sections[section["link"]]["offset"]
            for entry in range(section["offset"], section["offset"] + section["size"], 24):
                name, _, _, index, value, size = struct.unpack_from("<IBBHQQ", self._data, entry)
                if index:
                    start = strings + name
                    symbols[self._data[start : self._data.index(b"\0", start)].decode()] = (value, size)
        return symbols

    @cached_property
    def metadata(self) -> dict:
        """Return the amdhsa metadata map."""
        for section in self._sections:
            note, end = section["offset"], section["offset"] + section["size"]
            while section["type"] == _SHT_NOTE and note < end:
                name_size, size, kind = struct.unpack_from("<III", self._data, note)
                content = note + 12 + (name_size + 3 & ~3)
                if kind == _NT_AMDGPU_METADATA:
                    return msgpack(self._data[content : content + size])[0]
                note = content + (size + 3 & ~3)
        raise ValueError(f"{self.path} must hold an NT_AMDGPU_METADATA note")

    @cached_property
    def kernels(self) -> dict[str, KernelObject]:
        """Return the kernels by name."""
        return {kernel[".name"]: self._kernel(kernel) for kernel in self.metadata["amdhsa.kernels"]}

    def _kernel(self, metadata: dict) -> KernelObject:
        name = metadata[".name"]
        address, _ = self.symbols[metadata[".symbol"]]
        lds, scratch, kernarg, _, offset = struct.unpack_from("<IIIIq", self.image, address)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", self.image, address + 44)
        entry = address + offset
        size = self.symbols.get(name, (entry, 0))[1] or self._code_end(entry) - entry
        kernarg = kernarg or metadata.get(".kernarg_segment_size", 0)
        rsrc = rsrc1, rsrc2, rsrc3
        return KernelObject(
            name, entry, size, lds, scratch, kernarg, *rsrc, properties, preload & 0x7F, preload >> 7, metadata
        )

    def _code_end(self, entry: int) -> int:
        """Return an upper bound for the end of the code at `entry`, for assemblers that omit a kernel's size."""
        spans = ((section["address"], section["address"] + section["size"]) for section in self._sections)
        kernels = (self.symbols.get(kernel[".name"], (0, 0))[0] for kernel in self.metadata["amdhsa.kernels"])
        return min(
            [end for start, end in spans if start <= entry < end] + [address for address in kernels if address > entry]
        )

    def relocated(self, base: int) -> bytearray:
        """Return the image relocated to `base`."""
        image = bytearray(self.image)
        for section in self._sections:
            if section["type"] == _SHT_RELA:
                dynamic = list(self._symbol_values(self._sections[section["link"]]))
                for entry in range(section["offset"], section["offset"] + section["size"], 24):
                    offset, info, addend = struct.unpack_from("<QQq", self._data, entry)
                    kind, symbol = info & 0xFFFFFFFF, info >> 32
                    if kind == _R_AMDGPU_RELATIVE64:
                        struct.pack_into("<Q", image, offset, base + addend)
                    elif kind == _R_AMDGPU_ABS64:
                        struct.pack_into("<Q", image, offset, base + dynamic[symbol] + addend)
        return image

    def _symbol_values(self, section: dict):
        for entry in range(section["offset"], section["offset"] + section["size"], 24):
            yield struct.unpack_from("<Q", self._data, entry + 8)[0]
