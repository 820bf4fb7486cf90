"""Compare the machine code of two folders of code objects, kernel by kernel.

    python csrc/compare_code.py BEFORE AFTER [--archs gfx942,sm_90] [--map old=new ...]

A folder holds <arch>/<stem>.co or .ptx, like vllm_rocm_ops/code. Differences are printed; the exit status is 1 if there are any.
On AMD a kernel is its function's bytes, its kernel descriptor and its file's constants. On NVIDIA it is its PTX, with registers,
labels, parameters and variables numbered in order of appearance. The order of kernels in a file is ignored. Their names are
compared, unless --map renames a kernel.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

# (offset, struct format, name) of each field (LLVM AMDGPU usage, "Kernel Descriptor").
DESCRIPTOR = (
    (0, "I", "group_segment_fixed_size"),
    (4, "I", "private_segment_fixed_size"),
    (8, "I", "kernarg_size"),
    (12, "I", "reserved0"),
    (24, "20s", "reserved1"),
    (44, "I", "compute_pgm_rsrc3"),
    (48, "I", "compute_pgm_rsrc1"),
    (52, "I", "compute_pgm_rsrc2"),
    (56, "H", "kernel_code_properties"),
    (58, "H", "kernarg_preload"),
    (60, "I", "reserved3"),
)
ENTRY_OFFSET = slice(16, 24)  # from descriptor to function: depends on the link

Kernel = dict[str, bytes | tuple[str, ...]]  # by part name


@functools.cache
def objects() -> ModuleType:
    """Import vllm_rocm_ops/emulator/objects.py, the code object reader, without its parent packages: they need torch."""
    package = sys.modules["emulator"] = ModuleType("emulator")
    package.__path__ = [str(Path(__file__).parents[1] / "vllm_rocm_ops" / "emulator")]
    return importlib.import_module("emulator.objects")


def amd_kernels(path: Path) -> dict[str, Kernel]:
    """Return the code, descriptor and constants of each kernel in an AMD code object."""
    elf = objects().CodeObject(path)
    data = {name: bytes(elf.image[first : first + size]) for name, (first, size) in elf.symbols.items() if size}
    descriptors = {name: f"{name}.kd" for name in elf.kernels}
    others = sorted(data[name] for name in data.keys() - {*descriptors, *descriptors.values()})
    kernels = {}
    for name, descriptor in descriptors.items():
        without_entry = bytearray(data[descriptor])
        without_entry[ENTRY_OFFSET] = bytes(8)
        kernels[name] = {"text": data[name], "descriptor": bytes(without_entry), "constants": b"".join(others)}
    return kernels


def nvidia_kernels(ptx: str) -> dict[str, Kernel]:
    """Return the instructions of each kernel in a PTX file, without names."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    if re.search(r"^\.(?:visible |weak )?\.?func\b", ptx, re.MULTILINE):
        raise ValueError("functions must be inlined: one that is not belongs to no kernel and would not be compared")
    variables = {}  # declared outside kernels: name -> declaration without the name
    for declaration in re.findall(r"^\.[^;{}()\n]*?\.(?:shared|global|const)\b[^;]*;", ptx, re.MULTILINE):
        name = re.search(r"(\w+)(?:\[\d*\])?\s*[;=]", declaration)[1]
        variables[name] = " ".join(declaration.replace(name, "").split())
    header = tuple(re.findall(r"^\.(?:version|target|address_size) .*", ptx, re.MULTILINE))
    return {
        match[1]: {"instructions": header + normalized(match[0], match[1], variables)}
        for match in re.finditer(r"^\.visible \.entry (\w+)\(.*?^\}", ptx, re.MULTILINE | re.DOTALL)
    }


def normalized(text: str, kernel: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a kernel's lines, with its local names numbered in order of appearance."""
    numbers: dict[str, dict[str, int]] = {}

    def numbered(kind: str, name: str) -> str:
        known = numbers.setdefault(kind, {})
        return f"{kind}{known.setdefault(name, len(known))}"

    def replaced(match: re.Match) -> str:
        name = match[0]
        if register := re.fullmatch(r"(%[a-z]+)\d+", name):
            return numbered(register[1], name)
        if name.startswith("$"):
            return numbered("$label", name)
        if name in variables:
            return f"{numbered('variable', name)}{{{variables[name]}}}"
        if name == kernel:
            return "kernel"
        return re.sub(rf"^{kernel}(?=_param_\d+$)", "kernel", name)

    lines = (" ".join(line.split()) for line in text.splitlines())
    return tuple(re.sub(r"[%$]?[A-Za-z_]\w*", replaced, line) for line in lines if line)


def kernels(folder: Path) -> dict[str, dict[str, Kernel]]:
    """Return the kernels of each file in one architecture's folder."""
    found = {path.name: amd_kernels(path) for path in sorted(folder.glob("*.co"))}
    return found | {path.name: nvidia_kernels(path.read_text()) for path in sorted(folder.glob("*.ptx"))}


def difference(part: str, before: bytes | tuple[str, ...], after: bytes | tuple[str, ...]) -> str:
    """Describe the first difference between two parts with the same name."""
    if part == "descriptor":
        changed = []
        for offset, kind, name in DESCRIPTOR:
            old, new = (struct.unpack_from(f"<{kind}", data, offset)[0] for data in (before, after))
            changed += [f"{name} {old} -> {new}"] if old != new else []
        return ", ".join(changed) or f"{len(before)} -> {len(after)} bytes"
    place = next((i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), None)
    if place is None:
        return f"length {len(before)} -> {len(after)}"
    if isinstance(before, bytes):
        return f"length {len(before)} -> {len(after)}, first at byte {place:#x}"
    return f"line {place}: {before[place]} -> {after[place]}"


def compare(before: Path, after: Path, archs: list[str], names: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return the number of common kernels, and a line per difference."""
    count, lines = 0, []
    for arch in archs:
        old_files, new_files = kernels(before / arch), kernels(after / arch)
        for file in sorted({*old_files, *new_files}):
            old = {names.get(name, name): kernel for name, kernel in old_files.get(file, {}).items()}
            new = new_files.get(file, {})
            for name in sorted({*old, *new}):
                place = f"{arch}/{file} {name}"
                if name not in old or name not in new:
                    lines.append(f"{place}: only in {after if name in new else before}")
                    continue
                count += 1
                parts = sorted({*old[name], *new[name]})
                changed = [part for part in parts if old[name].get(part) != new[name].get(part)]
                lines += [f"{place}: {part}: {difference(part, old[name][part], new[name][part])}" for part in changed]
    return count, lines


def main() -> None:
    """Compare two folders of code objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--archs", type=lambda text: text.split(","), help="comma list; default: all in BEFORE")
    parser.add_argument("--map", nargs="*", default=[], metavar="OLD=NEW", help="renamed kernels")
    arguments = parser.parse_args()
    archs = arguments.archs or sorted(path.name for path in arguments.before.glob("*") if path.is_dir())
    names = dict(pair.split("=") for pair in arguments.map)
    count, lines = compare(arguments.before, arguments.after, archs, names)
    print(*lines, f"{count} kernels of {', '.join(archs)} compared, {len(lines)} differences", sep="\n")
    sys.exit(1 if lines or not count else 0)


if __name__ == "__main__":
    main()
