"""Patches to an installed vLLM, for what no plugin reaches: `vllm-rocm-ops patch`.

Nothing needs them. A patch applies where each of its hunks matches exactly one place, character for character, and all of them
are tried before anything is written. What is applied is kept beside vLLM's files, in MARKER: it shows what was done to them,
and its reverse undoes it, whatever version of this package is installed by then.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
MARKER = "rocm_ops_patches"
"""The folder in vLLM's package that holds the applied patches."""


class PatchError(RuntimeError):
    """A patch that cannot be applied or reverted; nothing was changed."""


@dataclass(frozen=True)
class Hunk:
    """Whole lines that follow each other, before and after."""

    path: str  # relative to the folder that vLLM's package is in
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Patch:
    """A patch file: a header of `Name: text`, the commit message's body, and a unified diff against vLLM's tree.

    `hunks` are those of the package, `tests` those of vLLM's tests/, which no installed vLLM has and nothing is applied to.
    """

    name: str
    text: str
    header: dict[str, str]
    message: str
    hunks: tuple[Hunk, ...]
    tests: tuple[Hunk, ...]

    @property
    def paths(self) -> list[str]:
        """The files of the package that it changes."""
        return list(dict.fromkeys(hunk.path for hunk in self.hunks))


@dataclass(frozen=True)
class Status:
    """What is true of one patch in one vLLM: applied, or why not."""

    patch: Patch
    applied: bool
    reason: str


def folder() -> Path:
    """The patches: in the package, or beside it in a source tree."""
    installed = PACKAGE / "patches"
    return installed if installed.exists() else PACKAGE.parent / "patches"


def read(path: Path) -> Patch:
    """The patch in a file. ValueError where it is no such patch."""
    text = path.read_bytes().decode()
    head, _, diff = text.partition("\n\n--- ")
    head, _, message = head.partition("\n\n")
    header = dict(line.split(": ", 1) for line in re.sub(r"\n +", " ", head).splitlines())
    hunks = []
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE):
        old, new, *body = part.splitlines(keepends=True)
        target = re.fullmatch(r"\+\+\+ b/((?:vllm|tests)/\S+)\n", new)
        if not target or ".." in target[1] or old not in (f"a/{target[1]}\n", "/dev/null\n"):
            raise ValueError(f"{path.name}: {old.strip()} and {new.strip()} name no file of vLLM's")
        hunks += [_hunk(path.name, target[1], lines) for lines in _split(body)]
        if old == "/dev/null\n" and hunks[-1].before:
            raise ValueError(f"{path.name}: {target[1]} is new but has lines before")
    package = [hunk for hunk in hunks if hunk.path.startswith("vllm/")]
    tests = [hunk for hunk in hunks if hunk not in package]
    return Patch(path.stem, text, header, message, tuple(package), tuple(tests))


def _split(body: list[str]) -> list[list[str]]:
    """The lines of each hunk of a file, which begin with its @@."""
    starts = [i for i, line in enumerate(body) if line.startswith("@@ ")]
    return [body[start:end] for start, end in zip(starts, [*starts[1:], len(body)])]


def _hunk(name: str, path: str, lines: list[str]) -> Hunk:
    """A hunk from its lines, counted as its @@ says."""
    head = re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", lines[0])
    sides = {side: [line[1:] for line in lines[1:] if line[:1] in (" ", side)] for side in "-+"}
    counts = [int(count or 1) for count in (head[2], head[3])] if head else None
    if counts != [len(sides["-"]), len(sides["+"])] or any(line[:1] not in (" ", "-", "+") for line in lines[1:]):
        raise ValueError(f"{name}: broken hunk in {path}: {lines[0].strip()}")
    return Hunk(path, int(head[1]), "".join(sides["-"]), "".join(sides["+"]))


