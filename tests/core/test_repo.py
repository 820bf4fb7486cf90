"""Test the repository's rules."""

import ast
import contextlib
import functools
import graphlib
import io
import pathlib
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys

import prose
import pytest
from marks import BUILT
from pages import readme
from pages.measurements import in_git
from pages.op_pages import DOCS, GUIDES, supported_calls
from sources import FILES, ROOT, file_of_tests, source_files

from vllm_rocm_ops import collectives
from vllm_rocm_ops.collectives import flagged, launches
from vllm_rocm_ops.core import archs, envs, launch
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.ops.shared.decode import MAX_ROWS
from vllm_rocm_ops.tools import check, cli
from vllm_rocm_ops.tools.bench import tune
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import decoder, mla, mla_absorb, timing
from vllm_rocm_ops.vllm.graph import all_reduce_timing, compiled_ops
from vllm_rocm_ops.vllm.selection import comparison, kernel_selection, kernel_timing

LARGEST_FILE = 200_000
LARGEST_CODE = 20 * 1024
README_LINES, README_TABLES, README_ALL = 90, 3, 140  # written, and generated; lines of both
needs_git = pytest.mark.skipif(not in_git(), reason="git alone knows the order of a day's results, and what is tracked")


def files(*patterns: str) -> list[pathlib.Path]:
    """Return the source files that match patterns relative to the root."""
    return [path for path in FILES if any(path.relative_to(ROOT).match(pattern) for pattern in patterns)]


def under(folder: str, *suffixes: str) -> list[pathlib.Path]:
    return [path for path in FILES if path.is_relative_to(ROOT / folder) and path.suffix in suffixes]


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def code_strings(path: pathlib.Path) -> str:
    """Return a Python file's code, without comments and docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and node.body and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


# Vendors

VENDOR_TOKENS = {
    r"__builtin_amdgcn|__gfx\d|\bs_waitcnt\b": ("csrc/device/amd/", "csrc/gemm/skinny/amd/", "csrc/attention/amd/"),
    r"__nvvm_|__syncthreads|__nv_": ("csrc/device/nvidia/", "csrc/gemm/skinny/nvidia/", "csrc/attention/nvidia/"),
    # These choose the vendor's header.
    r"__AMDGCN__|__NVPTX__|__HIP|__CUDA": (
        "csrc/device/gpu.h",
        "csrc/device/flags.h",
        "csrc/device/four_bit.h",
        "csrc/device/mx_values.h",
        "csrc/device/tile_mma.h",
        "csrc/gemm/skinny/mx_weights.h",
        "csrc/gemm/skinny/packed_tile.h",
        "csrc/gemm/skinny/streamed_tile.h",
        "csrc/attention/operands.h",
    ),
    r"\b(gfx\d+|sm_\d+)\b": ("nowhere",),
}


@pytest.mark.parametrize("tokens", VENDOR_TOKENS)
def test_kernels_speak_of_vendors_only_in_their_folders(tokens):
    places = VENDOR_TOKENS[tokens]
    found = [
        f"{name(path)}: {match[0]}"
        for path in under("csrc", ".h", ".hip")
        if not name(path).startswith((*places, "csrc/runtime/"))
        for match in re.finditer(tokens, without_comments(path.read_text()))
    ]
    assert not found


def test_python_names_archs_only_in_their_registry():
    """A spec asks the Arch for its properties, never for its name."""
    pattern = rf"['\"].*?\b({'|'.join(archs.ARCHS)})\b"
    allowed = {
        *under("vllm_rocm_ops/core/archs", ".py"),
        *under("vllm_rocm_ops/emulator", ".py"),
    }  # of these instructions only
    found = [
        name(path)
        for path in under("vllm_rocm_ops", ".py")
        if path not in allowed and re.search(pattern, code_strings(path))
    ]
    assert not found


def exported(vendor: str) -> set[str]:
    """Return the functions, constants and types that csrc/device/<vendor> defines, with their namespace."""
    names = set()
    for path in under(f"csrc/device/{vendor}", ".h"):
        text = without_comments(path.read_text())
        namespace = re.search(r"^namespace (\w+)", text, re.MULTILINE)
        prefix = f"{namespace[1]}::" if namespace else ""
        names |= {prefix + n for n in re.findall(r"^DEVICE [^(=]*?(\w+)\(", text, re.MULTILINE)}
        names |= {prefix + n for n in re.findall(r"^constexpr \w+ (\w+)", text, re.MULTILINE)}
        names |= {prefix + n for n in re.findall(r"^using (\w+)", text, re.MULTILINE)}
    return names


def test_vendors_export_the_same_names():
    """Only internals of a header, and what kernels use under a HAS_ macro, may be missing from the other vendor's."""
    amd, nvidia = exported("amd"), exported("nvidia")
    assert {path.name for path in under("csrc/device/amd", ".h")} == {p.name for p in under("csrc/device/nvidia", ".h")}
    assert len(amd & nvidia) > 10
    users = [path for path in under("csrc", ".h", ".hip") if path.parent.name not in ("amd", "nvidia")]
    used = "\n".join(without_comments(path.read_text()) for path in users)
    used = re.sub(r"^#ifdef HAS_\w+$.*?^#endif$", "", used, flags=re.DOTALL | re.MULTILINE)
    assert [n for n in sorted(amd ^ nvidia) if re.search(rf"\b{n}\b", used)] == []


