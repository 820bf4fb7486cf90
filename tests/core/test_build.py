"""Test the build: its compiler, outputs, rebuilds, and the state after a failure."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from load_build import load_build
from marks import full

from vllm_rocm_ops.core import envs, launch
from vllm_rocm_ops.core.archs import ARCHS
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.tools import doctor

ROOT = Path(__file__).resolve().parents[2]
IN_TREE = "gfx942", "gfx950", "sm_90"
KERNEL = """
#include "device/value.h"
extern "C" __attribute__((global)) void add(float* p) { p[0] += VALUE; }
#if VLLM_ROCM_OPS_DEBUG
extern "C" __attribute__((global)) void debug_only() {}
#endif
"""


def make_tree(root: Path):
    """Return a source tree with one op, and its build module."""
    headers = {"device/value.h": '#include "gemm/loop.h"\n#define VALUE 1.0f\n', "gemm/loop.h": "", "gemm/other.h": ""}
    for name, text in ({"ops/add.hip": KERNEL} | headers).items():
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("csrc/build.py", "csrc/debug_info.py", *(f"vllm_rocm_ops/core/archs/{arch}.py" for arch in IN_TREE)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return load_build(root / "csrc")


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return the build module of a new tree that uses ziglang, whatever compilers this machine has, and builds for all archs."""
    for name in ("VLLM_ROCM_OPS_CLANG", "VLLM_ROCM_OPS_DEBUG", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_ROCM_OPS_ARCHS", ",".join(IN_TREE))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    module = make_tree(tmp_path / "tree")
    monkeypatch.setattr(module, "ROCM", str(tmp_path / "absent"))
    return module


def wrapper(path: Path, version: str, build, extra: str = "") -> Path:
    """Write a clang that reports `version`, a wrapper around ziglang's.

    It runs the shell text `extra` first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    zig = build.zig()[0]
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\n{extra}\nexec {zig} clang "$@"\n')
    path.chmod(0o755)
    return path


def files(build) -> set[str]:
    return {str(path.relative_to(build.CODE)) for path in build.CODE.rglob("*") if path.is_file()}


def stamp_of(path: Path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


def times(paths) -> list[int]:
    return [path.stat().st_mtime_ns for path in paths]


ARGUMENTS = """
#include "device/value.h"
typedef unsigned int u32;
enum Kind : int { kOne };
namespace outer {
struct Divisor { u32 inverse; int shift; };
}
struct Base { float* out; FIELDS };
struct Problem : Base {
  static constexpr int kRows = 4;
  outer::Divisor divisor;
  const volatile long stride;
  Kind kind;
  struct { unsigned char small; double wide; } inner;
};
template <class T> struct Pair { T first, second; };
extern "C" __attribute__((global)) void store(Problem problem, int scale, Pair<long> pair) {
  problem.out[0] = VALUE * scale * (100 * problem.rows + problem.columns) + pair.first;
}
template <class T> __attribute__((device)) void helper(T* not_an_argument) { *not_an_argument = T(1); }
extern "C" __attribute__((global)) void scalars(const int* restricted, float epsilon, short count, char) {
  helper((int*)restricted + count + int(epsilon));
}
"""
STORES = {"problem.out": [0, "pointer"], "problem.rows": [8, "i32"], "problem.columns": [12, "i32"]}
STORES |= {"problem.divisor.inverse": [16, "u32"], "problem.divisor.shift": [20, "i32"], "problem.stride": [24, "i64"]}
STORES |= {"problem.kind": [32, "i32"], "problem.inner.small": [40, "u8"], "problem.inner.wide": [48, "f64"]}
STORES |= {"scale": [56, "i32"], "pair.first": [64, "i64"], "pair.second": [72, "i64"]}


def described(build, arch: str, debug: bool = False) -> dict:
    """Return the arguments of the kernels of the tree's op."""
    (path,) = build.build(archs=[arch], debug=debug)
    return stamp_of(path)["kernels"]


@pytest.mark.parametrize("debug", [False, True])
def test_a_stamp_has_names_offsets_and_types_of_arguments(build, debug):
    """A stamp describes structures, their nested structures and typedefs, for each order of the fields."""
    source = build.CSRC / "ops/add.hip"
    scalars = {"restricted": [0, "pointer"], "epsilon": [8, "f32"], "count": [12, "i16"], "4": [14, "i8"]}
    for fields in ("int rows, columns;", "int columns, rows;"):
        source.write_text(ARGUMENTS.replace("FIELDS", fields))
        wanted = dict(STORES)
        if fields != "int rows, columns;":
            wanted |= {"problem.rows": [12, "i32"], "problem.columns": [8, "i32"]}
        for arch in build.ARCHS:
            assert described(build, arch, debug) == {
                "scalars": {"bytes": 15, "arguments": scalars},
                "store": {"bytes": 80, "arguments": wanted},
            }


def test_swapped_fields_are_filled_by_name(build):
    """With the same plan and another order in the structure, each field still gets its value."""
    for fields in ("int rows, columns;", "int columns, rows;", "int columns, more, rows;"):
        (build.CSRC / "ops/add.hip").write_text(ARGUMENTS.replace("FIELDS", fields))
        (path,) = build.build(archs=["gfx942"])
        out = torch.zeros(1)
        names = stamp_of(path)["kernels"]["store"]["arguments"]
        args = {name: 0.0 if kind == "f64" else 0 for name, (_, kind) in names.items()}
        args |= {"problem.out": out, "problem.rows": 3, "problem.columns": 7, "scale": 2, "pair.first": 1}
        Emulator("gfx942").run(path, launch.Launch("", "store", (1, 1, 1), (1, 1, 1), args), (out,))
        assert out == 2 * 307 + 1


@pytest.mark.parametrize(
    "field, got", [("int rows[4]; int columns;", "array_type"), ("union { int rows; float columns; };", "union_type")]
)
def test_an_argument_that_no_launch_can_pass_is_refused(build, field, got):
    kernel = 'extern "C" __attribute__((global)) void store(P p) { p.out[0] = 0; }'
    (build.CSRC / "ops/add.hip").write_text(f"struct P {{ float* out; {field} }};\n{kernel}\n")
    with pytest.raises(
        build.BuildError, match=f"ops/add.hip: p.* must be a number, a pointer or a structure of such, got {got}"
    ):
        build.build(archs=["gfx942"])
    assert not files(build)


@pytest.mark.parametrize(("arch", "machine"), [("gfx942", 0x4C), ("gfx950", 0x4F)])
def test_amd_object_is_what_rocm_6_and_7_load(build, tmp_path, arch, machine):
    compiler = build.compile_source(build.CSRC / "ops/add.hip", arch, tmp_path / "add.co")
    elf = (tmp_path / "add.co").read_bytes()
    kind, elf_machine, flags = *struct.unpack_from("<HH", elf, 16), struct.unpack_from("<I", elf, 48)[0]
    assert elf[:4] == b"\x7fELF" and elf[7] == 64, "OS ABI is AMD HSA"
    assert elf[8] == 3, "ABI version 3 is code object version 5"
    assert (kind, elf_machine) == (3, 224), "a linked (ET_DYN) AMDGPU object"
    assert flags == 0x500 | machine, "any xnack, any sramecc"
    assert b"\0add\0" in elf and b"\0add.kd\0" in elf and b"debug_only" not in elf
    assert compiler.name.startswith("ziglang")


def test_nvidia_object_is_ptx(build, tmp_path):
    build.compile_source(build.CSRC / "ops/add.hip", "sm_90", tmp_path / "add.ptx")
    ptx = (tmp_path / "add.ptx").read_text()
    assert ".version 8.7" in ptx and ".target sm_90a\n" in ptx and ".visible .entry add(" in ptx


def test_compile_source_takes_defines_debug_and_assembler(build, tmp_path):
    source = tmp_path / "kernel.hip"
    source.write_text('extern "C" __attribute__((global)) void NAME() {}\n')
    build.compile_source(source, "gfx942", tmp_path / "define.co", defines=["NAME=named_so"])
    assert b"named_so.kd" in (tmp_path / "define.co").read_bytes()
    build.compile_source(build.CSRC / "ops/add.hip", "gfx942", tmp_path / "debug.co", debug=True)
    elf = (tmp_path / "debug.co").read_bytes()
    assert b"debug_only.kd" in elf and b".debug_line" in elf and str(tmp_path).encode() not in elf
    text = tmp_path / "text.s"
    text.write_text(".text\n.globl start\nstart:\n  v_mov_b32 v0, 1000\n  s_endpgm\n")
    build.compile_source(text, "gfx950", tmp_path / "text.co")
    assert struct.pack("<II", 0x7E0002FF, 1000) in (tmp_path / "text.co").read_bytes()


def test_the_same_source_gives_the_same_bytes_anywhere(build, tmp_path):
    other = make_tree(tmp_path / "elsewhere")
    other.ROCM = build.ROCM
    for mine, theirs in zip(build.build(), other.build(), strict=True):
        assert mine.read_bytes() == theirs.read_bytes()
        assert mine.with_suffix(".json").read_text() == theirs.with_suffix(".json").read_text()


def test_by_default_archs_of_amd_are_built(build, monkeypatch):
    """Users of AMD's GPUs need no others, and theirs take a third of the time."""
    monkeypatch.delenv("VLLM_ROCM_OPS_ARCHS")
    default = envs.VARIABLES["VLLM_ROCM_OPS_ARCHS"].default
    assert ",".join(build.wanted_archs()) == ",".join(filter(build.is_amd, build.ARCHS)) == default
    assert build.wanted_archs() == [name for name, arch in ARCHS.items() if arch.vendor == "amd"]


def test_builds_every_file_for_every_arch_with_a_stamp(build):
    paths = build.build()
    assert files(build) == {
        f"{arch}/add{suffix}"
        for arch, code in (("gfx942", ".co"), ("gfx950", ".co"), ("sm_90", ".ptx"))
        for suffix in (code, ".json")
    }
    stamp = stamp_of(paths[0])
    assert set(stamp) == {"sources", "flags", "arch", "compiler", "debug", "sha256", "kernels"}
    for path in paths:
        kernels = stamp_of(path)["kernels"]
        assert kernels == {"add": {"bytes": 8, "arguments": {"p": [0, "pointer"]}}}
    assert (stamp["arch"], stamp["debug"]) == ("gfx942", False)
    assert stamp["compiler"].startswith("ziglang ") and "clang version" in stamp["compiler"]
    assert "-O3" in stamp["flags"] and "-mcode-object-version=5" in stamp["flags"]


def test_builds_again_only_what_changed(build):
    paths = build.build()
    before = times(paths)
    assert times(build.build()) == before
    build.build(archs=["gfx942"], force=True)
    forced = times(paths)
    assert [a != b for a, b in zip(forced, before, strict=True)] == [True, False, False]
    for changed in ("ops/add.hip", "device/value.h", "gemm/loop.h"):
        before = times(paths)
        with (build.CSRC / changed).open("a") as file:
            file.write("// changed\n")
        assert all(a != b for a, b in zip(times(build.build()), before, strict=True)), changed
    before = times(paths)
    (build.CSRC / "gemm/other.h").write_text("// included by nobody\n")
    assert times(build.build()) == before
    assert all(a != b for a, b in zip(times(build.build(debug=True)), before, strict=True))
    assert "debug_only" in paths[2].read_text()
    paths[0].unlink()
    build.build(debug=True)
    assert paths[0].exists()


def test_a_damaged_object_is_not_loaded_and_is_built_again(build, monkeypatch):
    monkeypatch.setattr(launch, "CODE", build.CODE)
    (path,) = build.build(archs=["gfx942"])
    whole = path.read_bytes()
    assert launch.built("add", "gfx942") == path
    path.write_bytes(whole[:-64])
    with pytest.raises(RuntimeError, match=f"the code object of add for gfx942 is damaged: {path}"):
        launch.built("add", "gfx942")
    build.build(archs=["gfx942"])
    assert path.read_bytes() == whole and launch.built("add", "gfx942") == path


def test_code_of_a_release_is_told_from_code_built_here(build, monkeypatch):
    """It has the hashes that came with the wheel, all of them. A file of hashes alone makes no release."""
    monkeypatch.setattr(launch, "CODE", build.CODE)
    assert launch.origin("gfx942") == "none"
    (build.CSRC / "ops/good.hip").write_text(KERNEL)
    add, good = build.build(archs=["gfx942"])
    compiler = stamp_of(add)["compiler"]
    assert launch.origin("gfx942") == f"built here by {compiler}"
    hashes = {path.stem: build.hash_of(path)["sha256"] for path in (add, good)}
    (build.CODE / build.RELEASE).write_text(json.dumps({"version": "0.1.0", "objects": {"gfx942": hashes}}))
    assert launch.origin("gfx942") == "release 0.1.0"
    vllm = {"version": "1", "plugin": True, "why_off": "", "seams": []}
    monkeypatch.setattr(doctor, "find_vllm", lambda: vllm)
    assert doctor.text(doctor.find(), verbose=True).count("add, good  release 0.1.0\n") == 1
    build.build(["good"], archs=["gfx942"], debug=True)
    assert launch.origin("gfx942") == f"built here by {compiler}, debug"
    build.build(["add"], archs=["gfx950"])
    assert launch.origin("gfx950") == f"built here by {compiler}"


def test_environment_chooses_debug_and_archs(build, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_DEBUG", "1")
    monkeypatch.setenv("VLLM_ROCM_OPS_ARCHS", "sm_90")
    (path,) = build.build()
    assert stamp_of(path)["debug"] is True
    assert files(build) == {"sm_90/add.ptx", "sm_90/add.json"}
    monkeypatch.setenv("VLLM_ROCM_OPS_ARCHS", "gfx90a")
    with pytest.raises(build.BuildError, match="arch must be one of gfx942, gfx950, sm_90, got gfx90a"):
        build.build()


def test_objects_built_elsewhere_are_used_as_they_are(build, tmp_path, monkeypatch):
    paths = build.build()
    for path in paths:
        path.write_bytes(b"made elsewhere")
        stamp = stamp_of(path) | build.hash_of(path)
        path.with_suffix(".json").write_text(json.dumps(stamp | {"compiler": "another: clang version 23.0.0"}))
    monkeypatch.setattr(build, "compilers", lambda arch: pytest.fail(f"compiled for {arch}"))
    copies = build.build(output=tmp_path / "wheel")
    assert [path.read_bytes() for path in (*build.build(), *copies)] == [b"made elsewhere"] * 6
    assert "another: clang" in copies[0].with_suffix(".json").read_text()


def test_a_compiler_asked_for_by_name_compiles_again(build, tmp_path, monkeypatch):
    build.build()
    clang = wrapper(tmp_path / "my-clang", "clang version 99", build)
    monkeypatch.setenv("VLLM_ROCM_OPS_CLANG", str(clang))
    paths = build.build()
    assert {stamp_of(path)["compiler"] for path in paths} == {"my-clang: clang version 99"}
    before = times(paths)
    assert times(build.build()) == before


def test_a_failing_compile_says_all_and_leaves_nothing(build):
    paths = build.build()
    before = [path.read_bytes() for path in paths]
    (build.CSRC / "ops/add.hip").write_text("#ifdef __NVPTX__\nint works;\n#else\nint x = nonsense;\n#endif\n")
    (build.CSRC / "ops/good.hip").write_text(KERNEL)
    with pytest.raises(build.BuildError) as error:
        build.build()
    text = str(error.value)
    for arch in ("gfx942", "gfx950"):
        assert f"ops/add.hip does not compile for {arch}:\ncd {build.CSRC} && " in text
    assert "ops/add.hip:4:9: error: use of undeclared identifier 'nonsense'" in text
    assert "--offload-arch=gfx942" in text and "-c ops/add.hip -o /dev/null\n" in text and "sm_90" not in text
    assert [path.read_bytes() for path in paths[:2]] == before[:2], "the old objects and their stamps stay together"
    assert not build.is_fresh(paths[0], build.wanted_stamp("add", "gfx942", False))
    assert build.is_fresh(paths[2], build.wanted_stamp("add", "sm_90", False))
    assert files(build) == {
        f"{arch}/{stem}{end}"
        for arch in build.ARCHS
        for stem in ("add", "good")
        for end in (build.suffix(arch), ".json")
    }
    assert not list(build.CODE.glob("*/.*"))


def test_a_failing_compile_into_an_empty_folder_leaves_it_empty(build, tmp_path):
    (build.CSRC / "ops/add.hip").write_text("nonsense")
    with pytest.raises(build.BuildError):
        build.compile_source(build.CSRC / "ops/add.hip", "gfx942", tmp_path / "empty" / "add.co")
    assert not list((tmp_path / "empty").iterdir())


def test_objects_of_ops_that_are_gone_go_too(build):
    build.build()
    (build.CSRC / "ops/add.hip").rename(build.CSRC / "ops/plus.hip")
    build.build()
    assert {Path(name).stem for name in files(build)} == {"plus"}
    with pytest.raises(build.BuildError, match="stem must be one of plus, got add"):
        build.build(["add"])


def test_the_compilers_are_tried_in_order(build, tmp_path, monkeypatch):
    """Each compiler is used only for archs that it can compile for.

    An explicit one is the only one. Without it ziglang comes first, then ROCm's and the system's newest.
    """
    no_nvidia = 'case "$*" in *"-x cuda"*) echo no nvptx >&2; exit 1;; esac'
    too_old = 'set -- "$@" -Wno-builtin-macro-redefined -U__clang_major__ -D__clang_major__=17'
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{tmp_path}/absent:{tmp_path}/tree/csrc/build.py::{folder}")  # some are not folders
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))

    def found() -> list[list[str]]:
        return [[compiler.version for compiler in build.compilers(arch)] for arch in build.ARCHS]

    zig = build.Compiler.from_command((*build.zig(), "clang")).version
    assert found() == [[zig]] * 3
    wrapper(folder / "clang", "old", build, too_old)
    assert found() == [[zig]] * 3
    for version in (9, 21, 20):
        wrapper(folder / f"clang-{version}", f"clang {version}", build)
    system = ["clang 21", "clang 20", "clang 9"]
    assert found() == [[zig, *system]] * 3
    wrapper(tmp_path / "rocm/lib/llvm/bin/clang", "ROCm", build, no_nvidia)
    assert found() == [[zig, "ROCm", *system], [zig, "ROCm", *system], [zig, *system]]
    monkeypatch.setenv("VLLM_ROCM_OPS_CLANG", str(wrapper(tmp_path / "mine", "mine", build, no_nvidia)))
    assert found() == [["mine"], ["mine"], [zig, *system]]
    monkeypatch.delenv("VLLM_ROCM_OPS_CLANG")
    monkeypatch.setattr(build, "zig", tuple)
    assert found()[0] == ["ROCm", *system]


