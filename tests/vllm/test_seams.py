"""Test that a seam that does not fit is off, alone, with one log line, and that vLLM generates nevertheless."""

import dataclasses
import os
import re

import pytest
from fakes import Fake
from linears import TABLES
from marks import full
from vllm import platforms
from vllm.platforms import current_platform

from vllm_rocm_ops import vllm as plugin
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.vllm import seam

MODEL = ("llama", "token")
TESTED = "tested on vLLM {} to {}".format(*seam.Seam.versions)
NEWEST = f"{seam.Seam.versions[1]}.0"


@pytest.mark.slow
def test_broken_seams_are_off_and_the_others_on(engines, expected):
    """Two seams' vLLM functions have other parameters, one seam's installation raises, one is switched off."""
    before = """
import dataclasses
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.activation import SiluAndMul
from vllm_rocm_ops.vllm.graph import norm
known = SiluAndMul.forward_native
SiluAndMul.forward_native = staticmethod(lambda rows: known(rows))
choose = linear.choose_scaled_mm_linear_kernel
linear.choose_scaled_mm_linear_kernel = lambda **keywords: choose(**keywords)
norm.SEAM = dataclasses.replace(norm.SEAM, install=lambda: [][0])
"""
    answers = engines.run({"broken": engines.job(MODEL)}, before=before, VLLM_ROCM_OPS_SEAMS="-fusion")
    answer = answers["broken"]
    off = {name: reason for name, reason in answer["seams"].items() if reason != "on"}
    broken = {"activation", "norm"}
    broken |= {name for name in seam.NAMES if {"norm", "fusion"} & {*seam.load(name).requires}}
    broken |= {name for name, table in TABLES.items() if table.chooser[0] == "choose_scaled_mm_linear_kernel"}
    assert off.keys() == broken | {"fusion", "unquantized_linear"}
    assert off["activation"].startswith("this vLLM lacks ") and "(x), got (rows)" in off["activation"]
    assert off["norm"] == "IndexError: list index out of range"
    assert "requires norm" in off["mla_norms"]
    assert off["fusion"] == "VLLM_ROCM_OPS_SEAMS=-fusion"
    assert "(config, possible_kernels), got (keywords)" in off["scaled_linear"]
    assert off["unquantized_linear"] == "for rocm and cuda only"
    lines = re.findall(r"vllm-rocm-ops: ([\w, ]+) off: (.*)\. vLLM's own code runs\.", answers["output"])
    said = sorted((name, why) for names, why in lines for name in names.split(", "))
    assert said == sorted((name, off[name]) for name in broken) and len({why for _, why in lines}) == len(lines)
    assert answer["stats"] == {}
    assert answer["tokens"] == [wanted.argmax(-1).tolist() for wanted in expected(MODEL, answer["tokens"])]


@full
@pytest.mark.slow
def test_stale_compiled_graphs_are_not_run(engines, expected):
    """vLLM's cache key has the plugin's name and variables; the plugin adds its seams and code to it."""

    def run(flavour: tuple[str, str], *names: str) -> dict:
        installed = f"from vllm_rocm_ops.vllm import seam\nseam.NAMES = {names}\n"
        job = engines.job(flavour, compiled=True)
        return engines.run_one(job, before=installed, cache="stale", generates=True)

    flavour = "llama", "bf16"
    assert run(flavour, "cpu_shims")["stats"] == {}
    unmarked = run(flavour, "cpu_shims", "norm", "activation")  # others name passes, which are in vLLM's key
    assert unmarked["stats"] == {}, "vLLM knows plugins now: the seam can go"
    answer = run(flavour, *seam.NAMES)
    assert answer["stats"].keys() == {"rms_norm", "fused_add_rms_norm", "silu_and_mul"}
    assert answer["tokens"] == [wanted.argmax(-1).tolist() for wanted in expected(flavour, answer["tokens"])]


@pytest.fixture
def installed(monkeypatch, caplog):
    """Return a function that installs four seams that do nothing, and returns the active ones and the log."""

    def install(version: str = NEWEST, **changed) -> tuple[list[str], list[str]]:
        seams = {name: seam.Seam(name, "nothing", lambda: None, lambda: None) for name in ("first", "norm", "fusion")}
        seams["other"] = dataclasses.replace(seams["norm"], name="other", platforms=("cuda",))
        seams |= {name: dataclasses.replace(seams[name], **change) for name, change in changed.items()}
        monkeypatch.setattr(seam, "_status", {})
        monkeypatch.setattr(seam, "NAMES", tuple(seams))
        monkeypatch.setattr(seam, "load", seams.get)
        monkeypatch.setattr(vllm, "__version__", version)
        caplog.clear()
        with caplog.at_level("INFO", logger="vllm.vllm_rocm_ops"):
            seam.install_all()
        return seam.active(), caplog.messages

    import vllm

    return install


