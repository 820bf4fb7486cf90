"""Find a GPU architecture by name or by device."""

from __future__ import annotations

import functools
import importlib
import re

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.archs import Arch


def load(name: str) -> Arch:
    """Return the arch that a file of `core/archs` defines. Raises TypeError if it lacks a property or a cost."""
    try:
        return importlib.import_module(f"{archs.__name__}.{name}").ARCH
    except TypeError as error:
        raise TypeError(f"core/archs/{name}.py: {error}") from error


ARCHS = {name: load(name) for name in archs.NAMES}
PRODUCTS = {product: arch.of_units(units) for arch in ARCHS.values() for product, units in arch.products.items()}


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
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    arch = ARCHS.get(name)
    return None if arch is None else arch.of_units(properties.multi_processor_count)
