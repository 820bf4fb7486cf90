"""Test the page for authors of other kernels: its example runs, its error is raised, its table has every error."""

import pathlib
import re
import subprocess
import sys

import pytest
import schedules
import torch
from assembly import build_module
from pages import block_of

import vllm_rocm_ops
from vllm_rocm_ops.emulator import CodeObject, Emulator, EmulatorError

PAGE = (pathlib.Path(vllm_rocm_ops.__file__).parent / "docs" / "emulator.md").read_text()
HIP = """
#define __global__ __attribute__((global))
struct Dimensions { unsigned x; };
#define blockIdx Dimensions{__builtin_amdgcn_workgroup_id_x()}
#define blockDim Dimensions{__builtin_amdgcn_workgroup_size_x()}
#define threadIdx Dimensions{__builtin_amdgcn_workitem_id_x()}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the page's kernel, compiled without HIP's headers."""
    found = tmp_path_factory.mktemp("page")
    (found / "scale.hip").write_text(HIP + block_of(PAGE, "c++"))
    build_module().compile_source(found / "scale.hip", "gfx942", found / "scale.co")
    return found


def run(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_the_example_runs(folder):
    code = block_of(PAGE, "python")
    assert len([line for line in code.splitlines() if line]) <= 10
    result = run(code, folder)
    assert result.returncode == 0, result.stderr
    loaded, accesses, cycles = map(int, result.stdout.split())
    assert loaded == 4000 and accesses == 2 * 16 and cycles > 0
    assert CodeObject(folder / "scale.co").kernels["scale"].statistics["vgprs"] > 0


def test_the_pages_example_raises_the_error_it_shows(folder):
    """Only the registers and the offset, which a compiler chooses, may differ."""
    code = block_of(PAGE, "python")
    assert code.count("2.0, 1000)") == 1
    said = run(code.replace("2.0, 1000)", "2.0, 1001)"), folder).stderr.strip().splitlines()[-1]
    assert said.startswith("vllm_rocm_ops.emulator.errors.OutOfBounds: scale+0x"), said
    shown = re.compile(r"\+0x\w+ `(\w+) [^`]*`")
    assert shown.sub(r" `\1`", said.partition(": ")[2]) == shown.sub(r" `\1`", block_of(PAGE, "text").strip())


def test_the_table_names_every_error():
    known = {error.__name__ for error in EmulatorError.__subclasses__()}
    assert {
        name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    } == known


@pytest.mark.parametrize("seed", [1, 2])
def test_other_options_of_the_page(folder, seed):
    x, y = torch.randn(64), torch.empty(64)
    launch = vllm_rocm_ops.core.launch.Launch("", "scale", (1, 1, 1), (64, 1, 1), (x, y, 0.5, 64))
    Emulator("gfx942:80", seed=seed, preloads_arguments=False).run(folder / "scale.co", launch, (y,))
    assert torch.equal(y, x / 2)


def test_an_offload_bundle_is_named(tmp_path):
    (tmp_path / "bundle.co").write_bytes(b"__CLANG_OFFLOAD_BUNDLE__" + bytes(100))
    wanted = "must be an AMDGPU ELF file, got an offload bundle: compile with --no-gpu-bundle-output"
    with pytest.raises(ValueError, match=wanted):
        CodeObject(tmp_path / "bundle.co")


def test_the_tables_of_schedules_are_those_of_what_ran():
    """All schedules are as expected, or find a planted bug at least once, except residency with 2 ranks."""
    page = schedules.PAGE.read_text()
    assert schedules.with_tables(page) == page, "run: python tests/emulator/schedules.py page FILE"
    seen = schedules.read(schedules.SUMS)
    assert seen.keys() == schedules.cells().keys()
    for (bug, _, ranks, _), [line] in seen.items():
        if not bug:
            assert line["expected"] == line["schedules"]
        elif bug != "residency" or ranks > 2:
            assert line["expected"] > 0, bug
