"""Patches to vLLM: all or nothing, exactly where they fit, and back again; here on folders that look like a vLLM."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import readme

from vllm_rocm_ops import cli, doctor, patch

ROOT = readme.ROOT
FIRST = """\
Subject: Say two
Without: there is one
Upstream: none
Remove when: there are two
Test: here

One is too few.

--- /dev/null
+++ b/tests/test_a.py
@@ -0,0 +1 @@
+assert second == 2
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,3 +1,4 @@ def somewhere
 first = 1
+second = 2
 third = 3
 fourth = 4
@@ -7,2 +8,2 @@
 seventh = 7
-eighth = 8
+eighth = "eight"
"""
SECOND = """\
Subject: Add a file
Without: it is not there
Upstream: none
Remove when: it is there
Test: here

It is new.

--- /dev/null
+++ b/vllm/deep/new.py
@@ -0,0 +1,2 @@
+new = 1
+newer = 2
--- a/vllm/deep/b.py
+++ b/vllm/deep/b.py
@@ -1 +1 @@
-old = 1
+old = 0
"""
A = "".join(f"{name} = {n}\n" for n, name in {1: "first", 3: "third", 4: "fourth", 7: "seventh", 8: "eighth"}.items())


def make(root: Path, version: str = "0.33.0") -> Path:
    """A folder of a vLLM package that both patches fit."""
    package = root / "vllm"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text(f"__version__: str\n__version__ = version = '{version}'\n")
    (package / "a.py").write_text(A)
    (package / "deep" / "b.py").write_text("old = 1\n")
    return package


def contents(package: Path) -> dict[str, str]:
    """Every file of the package with what is in it."""
    return {str(path.relative_to(package)): path.read_text() for path in package.rglob("*") if path.is_file()}


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> Path:
    """A vLLM, and the two patches as those that there are for it."""
    patches = tmp_path / "patches"
    (patches / "vllm-0.33").mkdir(parents=True)
    (patches / "vllm-0.33" / "01-two.patch").write_text(FIRST)
    (patches / "vllm-0.33" / "02-new.patch").write_text(SECOND)
    monkeypatch.setattr(patch, "folder", lambda: patches)
    return make(tmp_path / "site-packages")


def run(capsys, *arguments: object) -> tuple[int, str]:
    """The command's exit status and all that it printed."""
    status = cli.main(["patch", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_apply_changes_what_it_says_and_revert_brings_it_back(vllm, capsys):
    before = contents(vllm)
    assert run(capsys, "--vllm", vllm, "--apply")[0] == 0
    after = contents(vllm)
    assert after["a.py"] == A.replace("third", "second = 2\nthird").replace("= 8", '= "eight"')
    assert after["deep/new.py"] == "new = 1\nnewer = 2\n" and after["deep/b.py"] == "old = 0\n"
    assert after[f"{patch.MARKER}/01-two.patch"] == FIRST and not (vllm.parent / "tests").exists()
    assert [entry.applied for entry in patch.status(vllm)] == [True, True]
    assert "all were applied before" in run(capsys, "--vllm", vllm.parent, "--apply")[1]
    assert contents(vllm) == after
    assert run(capsys, "--vllm", vllm, "--revert")[0] == 0
    assert contents(vllm) == before and not (vllm / patch.MARKER).exists()
    assert "nothing was applied" in run(capsys, "--vllm", vllm, "--revert")[1]


def test_patches_are_chosen_by_name_or_number(vllm, capsys):
    assert "applied: 02-new" in run(capsys, "02", "--vllm", vllm, "--apply")[1]
    listed = run(capsys, "--vllm", vllm)[1]
    assert "01-two: not applied\n  Say two\n  Without: there is one" in listed and "02-new: applied\n" in listed
    assert "applied: 01-two" in run(capsys, "01-two", "--vllm", vllm, "--apply")[1]
    assert "reverted: 02-new" in run(capsys, "02", "--vllm", vllm, "--revert")[1]
    assert (vllm / "deep" / "b.py").read_text() == "old = 1\n" and "second" in (vllm / "a.py").read_text()
    assert run(capsys, "3", "--vllm", vllm, "--apply") == (
        2,
        f"vLLM 0.33.0 in {vllm}\npatch: 3 not in 01-two, 02-new\n",
    )


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("deep/b.py", "old = 2\n", "02-new: vllm/deep/b.py:1: its lines are not there"),
        ("deep/b.py", "old = 1 \n", "02-new: vllm/deep/b.py:1: its lines are not there"),
        ("deep/b.py", "  old = 1\n", "02-new: vllm/deep/b.py:1: its lines are not there"),
        ("deep/b.py", "old = 1\nold = 1\n", "02-new: vllm/deep/b.py:1: its lines are in 2 places"),
        ("deep/b.py", None, "02-new: vllm/deep/b.py:1: there is no such file"),
        ("deep/new.py", "other = 1\n", "02-new: vllm/deep/new.py:0: there is another file in its place"),
        ("a.py", A.replace("eighth = 8", "eighth = 9"), "01-two: vllm/a.py:7: its lines are not there"),
    ],
)
def test_one_hunk_that_does_not_fit_stops_all(vllm, capsys, file, text, message):
    """The first patch and the first hunk fit, and are not applied either."""
    if text is None:
        (vllm / file).unlink()
    else:
        (vllm / file).write_text(text)
    before = contents(vllm)
    status, printed = run(capsys, "--vllm", vllm, "--apply")
    assert (status, printed.splitlines()[-1]) == (2, f"patch: {message}")
    assert contents(vllm) == before
    status, printed = run(capsys, "--vllm", vllm, "--check")
    assert status == 1 and f"not applied, it does not fit: {message.partition(': ')[2]}" in printed
    assert run(capsys, "--vllm", vllm, "--list")[0] == 0


