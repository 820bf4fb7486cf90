"""Test the patches of vLLM 0.33.0 by their own tests and these, before and after, and that the seams use them.

`git apply` applies them to a copy of its Python files, as patches/README.md says.
"""

import csv
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
    """Return a copy with all patches."""
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


@full
def test_registered_experts_come_first(source, patched):
    """They are ordered by priority, if they support a layer and the user named no backend, before an enabled AITER."""
    code = """
import json, os, torch, types
import selection
selection.fake_amd("gfx942", "1")
import vllm.config
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
asked = []
def make(name, supports):
    def is_supported_config(cls, config, weight_key, activation_key, activation_format):
        asked.append((name, str(weight_key), activation_format.name))
        return supports, None if supports else "it does not"
    return type(name, (), {"is_supported_config": staticmethod(is_supported_config)})
try:
    from vllm.model_executor.layers.fused_moe.oracle.registry import register_moe_experts
except ImportError:
    pass
else:
    register_moe_experts(make("Late", True), fp8.Fp8MoeBackend.TRITON)
    register_moe_experts(make("Later", True), fp8.Fp8MoeBackend.TRITON)
    register_moe_experts(make("Early", True), fp8.Fp8MoeBackend.AITER, priority=1)
    register_moe_experts(make("Unable", False), fp8.Fp8MoeBackend.TRITON, priority=2)
    register_moe_experts(make("Plain", True), unquantized.UnquantizedMoeBackend.TRITON)
block = keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu")), check_compile=False):
    answer = {
        "fp8": fp8.select_fp8_moe_backend(selection.moe_config(torch), *block),
        "named": fp8.select_fp8_moe_backend(selection.moe_config(torch, moe_backend="triton"), *block),
        "bf16": unquantized.select_unquantized_moe_backend(selection.moe_config(torch)),
        "bf16 named": unquantized.select_unquantized_moe_backend(selection.moe_config(torch, moe_backend="triton")),
    }
print(json.dumps([{k: [backend.name, cls.__name__] for k, (backend, cls) in answer.items()}, asked]))
"""
    named = {"named": ["TRITON", "TritonExperts"], "bf16 named": ["TRITON", "TritonExperts"]}
    baseline = named | {"fp8": ["AITER", "AiterFp8BlockExperts"], "bf16": ["AITER", "AiterUnquantizedExperts"]}
    assert ask(source, code) == [baseline, []]
    chosen, asked = ask(patched, code)
    assert chosen == named | {"fp8": ["AITER", "Early"], "bf16": ["TRITON", "Plain"]}
    assert [(name, form) for name, _, form in asked] == [(n, "Standard") for n in ("Unable", "Early", "Plain")]
    assert [key for _, key, _ in asked][2] == "None"


def test_registered_gemms_come_first(patched):
    """The first that does not decline serves; the op in the graph stays vLLM's."""
    code = """
import json, torch
from vllm.model_executor.layers import utils
asked = []
def decline(x, weight, bias):
    asked.append("decline")
def take(x, weight, bias):
    asked.append("take")
    return x @ weight.t() + 1
utils.register_rocm_unquantized_gemm(decline)
utils.register_rocm_unquantized_gemm(take)
x, weight = torch.ones(2, 16), torch.ones(4, 16)
result = utils.rocm_unquantized_gemm_impl(x, weight)
print(json.dumps([asked, result.tolist(), str(utils.rocm_unquantized_gemm.__module__)]))
"""
    assert ask(patched, code) == [["decline", "take"], [[17.0] * 4] * 2, "vllm.model_executor.layers.utils"]


# The seams


def test_seams_use_what_is_there(source, patched):
    """They work around a vLLM without the patches. The machine is a faked MI300X."""
    code = """
import json, sys, types
import selection
selection.fake_amd("gfx942", "0")
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
from vllm import plugins
from vllm.platforms import current_platform
used, register = [], linear.register_linear_kernel
def register_linear_kernel(kernel_class, *arguments, **keywords):
    used.append(kernel_class.__name__)
    register(kernel_class, *arguments, **keywords)
register_linear_kernel.__wrapped__ = register  # what inspect.signature shows
linear.register_linear_kernel = register_linear_kernel
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.guards import compile_cache
off = [entry.reason for entry in seam.install_all() if not entry.on and entry.name not in ("cpu_shims", "mxfp8_linear")]
warnings = []
compile_cache.logger.warning = warnings.append
compile_cache.mark(types.SimpleNamespace(additional_config=object()))
registry = sys.modules.get("vllm.model_executor.layers.fused_moe.oracle.registry")
print(json.dumps({
    "off": off,
    "linear": used,
    "first": linear._POSSIBLE_FP8_KERNELS[current_platform._enum][0].__name__,
    "experts": [cls.__name__ for _, _, cls in registry._REGISTERED_EXPERTS] if registry else [],
    "replaced": sorted(
        function.__name__
        for function in (fp8.select_fp8_moe_backend, unquantized.select_unquantized_moe_backend, utils.rocm_unquantized_gemm)
        if not function.__module__.startswith("vllm.")
    ),
    "gemms": len(getattr(utils, "_REGISTERED_ROCM_UNQUANTIZED_GEMMS", ())),
    "factors": getattr(plugins, "compile_factors", list)(),
    "warnings": warnings,
}))
"""
    without, with_patches = ask(source, code), ask(patched, code)
    assert without["off"] == with_patches["off"] == []
    assert without["first"] == with_patches["first"] == "RocmOpsScaledLinear"
    assert (without["linear"], without["experts"], without["gemms"]) == ([], [], 0)
    assert len(without["replaced"]) == 3 and with_patches["replaced"] == []
    assert with_patches["warnings"] == [] and "additional_config is not a dict" in without["warnings"][0]
    assert without["factors"] == [] and [name.partition(" with ")[0] for name in with_patches["factors"]] == [FACTOR]
    ours = ["BlockScaled", "Int8", "Mxfp8", "Scaled"]
    assert with_patches["linear"] == [f"RocmOps{name}Linear" for name in ours]
    modular = ["RocmOpsFp8Experts", "RocmOpsUnquantizedExperts"]
    routing = [name.replace("Ops", "OpsRouting") for name in modular]
    names = list(dict.fromkeys(with_patches["experts"]))  # AITER's have one for each form of weights
    assert [name for name in names if "Aiter" not in name] == routing + modular and with_patches["gemms"] == 1
    assert {name for name in names if "Aiter" in name} == {name.replace("Ops", "OpsAiter") for name in modular}


@full
def test_selection_is_the_same_with_patches(patched, monkeypatch):
    """The exception is the function of unquantized layers, which is then vLLM's own and calls the plugin's."""
    monkeypatch.setattr(test_selection, "python_files", lambda requirement: patched.parent)
    answers = test_selection.ask(RELEASE)
    with (HERE / "selection.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found = answers[f"{row['arch']} aiter={row['aiter']} {row['plugin']}"][row["what"]]
            own = row["what"] == "linear unquantized" and row["plugin"] == "with"
            assert found == ("vllm.model_executor.layers.utils.rocm_unquantized_gemm" if own else row[RELEASE]), row
