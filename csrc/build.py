"""Compile csrc/ops/**/*.hip: one code object and one stamp per file and architecture.

    python csrc/build.py [--arch gfx942,gfx950] [--debug] [--force] [stem ...]

builds in place (vllm_rocm_ops/code/<arch>/<stem>.co or .ptx); `pip install` calls `build` for the wheel. Ops and archs are
not listed: each is a file in csrc/ops or core/archs. Kernels use only clang builtins and csrc's headers, so any clang with the
target compiles them, without ROCm, CUDA or a GPU. For each architecture, the first compiler that compiles a kernel is used:

    $VLLM_ROCM_OPS_CLANG      a command, the only one then; must compile for AMD, and is used for NVIDIA if it can
    ziglang                   from PyPI: the one with which code objects are tested, a build requirement, so always available
    ROCm's clang              under $ROCM_PATH, /opt/rocm
    a system clang            clang, then the newest clang-<version> in $PATH

A file that it cannot compile goes to the next one, and a line on stderr says so; an explicit one has no next.

The stamp holds sources, flags, compiler, the object's hash, and the names, offsets and types of each kernel's arguments, which
a separate pass reads from debug information. A fresh object is not rebuilt: it has the same sources and flags, whichever
compiler built it, unless $VLLM_ROCM_OPS_CLANG names another one. $VLLM_ROCM_OPS_DEBUG=1 enables debug builds, like --debug.
$VLLM_ROCM_OPS_ARCHS, a comma list, selects architectures, like --arch; by default AMD's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import debug_info

CSRC = Path(__file__).resolve().parent
CODE = CSRC.parent / "vllm_rocm_ops" / "code"
ARCHS = tuple(sorted(path.stem for path in CODE.parent.glob("core/archs/[!_]*.py")))
RELEASE = "release.json"  # in CODE, only where csrc/wheels.py builds: its objects' hashes
ROCM = "/opt/rocm"

# Both ROCm 6 and ROCm 7 load version 5. An object without xnack or sramecc settings runs with any.
CODE_OBJECT_VERSION = "-mcode-object-version=5"
# Preloads a kernel's first arguments, except structures, into SGPRs: two hold the arguments' address, 14 are left. Such a kernel
# begins with 256 bytes that load them; firmware that has preloaded them skips these. Not on gfx950, whose firmware starts single
# waves with stale values after a storm of page faults, until a reboot (ROCm/rocm-systems#10145, #10146).
PRELOAD_ARGUMENTS = {"gfx942": ("-mllvm", "-amdgpu-kernarg-preload-count=16")}
# LLVM IR with debug information; the compile step has already printed the warnings.
DESCRIBE = ("-S", "-emit-llvm", "-w", "-Xclang", "-debug-info-kind=standalone", "-Xclang", "-disable-llvm-passes")
PROBE = """
#if __clang_major__ < 20
#error "clang 20 or later is required: the first to support gfx950 fully"
#endif
extern "C" __attribute__((global)) void probe() {}
"""


class BuildError(RuntimeError):
    """A failed compile, or a missing compiler; the text is all a user needs to see."""


@dataclass(frozen=True)
class Flags:
    """Compiler flags: source to bitcode (PTX on NVIDIA), bitcode or assembler to object, object to ELF, description."""

    compile: tuple[str, ...]
    describe: tuple[str, ...] = DESCRIBE
    lower: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


def is_amd(arch: str) -> bool:
    """True if an arch is AMD's."""
    return arch.startswith("gfx")


def suffix(arch: str) -> str:
    """Return a code object's suffix: ELF for AMD, PTX text for NVIDIA."""
    return ".co" if is_amd(arch) else ".ptx"


def flags(arch: str, debug: bool) -> Flags:
    """Return the flags that determine an object; paths are not among them."""
    optimize = (
        ("-O1", "-g", "-fdebug-compilation-dir=.", "-mllvm", "-disable-promote-alloca-to-lds") if debug else ("-O3",)
    )
    # -nostdinc: no system headers
    source = (*optimize, "-std=c++20", "-nostdinc", "-I.", "-Wall", "-Wextra", "--cuda-device-only")
    source += ("-DVLLM_ROCM_OPS_DEBUG=1",) if debug else ()
    if not is_amd(arch):
        nvidia = (f"--cuda-gpu-arch={arch}a", "--cuda-feature=+ptx87", "-nocudainc", "-nocudalib")
        return Flags(compile=(*source, "-x", "cuda", *nvidia, "-Wno-unknown-cuda-version", "-S"))
    amd = (f"--offload-arch={arch}", "-nogpuinc", "-nogpulib", CODE_OBJECT_VERSION, "-fuse-cuid=none")
    return Flags(
        compile=(*source, "-x", "hip", *amd, "--no-gpu-bundle-output", "-emit-llvm", "-c"),
        lower=(
            *optimize,
            "-Wno-unused-command-line-argument",
            "--target=amdgcn-amd-amdhsa",
            f"-mcpu={arch}",
            "-nogpulib",
            CODE_OBJECT_VERSION,
            *PRELOAD_ARGUMENTS.get(arch, ()),
            "-c",
        ),
        link=("-shared",),
    )


