"""The wheels to release: the compiler and the glibc that they are built for, and what is refused."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from distutils.core import run_setup  # setuptools has one for Pythons without
from pathlib import Path

import pytest

import vllm_rocm_ops

ROOT = Path(__file__).resolve().parents[2]
TAG = "cp312-cp312-manylinux_2_28_x86_64"
METADATA = "vllm_rocm_ops-1.0.dist-info/WHEEL"
EXTENSION = "vllm_rocm_ops/_C.cpython-312-x86_64-linux-gnu.so"
ANY_OBJECT = "vllm_rocm_ops/code/gfx950/rms_norm.co"


@pytest.fixture
def wheels(monkeypatch):
    """csrc/wheels.py."""
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    return importlib.import_module("wheels")


def write_wheel(folder: Path, name: str = f"vllm_rocm_ops-1.0-{TAG}.whl", **changes: bytes | None) -> Path:
    """A wheel with nothing in it but what is checked; of `changes`, by file, None leaves a file out."""
    files = {METADATA: f"Root-Is-Purelib: false\nTag: {TAG}\n".encode()}
    files[EXTENSION] = b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.28\0libc.so.6\0"
    stems = [path.stem for path in (ROOT / "csrc/ops").glob("*.hip")]
    names = [f"{arch}/{stem}.{end}" for arch in ("gfx942", "gfx950") for stem in stems for end in ("co", "json")]
    files |= {f"vllm_rocm_ops/code/{name}": b"" for name in names} | changes
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, content in files.items():
            if content is not None:
                archive.writestr(file, content)
    return folder / name


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({METADATA: b"Tag: cp312-cp312-linux_x86_64\n"}, f"tag must be {TAG}, got cp312-cp312-linux_x86_64"),
        ({METADATA: f"Tag: {TAG}\nTag: py3-none-any\n".encode()}, f"tag must be {TAG}, got {TAG}, py3-none-any"),
        ({"name": "vllm_rocm_ops-1.0-cp312-cp312-linux_x86_64.whl"}, f"tag must be {TAG}, got {TAG}"),
        ({"name": "vllm_rocm_ops-1.0-cp312-abi3-manylinux_2_28_x86_64.whl"}, f"tag must be {TAG}, got {TAG}"),
        ({ANY_OBJECT: None}, f"must have {ANY_OBJECT}"),
        ({ANY_OBJECT.replace(".co", ".json"): None}, "must have vllm_rocm_ops/code/gfx950/rms_norm.json"),
        ({"vllm_rocm_ops/code/sm_90/rms_norm.ptx": b""}, "must not have vllm_rocm_ops/code/sm_90/rms_norm.ptx"),
        ({"vllm_rocm_ops/code/gfx942/gone.co": b""}, "must not have vllm_rocm_ops/code/gfx942/gone.co"),
        ({EXTENSION: None}, f"must have one extension, {EXTENSION}, got none"),
        ({EXTENSION.replace("312", "311"): b""}, f"must have one extension, {EXTENSION}, got .*-311-.*, .*-312-.*"),
        ({EXTENSION: b"\0GLIBC_2.28\0GLIBC_2.29\0"}, f"{EXTENSION} needs GLIBC_2.29"),
        ({EXTENSION: b"\0GLIBC_2.4\0GLIBC_3.0\0"}, f"{EXTENSION} needs GLIBC_3.0"),
        ({EXTENSION: b"\0GLIBC_2.4\0GLIBC_ABI_DT_RELR\0"}, f"{EXTENSION} needs GLIBC_ABI_DT_RELR"),
        ({EXTENSION: b"\0GLIBC_2.28\0libstdc++.so.6\0"}, f"{EXTENSION} needs libstdc\\+\\+.so.6"),
    ],
)
def test_a_wheel_that_is_not_to_be_released_says_why(wheels, tmp_path, changes, problem):
    assert wheels.problems(write_wheel(tmp_path)) == []
    (found,) = wheels.problems(write_wheel(tmp_path, **changes))
    assert re.fullmatch(problem, found)


@pytest.mark.parametrize(
    ("platform", "machine_has", "asked_for", "compiler"),
    [
        ("manylinux_2_28_x86_64", "/usr/bin/c++", None, "zig c++ -target x86_64-linux-gnu.2.28"),
        ("manylinux_2_28_x86_64", None, None, "zig c++ -target x86_64-linux-gnu.2.28"),
        ("manylinux_2_28_x86_64", "/usr/bin/c++", "mine", "mine"),
        ("linux_x86_64", None, None, "zig c++"),
        ("linux_x86_64", "/usr/bin/c++", None, None),
    ],
)
def test_zig_builds_where_a_glibc_or_no_other_compiler_is_named(
    monkeypatch, platform, machine_has, asked_for, compiler
):
    for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if asked_for:
        monkeypatch.setenv("CXX", asked_for)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    distribution = run_setup("setup.py", stop_after="config")
    distribution.get_command_obj("bdist_wheel").plat_name = platform
    build_extension = distribution.get_command_obj("build_ext")
    monkeypatch.setattr(type(build_extension).__mro__[1], "run", lambda self: None)
    monkeypatch.setattr(shutil, "which", lambda name: machine_has)
    build_extension.run()
    found = os.environ.get("CXX")
    assert found == compiler or found.rpartition("/")[2] == compiler
    assert asked_for or os.environ.get("LDCXXSHARED") == (f"{found} -shared" if found else None)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("FULL_TESTS"), reason="zig compiles its C++ library first: FULL_TESTS=1")
def test_the_command_makes_a_wheel_to_release(tmp_path):
    """Of this Python; what it would be refused for is tested above."""
    command = [sys.executable, ROOT / "csrc/wheels.py", "--python", sys.executable, "--out", tmp_path / "dist"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name == f"vllm_rocm_ops-{vllm_rocm_ops.__version__}-{python}-{python}-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed", [name for name in archive.namelist() if name.endswith(".so")])
    (extension,) = (tmp_path / "installed").rglob("*.so")
    code = f"import sys; sys.path.insert(0, {str(extension.parent)!r}); import _C; assert _C.status()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_python_that_is_not_there_is_named(wheels, tmp_path, capfd):
    """With what uv says of it; nothing is left."""
    absent = str(tmp_path / "python")
    with pytest.raises(SystemExit, match=f"no wheel for Python {absent}, as uv says above"):
        wheels.make([absent], tmp_path / "dist")
    assert absent in capfd.readouterr().err and not (tmp_path / "dist").exists()