# Ops


STANDALONE = under("vllm_rocm_ops/ops/standalone", ".py")
SERVING = "vllm", "models", "timing"
"""Folders of `vllm_rocm_ops` that name no standalone op."""


def names_of_ops(path: pathlib.Path) -> set[str]:
    """Return what a Python file imports or takes by `ops.` or another dotted name, or a JSON file's strings.

    In `timing`, which selects ops by name, a Python file's strings count, too; elsewhere `softmax` is a function of scores.
    """
    if path.suffix == ".json":
        return set(re.findall(r'"(\w+)"', path.read_text()))
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.search(r"\b(ops|vllm_rocm_ops)$", ast.unparse(node.value)):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "timing" in path.parts:
            found.add(node.value)
    return found


def named_although_standalone(paths: list[pathlib.Path], standalone: set[str]) -> list[str]:
    return sorted(f"{path.name}: {one}" for path in paths for one in names_of_ops(path) & standalone)


def standalone_ops() -> set[str]:
    return {op.name for op in op_module.registered() if op.is_standalone}


def test_nothing_that_serves_names_a_standalone_op():
    """Nor imports its file: only the list of ops does."""
    folder = "vllm_rocm_ops.ops.standalone"
    graph = import_graph(ROOT / "vllm_rocm_ops")
    importers = {module for module in graph if any(one.startswith(folder) for one in graph[module])}
    assert {module for module in importers if not module.startswith(folder)} == {"vllm_rocm_ops.ops"}
    assert {"softmax", "layer_norm", "flash_attention"} < standalone_ops()
    paths = [path for part in SERVING for path in under(f"vllm_rocm_ops/{part}", ".py", ".json")]
    assert named_although_standalone(paths, standalone_ops()) == []


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("vllm/norm.py", "def f(x):\n    return ops.softmax(x)", True),
        ("vllm/norm.py", "torch.ops.vllm_rocm_ops.softmax(x)", True),
        ("models/layers.py", "from vllm_rocm_ops.ops import softmax", True),
        ("models/layers.py", "call('softmax', ops.rms_norm, scores.softmax(-1))", False),
        ("timing/predict.py", "ROWS = 'rms_norm', 'softmax'", True),
        ("timing/times.json", '[{"op": "softmax"}]', True),
        ("timing/times.json", '[{"op": "rms_norm", "source": "softmax.py"}]', False),
    ],
)
def test_a_standalone_op_that_serves_is_seen(tmp_path, file, text, found):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(text)
    assert bool(named_although_standalone([path], standalone_ops())) == found


def test_every_kernel_file_has_its_spec():
    """The spec is a file of the same name, or one that several ops share, which names the kernel file as its MODULE."""
    specs = {path.stem for path in (*files("vllm_rocm_ops/ops/*.py"), *STANDALONE)}
    for path in files("vllm_rocm_ops/ops/*.py", "vllm_rocm_ops/ops/shared/*.py"):
        specs |= set(re.findall(r'^(?:\w+_)?MODULE = "(\w+)"', path.read_text(), re.MULTILINE))
    specs |= set(collectives.kernels())
    assert {path.stem for path in under("csrc/ops", ".hip")} <= specs


def test_the_folder_of_ops_has_nothing_else():
    defining = {op.reference.__module__.rpartition(".")[2] for op in op_module.registered()}
    assert {path.stem for path in (*files("vllm_rocm_ops/ops/*.py"), *STANDALONE)} == {"__init__", "flash", *defining}


def test_every_op_file_has_its_test_file_and_no_other_file_runs_cases():
    line = "from op_tests import test_case  # noqa: F401\n"
    running = {path for path in under("tests", ".py") if line in path.read_text().splitlines(keepends=True)}
    assert running == {file_of_tests(op) for op in op_module.registered()}


