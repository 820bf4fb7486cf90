"""What the patches change in vLLM 0.33.0, by their own tests and ours, before and after; and that the seams use what they bring.

They are applied to a copy of its Python files.
"""

import csv
import json
import pathlib
import shutil
import subprocess

import processes
import pytest
import test_selection
from engines import HERE
from marks import full

import vllm_rocm_ops
from vllm_rocm_ops import patch

pytestmark = pytest.mark.slow

ROOT = HERE.parents[1]
RELEASE = "0.33"
FACTOR = f"rocm_ops: {vllm_rocm_ops.__version__}"


@pytest.fixture(scope="module")
def source() -> pathlib.Path:
    """The folder of vLLM's package, as released."""
    test_selection.BUILD.mkdir(exist_ok=True)
    try:
        return test_selection.python_files(test_selection.RELEASES[RELEASE]) / "vllm"
    except subprocess.CalledProcessError as error:
        raise pytest.skip.Exception(f"vLLM {RELEASE} is not here and cannot be downloaded: {error}") from error


def copy(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy of a package in a folder, with what is compiled of it."""
    return shutil.copytree(source, folder / "vllm")


@pytest.fixture(scope="module")
def patched(source, tmp_path_factory) -> pathlib.Path:
    """A copy with all patches."""
    package = copy(source, tmp_path_factory.mktemp("patched"))
    patch.apply(package, patch.known(package))
    return package


def ask(package: pathlib.Path, code: str, *folders: pathlib.Path, **environment: str):
    """What the code, run in a process with that vLLM, prints last, as JSON."""
    options = {"VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR"} | environment
    return json.loads(processes.run(code, package.parent, *folders, ROOT, HERE, **options).splitlines()[-1])


def contents(package: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}


def test_patches_apply_and_revert(source, tmp_path):
    """Alone and together, without a trace; and what they make is Python."""
    package = copy(source, tmp_path)
    before, patches = contents(package), patch.known(package)
    assert [(entry.applied, entry.reason) for entry in patch.status(package)] == [(False, "")] * len(patches)
    for one in patches:
        patch.apply(package, [one])
        assert {path for path, text in contents(package).items() if before.get(path) != text} == {
            path.removeprefix("vllm/") for path in one.paths
        }
        patch.revert(package, [one])
        assert contents(package) == before
    patch.apply(package, patches)
    for path in (path for one in patches for path in one.paths):
        compile((tmp_path / path).read_text(), path, "exec")
    patch.revert(package, patches)
    assert contents(package) == before


@full
def test_the_patches_own_tests(source, patched, tmp_path):
    """What is sent to vLLM with them: each patch's file passes, and without its patch some of it fails."""
    patches = [one for one in patch.known(patched) if one.tests]
    for hunk in (hunk for one in patches for hunk in one.tests):
        file = tmp_path / hunk.path
        file.parent.mkdir(parents=True)
        file.write_text(hunk.after)
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
    files = [one.tests[0].path for one in patches]
    assert ask(patched, code) == {file: ["passed"] for file in files}
    without = ask(source, code)
    assert without.keys() == set(files) and all("failed" in found for found in without.values())


@full
def test_registered_experts_come_first(source, patched):
    """By priority, where they support a layer and the user named no backend, before AITER that was asked for."""
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
    stock = named | {"fp8": ["AITER", "AiterFp8BlockExperts"], "bf16": ["AITER", "AiterUnquantizedExperts"]}
    assert ask(source, code) == [stock, []]
    chosen, asked = ask(patched, code)
    assert chosen == named | {"fp8": ["AITER", "Early"], "bf16": ["TRITON", "Plain"]}
    assert [(name, form) for name, _, form in asked] == [(n, "Standard") for n in ("Unable", "Early", "Plain")]
    assert [key for _, key, _ in asked][2] == "None"


def test_registered_gemms_come_first(patched):
    """The first that does not decline; the op in the graph stays vLLM's."""
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
    """And reach around vLLM where it is not. On a faked MI300X."""
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
from vllm_rocm_ops.vllm.seams import compile_cache
off = [entry.reason for entry in seam.install_all() if not entry.on and entry.name not in ("cpu_gaps", "mxfp8_linear")]
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
    assert with_patches["warnings"] == [] and "additional_config is no dict" in without["warnings"][0]
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
    """But for the function of unquantized layers, which is vLLM's own then and asks ours."""
    monkeypatch.setattr(test_selection, "python_files", lambda requirement: patched.parent)
    answers = test_selection.ask(RELEASE)
    with (HERE / "selection.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found = answers[f"{row['arch']} aiter={row['aiter']} {row['plugin']}"][row["what"]]
            own = row["what"] == "linear unquantized" and row["plugin"] == "with"
            assert found == ("vllm.model_executor.layers.utils.rocm_unquantized_gemm" if own else row[RELEASE]), row