def test_rocms_clang_builds_only_by_name(build, tmp_path, monkeypatch):
    """The code objects of an install are the tested ones also where ROCm's clang is there, as in vLLM's image."""
    rocm = wrapper(tmp_path / "rocm/llvm/bin/clang", "clang version 22.0.0git", build)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setenv("PATH", str(rocm.parent))
    (path,) = build.build(archs=["gfx942"])
    assert stamp_of(path)["compiler"].startswith("ziglang ")
    monkeypatch.setenv("VLLM_ROCM_OPS_CLANG", str(rocm))
    build.build(archs=["gfx942"])
    assert stamp_of(path)["compiler"] == "clang: clang version 22.0.0git"


def test_a_file_that_one_compiler_refuses_goes_to_the_next(build, tmp_path, monkeypatch, capfd):
    """An explicit compiler has no next, and a file that none compiles has the first one's error."""
    refuses = wrapper(
        tmp_path / "first", "first", build, 'case "$*" in *ops/add*) echo "first is broken" >&2; exit 1;; esac'
    )
    second = wrapper(tmp_path / "second", "second", build)
    paths = [build.Compiler.from_command((str(path),)) for path in (refuses, second)]
    monkeypatch.setattr(build, "candidates", lambda: iter(paths))
    (build.CSRC / "ops/good.hip").write_text(KERNEL)
    add, good = build.build(archs=["gfx942"])
    stamps = [stamp_of(path)["compiler"] for path in (add, good)]
    assert stamps == ["second: second", "first: first"]
    said = capfd.readouterr().err
    assert "ops/add.hip does not compile for gfx942" in said and "first is broken" in said
    assert "with first: first; second: second compiles it" in said
    (build.CSRC / "ops/add.hip").write_text("nonsense")
    with pytest.raises(build.BuildError, match="(?s)first is broken.*\nnor with second: second"):
        build.build(archs=["gfx942"])
    (build.CSRC / "ops/add.hip").write_text(KERNEL)
    monkeypatch.setenv("VLLM_ROCM_OPS_CLANG", str(refuses))
    with pytest.raises(build.BuildError, match="first is broken") as error:
        build.build(["add"], archs=["gfx942"], force=True)
    assert "second" not in str(error.value)