@functools.cache
def launches_of(op: op_module.Op, arch_name: str) -> tuple[launch.Launch, ...]:
    """Return the launches of every case of an op, in every configuration that fits."""
    arch = archs.ARCHS[arch_name]
    calls = [(a, op.allocate(a)) for a in supported_calls(op, arch_name)]
    return tuple(
        planned
        for a, outputs in calls
        for config in op.configs(a, arch)
        for planned in op.plan(config, outputs, a, arch)
    )


@pytest.mark.parametrize("arch", BUILT)
def test_every_kernel_belongs_to_a_plan_and_every_plan_has_its_kernel(arch):
    """This holds over all cases in all configurations, so the tests that run the cases run all kernels."""
    planned: dict[str, set[str]] = collectives.kernels()
    for op in op_module.registered():
        for planned_launch in launches_of(op, arch):
            planned.setdefault(planned_launch.module, set()).add(planned_launch.symbol)
    pattern = rb"\.visible \.entry (\w+)\(" if archs.ARCHS[arch].code_suffix == ".ptx" else rb"\0(\w+)\.kd(?=\0)"
    compiled = {
        path.stem: {symbol.decode() for symbol in re.findall(pattern, launch.code_object(path.stem, arch).read_bytes())}
        for path in under("csrc/ops", ".hip")
    }
    # A file that needs a feature of an arch asks for it by a HAS_ macro, and has no kernels without it.
    assert planned == {module: symbols for module, symbols in compiled.items() if symbols}


def test_every_launch_fits_its_arch():
    """It has whole waves, at most 1024 threads, and a grid within limits."""
    for op in op_module.registered():
        for arch in archs.ARCHS.values():
            for planned in launches_of(op, arch.name):
                assert 0 < planned.block[0] * planned.block[1] * planned.block[2] <= 1024
                assert planned.block[0] % arch.wave_lanes == 0 and planned.lds <= arch.lds_bytes
                assert all(0 < size < limit for size, limit in zip(planned.grid, (2**31, 2**16, 2**16)))


# Environment variables

TEXT = (".py", ".sh", ".cpp", ".h", ".hip", ".md", ".toml")
SCRIPTS = "serving_benchmarks"


def test_environment_variables_are_declared_and_used():
    def mentions(path: pathlib.Path) -> set[str]:
        return set(re.findall(r"VLLM_ROCM_OPS_[A-Z_]*[A-Z]", path.read_text()))

    product = [path for path in FILES if path.suffix in TEXT and not path.is_relative_to(ROOT / "tests")]
    readers = [
        path for path in product if path.suffix in (".py", ".cpp") and name(path) != "vllm_rocm_ops/core/envs.py"
    ]
    assert set().union(*map(mentions, product)) == set(envs.VARIABLES)
    assert set().union(*map(mentions, readers)) == set(envs.VARIABLES)


def test_environment_is_read_in_one_place():
    """Only `doctor`, and scripts that run before the package is installed, read it elsewhere."""
    python = [path for path in FILES if path.suffix == ".py" and path.parts[len(ROOT.parts)] not in ("tests", SCRIPTS)]
    readers = {name(path) for path in python if re.search(r"os\.(environ|getenv)", path.read_text())}
    built = {"csrc/build.py", "csrc/wheels.py", "setup.py"}
    assert readers == {"vllm_rocm_ops/core/envs.py", "vllm_rocm_ops/tools/doctor.py"} | built
    for path in under("csrc/runtime", ".cpp", ".h"):
        assert set(re.findall(r'getenv\("(\w+)"\)', path.read_text())) <= set(envs.VARIABLES)


# Imports


def test_importing_the_package_starts_nothing():
    code = """
import sys, vllm_rocm_ops, vllm_rocm_ops.vllm, torch
apart = ("vllm", "triton", "tinygrad", *(f"vllm_rocm_ops.{name}" for name in ("_C", "emulator", "tools")))
loaded = [name for name in sys.modules if f"{name}.".startswith(tuple(f"{part}." for part in apart))]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def packages_imported(path: pathlib.Path) -> set[str]:
    """Return the top-level modules that a file imports, also within functions."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module)
    return {module.partition(".")[0] for module in modules}