# Compilers


@dataclass(frozen=True)
class Compiler:
    """A clang and its ld.lld."""

    name: str
    clang: tuple[str, ...]
    linker: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return f"{self.name}: {self.version}"

    @staticmethod
    @functools.cache
    def from_command(command: tuple[str, ...]) -> Compiler:
        """Return `command`'s clang, with its ld.lld or else ziglang's. OSError if it does not start."""

        def ask(flag: str) -> str:
            result = subprocess.run([*command, flag], check=False, capture_output=True, text=True)
            if result.returncode:
                raise OSError(f"{shlex.join([*command, flag])}: {(result.stderr or result.stdout).strip()}")
            return result.stdout.partition("\n")[0].strip()

        linker = ask("-print-prog-name=ld.lld")
        linker_command = (linker,) if os.path.isabs(linker) else (*zig(), "ld.lld")
        return Compiler(Path(command[0]).name, command, linker_command, ask("--version"))


def zig() -> tuple[str, ...]:
    """Return ziglang's zig binary, or nothing."""
    spec = importlib.util.find_spec("ziglang")
    return (str(Path(spec.submodule_search_locations[0], "zig")),) if spec else ()


def explicit_compiler() -> Compiler | None:
    """Return $VLLM_ROCM_OPS_CLANG's compiler."""
    command = tuple(shlex.split(os.environ.get("VLLM_ROCM_OPS_CLANG", "")))
    try:
        return Compiler.from_command(command) if command else None
    except OSError as error:
        raise BuildError(f"VLLM_ROCM_OPS_CLANG must be a clang, got {shlex.join(command)}\n{error}") from error


def clang_paths() -> Iterator[str]:
    """Yield ROCm's and the system's clangs, untested, best first."""
    for rocm in filter(None, (os.environ.get("ROCM_PATH"), ROCM)):
        yield from (f"{rocm}/llvm/bin/clang", f"{rocm}/lib/llvm/bin/clang")
    found = []
    for folder in dict.fromkeys(map(os.path.realpath, filter(None, os.get_exec_path()))):
        with contextlib.suppress(OSError):  # $PATH may name missing or unreadable folders
            found += [f"{folder}/{name}" for name in os.listdir(folder) if re.fullmatch(r"clang(-\d+)?", name)]
    # Stable: $PATH order within each version, and among unversioned ones.
    yield from sorted(found, key=lambda path: -int(path.rpartition("clang")[2].removeprefix("-") or sys.maxsize))


def candidates() -> Iterator[Compiler]:
    """Yield the compilers to try without an explicit one."""
    if zig():
        clang = Compiler.from_command((*zig(), "clang"))
        yield Compiler(f"ziglang {importlib.metadata.version('ziglang')}", clang.clang, clang.linker, clang.version)
    for path in dict.fromkeys(clang_paths()):
        if os.access(path, os.X_OK):
            try:
                yield Compiler.from_command((path,))
            except OSError:
                continue  # a wrapper whose compiler is gone


