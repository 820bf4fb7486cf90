"""Find source lines of instructions in a code object's DWARF line table, version 5.

Source: DWARF 5, section 6.2 "Line Number Information".
"""

from __future__ import annotations

import bisect
import struct

_STRP, _LINE_STRP, _UDATA, _STRING, _DATA16 = 0x0E, 0x1F, 0x0F, 0x08, 0x1E


class _Reader:
    def __init__(self, data: bytes, offset: int):
        self.data, self.offset = data, offset

    def take(self, format: str) -> int:
        (value,) = struct.unpack_from("<" + format, self.data, self.offset)
        self.offset += struct.calcsize(format)
        return value

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def signed(self) -> int:
        start = self.offset
        value = self.unsigned()
        bits = 7 * (self.offset - start)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.offset)
        string = self.data[self.offset : end].decode()
        self.offset = end + 1
        return string


class Lines:
    """Map addresses to files and lines; empty without debug information. `sections` are the bytes of sections by name."""

    def __init__(self, sections: dict[str, bytes]):
        self._sections = sections
        self._rows: list[tuple[int, str]] = []
        reader = _Reader(sections.get(".debug_line", b""), 0)
        while reader.offset < len(reader.data):
            self._unit(reader)
        self._rows.sort(key=lambda row: row[0])
        self._addresses = [address for address, _ in self._rows]

    def source_of(self, address: int) -> str:
        """Return the source line of an instruction as "file:line", or ""."""
        row = bisect.bisect_right(self._addresses, address) - 1
        return self._rows[row][1] if row >= 0 else ""

    def _table(self, reader: _Reader) -> list[str]:
        """Return the first string of each entry in a directory or file table."""
        formats = [(reader.unsigned(), reader.unsigned()) for _ in range(reader.take("B"))]
        names = []
        for _ in range(reader.unsigned()):
            name = ""
            for content, form in formats:
                if form in (_STRP, _LINE_STRP):
                    strings = self._sections[".debug_str" if form == _STRP else ".debug_line_str"]
                    value = _Reader(strings, reader.take("I")).text()
                elif form == _STRING:
                    value = reader.text()
                elif form == _UDATA:
                    value = reader.unsigned()
                elif form == _DATA16:
                    value = reader.take("16s")
                else:
                    value = reader.take({0x0B: "B", 0x05: "H", 0x06: "I"}[form])
                name = value if content == 1 else name
            names.append(name)
        return names

    def _unit(self, reader: _Reader) -> None:
        length = reader.take("I")
        end = reader.offset + length
        if reader.take("H") != 5:
            reader.offset = end
            return
        reader.offset += 2  # sizes of addresses and segments
        header = reader.take("I")
        program = reader.offset + header
        step, _, _, line_base, line_range, opcode_base = (reader.take(format) for format in "BBBbBB")
        lengths = [reader.take("B") for _ in range(opcode_base - 1)]
        self._table(reader)
        files = [name.rpartition("/")[2] for name in self._table(reader)]
        reader.offset = program
        address, file, line = 0, 1, 1

        def row():
            self._rows.append((address, f"{files[file]}:{line}" if line else ""))

        while reader.offset < end:
            opcode = reader.take("B")
            if opcode >= opcode_base:
                advance, steps = divmod(opcode - opcode_base, line_range)
                address, line = address + advance * step, line + line_base + steps
                row()
            elif opcode == 0:
                size = reader.unsigned()
                following = reader.offset + size
                kind = reader.take("B")
                if kind == 1:
                    self._rows.append((address, ""))
                    address, file, line = 0, 1, 1
                elif kind == 2:
                    address = reader.take("Q")
                reader.offset = following
            elif opcode == 1:
                row()
            elif opcode == 2:
                address += reader.unsigned() * step
            elif opcode == 3:
                line += reader.signed()
            elif opcode == 4:
                file = reader.unsigned()
            elif opcode == 8:
                address += (255 - opcode_base) // line_range * step
            elif opcode == 9:
                address += reader.take("H")
            else:
                for _ in range(lengths[opcode - 1]):
                    reader.unsigned()
