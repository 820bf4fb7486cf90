"""Test the patches proposed to vLLM 0.33.0: their form, that they apply and revert, and their own tests before and after.

`git apply` applies them to a copy of its Python files, as patches/README.md says.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pages
import processes
import pytest
import test_selection
from engines import HERE
from marks import full

import vllm_rocm_ops

ROOT = HERE.parents[1]
RELEASE = "0.33"
PATCHES = sorted(ROOT.glob(f"patches/vllm-{RELEASE}/*.patch"))
FACTOR = f"rocm_ops: {vllm_rocm_ops.__version__}"
OF_PACKAGE, OF_TESTS = "--exclude=*/test_*.py", "--exclude=vllm/*"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches")]
each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def source() -> pathlib.Path:
    """Return the folder of vLLM's package, as released."""
    test_selection.BUILD.mkdir(exist_ok=True)
    try:
        return test_selection.python_files(test_selection.RELEASES[RELEASE]) / "vllm"
    except subprocess.CalledProcessError as error:
        raise pytest.skip.Exception(f"vLLM {RELEASE} is not here and cannot be downloaded: {error}") from error


def copy(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy a package to a folder, with its compiled files."""
    return shutil.copytree(source, folder / "vllm")


def apply(patch: pathlib.Path, folder: pathlib.Path, *options: str) -> str:
    """Apply a patch in a folder by git, and return git's output."""
    command = ["git", "-C", str(folder), "apply", *options, str(patch)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def paths(patch: pathlib.Path) -> list[str]:
    """Return the files that a patch changes."""
    return [line.split("\t")[2] for line in apply(patch, ROOT, "--numstat").splitlines()]


@pytest.fixture(scope="module")
def patched(source, tmp_path_factory) -> pathlib.Path:
    package = copy(source, tmp_path_factory.mktemp("patched"))
    for patch in PATCHES:
        apply(patch, package.parent, OF_PACKAGE)
    return package


def ask(package: pathlib.Path, code: str, *folders: pathlib.Path, **environment: str):
    """Return the last JSON line that the code prints in a process with that vLLM."""
    options = {"VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR"} | environment
    return json.loads(processes.run(code, package.parent, *folders, ROOT, HERE, **options).splitlines()[-1])


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}


# Their form


@each_patch
def test_a_patch_is_in_upstreams_form(patch, tmp_path):
    """It has a tagged title, a message that ends with how to test it, and one new test file, as vLLM's linters require."""
    text = patch.read_text()
    title, message = text.partition("\n\n--- ")[0].split("\n\n", 1)
    assert re.fullmatch(r"(\[[\w/]+\])+ [A-Z].*[^.]", title) and max(map(len, [title, *message.splitlines()])) <= 72
    (test,) = (path for path in paths(patch) if not path.startswith("vllm/"))
    assert message.endswith(f"\n\nTest: pytest {test}") and "Signed-off-by" not in text, "the sender's"
    assert max(len(line) for line in text.splitlines() if line.startswith("+")) <= 88 + 1, "vLLM's line length"
    apply(patch, tmp_path, OF_TESTS)
    file = tmp_path / test
    licence, owner, docstring = file.read_text().splitlines()[:3]
    assert licence == "# SPDX-License-Identifier: Apache-2.0" and docstring.startswith('"""')
    assert owner == "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project"
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--isolated", "--no-cache", "--line-length=88", "--target-version=py310", str(file)]
    rules = ["--select=E,F,UP,B,ISC,SIM,I,G", "--config=lint.isort.known-first-party=['vllm']"]
    for command in (["format", "--check", *style], ["check", *rules, *style]):
        done = subprocess.run([*ruff, *command], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "patches" / "README.md").read_text()
    assert f"\n| [{patch.stem}](vllm-{RELEASE}/{patch.name}) | {title} | " in page


def test_patches_are_independent():
    """Each can be applied without the others: no two change the same file."""
    changed = [path for patch in PATCHES for path in paths(patch)]
    assert PATCHES and len(changed) == len(set(changed))
    assert [patch.name[:2] for patch in PATCHES] == [f"{n:02}" for n in range(1, len(PATCHES) + 1)]


# Their effect


@each_patch
def test_a_patch_applies_and_reverts(patch, source, tmp_path):
    """It applies alone, makes valid Python, reverts without a trace, and as a whole fits a source tree, too."""
    copy(source, tmp_path)
    before = contents(tmp_path)
    apply(patch, tmp_path, OF_PACKAGE)
    own = [path for path in paths(patch) if path.startswith("vllm/")]
    assert {path for path, text in contents(tmp_path).items() if before.get(path) != text} == set(own)
    for path in own:
        compile((tmp_path / path).read_text(), path, "exec")
    apply(patch, tmp_path, "-R", OF_PACKAGE)
    assert contents(tmp_path) == before
    apply(patch, tmp_path)
    assert {path for path, text in contents(tmp_path).items() if before.get(path) != text} == set(paths(patch))


@pytest.mark.parametrize("is_in_repository", [False, True])
def test_the_commands_of_the_page(source, tmp_path, is_in_repository):
    """They work in a folder of packages, also of an environment within a repository, and leave hard-linked files alone."""
    if is_in_repository:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
        (tmp_path / ".gitignore").write_text("/site\n")
    package = copy(source, tmp_path / "site")
    before = contents(package)
    linked = tmp_path / "linked.py"
    linked.hardlink_to(package / "model_executor/kernels/linear/__init__.py")
    (tmp_path / "python").symlink_to(sys.executable)
    commands = pages.block_of((ROOT / "patches" / "README.md").read_text(), "bash")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(package.parent)}
    for text in (commands, commands.replace(" apply ", " apply -R ")):
        subprocess.run(["bash", "-euc", text], check=True, cwd=ROOT, env=environment)
        found = contents(package)
        changed = {path for path in found if found[path] != before.get(path)}
        assert changed == ({"model_executor/kernels/linear/__init__.py"} if text == commands else set())
        assert linked.read_bytes() == before["model_executor/kernels/linear/__init__.py"]
        assert not (package.parent / "tests").exists()


@full
def test_the_patches_own_tests(source, patched, tmp_path):
    """They are sent to vLLM with the patches: each patch's file passes, and without its patch some of it fails."""
    for patch in PATCHES:
        apply(patch, tmp_path, OF_TESTS)
    code = f"""
import json, pytest
class Outcomes:
    found = {{}}
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self.found.setdefault(report.nodeid.partition("::")[0], set()).add(report.outcome)
outcomes = Outcomes()
options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", {str(tmp_path)!r}]
pytest.main([*options, {str(tmp_path)!r}], plugins=[outcomes])
print()
print(json.dumps({{path: sorted(found) for path, found in outcomes.found.items()}}))
"""
    files = {path for patch in PATCHES for path in paths(patch) if not path.startswith("vllm/")}
    assert ask(patched, code) == {file: ["passed"] for file in files}
    without = ask(source, code)
    assert without.keys() == files and all("failed" in found for found in without.values())
