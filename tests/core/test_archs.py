"""Test that an arch is one file: its properties and its costs."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rocm_ops.core import arch as archs

ROOT = Path(__file__).resolve().parents[2]
GFX943 = """
import dataclasses

from vllm_rocm_ops.core.archs import gfx942

ARCH = dataclasses.replace(gfx942.ARCH, name="gfx943", compute_units=228, products={"MI300A": 228})
"""
PLANNED = """
import json, sys, torch
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch, envs, op

def plans(name):
    of, found = arch.named(name), {}
    for each in op.registered():
        for case in each.cases():
            arguments = case.make("meta", torch.Generator(), of.fp8_dtype)
            chosen = each.explain(*arguments, arch=name)
            found[f"{each.name}/{case.name}"] = repr((chosen.config, chosen.launches and [l.grid for l in chosen.launches]))
    return found

product = str(arch.named("MI300A"))
archs = envs.VARIABLES["VLLM_ROCM_OPS_ARCHS"].default.split(",")
print(json.dumps({"known": list(arch.ARCHS), "product": product, "envs": archs, "new": plans("gfx943"), "old": plans("gfx942:228")}))
"""
BUILT = "import build; print(*build.ARCHS)"


def test_a_new_arch_is_one_file(tmp_path):
    """gfx943, a gfx942 with 228 compute units, can be planned and built for, and is found by its product's name."""
    ignored = shutil.ignore_patterns("__pycache__", "code", "docs")
    shutil.copytree(ROOT / "vllm_rocm_ops", tmp_path / "vllm_rocm_ops", ignore=ignored)
    (tmp_path / "csrc").mkdir()
    shutil.copy(ROOT / "csrc/build.py", tmp_path / "csrc")
    (tmp_path / "vllm_rocm_ops/core/archs/gfx943.py").write_text(GFX943)

    def run(program: str, path: Path) -> str:
        environment = os.environ | {"PYTHONPATH": str(path)}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, cwd=path, check=True, capture_output=True, text=True).stdout

    found, names = json.loads(run(PLANNED, tmp_path)), ["gfx942", "gfx943", "gfx950", "sm_90"]
    assert found["known"] == found["envs"] == run(BUILT, tmp_path / "csrc").split() == names
    assert found["product"] == "gfx943"
    assert len(found["new"]) > 1000 and sum("Config" in plan for plan in found["new"].values()) > 1000
    assert found["new"] == found["old"]


PROPERTIES = """
import dataclasses

import torch

from vllm_rocm_ops.core.archs import Arch, Costs, DecodeCosts, SkinnyCosts, gfx942

properties = {"name": "gfx943", "vendor": "amd", "wave_lanes": 64, "fp8_dtype": torch.float8_e4m3fnuz, "compute_units": 228,
              "lds_bytes": 65536, "bandwidth_gb_s": 5300.0, "clock_ghz": 2.1, "block_scales": False, "sum_rounding": 0.0,
              "products": {}}
skinny = vars(gfx942.SKINNY).copy()
costs = vars(gfx942.COSTS).copy()
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load gfx943 from a text."""
    monkeypatch.setattr(archs.archs, "__path__", [*archs.archs.__path__, str(tmp_path)])

    def load(text: str):
        (tmp_path / "gfx943.py").write_text(text)
        importlib.invalidate_caches()
        return archs.load("gfx943")

    yield load
    sys.modules.pop("vllm_rocm_ops.core.archs.gfx943", None)


@pytest.mark.parametrize(
    "text, missing",
    [
        ("ARCH = Arch(**properties)", "costs"),
        ("del costs['decode']\nARCH = Arch(**properties, costs=Costs(**costs))", "decode"),
        ("del skinny['sharing_us']\nARCH = Arch(**properties, costs=Costs(**costs | {'skinny': SkinnyCosts(**skinny)}))", "sharing_us"),
        ("del properties['vendor']\nARCH = Arch(**properties, costs=gfx942.COSTS)", "vendor"),
    ],
)  # fmt: skip
def test_an_arch_without_a_cost_does_not_load(load, text, missing):
    with pytest.raises(
        TypeError, match=rf"^core/archs/gfx943.py: .*missing 1 required keyword-only argument: '{missing}'"
    ):
        load(PROPERTIES + text)


def test_such_an_arch_loads_with_all_costs(load):
    assert load(PROPERTIES + "ARCH = Arch(**properties, costs=Costs(**costs))").costs == archs.ARCHS["gfx942"].costs


def test_a_file_defines_the_arch_of_its_name():
    assert {name: arch.name for name, arch in archs.ARCHS.items()} == {name: name for name in archs.ARCHS}
    assert all(arch.vendor in ("amd", "nvidia") and str(arch) == arch.name for arch in archs.ARCHS.values())


def test_a_product_with_fewer_compute_units_says_so():
    arch = archs.ARCHS["gfx942"]
    assert str(arch.of_units(80)) == "gfx942:80" == str(archs.named("MI308X")) and str(arch.of_units(304)) == "gfx942"
    assert arch.of_units(80).costs is arch.costs
