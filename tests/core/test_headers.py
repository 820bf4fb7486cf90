"""Test that every header of csrc/attention, csrc/device, csrc/gemm and csrc/ops compiles alone.

It does for its vendor, or for AMD and, with --full as all of sm_90, for NVIDIA.
"""

import subprocess
from pathlib import Path

import pytest
from load_build import load_build
from marks import full

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ("-c", "-S", "-emit-llvm")
VENDORS = {"gfx942": "amd", "sm_90": "nvidia"}
CASES = [
    pytest.param(arch, header, id=f"{arch}-{header}", marks=() if vendor == "amd" or vendor in path.parts else full)
    for arch, vendor in VENDORS.items()
    for folder in ("attention", "device", "gemm", "ops")
    for path in sorted((ROOT / "csrc" / folder).rglob("*.h"))
    if not ({*VENDORS.values()} - {vendor}) & {*(header := path.relative_to(ROOT / "csrc")).parts}
]


@pytest.mark.parametrize(("arch", "header"), CASES)
def test_a_header_compiles_alone(arch, header, tmp_path):
    build = load_build(ROOT / "csrc")
    source = tmp_path / "alone.hip"
    source.write_text(f'#include "{header}"\n')
    compiler = build.find_compiler(arch)
    flags = [flag for flag in build.flags(arch, debug=False).compile if flag not in OUTPUTS]
    command = [*compiler.clang, *flags, "-Werror", "-fsyntax-only", source]
    result = subprocess.run(command, cwd=build.CSRC, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
