"""Test that the emulator is an optional part of the package, with clear errors for missing requirements.

Its modules are small, and their imports have no cycle.
"""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest
from marks import full

import vllm_rocm_ops

PACKAGE = pathlib.Path(vllm_rocm_ops.__file__).parent / "emulator"
LARGEST_MODULE = 20_000

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import vllm_rocm_ops.tools.cli, vllm_rocm_ops.tools.doctor, vllm_rocm_ops.vllm
sys.version_info = {version}
print(vllm_rocm_ops.tools.doctor.find_emulator()["why_off"])
sys.exit(vllm_rocm_ops.tools.cli.main(["verify", "--emulate", "gfx942"]))
"""


@pytest.mark.parametrize(
    ("missing", "version", "needs"),
    [
        pytest.param("numpy", sys.version_info[:2], r"numpy: pip install 'vllm-rocm-ops\[emulator\]'", marks=full),
        ("tinygrad", sys.version_info[:2], r"tinygrad[\w.]*: pip install 'vllm-rocm-ops\[emulator\]'"),
        ("tinygrad", (3, 10), r"Python 3\.11 or newer, got 3\.10"),
    ],
)
def test_it_says_what_it_needs(missing, version, needs):
    """`doctor` reports it as well, and all else works without."""
    command = [sys.executable, "-W", "ignore", "-c", REFUSE.format(refused=[missing], version=version)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.fullmatch(f"the emulator needs {needs}\n", result.stdout)
    assert (result.returncode, result.stderr) == (2, result.stdout)


def imports(path: pathlib.Path) -> set[str]:
    """Return the emulator's modules that one of them imports, also within functions; for a package, its __init__."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = path.parents[node.level - 1]
        target = folder.joinpath(*(node.module or "").split("."))
        inside = {target / alias.name for alias in node.names} if target.is_dir() else set()
        modules = {module for module in inside if module.with_suffix(".py").exists()}
        for module in modules or {target}:
            found.add(module / "__init__" if module.is_dir() else module)
            if module.parent not in (PACKAGE, path.parent):
                found.add(module.parent / "__init__")
    return {module.relative_to(PACKAGE).as_posix() for module in found}


def test_no_module_imports_one_that_imports_it():
    graph = {path.relative_to(PACKAGE).with_suffix("").as_posix(): imports(path) for path in PACKAGE.rglob("*.py")}
    assert graph["scheduler"] > {"instructions/scalar", "instructions/__init__", "sanitizer", "program"}
    assert set().union(*graph.values()) <= set(graph)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_modules_are_small():
    sizes = {path.name: path.stat().st_size for path in PACKAGE.rglob("*.py")}
    assert {name: size for name, size in sizes.items() if size > LARGEST_MODULE} == {}