def find_vllm(path: str | None = None) -> Path:
    """The folder of vLLM's package: at `path`, which is it or holds it, or where Python finds it. Imports nothing."""
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise PatchError("vLLM is not installed; --vllm PATH says where it is")
        return Path(spec.submodule_search_locations[0])
    for package in (Path(path), Path(path) / "vllm"):
        if (package / "__init__.py").exists() and package.name == "vllm":
            return package.resolve()
    raise PatchError(f"{path} neither is nor holds the folder of a vLLM package")


def version(package: Path) -> str:
    """The version of the vLLM in a folder, which is not imported; "unknown" where it does not say."""
    path = package / "_version.py"
    found = re.search(r"^__version__ = .*['\"](.+)['\"]", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[1] if found else "unknown"


def known(package: Path) -> list[Patch]:
    """The patches for the vLLM in a folder, in their order. PatchError where there are none for its version."""
    here = version(package)
    releases = sorted(path.name for path in folder().glob("vllm-*"))
    release = "vllm-" + ".".join(here.split(".")[:2])
    if release not in releases:
        raise PatchError(f"there are no patches for vLLM {here} in {package}, only for {', '.join(releases) or 'none'}")
    return [read(path) for path in sorted((folder() / release).glob("*.patch"))]


def kept(package: Path) -> dict[str, Patch]:
    """The patches that were applied to the vLLM in a folder, as they were then."""
    return {path.stem: read(path) for path in sorted((package / MARKER).glob("*.patch"))}


def status(package: Path) -> list[Status]:
    """What is true of every patch that is known for the vLLM in a folder, or was applied to it."""
    marks = kept(package)
    result = []
    for patch in (marks | {patch.name: patch for patch in known(package)}).values():
        mark = marks.get(patch.name)
        if mark and not _fails(package, mark, reverse=True):
            result.append(Status(mark, True, "" if mark.text == patch.text else "in an earlier version"))
        else:
            why = _fails(package, patch)
            result.append(Status(patch, False, f"it does not fit: {why}" if why else ""))
    return sorted(result, key=lambda entry: entry.patch.name)


def changed(package: Path, patches: list[Patch], reverse: bool = False) -> dict[str, str | None]:
    """The text of each file after the patches, or after they are undone; None for one that is then gone.

    PatchError names the first hunk that does not match exactly one place.
    """
    files: dict[str, str | None] = {}
    for patch in patches:
        for hunk in patch.hunks:
            before, after = (hunk.after, hunk.before) if reverse else (hunk.before, hunk.after)
            path = package.parent / hunk.path
            text = files[hunk.path] if hunk.path in files else _text(path)
            where = f"{patch.name}: {hunk.path}:{hunk.line}"
            if not before or not after:  # a file that comes, or goes; it comes again where an installer left it behind
                if text is not None and text not in (before, after):
                    raise PatchError(f"{where}: there is another file in its place")
                if text is None and before:
                    raise PatchError(f"{where}: there is no such file")
                files[hunk.path] = after or None
                continue
            if text is None:
                raise PatchError(f"{where}: there is no such file")
            starts = (match.start() for match in re.finditer("^", text, re.MULTILINE))
            places = [start for start in starts if text.startswith(before, start)]
            if len(places) != 1:
                raise PatchError(f"{where}: its lines are {f'in {len(places)} places' if places else 'not there'}")
            files[hunk.path] = text[: places[0]] + after + text[places[0] + len(before) :]
    return files


def apply(package: Path, patches: list[Patch]) -> None:
    """Apply patches and keep them in MARKER; all or none. PatchError where one does not fit."""
    _write(package, changed(package, patches), {patch.name: patch.text for patch in patches})


def revert(package: Path, patches: list[Patch]) -> None:
    """Undo patches that were applied; all or none. PatchError where vLLM's files changed since."""
    # Where vLLM was installed anew, its files are as before, but the new ones of a patch are still there.
    anew = [patch for patch in patches if not _fails(package, patch)]
    files = changed(package, [patch for patch in patches[::-1] if patch not in anew], reverse=True)
    files |= {hunk.path: None for patch in anew for hunk in patch.hunks if not hunk.before}
    _write(package, files, dict.fromkeys(patch.name for patch in patches))


def _fails(package: Path, patch: Patch, reverse: bool = False) -> str:
    """Why a patch cannot be applied, or undone; empty if it can."""
    try:
        changed(package, [patch], reverse)
    except PatchError as error:
        return str(error).removeprefix(f"{patch.name}: ")
    return ""


def _text(path: Path) -> str | None:
    return path.read_bytes().decode() if path.exists() else None


def _write(package: Path, files: dict[str, str | None], marks: dict[str, str | None]) -> None:
    """Write files and marks, or remove those that are None. Where one fails the ones before it are put back.

    Each is replaced, never written into: installers link files to their caches.
    """
    after = {package.parent / path: text for path, text in files.items()}
    after |= {package / MARKER / f"{name}.patch": text for name, text in marks.items()}
    before = {path: _text(path) for path in after}
    try:
        for path, text in after.items():
            _replace(path, text)
    except BaseException as error:
        for path, text in before.items():
            if _text(path) != text:
                _replace(path, text)
        if isinstance(error, OSError):
            raise PatchError(f"nothing was changed: {error}") from error
        raise


def _replace(path: Path, text: str | None) -> None:
    """Give a file a text at once, or remove it, and a folder of ours that is empty then."""
    if text is None:
        path.unlink(missing_ok=True)
        if path.parent.name == MARKER and not any(path.parent.iterdir()):
            path.parent.rmdir()
        return
    if path.parent.name == MARKER:
        path.parent.mkdir(exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.chmod(temporary, 0o644)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def select(patches: list[Patch], names: list[str]) -> list[Patch]:
    """The patches of those names or numbers, all without names. PatchError where one is unknown."""
    unknown = [name for name in names if not any(_is_called(patch, name) for patch in patches)]
    if unknown:
        raise PatchError(f"{', '.join(unknown)} not in {', '.join(patch.name for patch in patches) or 'none'}")
    return [patch for patch in patches if not names or any(_is_called(patch, name) for name in names)]


def _is_called(patch: Patch, name: str) -> bool:
    return name in (patch.name, patch.name.partition("-")[0])


def find() -> dict:
    """What is true of the patches for the vLLM that Python finds, as plain data: a list, or `why_none`."""
    try:
        entries = status(find_vllm())
    except (PatchError, ValueError) as error:
        return {"why_none": str(error), "patches": []}
    losses = ["" if entry.applied else f"without it {entry.patch.header['Without']}" for entry in entries]
    rows = [(entry.patch.name, entry.applied, entry.reason, loss) for entry, loss in zip(entries, losses)]
    return {"why_none": "", "patches": [dict(zip(("name", "applied", "reason", "loss"), row)) for row in rows]}


def run(action: str, path: str | None, names: list[str]) -> int:
    """The command: prints what was found or done, and returns 1 if `check` found a patch that cannot be applied."""
    package = find_vllm(path)
    print(f"vLLM {version(package)} in {package}")
    if action == "revert":  # what is kept is enough, whatever this package knows
        chosen = select(list(kept(package).values()), names)
        revert(package, chosen)
        print("reverted: " + (", ".join(patch.name for patch in chosen) or "nothing was applied"))
        return 0
    found = status(package)
    chosen = select([entry.patch for entry in found], names)
    found = [entry for entry in found if entry.patch in chosen]
    if action == "apply":
        due = [entry.patch for entry in found if not entry.applied]
        apply(package, due)
        print("applied: " + (", ".join(patch.name for patch in due) or "all were applied before"))
        return 0
    for entry in found:
        state = "applied" if entry.applied else "not applied"
        print(f"\n{entry.patch.name}: {state}{', ' if entry.reason else ''}{entry.reason}")
        print(f"  {entry.patch.header['Subject']}")
        if not entry.applied:
            print(f"  Without: {entry.patch.header['Without']}")
    return int(action == "check" and any(entry.reason and not entry.applied for entry in found))
