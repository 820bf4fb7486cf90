"""Follow the page's "Add an op" in a copy of the sources: its files and commands make an op that the emulator checks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import full
from pages import block_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "vllm_rocm_ops" / "docs" / "development.md"
SECTION = re.search(r"^## Add an op\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Return a function that writes the page's files and runs its commands, with one text of the kernel replaced."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(ROOT / "csrc", root / "csrc")
    shutil.copytree(
        ROOT / "vllm_rocm_ops", root / "vllm_rocm_ops", ignore=shutil.ignore_patterns("code", "__pycache__")
    )
    programs = root / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("vllm-rocm-ops", "-m vllm_rocm_ops ")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    ops = (root / "vllm_rocm_ops/ops/__init__.py").read_text()
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(root),
        "VLLM_ROCM_OPS_ARCHS": "gfx942,gfx950",
    }

    def run(text: str, replacement: str) -> subprocess.CompletedProcess:
        kernel = block_of(SECTION, "c++")
        assert kernel.count(text) == 1
        (root / "csrc/ops/scaled_add.hip").write_text(kernel.replace(text, replacement))
        (root / "vllm_rocm_ops/ops/scaled_add.py").write_text(block_of(SECTION, "python"))
        (root / "vllm_rocm_ops/ops/__init__.py").write_text(ops)
        command = ["bash", "-e", "-c", block_of(SECTION, "bash")]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)

    return run


def test_the_documented_sample_passes_its_cases(commands):
    result = commands("factor * load", "factor * load")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 cases on gfx942: all passed" in result.stdout
    assert "scaled_add_bf16 grid (8, 1, 1) block (256, 1, 1)" in result.stdout


@pytest.mark.parametrize(
    "text, replacement",
    [
        pytest.param("factor * load", "load", marks=full),
        pytest.param("row * y_stride", "row * x_stride", marks=full),
        pytest.param("i < columns", "i < columns - 1", marks=full),
    ],
)
def test_its_cases_catch_a_mistake(commands, text, replacement):
    result = commands(text, replacement)
    assert result.returncode != 0 and re.search("cases on gfx942: [1-9] failed", result.stdout)


def test_there_are_eight_steps():
    assert re.findall(r"^(\d)\. ", SECTION, re.MULTILINE) == [*"12345678"]


@pytest.mark.parametrize(
    ("file", "tables"), [("tests/ops/formulas.py", {"FORMULAS"}), ("tests/core/test_rules.py", {"BREACHES", "FOLLOW"})]
)
def test_the_tables_that_an_op_may_need_are_named(file, tables):
    """Each exists, and the page names it with its file."""
    assert tables <= set(re.findall(r"^([A-Z]+)(?:: .*)? = [{[]", (ROOT / file).read_text(), re.MULTILINE))
    assert f"`{file}`" in SECTION and all(f"`{name}`" in SECTION for name in tables)
