"""Read the arguments of kernels from the debug information in LLVM IR, for csrc/build.py."""

from __future__ import annotations

import re

LETTERS = {"signed": "i", "unsigned": "u", "float": "f"}  # by DWARF encoding
NAMED = ("typedef", "const_type", "volatile_type", "restrict_type", "enumeration_type")  # that alias another type
Numbers = list[tuple[str, int, str]]  # (name, offset, type)


class DebugInfo:
    """Kernels in LLVM IR, with parameters and types from its debug information."""

    def __init__(self, ir: str):
        kernel = r"^define [^@]*\b(?:amdgpu|ptx)_kernel\b[^@]*@(\w+)\(.*!dbg (!\d+)"
        self.kernels = dict(re.findall(kernel, ir, re.MULTILINE))  # name: debug node
        self.nodes = dict(re.findall(r"^(!\d+) = (?:distinct )?!(.*)$", ir, re.MULTILINE))
        variables = [self.fields(node) for node, text in self.nodes.items() if text.startswith("DILocalVariable(")]
        self.parameters = sorted((v for v in variables if "arg" in v), key=lambda v: int(v["arg"]))

    def fields(self, node: str) -> dict[str, str]:
        return {name: value.strip('"') for name, value in re.findall(r'(\w+): ("[^"]*"|[^,()]+)', self.nodes[node])}

    def numbers(self, name: str, node: str) -> tuple[int, int, Numbers]:
        """Return a type's size and alignment in bytes, and its numbers and pointers, recursively for a structure."""
        found = self.fields(node)
        kind, size = found.get("tag", "DW_TAG_base_type").removeprefix("DW_TAG_"), int(found.get("size", 0)) // 8
        if kind in NAMED:
            return self.numbers(name, found["baseType"])
        if kind == "pointer_type":
            return size, size, [(name, 0, "pointer")]
        if kind == "base_type" and (letter := LETTERS.get(found["encoding"].split("_")[2])):
            return size, size, [(name, 0, f"{letter}{8 * size}")]
        if kind != "structure_type":
            raise ValueError(
                f"{name} must be a number, a pointer or a structure of such, got {found.get('name', kind)}"
            )
        alignment, inside = int(found.get("align", 8)) // 8, []
        for member in map(self.fields, re.findall(r"!\d+", self.nodes[found["elements"]])):
            is_static = "DIFlagStaticMember" in member.get("flags", "")
            if member.get("tag") in ("DW_TAG_member", "DW_TAG_inheritance") and not is_static:
                its_name = f"{name}.{member['name']}" if "name" in member else name
                _, least, numbers = self.numbers(its_name, member["baseType"])
                alignment, start = max(alignment, least), int(member.get("offset", 0)) // 8
                inside += [(each, start + offset, its_type) for each, offset, its_type in numbers]
        return size, alignment, inside

    def arguments(self, kernel: str) -> dict:
        """Return a kernel's argument bytes, and offset and type by name: "parameter" or "parameter.field"."""
        end, found = 0, {}
        for parameter in self.parameters:
            if parameter["scope"] == self.kernels[kernel]:
                size, alignment, numbers = self.numbers(parameter.get("name", parameter["arg"]), parameter["type"])
                start = -(-end // alignment) * alignment
                found |= {name: [start + offset, its_type] for name, offset, its_type in numbers}
                end = start + size
        return {"bytes": end, "arguments": found}
