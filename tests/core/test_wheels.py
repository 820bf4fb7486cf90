"""Test the release: the wheels' compiler and glibc, refusals, metadata, and the workflow."""

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from distutils.core import run_setup  # setuptools has one for Pythons without
from pathlib import Path

import pytest
import yaml

import vllm_rocm_ops
from vllm_rocm_ops.core import archs

ROOT = Path(__file__).resolve().parents[2]
TAG = "cp312-cp312-manylinux_2_28_x86_64"
METADATA = "vllm_rocm_ops-1.0.dist-info/WHEEL"
EXTENSION = "vllm_rocm_ops/_C.cpython-312-x86_64-linux-gnu.so"
ANY_OBJECT = "vllm_rocm_ops/code/gfx950/rms_norm.co"
RELEASE = "vllm_rocm_ops/code/release.json"
EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.fixture
def wheels(monkeypatch):
    """Return csrc/wheels.py."""
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    return importlib.import_module("wheels")


@pytest.fixture
def configure(monkeypatch):
    """Return a function for the distribution that setup.py and pyproject.toml describe."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda: run_setup("setup.py", stop_after="config")


def write_wheel(folder: Path, name: str = f"vllm_rocm_ops-1.0-{TAG}.whl", **changes: bytes | None) -> Path:
    """Write a wheel that has only the checked files.

    `changes` maps a file to its text, or to None to leave it out.
    """
    files = {METADATA: f"Root-Is-Purelib: false\nTag: {TAG}\n".encode()}
    files[EXTENSION] = b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.28\0libc.so.6\0"
    stems = [path.stem for path in (ROOT / "csrc/ops").rglob("*.hip")]
    names = [f"{arch}/{stem}.{end}" for arch in ("gfx942", "gfx950") for stem in stems for end in ("co", "json")]
    hashes = {arch: dict.fromkeys(stems, EMPTY) for arch in ("gfx942", "gfx950")}
    files[RELEASE] = json.dumps({"version": "1.0", "objects": hashes}).encode()
    modules = [str(path.relative_to(ROOT)) for path in ROOT.glob("vllm_rocm_ops/**/*.py")]
    files |= {name: b"" for name in [*modules, *(f"vllm_rocm_ops/code/{name}" for name in names)]} | changes
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
        ({"vllm_rocm_ops/ops/rms_norm.py": None}, "must have vllm_rocm_ops/ops/rms_norm.py"),
        ({ANY_OBJECT: None}, f"must have {ANY_OBJECT}"),
        ({ANY_OBJECT.replace(".co", ".json"): None}, "must have vllm_rocm_ops/code/gfx950/rms_norm.json"),
        ({"vllm_rocm_ops/code/sm_90/rms_norm.ptx": b""}, "must not have vllm_rocm_ops/code/sm_90/rms_norm.ptx"),
        ({"vllm_rocm_ops/code/gfx942/gone.co": b""}, "must not have vllm_rocm_ops/code/gfx942/gone.co"),
        ({RELEASE: None}, f"must have {RELEASE}"),
        ({RELEASE: b"{}"}, f"{RELEASE} must have the wheel's version and its objects' hashes"),
        ({ANY_OBJECT: b"another"}, f"{RELEASE} must have the wheel's version and its objects' hashes"),
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


def test_a_copy_of_the_source_has_all_modules(wheels, tmp_path):
    """A folder of the package may have the name of one that the source lacks, as ops/shared has."""
    copy = shutil.copytree(ROOT / "vllm_rocm_ops", tmp_path / "vllm_rocm_ops", ignore=wheels.not_source)
    copied = {path.relative_to(tmp_path).as_posix() for path in copy.rglob("*") if path.suffix in (".py", ".co", ".so")}
    assert copied == wheels.modules()


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
    configure, monkeypatch, platform, machine_has, asked_for, compiler
):
    for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if asked_for:
        monkeypatch.setenv("CXX", asked_for)
    distribution = configure()
    distribution.get_command_obj("bdist_wheel").plat_name = platform
    build_extension = distribution.get_command_obj("build_ext")
    monkeypatch.setattr(type(build_extension).__mro__[1], "run", lambda self: None)
    monkeypatch.setattr(shutil, "which", lambda name: machine_has)
    build_extension.run()
    found = os.environ.get("CXX")
    assert found == compiler or found.rpartition("/")[2] == compiler
    assert asked_for or os.environ.get("LDCXXSHARED") == (f"{found} -shared" if found else None)


@pytest.mark.parametrize("here", ["a release's sources", "a checkout", "in place"])
def test_only_a_wheel_of_the_release_carries_its_hashes(configure, monkeypatch, tmp_path, wheels, here):
    """csrc/wheels.py writes them into its copy of the sources; an install from a checkout or in place has none."""
    command = configure().get_command_obj("build_py")
    command.ensure_finalized()
    command.build_lib, command.editable_mode = str(tmp_path / "lib"), here == "in place"
    build = wheels.build
    monkeypatch.setattr(build, "CODE", tmp_path / "code")
    monkeypatch.setattr(build, "build", lambda output: output.mkdir(parents=True) or [])
    monkeypatch.setattr(type(command).__mro__[1], "run", lambda self: None)
    monkeypatch.setattr(type(command).__mro__[1], "get_outputs", lambda self, include_bytecode: [])
    if here == "a release's sources":
        build.CODE.mkdir()
        (build.CODE / "release.json").write_text("hashes")
    command.run()
    carried = tmp_path / "lib" / RELEASE
    assert command.get_outputs() == [str(carried)] * (here == "a release's sources")
    assert carried.is_file() == (here == "a release's sources")


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("FULL_TESTS"), reason="zig compiles its C++ library first: FULL_TESTS=1")
def test_the_command_makes_a_wheel_to_release(tmp_path):
    """It is a wheel of this Python and the source distribution; refusals are tested above."""
    command = [sys.executable, ROOT / "csrc/wheels.py", "--python", sys.executable, "--out", tmp_path / "dist"]
    on_github = {"GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "who/what"}
    made = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | on_github)
    assert made.returncode == 0, made.stdout + made.stderr
    wheel, sdist = sorted((tmp_path / "dist").iterdir())
    assert sdist.name == f"vllm_rocm_ops-{vllm_rocm_ops.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/build.py", "pyproject.toml", "setup.py", "LICENSE", "vllm_rocm_ops/tools/cli.py"} <= names
    assert not [name for name in names if name.endswith((".co", ".so", "release.json"))]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name == f"vllm_rocm_ops-{vllm_rocm_ops.__version__}-{python}-{python}-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert b"\nProject-URL: Source, https://github.example/who/what\n" in archive.read(metadata)
        archive.extractall(tmp_path / "installed", [name for name in archive.namelist() if name.endswith(".so")])
    (extension,) = (tmp_path / "installed").rglob("*.so")
    code = f"import sys; sys.path.insert(0, {str(extension.parent)!r}); import _C; assert _C.status()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_python_that_is_not_there_is_named(wheels, tmp_path, capfd):
    """The message has uv's output, and nothing is left."""
    absent = str(tmp_path / "python")
    with pytest.raises(SystemExit, match=f"no wheel for Python {absent}, see uv's output above"):
        wheels.make([absent], tmp_path / "dist")
    assert absent in capfd.readouterr().err and not (tmp_path / "dist").exists()