def test_check_passes_what_can_be_applied_or_was(vllm, capsys):
    before = contents(vllm)
    assert run(capsys, "--vllm", vllm, "--check")[0] == 0
    assert contents(vllm) == before
    run(capsys, "01", "--vllm", vllm, "--apply")
    assert run(capsys, "--vllm", vllm, "--check")[0] == 0


def test_lines_may_have_moved(vllm, capsys):
    """A patch release has other line numbers; the lines themselves are what counts."""
    (vllm / "a.py").write_text("zeroth = 0\n" * 20 + A)
    assert run(capsys, "--vllm", vllm, "--apply")[0] == 0
    run(capsys, "--vllm", vllm, "--revert")
    assert (vllm / "a.py").read_text() == "zeroth = 0\n" * 20 + A


@pytest.mark.parametrize("fails_at", range(6))
def test_a_write_that_fails_leaves_everything_as_it_was(vllm, capsys, monkeypatch, fails_at):
    """Three files and two marks are written; the sixth is beyond them."""
    before, replace, written = contents(vllm), patch._replace, []

    def replace_or_fail(path, text):
        written.append(path)
        if len(written) == fails_at + 1:
            raise PermissionError(13, "Permission denied", str(path))
        replace(path, text)

    monkeypatch.setattr(patch, "_replace", replace_or_fail)
    status, printed = run(capsys, "--vllm", vllm, "--apply")
    if fails_at == 5:
        assert status == 0 and len(written) == 5
        return
    assert status == 2 and "patch: nothing was changed: [Errno 13] Permission denied" in printed
    assert contents(vllm) == before and not (vllm / patch.MARKER).exists()


def test_links_to_an_installers_cache_are_not_written_through(vllm, capsys, tmp_path):
    cached = tmp_path / "cached.py"
    os.link(vllm / "a.py", cached)
    (vllm / "a.py").chmod(0o664)
    run(capsys, "--vllm", vllm, "--apply")
    assert cached.read_text() == A and "second" in (vllm / "a.py").read_text()
    assert (vllm / "a.py").stat().st_mode & 0o777 == 0o664