@functools.cache
def probe(compiler: Compiler, arch: str) -> str:
    """Compile an empty kernel. Return "" on success, else the compiler's message."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.hip")
        source.write_text(PROBE)
        try:
            run_steps(compiler, source, arch, source.with_suffix(suffix(arch)))
        except BuildError as error:
            return str(error)
    return ""


def compilers(arch: str) -> Iterator[Compiler]:
    """Yield the compilers that compile a kernel for `arch`, best first: at least one, and only an explicit one if it does."""
    failures, works = [], False
    if explicit := explicit_compiler():
        if not (message := probe(explicit, arch)):
            yield explicit
            return
        if is_amd(arch):
            raise BuildError(f"VLLM_ROCM_OPS_CLANG must compile for {arch}, got {explicit}\n{message}")
        failures.append(f"{explicit}\n{message}")
    for compiler in candidates():
        if message := probe(compiler, arch):
            failures.append(f"{compiler}\n{message}")
        else:
            works = True
            yield compiler
    if not works:
        tried = "\n".join(failures) or "there is none"
        raise BuildError(f"{arch}: no clang that compiles for it (`pip install ziglang` brings one). Tried:\n{tried}")


def find_compiler(arch: str) -> Compiler:
    """Return the first of `compilers`."""
    return next(compilers(arch))


# Compiling


def run(command: Sequence[str | Path], output: Path, source: Path, arch: str) -> None:
    """Run one step in csrc/, so that paths, and with them its output, are reproducible. Warnings pass through."""
    result = subprocess.run([*command, "-o", output], check=False, cwd=CSRC, capture_output=True, text=True)
    if result.returncode:
        shown = f"cd {CSRC} && {shlex.join(map(str, command))} -o /dev/null"
        raise BuildError(f"{source} does not compile for {arch}:\n{shown}\n{result.stderr}{result.stdout}")
    sys.stderr.write(result.stderr)


def run_steps(
    compiler: Compiler, source: Path, arch: str, output: Path, defines: Iterable[str] = (), debug: bool = False
) -> None:
    """Compile a source in three steps that every clang supports. ziglang's driver cannot start the linker."""
    step = flags(arch, debug)
    compile = [*compiler.clang, *step.compile, *(f"-D{define}" for define in defines), source]
    if not is_amd(arch):
        run(compile, output, source, arch)
        return
    bitcode, relocatable = output.with_suffix(".bc"), output.with_suffix(".o")
    lower = [*step.lower, "-x", "assembler", source]
    if source.suffix != ".s":
        run(compile, bitcode, source, arch)
        lower = [*step.lower, "-x", "ir", bitcode]
    run([*compiler.clang, *lower], relocatable, source, arch)
    run([*compiler.linker, *step.link, relocatable], output, source, arch)


def compile_source(
    source_path: Path | str, arch: str, output_path: Path | str, defines: Iterable[str] = (), debug: bool = False
) -> Compiler:
    """Compile a HIP source, or AMD assembler text (.s), to `output_path`, which a BuildError leaves untouched.

    Returns the compiler. If all fail, the first one's error is raised.
    """
    source, output = Path(source_path), Path(output_path).absolute()
    source = source.relative_to(CSRC) if source.is_relative_to(CSRC) else source.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    failures: dict[Compiler, BuildError] = {}
    for compiler in compilers(arch):
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".") as folder:
            unfinished = Path(folder, output.name)
            try:
                run_steps(compiler, source, arch, unfinished, defines, debug)
            except BuildError as error:
                failures[compiler] = error
                continue
            for failed, error in failures.items():
                print(f"{error}\nwith {failed}; {compiler} compiles it", file=sys.stderr, flush=True)
            unfinished.replace(output)
            return compiler
    first, *others = failures
    raise BuildError("\n".join([str(failures[first]), *(f"nor with {other}" for other in others)]))


def describe_kernels(compiler: Compiler, stem: str, arch: str, debug: bool, folder: Path) -> dict[str, dict]:
    """Return the arguments of an op's kernels."""
    step, source, ir = flags(arch, debug), sources()[stem].relative_to(CSRC), folder / f"{stem}.ll"
    run([*compiler.clang, *step.compile, *step.describe, source], ir, source, arch)
    found = debug_info.DebugInfo(ir.read_text())
    try:
        return {kernel: found.arguments(kernel) for kernel in sorted(found.kernels)}
    except ValueError as error:
        raise BuildError(f"{source}: {error}") from None


# Stamps


