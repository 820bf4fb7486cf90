"""Find a GPU architecture by name or by device, and a device's product and PCI folder.

Each file of this folder has the `ARCH` of one architecture. Shared costs are imported by name. Nothing has a default, so an arch without a
cost does not load. csrc/build.py compiles for the archs with a file here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from pathlib import Path

import torch

from vllm_rocm_ops.core.arch import Arch

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> Arch:
    """Return the arch that a file of `core/archs` defines. Raises TypeError if it lacks a property or a cost."""
    try:
        return importlib.import_module(f"{__name__}.{name}").ARCH
    except TypeError as error:
        raise TypeError(f"core/archs/{name}.py: {error}") from error


ARCHS = {name: load(name) for name in NAMES}
PRODUCTS = {product: arch.of_units(units) for arch in ARCHS.values() for product, units in arch.products.items()}

PCI = Path("/sys/bus/pci/devices")


def named(name: str) -> Arch:
    """Return the architecture of a name.

    Args:
        name: One of `ARCHS`, such a name with compute units ("gfx942:80"), or one of `PRODUCTS` ("MI300X"), in any case.

    Returns:
        The architecture with these compute units.

    Raises:
        ValueError: The name is unknown.
    """
    if name.upper() in PRODUCTS:
        return PRODUCTS[name.upper()]
    match = re.fullmatch(r"(\w+)(?::([1-9]\d{0,3}))?", name.lower())
    if match is None or match[1] not in ARCHS:
        raise ValueError(
            f"arch must be one of {', '.join((*ARCHS, *PRODUCTS))} or like {next(iter(ARCHS))}:80, got {name}"
        )
    arch = ARCHS[match[1]]
    return arch.of_units(int(match[2] or arch.compute_units))


@functools.cache
def of_device(index: int) -> Arch | None:
    """Return the architecture of GPU `index` with its compute units, or None if it has no kernels."""
    properties = torch.cuda.get_device_properties(index)
    arch = ARCHS.get(arch_name(properties))
    return None if arch is None else arch.of_units(properties.multi_processor_count)


def arch_name(properties) -> str:
    """Return the name of the architecture in a GPU's properties, known or not."""
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def pci_folder(properties) -> Path:
    """Return the folder of a GPU's files about its PCI device; the driver of AMD's adds some."""
    numbers = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return PCI / "{:04x}:{:02x}:{:02x}.0".format(*numbers)


@functools.cache
def product_of(index: int) -> str:
    """Return the product of GPU `index`, never empty: by its PCI device id, else by the name that torch reports.

    That name may be empty or "AMD Radeon Graphics" although the GPU is known, so it counts only for unknown ids. If it has
    no product, it is returned as it is, and the arch in place of an empty one.
    """
    properties = torch.cuda.get_device_properties(index)
    by_id = {pci: product for arch in ARCHS.values() for pci, product in arch.pci_devices.items()}
    try:
        product = by_id.get((pci_folder(properties) / "device").read_text().strip())
    except OSError:
        product = None
    name = properties.name
    return product or next((each for each in PRODUCTS if each in name), name) or arch_name(properties)