def test_a_vllm_that_was_installed_anew(vllm, capsys):
    """An installer replaces its own files and leaves the new ones of a patch, and the marks."""
    run(capsys, "--vllm", vllm, "--apply")
    (vllm / "a.py").write_text(A)
    (vllm / "deep" / "b.py").write_text("old = 1\n")
    assert [(entry.applied, entry.reason) for entry in patch.status(vllm)] == [(False, ""), (False, "")]
    assert "applied: 01-two, 02-new" in run(capsys, "--vllm", vllm, "--apply")[1]
    (vllm / "deep" / "b.py").write_text("old = 1\n")
    assert run(capsys, "--vllm", vllm, "--revert")[0] == 0
    assert not (vllm / "deep" / "new.py").exists() and not (vllm / patch.MARKER).exists()
    assert (vllm / "a.py").read_text() == A


def test_what_was_applied_is_reverted_though_the_patch_is_another_now(vllm, capsys):
    before = contents(vllm)
    run(capsys, "--vllm", vllm, "--apply")
    (patch.folder() / "vllm-0.33" / "01-two.patch").write_text(FIRST.replace("+second = 2", "+second = 22"))
    assert patch.status(vllm)[0].reason == "in an earlier version"
    (patch.folder() / "vllm-0.33" / "02-new.patch").unlink()
    assert run(capsys, "--vllm", vllm, "--revert")[0] == 0
    assert contents(vllm) == before


def test_revert_refuses_files_that_changed_since(vllm, capsys):
    run(capsys, "--vllm", vllm, "--apply")
    (vllm / "a.py").write_text((vllm / "a.py").read_text().replace("second = 2", "second = 3"))
    before = contents(vllm)
    status, printed = run(capsys, "--vllm", vllm, "--revert")
    assert status == 2 and "patch: 01-two: vllm/a.py:1: its lines are not there" in printed
    assert contents(vllm) == before
    assert run(capsys, "--vllm", vllm, "--check")[0] == 1


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0rc1", "1.33.0", "unknown"])
def test_an_unknown_vllm_is_refused(vllm, capsys, tmp_path, version):
    other = make(tmp_path / "other", version)
    before = contents(other)
    for action in ("--list", "--check", "--apply"):
        status, printed = run(capsys, "--vllm", other, action)
        assert status == 2
        assert f"patch: there are no patches for vLLM {version} in {other}, only for vllm-0.33" in printed
    assert contents(other) == before


