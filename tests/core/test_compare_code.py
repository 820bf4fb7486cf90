"""Test csrc/compare_code.py: it sees a changed byte, field or instruction, and ignores names and placement."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import full

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator.objects import CodeObject

pytestmark = full  # NVIDIA's code is compared, too
ROOT = Path(__file__).resolve().parents[2]
STEM, KERNEL, OTHER = "silu_and_mul", "silu_and_mul_per_token_quant_bf16_x1", "silu_and_mul_bf16_x1"


@pytest.fixture
def folders(tmp_path):
    """Return two folders with the same three code objects."""
    for side in ("before", "after"):
        for arch in ("gfx942", "gfx950", "sm_90"):
            (tmp_path / side / arch).mkdir(parents=True)
            shutil.copy(launch.code_object(STEM, arch), tmp_path / side / arch)
    return tmp_path / "before", tmp_path / "after"


def run(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, "-S", ROOT / "csrc/compare_code.py", *arguments]  # a build tool needs no packages
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not result.stderr, result.stderr
    return result.returncode, result.stdout


def change_byte(path: Path, kernel: str, symbol_offset: int) -> None:
    """Flip a bit of a symbol of an ELF file."""
    code, elf = CodeObject(path), bytearray(path.read_bytes())
    address, size = code.symbols[kernel]
    data = code.image[address : address + size]
    assert elf.count(data) == 1
    elf[elf.index(data) + symbol_offset] ^= 1
    path.write_bytes(elf)


def change_ptx(path: Path, kernel: str, *change: str) -> None:
    """Replace one occurrence of a pattern in a kernel's instructions, by `change`, a pattern and its replacement."""
    ptx = path.read_text()
    start = ptx.index("{", ptx.index(f".entry {kernel}("))
    end = ptx.index("\n}", start)
    body, count = re.subn(*change, ptx[start:end], count=1)
    assert count == 1
    path.write_text(ptx[:start] + body + ptx[end:])


def test_the_same_code_has_no_differences(folders):
    status, output = run(*folders)
    assert status == 0 and re.fullmatch(r"\d{2,} kernels of gfx942, gfx950, sm_90 compared, 0 differences\n", output)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_one_byte_of_text(folders, arch):
    change_byte(folders[1] / arch / f"{STEM}.co", KERNEL, 100)
    status, output = run(*folders)
    assert status == 1 and f"{arch}/{STEM}.co {KERNEL}: text: " in output and "first at byte 0x64" in output
    assert output.endswith(" 1 differences\n")


@pytest.mark.parametrize(("field", "offset"), [("group_segment_fixed_size", 0), ("kernarg_size", 8), ("rsrc1", 48)])
def test_one_field_of_a_descriptor(folders, field, offset):
    change_byte(folders[1] / "gfx942" / f"{STEM}.co", f"{KERNEL}.kd", offset)
    status, output = run(*folders)
    assert status == 1 and re.search(rf"{KERNEL}: descriptor: \w*{field} \d+ -> \d+\n", output)
    assert output.endswith(" 1 differences\n")


@pytest.mark.parametrize(
    "change",
    [
        (r"\n\tadd\.s32 ", "\n\tsub.s32 "),
        (r"(\n\tmad\.lo\.s32 \t%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),  # operands swapped
        (r"\n\tbar\.sync \t0;", ""),
        (r"_param_6\]", "_param_5]"),
        (r"%tid\.x", "%ctaid.x"),
    ],
    ids=["instruction", "registers", "barrier", "parameter", "special register"],
)
def test_one_instruction_of_ptx(folders, change):
    change_ptx(folders[1] / "sm_90" / f"{STEM}.ptx", KERNEL, *change)
    status, output = run(*folders)
    assert status == 1 and f"sm_90/{STEM}.ptx {KERNEL}: instructions: " in output
    assert output.endswith(" 1 differences\n")


def test_the_size_of_shared_memory_of_ptx(folders):
    path = folders[1] / "sm_90" / f"{STEM}.ptx"
    path.write_text(path.read_text().replace("maxima[128]", "maxima[256]", 1))
    status, output = run(*folders, "--archs", "sm_90")
    assert status == 1 and f"{KERNEL}: instructions: " in output


def test_a_missing_kernel_and_a_missing_file(folders):
    path = folders[1] / "sm_90" / f"{STEM}.ptx"
    ptx = path.read_text()
    path.write_text(re.sub(rf"^\.visible \.entry {KERNEL}\(.*?^\}}", "", ptx, flags=re.MULTILINE | re.DOTALL))
    (folders[1] / "gfx950" / f"{STEM}.co").unlink()
    status, output = run(*folders)
    assert status == 1 and f"sm_90/{STEM}.ptx {KERNEL}: only in {folders[0]}\n" in output
    assert f"gfx950/{STEM}.co {KERNEL}: only in {folders[0]}\n" in output


def test_nothing_to_compare_is_a_failure(tmp_path):
    (tmp_path / "gfx942").mkdir()
    assert run(tmp_path, tmp_path)[0] == 1


def test_names_and_places_in_a_file_do_not_matter(folders):
    path = folders[1] / "sm_90" / f"{STEM}.ptx"
    ptx = re.sub(r"%(r|rd|f)(\d+)\b", lambda found: f"%{found[1]}{int(found[2]) + 1000}", path.read_text())
    ptx = ptx.replace("$L__BB", "$Label").replace("6maxima", "8maxima_2")
    entries = re.findall(r"^\.visible \.entry \w+\(.*?^\}", ptx, re.MULTILINE | re.DOTALL)
    path.write_text(ptx.partition(".visible")[0] + "\n".join(reversed(entries)))
    assert path.read_text() != (folders[0] / "sm_90" / f"{STEM}.ptx").read_text()
    status, output = run(*folders)
    assert status == 0, output


def test_a_renamed_kernel_needs_the_map(folders):
    path = folders[1] / "sm_90" / f"{STEM}.ptx"
    path.write_text(re.sub(rf"\b{OTHER}", "swiglu", path.read_text()))
    elf = folders[1] / "gfx942" / f"{STEM}.co"
    elf.write_bytes(elf.read_bytes().replace(OTHER.encode(), b"swiglu_and_mul_bf_x1"))
    assert run(*folders, "--archs", "sm_90")[0] == 1 == run(*folders, "--archs", "gfx942")[0]
    assert run(*folders, "--archs", "sm_90", "--map", f"{OTHER}=swiglu")[0] == 0
    assert run(*folders, "--archs", "gfx942", "--map", f"{OTHER}=swiglu_and_mul_bf_x1")[0] == 0