def test_a_compiler_asked_for_by_name_must_work(build, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_CLANG", str(tmp_path / "absent"))
    with pytest.raises(build.BuildError, match="VLLM_ROCM_OPS_CLANG must be a clang, got .*absent"):
        build.build()
    broken = wrapper(tmp_path / "broken", "clang version 99", build, "[ $# -gt 1 ] && echo broken >&2 && exit 1")
    monkeypatch.setenv("VLLM_ROCM_OPS_CLANG", str(broken))
    with pytest.raises(build.BuildError, match="(?s)must compile for gfx942, got broken: clang version 99.*\nbroken"):
        build.build(archs=["gfx942"])


def test_without_any_compiler_the_message_names_all_tried(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "zig", tuple)
    with pytest.raises(
        build.BuildError, match="(?s)gfx942: no clang that compiles for it .*pip install ziglang.*there is none"
    ):
        build.find_compiler("gfx942")


def test_command_line(build):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(build.CSRC / "build.py"), *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    assert "gfx950/add.co  " in run("--arch", "gfx950", "add").stdout
    assert files(build) == {"gfx950/add.co", "gfx950/add.json"}
    assert run("--arch", "gfx950").stdout == ""
    (build.CSRC / "ops/add.hip").write_text("nonsense")
    failed = run("--arch", "gfx942")
    assert (
        failed.returncode == 1 and "does not compile for gfx942" in failed.stderr and "Traceback" not in failed.stderr
    )


def test_the_package_knows_the_same_archs():
    build = load_build(ROOT / "csrc")
    assert {name: build.suffix(name) for name in build.ARCHS} == {
        arch.name: arch.code_suffix for arch in ARCHS.values()
    }


def test_checkout_builds():
    module = load_build(ROOT / "csrc")
    paths = module.build()
    assert len(paths) == len(module.sources()) * len(module.wanted_archs()) > 0


STEMS = ("fused_experts_quantize", "silu_and_mul")


@full
@pytest.mark.slow
def test_sdist_and_wheel_in_a_clean_environment(tmp_path, monkeypatch):
    """The source distribution has all sources, and its wheel works without the checkout.

    The wheel is built of two ops, to save time.
    """
    sdist = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    checkout = shutil.copytree(
        ROOT, tmp_path / "checkout", ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "*.so")
    )
    subprocess.run([sys.executable, "-c", sdist], check=True, cwd=checkout, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".pyc"}
    assert "csrc/gemm/skinny.h" in sources and sources <= names
    assert not [name for name in names if name.endswith((".co", ".ptx", ".so"))]

    def run(*command: str | Path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    shutil.unpack_archive(archive, tmp_path)
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    for path in (source / "csrc/ops").rglob("*.hip"):
        if path.stem not in STEMS:
            path.unlink()
    monkeypatch.setenv("VLLM_ROCM_OPS_ARCHS", "gfx942")  # like the others, in less time
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    assert "linux" in wheel.name, "a platform wheel"

    run(sys.executable, "-m", "venv", tmp_path / "clean")
    python = tmp_path / "clean/bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    # torch and its dependencies come from this environment, as bare folders of a .pth, which bring no editable install.
    (site,) = (tmp_path / "clean/lib").glob("python*/site-packages")
    (site / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    output = run(
        python,
        "-c",
        """
import torch, vllm_rocm_ops
from importlib.metadata import distribution
from vllm_rocm_ops import _C
from vllm_rocm_ops.core import launch
print(vllm_rocm_ops.__file__)
print(torch.ops.vllm_rocm_ops.silu_and_mul(torch.ones(2, 64)).shape)
print(*sorted(str(path.relative_to(launch.CODE)) for path in launch.CODE.rglob("*.*")))
print(*(entry.value for entry in distribution("vllm-rocm-ops").entry_points))
print(_C.status())
print(*sorted(path.name for path in launch.CODE.parent.glob("docs/*")))
import vllm_rocm_ops.emulator
print(vllm_rocm_ops.emulator.__file__)
""",
    )
    package, shape, code, entries, status, docs, emulator = output.splitlines()
    assert Path(package) == site / "vllm_rocm_ops/__init__.py"
    assert Path(emulator) == site / "vllm_rocm_ops/emulator/__init__.py"
    assert shape == "torch.Size([2, 32])"
    assert docs.split() == sorted(path.name for path in ROOT.glob("vllm_rocm_ops/docs/*"))
    build = load_build(ROOT / "csrc")
    assert set(code.split()) == {
        f"{arch}/{stem}{end}"
        for arch in build.wanted_archs()
        for stem in STEMS
        for end in (build.suffix(arch), ".json")
    }
    assert entries == "vllm_rocm_ops.__main__:main vllm_rocm_ops.vllm:register"
    assert status
    explained = run(tmp_path / "clean/bin/vllm-rocm-ops", "explain", "--model", "deepseek-v3", "--tp", "8")
    assert "lm_head" in explained and "fallback" not in explained
    command = ["verify", "--emulate", "gfx942", "--op", "silu_and_mul", "--case", "bf16"]
    assert "1 cases on gfx942: all passed" in run(tmp_path / "clean/bin/vllm-rocm-ops", *command)
