"""Test that an arch is one file, its properties and its costs, and that a GPU's product is known."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from marks import full

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.tools import check, doctor, smoke
from vllm_rocm_ops.vllm.selection import kernel_selection

ROOT = Path(__file__).resolve().parents[2]
GFX943 = """
import dataclasses

from vllm_rocm_ops.core.archs import gfx942

ARCH = dataclasses.replace(gfx942.ARCH, name="gfx943", compute_units=228, products={"MI300A": 228})
"""
PLANNED = """
import json, sys, torch
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, envs, op

def plans(name):
    of, found = archs.named(name), {}
    for each in op.registered():
        for case in each.cases():
            arguments = case.make("meta", torch.Generator(), of.fp8_dtype)
            chosen = each.explain(*arguments, arch=name)
            found[f"{each.name}/{case.name}"] = repr((chosen.config, chosen.launches and [l.grid for l in chosen.launches]))
    return found

product = str(archs.named("MI300A"))
default = envs.VARIABLES["VLLM_ROCM_OPS_ARCHS"].default.split(",")
print(json.dumps({"known": list(archs.ARCHS), "product": product, "envs": default, "new": plans("gfx943"), "old": plans("gfx942:228")}))
"""
BUILT = "import build; print(*build.ARCHS)"


@full
def test_a_new_arch_is_one_file(tmp_path):
    """gfx943, a gfx942 with 228 compute units, can be planned and built for, and is found by its product's name."""
    ignored = shutil.ignore_patterns("__pycache__", "code", "docs")
    shutil.copytree(ROOT / "vllm_rocm_ops", tmp_path / "vllm_rocm_ops", ignore=ignored)
    (tmp_path / "csrc").mkdir()
    for name in ("build.py", "debug_info.py"):
        shutil.copy(ROOT / "csrc" / name, tmp_path / "csrc")
    (tmp_path / "vllm_rocm_ops/core/archs/gfx943.py").write_text(GFX943)

    def run(program: str, path: Path) -> str:
        environment = os.environ | {"PYTHONPATH": str(path)}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, cwd=path, check=True, capture_output=True, text=True).stdout

    found, names = json.loads(run(PLANNED, tmp_path)), sorted([*archs.ARCHS, "gfx943"])
    assert found["known"] == run(BUILT, tmp_path / "csrc").split() == names
    assert found["envs"] == [name for name in names if name.startswith("gfx")]
    assert found["product"] == "gfx943"
    assert len(found["new"]) > 1000 and sum("Config" in plan for plan in found["new"].values()) > 1000
    assert found["new"] == found["old"]


PROPERTIES = """
import dataclasses

import torch

from vllm_rocm_ops.core.arch import Arch, Costs, DecodeCosts, SkinnyCosts
from vllm_rocm_ops.core.archs import gfx942

properties = {"name": "gfx943", "vendor": "amd", "wave_lanes": 64, "fp8_dtype": torch.float8_e4m3fnuz, "compute_units": 228,
              "lds_bytes": 65536, "bandwidth_gb_s": 5300.0, "clock_ghz": 2.1, "block_scales": False, "sum_rounding": 0.0,
              "products": {}, "pci_devices": {}}
skinny = vars(gfx942.SKINNY).copy()
costs = vars(gfx942.COSTS).copy()
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load gfx943 from a text."""
    monkeypatch.setattr(archs, "__path__", [*archs.__path__, str(tmp_path)])

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


# The product of a GPU


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Return a function that makes GPU 0 one with this name and PCI device id."""
    monkeypatch.setattr(archs, "PCI", tmp_path)
    monkeypatch.setattr(torch.version, "hip", "7.2")

    def place(name: str, pci: str, arch: str = "gfx942", units: int = 304):
        numbers = {"pci_domain_id": 0, "pci_bus_id": 0x75, "pci_device_id": 0}
        found = SimpleNamespace(
            name=name, gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=units, **numbers
        )
        folder = tmp_path / "0000:75:00.0"
        folder.mkdir(exist_ok=True)
        (folder / "device").write_text(f"{pci}\n")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        for cached in (archs.product_of, archs.of_device):
            cached.cache_clear()

    yield place
    archs.product_of.cache_clear()
    archs.of_device.cache_clear()


@pytest.mark.parametrize("name", ["", "AMD Radeon Graphics", "AMD Instinct MI300X"])
@pytest.mark.parametrize(
    ("pci", "product"), [("0x74a1", "MI300X"), ("0x74b9", "MI325X"), ("0x75a0", "MI350X"), ("0x75a3", "MI355X")]
)
def test_a_product_is_known_by_its_pci_device_whatever_its_name(gpu, name, pci, product):
    gpu(name, pci)
    assert archs.product_of(0) == product
    found = [next(smoke.driver(None))]
    assert found[0] == {"gpus": [{"name": product}]}
    assert check.file_name([{"found": found}], None).name.startswith(f"vllm-rocm-ops-check-{product}-")
    assert doctor.find_gpus()[0]["product"] == product


@pytest.mark.parametrize(
    ("name", "product"), [("AMD Instinct MI300X HF", "MI300X"), ("AMD Radeon Graphics",) * 2, ("", "gfx942")]
)
def test_an_unknown_pci_device_has_its_name_and_never_an_empty_one(gpu, name, product):
    gpu(name, "0x74a9")
    assert archs.product_of(0) == product
    (archs.PCI / "0000:75:00.0/device").unlink()
    archs.product_of.cache_clear()
    assert archs.product_of(0) == product


def test_records_of_nameless_gpus_are_of_their_product(gpu, monkeypatch):
    gpu("", "0x74a5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    (archs.PCI / "0000:75:00.0/current_compute_partition").write_text("SPX\n")
    found = kernel_selection.machine()
    assert (found["gpu"], found["arch"], found["partition"]) == ("MI325X", "gfx942", "SPX")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_pci_devices_are_those_of_vllm():
    """vLLM's own table has no other device of our products; it does not know all of them."""
    text = (Path(importlib.util.find_spec("vllm").origin).parent / "platforms/rocm.py").read_text()
    theirs = dict(re.findall(r'"(0x\w+)": "AMD_Instinct_(\w+)"', text))
    ours = {pci: product for arch in archs.ARCHS.values() for pci, product in arch.pci_devices.items()}
    assert {pci: name for pci, name in theirs.items() if name in archs.PRODUCTS}.items() <= ours.items()
    assert "0x74a1" in theirs and set(ours.values()) == set(archs.PRODUCTS)