@functools.cache
def import_graph(package: pathlib.Path) -> dict[str, set[str]]:
    """Return the modules of a package that each of its modules imports, also within functions and for type checkers only.

    A name imported from a package is its module of that name or, without
    such a module, the package itself.
    """

    def dotted(path: pathlib.Path) -> str:
        path = path.relative_to(package.parent)
        return ".".join((path.parent if path.stem == "__init__" else path.with_suffix("")).parts)

    modules = {dotted(path): path for path in package.rglob("*.py")}
    extension = f"{package.name}._C"
    graph = {}
    for module, path in modules.items():
        found, ahead = set(), [ast.parse(path.read_text())]
        while ahead:
            node = ahead.pop()
            ahead += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = (*module.split("."), "x")[: -node.level - (path.stem != "__init__")] if node.level else ()
                base = ".".join(filter(None, (*parts, node.module)))
                names = (f"{base}.{alias.name}" for alias in node.names)
                found |= {name if name in modules or name == extension else base for name in names}
        graph[module] = found & set(modules)
    return graph


def test_imports_of_the_package_have_no_cycle():
    graph = import_graph(ROOT / "vllm_rocm_ops")
    assert {
        "vllm_rocm_ops.tools.cli",
        "vllm_rocm_ops.emulator.scheduler",
        "vllm_rocm_ops.vllm.graph.norm",
    } < graph.keys()
    assert "vllm_rocm_ops.core.launch" in graph["vllm_rocm_ops.core.execution"] and graph["vllm_rocm_ops.ops"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


ROOMS = "compat", "seam", "selection", "linear", "graph", "moe", "attention", "guards"
"""The folders of vllm/ and the files under them, bottom up. Each imports those before it; other files are above all."""
META = "meta"
"""The folder of vllm/ above these, which runs in a process of its own."""


def climbs(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports of a folder of vllm/ from one above it."""

    def room(module: str) -> int | None:
        parts = module.split(".")
        if parts[:2] != ["vllm_rocm_ops", "vllm"] or len(parts) < 3:
            return None
        return ROOMS.index(parts[2]) if parts[2] in ROOMS else len(ROOMS) + (parts[2] == META)

    pairs = [(module, one) for module in graph for one in graph[module]]
    rooms = [(f"{module} -> {one}", room(module), room(one)) for module, one in pairs]
    return sorted(text for text, here, there in rooms if None not in (here, there) and here < there)


def test_folders_of_the_plugin_are_in_order():
    """For type checkers only, too. A folder that is not listed would be above all."""
    folders = {path.name for path in (ROOT / "vllm_rocm_ops/vllm").iterdir() if (path / "__init__.py").exists()}
    assert folders == {*ROOMS, META} - {"compat", "seam"}
    assert climbs(import_graph(ROOT / "vllm_rocm_ops")) == []


def test_an_import_of_a_higher_folder_is_found():
    graph = {"vllm_rocm_ops.vllm.linear.base": {"vllm_rocm_ops.vllm.moe.base", "vllm_rocm_ops.vllm.seam"}}
    assert climbs(graph) == ["vllm_rocm_ops.vllm.linear.base -> vllm_rocm_ops.vllm.moe.base"]


@pytest.mark.parametrize(
    ("line", "is_cycle"),
    [
        ("from package import b", True),
        ("import package.b", True),
        ("from . import b", True),
        ("from .b import f", True),
        ("def f():\n    from package.b import f", True),
        ("from package import f", True),
        ("import typing\nif typing.TYPE_CHECKING:\n    from package import b", True),
        ("import b", False),
        ("from package import _C", False),
    ],
)
def test_cycles_are_seen(tmp_path, line, is_cycle):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.b import f")
    (package / "a.py").write_text(line)
    (package / "b.py").write_text("from package import a")
    graph = graphlib.TopologicalSorter(import_graph(package))
    with pytest.raises(graphlib.CycleError) if is_cycle else contextlib.nullcontext():
        graph.prepare()


def test_only_the_vllm_folder_knows_vllm():
    outside = [path for path in under("vllm_rocm_ops", ".py") if not name(path).startswith("vllm_rocm_ops/vllm/")]
    knows = [name(path) for path in outside if "vllm" in packages_imported(path)]
    assert knows == ["vllm_rocm_ops/tools/doctor.py"]  # it asks for the version


def test_no_part_of_an_architectures_name_is_asked():
    """Another one may share it: tables by the name hold what differs."""
    asks = re.compile(r"(starts|ends)with\(\"(gfx|9\d\d)|\"(942|950)\" in ")
    found = [name(path) for path in under("vllm_rocm_ops", ".py") if asks.search(path.read_text())]
    assert not found


COMMANDS = ("tools", "timing", "emulator")
"""Folders of `vllm_rocm_ops` that no serving process imports, each before those that it imports."""
WORKER_MODULES = 79  # at most, beside seams and ops, packages among them; fewer is better


def reached(graph: dict[str, set[str]], starts: set[str]) -> set[str]:
    """Return the modules that these import, and their packages, at any time."""
    found, ahead = set(), set(starts)
    while ahead:
        module = ahead.pop()
        found.add(module)
        package = {module.rpartition(".")[0]} - {""}
        ahead |= (graph.get(module, set()) | package) - found
    return found


def belongs(module: str, *folders: str) -> bool:
    """True if a module of the package is, or is in, one of these."""
    return module.partition(".")[2].partition(".")[0] in folders


def test_a_worker_imports_no_command():
    graph = import_graph(ROOT / "vllm_rocm_ops")
    meta = {module for module in graph if belongs(module, "vllm") and module.split(".")[2:3] == [META]}
    worker = reached(graph, {module for module in graph if belongs(module, "vllm")} - meta)
    assert meta and not worker & meta
    assert {"vllm_rocm_ops.vllm.graph.norm", "vllm_rocm_ops.core.clock", "vllm_rocm_ops.ops.gemm"} < worker
    assert sorted(module for module in worker if belongs(module, *COMMANDS)) == []
    seams = {seam.module_of(name) for name in seam.NAMES}
    assert len({module for module in worker - seams if not belongs(module, "ops")}) <= WORKER_MODULES


def test_only_these_commands_import_the_plugin():
    graph = import_graph(ROOT / "vllm_rocm_ops")
    plugin = {module for module in graph if belongs(module, "vllm")}
    asks = {module for module in graph.keys() - plugin if graph[module] & plugin}
    wanted = {
        f"tools.{name}" for name in ("advise", "bench.baselines", "check_parts", "doctor", "explain", "first_start")
    }
    assert asks == {f"vllm_rocm_ops.{module}" for module in wanted}
    found = {module for asking in asks for module in graph[asking] & plugin}
    doors = {
        *("comparisons", "coverage", "seam"),
        *(
            f"selection.{name}"
            for name in ("comparison", "kernel_selection", "kernel_timing", "key", "replays", "report")
        ),
        "attention.decoder",
        "graph.vllm_row_kernels",
    }
    assert {module.removeprefix("vllm_rocm_ops.vllm").lstrip(".") for module in found} - {""} <= doors


def test_the_core_imports_nothing_above_it():
    graph = import_graph(ROOT / "vllm_rocm_ops")
    found = {one for module in graph if belongs(module, "core") for one in graph[module]}
    assert found - {"vllm_rocm_ops._C"} <= {module for module in graph if belongs(module, "core")}


def test_every_seam_is_in_the_list():
    files_of = {
        path for path in under("vllm_rocm_ops/vllm", ".py") if re.search(r"^SEAM = ", path.read_text(), re.MULTILINE)
    }
    assert {
        pathlib.Path(seam.load(name) and sys.modules[seam.module_of(name)].__file__) for name in seam.NAMES
    } == files_of


@pytest.mark.parametrize("folder", COMMANDS[1:])
def test_commands_import_those_after_them_and_not_the_plugin(folder):
    graph, above = import_graph(ROOT / "vllm_rocm_ops"), COMMANDS[: COMMANDS.index(folder)]
    found = reached(graph, {module for module in graph if belongs(module, folder)})
    assert [name for name in found if belongs(name, "vllm", *above)] == []


def changes_path(path: pathlib.Path) -> bool:
    """True if a file may change where Python finds packages."""
    return bool(re.search(r"sys\.path *[.\[+=]", path.read_text()))


def test_the_package_imports_neither_tests_nor_benchmarks():
    theirs = {path.stem for folder in ("tests", SCRIPTS) for path in under(folder, ".py")} | {SCRIPTS, "timing_study"}
    product = under("vllm_rocm_ops", ".py")
    assert [name(path) for path in product if packages_imported(path) & theirs or changes_path(path)] == []


# Files and style


def test_no_file_is_a_drawer_for_everything():
    banned = {"common", "utils", "util", "helpers", "helper", "misc", "v2", "new", "opt"}
    assert [name(p) for p in FILES if banned & {part.partition(".")[0] for part in p.relative_to(ROOT).parts}] == []


def test_source_files_are_those_that_gitignore_leaves(tmp_path):
    left = ["README.md", "out/kept", "source/build/kept", "source/kernel.hip"]
    ignored = [".git/HEAD", "build/x", ".venv-2/bin/python", "a/b.egg-info/x", "a/__pycache__/x", "source/_C.so"]
    (tmp_path / ".gitignore").write_text("/build/\n/.venv*/\n*.egg-info/\n__pycache__/\n*.so\n/kept/\n")
    for path in map(tmp_path.joinpath, left + ignored):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / ".venv").symlink_to(tmp_path / "source")
    assert [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)] == [".gitignore", *left]


@needs_git
def test_git_has_no_file_that_the_tests_do_not_see():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    assert {path for file in listed.stdout.split("\0") if file and (path := ROOT / file).is_file()} <= set(FILES)


def test_no_binaries_and_nothing_large():
    for path in FILES:
        content = path.read_bytes()
        assert len(content) <= LARGEST_FILE, f"{name(path)} has {len(content)} bytes"
        assert b"\0" not in content, f"{name(path)} is binary"


def test_code_files_are_small():
    code = [path for path in FILES if path.suffix in (".py", ".h", ".hip", ".cpp", ".sh")]
    large = {name(path) for path in code if path.stat().st_size > LARGEST_CODE and not name(path).startswith("tests/")}
    assert large == set(), f"divide these: more than {LARGEST_CODE} bytes"


def test_nothing_is_left_for_later():
    words = r"TO[D]O|FIX[M]E|XX[X]|pytest\.ski[p]\(|xfai[l]|NotImplemented[E]rror"
    code = [path for path in FILES if path.suffix in (".py", ".h", ".hip", ".cpp", ".sh")]
    assert [name(path) for path in code if re.search(words, path.read_text())] == []


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    sources = [
        str(path) for path in FILES if path.suffix == ".py"
    ]  # outside git, ruff would also check what git ignores
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *sources], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_prose_has_no_faults():
    places = prose.found(FILES)
    assert not places, "rewrite these:\n" + "\n".join(places)


@pytest.mark.parametrize(
    ("suffix", "text", "wanted"),
    [
        (".md", "The error is at most that of the baseline.", ["that of"]),
        (".md", "Errors, those\nof the baseline.", ["that of"]),
        (".md", "It takes so many tokens, and as\nmany rows.", ["so many", "so many"]),
        (".md", "Dequantisation of neighbours.", ["spelling", "spelling"]),
        (".md", "`that of` and\n```\nthose of\n```\n[a page](neighbour) quantizes", []),
        (".py", "x = 1  # that many", ["so many"]),
        (".py", "# as\n# many as there are", ["so many"]),
        (".py", "x = 'that of'  # as\ny = 1  # many", []),
        (".py", 'def f():\n    """Of a part."""', ["headless"]),
        (".py", 'def f():\n    """Return the blocks per split."""', []),
        (".py", 'def test_f():\n    """A wave ends."""', []),
        (".py", 'def test_f():\n    """What a wave ends."""', ["headless"]),
        (".py", 'class F:\n    """Of a part."""', ["headless"]),
        (".py", 'x = 1\n"""How many blocks."""', ["headless"]),
        (".hip", "int x;  // behaves like that of\n", ["that of"]),
        (
            ".hip",
            "// so\n// many\nf('\"', \"// as many\", '\"');  /* normalises\n * neighbours */",
            ["so many", "spelling", "spelling"],
        ),
        (".h", "int that, of;", []),
    ],
)
def test_faults_of_prose_are_seen(suffix, text, wanted):
    assert [fault for fault, *_ in prose.faults(suffix, text)] == wanted


@pytest.mark.parametrize(("text", "status"), [("those\nof", 1), ("a page", 0)])
def test_faults_of_prose_are_printed_with_their_place(tmp_path, monkeypatch, capsys, text, status):
    (tmp_path / "page.md").write_text("# Title\n" + text)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "FILES", [tmp_path / "page.md"])
    assert prose.main() == status
    assert capsys.readouterr().out == "page.md:2: that of: those of\n" * status + f"{status} faults\n"


def test_clang_format():
    sources = [str(path) for path in FILES if path.suffix in (".h", ".hip", ".cpp", ".c")]
    command = [str(pathlib.Path(sys.executable).parent / "clang-format"), "--dry-run", "--Werror", *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", files("*.sh", ".ci/*"), ids=name)
def test_shell_scripts_parse(script):
    result = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["tests/run.sh", "serving_benchmarks/quickstart.sh"])
def test_a_user_reads_once_what_a_bare_system_lacks(tmp_path, command):
    for tool in ("bash", "dirname", "echo", "xargs"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    result = subprocess.run(
        [shutil.which("bash"), str(ROOT / command)], capture_output=True, text=True, check=False, env=environment
    )
    packages = "python3 python3-venv python3-dev g++ libnuma1"
    assert f"`sudo apt-get install -y {packages}`" in readme.README.read_text()
    message = f"Please install first (names of Debian and Ubuntu): sudo apt-get install -y {packages}\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", message)


@needs_git
def test_what_is_generated_is_fresh():
    """README, the results page, and one page per op are up to date, and there is no other page."""
    documents = readme.documents()
    stale = [name(path) for path, text in documents.items() if not path.exists() or path.read_text() != text]
    assert not stale, "run: python tests/pages"
    assert set(DOCS.glob("*")) == {path for path in documents if path.parent == DOCS} | {
        DOCS / f"{page}.md" for page in GUIDES
    }


def test_the_module_map_has_every_folder_and_names_files_that_exist():
    """A row stands for its folder, for sub-folders that it names as `folder/`, and for vendors' folders."""
    rows = re.findall(
        r"^\| `([^|]+) \| (.+) \|$", (DOCS / "architecture.md").read_text().partition("## Module map")[2], re.MULTILINE
    )
    mapped = set()
    for folders, rest in rows:
        folders = [ROOT / folder for folder in re.findall(r"[\w/]+", folders)]
        named = re.findall(r"`([\w/]+/|[\w/]+\.(?:py|h|hip|cpp|sh))`", rest)
        missing = [one for one in named if not any((base / one).exists() for base in (*folders, ROOT))]
        assert folders and all(map(pathlib.Path.is_dir, folders)) and not missing
        mapped |= {*folders, *(folder / one for folder in folders for one in named if one.endswith("/"))}
    sources = [path for top in ("vllm_rocm_ops", "csrc") for path in under(top, ".py", ".h", ".hip", ".cpp")]
    homes = {path.parent.parent if path.parent.name in ("amd", "nvidia") else path.parent for path in sources}
    assert homes - mapped == {ROOT / "vllm_rocm_ops"}  # the entry points of the package and of its command


def test_every_source_file_says_what_it_is():
    """Python in a docstring, C++ in a comment that it begins with."""
    python = [path for path in under("vllm_rocm_ops", ".py") if path.read_text().strip()]
    silent = [name(path) for path in python if not ast.get_docstring(ast.parse(path.read_text()))]
    silent += [name(path) for path in under("csrc", ".h", ".hip", ".cpp") if not path.read_text().startswith("//")]
    assert silent == []


def test_the_readme_is_short():
    block = r"<!-- ([\w ]+) -->(.*?)<!-- /\1 -->"
    text = readme.README.read_text()
    generated = [found for _, found in re.findall(block, text, flags=re.DOTALL)]
    written = re.sub(block, "", text, flags=re.DOTALL)
    assert sum(bool(line) for line in written.splitlines()) <= README_LINES
    assert sum(found.count("| --- |") > 0 for found in generated) <= README_TABLES
    assert text.count("\n") <= README_ALL


def said(page: pathlib.Path) -> str:
    """Return a page's text without line breaks."""
    return " ".join(page.read_text().split())


def test_the_readme_states_the_limits_of_selection():
    limits = {
        f"more than {comparison.LARGEST_ERROR:g}x the error",
        f"more than {100 * kernel_selection.MARGIN:g} % faster",
        f"timing takes about {kernel_timing.limit_s():g} s of a start",
        f"serves 1 to {MAX_ROWS} query rows",
        f"over {launches.RANKS[0]} to {launches.RANKS[-1]} GPUs",
        f"more than {flagged.MAX_VALUES * 2 >> 20} MiB",
        "in three minutes",
    }
    assert {limit for limit in limits if limit not in said(readme.README)} == set()
    assert check.MINUTES == 3
    assert [b for b in (*decoder.PLATFORMS["rocm"], *mla.PLATFORMS["rocm"]) if b not in said(readme.README)] == []


def test_the_page_on_tuning_states_the_limits_of_selection():
    limits = {
        f"more than {100 * kernel_selection.MARGIN:g} % faster",
        f"{comparison.LARGEST_ERROR:g}x the baseline's error",
        f"{kernel_timing.limit_s():g} s for each start",
        f"{kernel_timing.limit_s() + kernel_timing.SECONDS_COMPILING:g} s for another process",
        f"the all-reduce up to {100 * all_reduce_timing.SHARE:g} %",
        f"{', '.join(map(str, timing.LENGTHS[:-1]))} and {timing.LENGTHS[-1]} keys",
        f"{', '.join(map(str, compiled_ops.TOKENS[:-1]))} and {compiled_ops.TOKENS[-1]} tokens",
        f"more than {100 * tune.MARGIN:g} % faster than the default",
    }
    assert {limit for limit in limits if limit not in said(DOCS / "tuning.md")} == set()
    assert mla_absorb.COMPARISON.max_tokens() == 0


@pytest.mark.parametrize("page", [readme.README, DOCS / "configuration.md"], ids=name)
def test_switches_name_what_there_is(page):
    """Every value of VLLM_ROCM_OPS_SEAMS and _DISABLE, and the verb and options of every command, must exist."""
    text = page.read_text()
    for value in re.findall(r"VLLM_ROCM_OPS_SEAMS=([\w,-]+)", text):
        seam.wanted("norm", value)  # raises for a name that is not a seam
    known = {op.name for op in op_module.registered()}
    assert set(re.findall(r"VLLM_ROCM_OPS_DISABLE=(\w+)", text)) <= known
    commands = commands_of(text)
    assert commands
    for command in commands:
        assert cli.parse_arguments(shlex.split(command)[1:])


def commands_of(text: str) -> list[str]:
    """Return the plugin's commands that a page shows."""
    text = re.sub(r"python3? -m vllm_rocm_ops (?=[a-z])", "vllm-rocm-ops ", text)
    shown = r"^(?:\$ )?(vllm-rocm-ops [a-z].*?) *(?:#.*)?$|`(vllm-rocm-ops [a-z][^`]*)`"
    return [*map("".join, re.findall(shown, text, re.MULTILINE))]


@functools.cache
def help_of(verb: str) -> str:
    """Return a command's help. Raises SystemExit with another status than 0 if there is no such command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        cli.parse_arguments([verb, "--help"])
    assert ended.value.code == 0, verb
    return said.getvalue()


@pytest.mark.parametrize("page", [page for page in under("", ".md") if page.stem != "CHANGELOG"], ids=name)
def test_commands_of_pages_exist(page):
    """Their values may be placeholders."""
    for command in commands_of(page.read_text()):
        _, verb, *rest = shlex.split(command)
        missing = {word.partition("=")[0] for word in rest if word.startswith("--")} - set(
            re.findall(r"--[\w-]+", help_of(verb))
        )
        assert not missing, f"{command}: {verb} has no {', '.join(missing)}"


def test_the_readme_links_every_guide():
    missing = [page for page in GUIDES if f"(vllm_rocm_ops/docs/{page}.md)" not in readme.README.read_text()]
    assert not missing


def headings(page: pathlib.Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", files("*.md"), ids=name)
def test_links_exist(page):
    text = page.read_text()
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        linked = page.parent / target if target else page
        assert target.startswith("https://") or linked.exists(), target
        assert not heading or heading in headings(linked), f"{target}#{heading}"
    for script in re.findall(r"(?:bash|python) ([\w/]+\.(?:sh|py))", text):
        assert (ROOT / script).exists(), script


NO_MODULES = {"vllm_rocm_ops.core.archs.gfx943", "vllm_rocm_ops.f", "vllm_rocm_ops.marked_quant.default"}
"""Names that tests invent. vllm_rocm_ops._C is compiled."""


def lost(code: str) -> set[str]:
    """Return the strings that name a module of the package, or a name in one, that does not exist.

    A call's argument with a gap is one, too, unless the call imports it: it could name anything.
    """
    tree = ast.parse(code)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [arg for call in calls if ast.unparse(call.func) != "importlib.import_module" for arg in call.args]
    gaps = {ast.unparse(arg) for arg in given if isinstance(arg, ast.JoinedStr)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    whole = {text for text in strings if re.fullmatch(r"vllm_rocm_ops(\.\w+)+(:\w+)?", text) and not resolves(text)}
    return {text for text in gaps if re.fullmatch(r"f['\"]vllm_rocm_ops\.[\w.{}]+['\"]", text)} | whole - NO_MODULES


def resolves(name: str) -> bool:
    """True if a dotted name is the compiled module, a module, or what a module has."""
    if name == "vllm_rocm_ops._C":
        return True
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_strings_that_name_modules_name_ones_that_exist():
    paths = [
        path for folder in ("tests", "csrc", "serving_benchmarks", "vllm_rocm_ops") for path in under(folder, ".py")
    ]
    found = {f"{name(path)}: {one}" for path in paths for one in lost(path.read_text())}
    assert not found


@pytest.mark.parametrize(
    ("code", "is_lost"),
    [
        ("sys.modules.get('vllm_rocm_ops.envs')", True),
        ("sys.modules.get('vllm_rocm_ops.core.envs')", False),
        ("sys.modules.get(f'vllm_rocm_ops.{name}')", True),
        ("importlib.import_module(f'vllm_rocm_ops.ops.{name}')", False),
        ("monkeypatch.setattr('vllm_rocm_ops.core.launch.CODES', None)", True),
    ],
)
def test_lost_names_are_seen(code, is_lost):
    assert bool(lost(code)) == is_lost
