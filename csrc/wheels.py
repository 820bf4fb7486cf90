"""Build and check a release: one wheel per Python version, and the source distribution.

    python csrc/wheels.py [--python 3.10 3.11 3.12 3.13 3.14] [--out dist]

A wheel runs on any Linux with its tag's glibc or newer: setup.py links with ziglang's compiler for that glibc, with the C++
library inside. It holds the AMD code objects, and their hashes in code/release.json, by which `check`, `doctor` and vLLM's log tell them
from others; NVIDIA needs a build from source. Code objects are compiled once for all wheels, and fresh ones in vllm_rocm_ops/code/ are
reused. release.json is written here alone, into a copy of the sources. uv (`pip install uv`) finds each Python, or downloads it with its headers, installs
the build requirements and runs twine; --python accepts versions or paths, as uv does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import build

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
GLIBC = (2, 28)
PLATFORM = "manylinux_{}_{}_x86_64".format(*GLIBC)
ARCHS = tuple(filter(build.is_amd, build.ARCHS))
CODE = "vllm_rocm_ops/code"
RELEASE = f"{CODE}/{build.RELEASE}"
NOT_SOURCE = (".*", "*.egg-info", "*.so", "__pycache__")
NOT_SOURCE_IN = {ROOT: ("build", "dist", "shared"), ROOT / "vllm_rocm_ops": ("code",)}


def make(pythons: Sequence[str], out: Path) -> list[Path]:
    """Build a wheel for each of `pythons` and the source into the folder `out`: all of them, or none if one has problems."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy: files left in build/ by an earlier build would be packaged.
        source = shutil.copytree(ROOT, Path(folder, "source"), ignore=not_source)
        code = source / "vllm_rocm_ops" / "code"
        objects = {
            path.relative_to(code).as_posix(): path.read_bytes()
            for path in build.build(archs=ARCHS, output=code, debug=False)
        }
        (code / build.RELEASE).write_text(json.dumps(release(version(), objects)) + "\n")
        environment = os.environ | {"VLLM_ROCM_OPS_ARCHS": ",".join(ARCHS), "VLLM_ROCM_OPS_DEBUG": "0"}
        uv = [sys.executable, "-m", "uv"]
        command = [*uv, "build", "--quiet", "--out-dir", folder, str(source)]
        for python in pythons:
            wheel = ["--wheel", f"--config-setting=--build-option=--plat-name={PLATFORM}", "--python", python]
            if subprocess.run([*command, *wheel], check=False, env=environment).returncode:
                sys.exit(f"no wheel for Python {python}, see uv's output above; --python also accepts installed paths")
        if subprocess.run([*command, "--sdist", "--python", pythons[0]], check=False, env=environment).returncode:
            sys.exit("no source distribution, see uv's output above")
        wheels, (sdist,) = sorted(Path(folder).glob("*.whl")), Path(folder).glob("*.tar.gz")
        if found := [f"{wheel.name}: {problem}" for wheel in wheels for problem in problems(wheel)]:
            sys.exit("\n".join(found))
        made = [*wheels, sdist]
        if subprocess.run([*uv, "tool", "run", "--quiet", "twine", "check", "--strict", *made], check=False).returncode:
            sys.exit("twine check failed, see its output above")
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.move(file, out / file.name)) for file in made]


def not_source(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of a folder of this tree leaves out."""
    return shutil.ignore_patterns(*NOT_SOURCE, *NOT_SOURCE_IN.get(Path(folder), ()))(folder, names)


def modules() -> set[str]:
    """Return the files of the package's Python modules."""
    return {path.relative_to(ROOT).as_posix() for path in ROOT.glob("vllm_rocm_ops/**/*.py")}


def version() -> str:
    """Return the package's version."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "vllm_rocm_ops/__init__.py").read_text(), re.MULTILINE)[1]


def release(version: str, objects: Mapping[str, bytes]) -> dict:
    """Return what release.json says of code objects, given by their paths in the folder code."""
    hashes: dict[str, dict[str, str]] = {}
    for name, content in sorted(objects.items()):
        arch, _, file = name.partition("/")
        hashes.setdefault(arch, {})[Path(file).stem] = hashlib.sha256(content).hexdigest()
    return {"version": version, "objects": hashes}


def problems(wheel: Path) -> list[str]:
    """Return a wheel's problems: its tag, modules, code objects and their hashes, or its extension's dependencies."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (.+)$", archive.read(metadata).decode(), re.MULTILINE)
        python = wheel.name.split("-")[2]
        tag = f"{python}-{python}-{PLATFORM}"
        if not wheel.name.endswith(f"-{tag}.whl") or tags != [tag]:
            found.append(f"tag must be {tag}, got {', '.join(tags)}")
        found += [f"must have {name}" for name in sorted(modules() - names)]
        wanted = {
            f"vllm_rocm_ops/code/{arch}/{stem}{end}"
            for arch in ARCHS
            for stem in build.sources()
            for end in (build.suffix(arch), ".json")
        } | {RELEASE}
        present = {name for name in names if name.startswith("vllm_rocm_ops/code/")}
        found += [f"must have {name}" for name in sorted(wanted - present)]
        found += [f"must not have {name}" for name in sorted(present - wanted)]
        of_amd = tuple(build.suffix(arch) for arch in ARCHS)
        objects = {name: archive.read(name) for name in present & wanted if name.endswith(of_amd)}
        said = release(wheel.name.split("-")[1], {name.removeprefix(f"{CODE}/"): of for name, of in objects.items()})
        if RELEASE in names and wanted <= present and json.loads(archive.read(RELEASE)) != said:
            found.append(f"{RELEASE} must have the wheel's version and its objects' hashes")
        extension = f"vllm_rocm_ops/_C.{python.replace('cp', 'cpython-')}-x86_64-linux-gnu.so"
        extensions = sorted(name for name in names if name.endswith(".so"))
        if extensions != [extension]:
            found.append(f"must have one extension, {extension}, got {', '.join(extensions) or 'none'}")
        for name in extensions:
            found += [f"{name} {problem}" for problem in needs(archive.read(name))]
    return found


def needs(extension: bytes) -> list[str]:
    """Return an extension's dependencies beyond its tag. Symbol versions are read from its string table."""
    found = []
    for name in sorted(set(re.findall(rb"\0GLIBC_([\w.]+)(?=\0)", extension))):
        numbers = name.split(b".")
        if not numbers[0].isdigit() or tuple(map(int, numbers[:2])) > GLIBC:
            found.append(f"needs GLIBC_{name.decode()}")
    libraries = set(re.findall(rb"\0(libstdc\+\+\.so\S*?|libgcc_s\.so\S*?|libc\+\+\S*?\.so\S*?)(?=\0)", extension))
    return found + [f"needs {library.decode()}" for library in sorted(libraries)]


def main() -> None:
    """Make the wheels and the source distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="output folder; default: dist")
    arguments = parser.parse_args()
    try:
        print(*make(arguments.python, arguments.out), sep="\n")
    except build.BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