def test_one_reason_is_one_line(installed, monkeypatch):
    """A reason of all seams turns the plugin off; a seam for another platform is not mentioned."""
    assert installed() == (["first", "norm", "fusion"], [])
    off = "vllm-rocm-ops is off: {}. vLLM's own code runs."
    skip = "VLLM_ROCM_OPS_ANY_VERSION=1 skips this check"
    assert installed("0.99.0") == ([], [off.format(f"{TESTED}, got 0.99.0; {skip}")])
    old = {"versions": ("0.30", "0.30")}
    line = f"vllm-rocm-ops: first, fusion off: tested on vLLM 0.30 to 0.30, got {NEWEST}; {skip}. vLLM's own code runs."
    assert installed(first=old, fusion=old) == (["norm"], [line])
    gpu = "this GPU is not supported, kernels exist for gfx942"
    monkeypatch.setattr(seam, "unsupported_reason", lambda platform: gpu)
    assert installed() == ([], [off.format(gpu)])
    monkeypatch.setattr(seam, "wanted", lambda name, switch: False)
    monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", "none")
    assert installed() == ([], [off.format("VLLM_ROCM_OPS_SEAMS=none")])


def test_what_the_user_switches_off_is_no_warning(installed, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", "-fusion")
    assert installed()[0] == ["first", "norm"]
    plugin = [record for record in caplog.records if record.name == "vllm.vllm_rocm_ops"]
    line = "vllm-rocm-ops: fusion off: VLLM_ROCM_OPS_SEAMS=-fusion. vLLM's own code runs."
    assert [(record.levelname, record.message) for record in plugin] == [("INFO", line)]


def test_a_seam_is_off_without_those_that_it_requires(installed, monkeypatch):
    """It comes after them, and its probe does not run."""
    needs = {"requires": ("norm", "fusion"), "probe": lambda: 1 / 0, "install": lambda: 1 / 0}
    off = {"versions": ("0.30", "0.30")}
    for absent, names in (({"norm": off}, "norm"), ({"norm": off, "fusion": off}, "norm and fusion")):
        active, lines = installed(first=needs, **absent)
        assert "first" not in active
        assert f"vllm-rocm-ops: first off: requires {names}. vLLM's own code runs." in lines
    assert installed(first={"requires": ("norm", "fusion")}) == (["norm", "fusion", "first"], [])


@pytest.mark.parametrize("version", ["0.99.0.dev12+g1234567", "dev"])
def test_untested_versions_have_to_be_asked_for(installed, monkeypatch, version):
    """The probes then decide, and one line says so. A tested version ignores the variable."""
    assert installed(version)[0] == []
    monkeypatch.setenv("VLLM_ROCM_OPS_ANY_VERSION", "1")

    def probe():
        raise seam.Unavailable("this vLLM lacks it")

    active, lines = installed(version, norm={"probe": probe})
    assert active == ["first", "fusion"]
    assert lines == [
        "vllm-rocm-ops: norm off: this vLLM lacks it. vLLM's own code runs.",
        f"vllm-rocm-ops: VLLM_ROCM_OPS_ANY_VERSION=1 enables first, fusion, not tested on vLLM {version}",
    ]
    assert installed() == (["first", "norm", "fusion"], [])


@pytest.mark.parametrize(("switch", "platform"), [(None, None), ("0", None), ("1", "cpu")])
def test_the_cpu_has_to_be_asked_for(installed, monkeypatch, switch, platform):
    """There are no kernels, and the references are slower than vLLM's own ops."""
    monkeypatch.delenv("VLLM_ROCM_OPS_ON_CPU")
    if switch is not None:
        monkeypatch.setenv("VLLM_ROCM_OPS_ON_CPU", switch)
    assert seam.served_platform() == platform
    assert installed() == (["first", "norm", "fusion"] if platform else [], [])


def test_register_never_raises(monkeypatch, caplog):
    """An exception in a plugin's entry point ends vLLM."""
    monkeypatch.setattr(seam, "install_all", lambda: 1 / 0)
    with caplog.at_level("WARNING", logger="vllm.vllm_rocm_ops"):
        plugin.register()
    assert "vllm-rocm-ops is off: ZeroDivisionError: division by zero" in caplog.text


def test_a_typo_is_said_in_one_line(monkeypatch, caplog):
    """It has the plugin, the variable, the word and the known words."""
    monkeypatch.setattr(seam, "_status", {})
    monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", "norms")
    with caplog.at_level("WARNING"):
        plugin.register()
    [line] = caplog.messages
    assert re.match(r"vllm-rocm-ops is off: .*VLLM_ROCM_OPS_SEAMS: norms not in all, none, activation, .* norm, ", line)
    assert seam.active() == []


def test_vllm_knows_our_variables(monkeypatch):
    """vLLM does not call them unknown, and includes them in its compile cache key: kernels are chosen when it compiles."""
    import vllm.envs

    validate = getattr(current_platform, "validate_environ", None) or vllm.envs.validate_environ  # from 0.31 on; before
    plugin.know_variables()
    monkeypatch.setattr(os, "environ", {name: "2" for name in envs.VARIABLES})
    validate(hard_fail=True)
    factors = vllm.envs.compile_factors()
    monkeypatch.setattr(os, "environ", {})
    changed = {name for name, value in vllm.envs.compile_factors().items() if value != factors[name]}
    assert changed == envs.VARIABLES.keys()
    os.environ["VLLM_ROCM_OPS_SEEMS"] = "none"
    with pytest.raises(ValueError, match="VLLM_ROCM_OPS_SEEMS"):
        validate(hard_fail=True)


@pytest.mark.parametrize(
    ("switch", "wanted"),
    [
        ("all", set(seam.NAMES)),
        ("", set(seam.NAMES)),
        ("none", set()),
        ("norm, activation", {"norm", "activation"}),
        ("-norm", set(seam.NAMES) - {"norm"}),
        ("all,-norm,-fusion", set(seam.NAMES) - {"norm", "fusion"}),
    ],
)
def test_seams_are_kept_or_left_out_by_name(switch, wanted):
    assert {name for name in seam.NAMES if seam.wanted(name, switch)} == wanted


def test_a_seam_comes_after_those_that_it_names():
    """Routing experts and the launch with norms need others' classes; other seams go by name. Cycles are refused."""
    seams = [seam.load(name) for name in seam.NAMES]
    names = [found.name for found in seam.ordered(seams)]
    later = {"routing_experts", "mla_norms"}
    assert [name for name in names if name not in later] == sorted(set(names) - later)
    assert names.index("mla_norms") > max(map(names.index, ("mla_attention", "norm")))
    assert names.index("routing_experts") > max(map(names.index, ("fp8_experts", "unquantized_experts")))
    with pytest.raises(ValueError, match="must have no cycle, got norm"):
        seam.ordered([dataclasses.replace(seam.load("norm"), after=("norm",))])


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.30.0", True),
        ("0.33.1+rocm724", True),
        ("0.29.9", False),
        ("0.34.0rc1", False),
        ("1.30", False),
        ("dev", False),
    ],
)
def test_version_range(version, inside):
    """Both ends belong to the range; an unreadable version does not."""
    assert seam.in_range(version, ("0.30", "0.33")) is inside


@pytest.mark.parametrize(
    ("switch", "capability", "platform", "lack"),
    [
        (None, 90, None, ""),
        ("0", 90, None, ""),
        pytest.param("1", 90, "cuda", "", marks=full),
        ("1", 100, "cuda", "this GPU is not supported, kernels exist for sm_90"),
    ],
)
def test_nvidia_has_to_be_asked_for(switch, capability, platform, lack, monkeypatch):
    """It then needs kernels compiled for it."""
    monkeypatch.delenv("VLLM_ROCM_OPS_ON_NVIDIA", raising=False)
    if switch is not None:
        monkeypatch.setenv("VLLM_ROCM_OPS_ON_NVIDIA", switch)
    capable = Fake(to_int=lambda: capability)
    machine = Fake(is_cuda=lambda: True, get_device_capability=lambda: capable)
    monkeypatch.setattr(platforms, "_current_platform", machine)
    monkeypatch.setattr(platforms, "current_platform", machine, raising=False)
    assert seam.served_platform() == platform
    if platform is not None:
        assert seam.unsupported_reason(platform) == lack