def test_no_vllm_is_a_plain_message(capsys, monkeypatch, tmp_path):
    status, printed = run(capsys, "--vllm", tmp_path)
    assert status == 2 and f"patch: {tmp_path} neither is nor holds the folder of a vLLM package" in printed
    monkeypatch.setattr(patch.importlib.util, "find_spec", lambda name: None)
    assert run(capsys)[1] == "patch: vLLM is not installed; --vllm PATH says where it is\n"
    assert doctor.text(doctor.find()).count("none: vLLM is not installed; --vllm PATH") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@@ -1,3 +1,4 @@", "@@ -1,3 +1,5 @@", "broken hunk in vllm/a.py: @@ -1,3 +1,5 @@"),
        (" third = 3", "third = 3", "broken hunk in vllm/a.py"),
        ("b/vllm/a.py", "b/vllm/../a.py", "name no file of vLLM's"),
        ("b/vllm/a.py", "b/torch/a.py", "name no file of vLLM's"),
        ("--- a/vllm/a.py", "--- a/vllm/b.py", "a/vllm/b.py and +++ b/vllm/a.py name no file of vLLM's"),
        ("--- a/vllm/a.py", "--- /dev/null", "vllm/a.py is new but has lines before"),
    ],
)
def test_a_broken_patch_is_refused(tmp_path, old, new, message):
    path = tmp_path / "01-two.patch"
    assert old in FIRST
    path.write_text(FIRST.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        patch.read(path)


def test_doctor_says_what_is_applied_and_what_is_lost(vllm, capsys, monkeypatch):
    monkeypatch.setattr(patch, "find_vllm", lambda: vllm)
    patch.apply(vllm, patch.known(vllm)[:1])
    found = doctor.find()["patches"]
    assert [(entry["name"], entry["applied"]) for entry in found["patches"]] == [("01-two", True), ("02-new", False)]
    text = doctor.text(doctor.find())
    assert re.search(r"patches +applied +01-two", text)
    assert re.search(r"not applied +02-new +without it it is not there", text)


# What ships

SHIPPED = sorted(ROOT.glob("patches/vllm-*/*.patch"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_patch_says_all_that_it_must(path):
    """And names a test that exists, with a number of its own."""
    shipped = patch.read(path)
    assert list(shipped.header) == ["Subject", "Without", "Upstream", "Remove when", "Test"]
    file, _, test = shipped.header["Test"].partition("::")
    assert f"\ndef {test}(" in (ROOT / file).read_text()
    assert re.fullmatch(r"\d\d-[a-z0-9-]+", path.stem)
    hunks = (*shipped.hunks, *shipped.tests)
    assert not [hunk for hunk in hunks if max(map(len, hunk.after.splitlines())) > 88], "vLLM's line length"
    assert shipped.message and max(map(len, shipped.message.splitlines())) <= 72
    assert "Signed-off-by" not in shipped.text, "the sender's"


FOR_UPSTREAM = [path for path in SHIPPED if patch.read(path).tests]


def test_patches_for_upstream():
    assert [path.stem[:2] for path in FOR_UPSTREAM] == ["01", "03"]


@pytest.mark.parametrize("path", FOR_UPSTREAM, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_patch_for_upstream_is_in_upstreams_form(path, tmp_path):
    """A tagged title, a message that ends with how to test it, and one new test file, as vLLM's linters want it."""
    shipped = patch.read(path)
    assert (
        re.fullmatch(r"(\[[\w/]+\])+ [A-Z].*[^.]", shipped.header["Subject"]) and len(shipped.header["Subject"]) <= 72
    )
    (hunk,) = shipped.tests
    assert not hunk.before and shipped.message.endswith(f"\n\nTest: pytest {hunk.path}")
    licence, owner, docstring = hunk.after.splitlines()[:3]
    assert licence == "# SPDX-License-Identifier: Apache-2.0" and docstring.startswith('"""')
    assert owner == "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project"
    file = tmp_path / "test_it.py"
    file.write_text(hunk.after)
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--isolated", "--no-cache", "--line-length=88", "--target-version=py310", str(file)]
    rules = ["--select=E,F,UP,B,ISC,SIM,I,G", "--config=lint.isort.known-first-party=['vllm']"]
    for command in (["format", "--check", *style], ["check", *rules, *style]):
        done = subprocess.run([*ruff, *command], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_shipped_patches_are_independent():
    """Each can be applied without the others: no two change the same file."""
    for folder in {path.parent for path in SHIPPED}:
        paths = [changed for path in SHIPPED if path.parent == folder for changed in patch.read(path).paths]
        assert len(paths) == len(set(paths))
        numbers = [path.name[:2] for path in SHIPPED if path.parent == folder]
        assert numbers == [f"{n:02}" for n in range(1, len(numbers) + 1)]


def test_the_table_in_the_readme_is_the_patches():
    text = (ROOT / "patches" / "README.md").read_text()
    rows = ["| patch | what it does | without it | upstream | remove when |", "| --- | --- | --- | --- | --- |"]
    for path in SHIPPED:
        header = patch.read(path).header
        cells = [header[name] for name in ("Subject", "Without", "Upstream", "Remove when")]
        rows.append(f"| [{path.stem}]({path.parent.name}/{path.name}) | " + " | ".join(cells) + " |")
    table = "\n".join(rows)
    assert table in text, f"patches/README.md must hold:\n{table}"


def test_the_package_finds_the_patches():
    """In a checkout beside it. A wheel has them inside, see test_build.py."""
    assert hashlib.sha256(SHIPPED[0].read_bytes()).digest() in {
        hashlib.sha256(path.read_bytes()).digest() for path in patch.folder().glob("vllm-*/*.patch")
    }
