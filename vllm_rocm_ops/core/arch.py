"""Find a GPU architecture: by its name, or of a device."""

from __future__ import annotations

import functools
import importlib
import re

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.archs import Arch


def load(name: str) -> Arch:
    """The arch that a file of `core/archs` defines. Raises TypeError if it lacks a property or a cost."""
    try:
        return importlib.import_module(f"{archs.__name__}.{name}").ARCH
    except TypeError as error:
        raise TypeError(f"core/archs/{name}.py: {error}") from error


ARCHS = {name: load(name) for name in archs.NAMES}
PRODUCTS = {product: arch.of_units(units) for arch in ARCHS.values() for product, units in arch.products.items()}


def named(name: str) -> Arch:
    """The architecture of a name: one of `ARCHS`, such a name with a number of compute units (gfx942:80), or one of `PRODUCTS`.
    Case does not matter. Raises ValueError."""
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
    """The architecture of GPU `index` of this process, with its number of compute units. None if there are no kernels for it."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    arch = ARCHS.get(name)
    return None if arch is None else arch.of_units(properties.multi_processor_count)