def sources_hash(stem: str) -> str:
    """Return the sha256 over the op's file and the headers that it includes."""
    digest = hashlib.sha256()
    for path in (sources()[stem], *sorted(headers_of(sources()[stem]))):
        digest.update(f"{path.relative_to(CSRC).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def headers_of(source: Path) -> set[Path]:
    """Return the headers that a file includes, and those that they include: of all archs, and all of the same name."""
    named, found, files = {}, set(), [source]
    for header in CSRC.glob("**/*.h"):
        named.setdefault(header.name, []).append(header)
    while files:
        for name in re.findall(r'#include "([^"]+)"', files.pop().read_text()):
            new = set(named.get(Path(name).name, ())) - found
            found |= new
            files += new
    return found


def wanted_stamp(stem: str, arch: str, debug: bool) -> dict:
    """Return a fresh object's stamp; with the compiler only if one is requested by name."""
    step = flags(arch, debug)
    stamp = {"sources": sources_hash(stem), "arch": arch, "debug": debug}
    stamp["flags"] = [*step.compile, *step.lower, *step.link, *step.describe]
    if explicit_compiler():
        stamp["compiler"] = str(find_compiler(arch))
    return stamp


def hash_of(code_object: Path) -> dict[str, str]:
    """Return the stamp's hash of the object, checked before loading."""
    return {"sha256": hashlib.sha256(code_object.read_bytes()).hexdigest()}


def is_fresh(code_object: Path, stamp: dict) -> bool:
    """Check that the object exists, and that its stamp contains `stamp` and its hash."""
    try:
        found = json.loads(code_object.with_suffix(".json").read_text())
        return (stamp | hash_of(code_object)).items() <= found.items()
    except (OSError, ValueError):
        return False


# Building


def wanted_archs() -> list[str]:
    """Return $VLLM_ROCM_OPS_ARCHS, by default AMD's."""
    return (os.environ.get("VLLM_ROCM_OPS_ARCHS") or ",".join(filter(is_amd, ARCHS))).split(",")


def sources() -> dict[str, Path]:
    """Return every op's file by its stem."""
    return {path.stem: path for path in sorted(CSRC.glob("ops/**/*.hip"), key=lambda path: path.stem)}


def make(stem: str, arch: str, output: Path, prebuilt: Path, debug: bool, force: bool) -> Path:
    """Keep output/<arch>/<stem> if fresh, else copy a fresh one from `prebuilt`, or compile it."""
    name = f"{arch}/{stem}{suffix(arch)}"
    code_object, stamp = output / name, wanted_stamp(stem, arch, debug)
    if is_fresh(code_object, stamp) and not force:
        return code_object
    code_object.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=code_object.parent, prefix=".") as folder:
        unfinished = Path(folder, code_object.name)
        if is_fresh(prebuilt / name, stamp) and not force:
            for extension in (code_object.suffix, ".json"):
                shutil.copyfile((prebuilt / name).with_suffix(extension), unfinished.with_suffix(extension))
        else:
            compiler = compile_source(sources()[stem], arch, unfinished, debug=debug)
            stamp = stamp | {"compiler": str(compiler)} | hash_of(unfinished)
            stamp["kernels"] = describe_kernels(compiler, stem, arch, debug, Path(folder))
            unfinished.with_suffix(".json").write_text(json.dumps(stamp) + "\n")
            print(f"{name}  {compiler}", flush=True)
        # In this order no object ever has another object's stamp.
        code_object.with_suffix(".json").unlink(missing_ok=True)
        unfinished.replace(code_object)
        unfinished.with_suffix(".json").replace(code_object.with_suffix(".json"))
    return code_object


def remove_orphans(output: Path) -> None:
    """Remove objects of deleted ops."""
    for arch in ARCHS:
        for path in (output / arch).glob("*.*"):
            if path.is_file() and path.stem not in sources():
                path.unlink()


def build(
    names: Sequence[str] = (),
    archs: Sequence[str] = (),
    output: Path = CODE,
    prebuilt: Path = CODE,
    debug: bool | None = None,
    force: bool = False,
) -> list[Path]:
    """Update the code objects of the ops `names` (default: all) in `output`, in parallel."""
    archs = archs or wanted_archs()
    for what, given, known in (("stem", names, sources()), ("arch", archs, ARCHS)):
        if unknown := set(given) - set(known):
            raise BuildError(f"{what} must be one of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if debug is None:
        debug = os.environ.get("VLLM_ROCM_OPS_DEBUG", "0") not in ("", "0")
    if not names:
        remove_orphans(output)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [
            pool.submit(make, stem, arch, output, prebuilt, debug, force)
            for stem in names or sources()
            for arch in archs
        ]
    errors = [job.exception() for job in jobs]
    if all(error is None or isinstance(error, BuildError) for error in errors) and any(errors):
        raise BuildError("\n".join(dict.fromkeys(str(error) for error in errors if error)))
    return [job.result() for job in jobs]


def main() -> None:
    """Compile the kernels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", nargs="*", help="file stem in csrc/ops; default: all")
    parser.add_argument("--arch", type=lambda text: text.split(","), default=(), help="comma list; default: AMD's")
    parser.add_argument("--debug", action="store_true", default=None, help="-O1 -g, and the kernels' assertions")
    parser.add_argument("--force", action="store_true", help="rebuild fresh objects, too")
    arguments = parser.parse_args()
    try:
        build(arguments.stem, arguments.arch, debug=arguments.debug, force=arguments.force)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