def test_the_package_names_the_repository_that_builds_it_and_no_other(configure, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert not configure().metadata.project_urls
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "who/what")
    urls = configure().metadata.project_urls
    assert urls["Source"] == "https://github.example/who/what"
    for url in urls.values():
        file = url.removeprefix(urls["Source"])
        assert file in ("", "/issues") or (ROOT / file.removeprefix("/blob/HEAD/")).is_file()


def test_the_package_says_which_pythons_it_has_wheels_for(wheels, configure):
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(configure().metadata.classifiers))
    assert tuple(named) == wheels.PYTHONS


# The workflows, and the issue form


def test_the_workflow_tries_each_wheel_in_a_bare_system(wheels):
    workflow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())
    tried = workflow["jobs"]["try"]["strategy"]["matrix"]["include"]
    assert tuple(one["python"].replace("cp3", "3.") for one in tried) == wheels.PYTHONS
    script = (ROOT / "tests/bare_root.sh").read_text()
    for one in tried:
        assert f"{one['python'].replace('cp3', '3.')} in {one['suite']}" in script
    project = (ROOT / "pyproject.toml").read_text()
    (pinned,) = re.findall(r'pip install uv "(.*)"', (ROOT / ".github/workflows/wheels.yml").read_text())
    assert f'"{pinned}"' in project and "tinygrad==0.14.0" in project
    assert f"refs/tags/v{vllm_rocm_ops.__version__}`" in (ROOT / "vllm_rocm_ops/docs/development.md").read_text()


def test_the_workflow_runs_what_must_pass_and_installs_what_the_readme_says():
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["steps"]
    assert steps[-1]["run"] == "bash .ci/run"
    packages = re.search(r"sudo apt-get install -y ([\w+ -]+)", (ROOT / "README.md").read_text())[1]
    assert steps[-2]["run"].endswith(packages)


def test_a_report_has_the_file_of_check_the_gpu_the_version_and_what_happened():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/report.yml").read_text())
    fields = {field["id"]: field for field in form["body"]}
    assert list(fields) == ["check", "gpu", "vllm", "happened"]
    assert all(field["validations"]["required"] for field in fields.values())
    assert set(fields["gpu"]["attributes"]["options"]) == {*archs.PRODUCTS, "other or none"}
    assert "`vllm-rocm-ops check`" in fields["check"]["attributes"]["label"]
