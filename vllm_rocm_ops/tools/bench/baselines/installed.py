"""Find the installed packages with baselines of the ops, and load vLLM's compiled ops."""

import contextlib
import functools
import importlib.util

import torch


@functools.cache
def load() -> None:
    """Register vLLM's compiled ops if vLLM is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm._custom_ops")


def has_compiled(name: str) -> bool:
    """True if vLLM's compiled op exists."""
    load()
    return hasattr(torch.ops._C, name)


def has(package: str, on_rocm: bool = False) -> bool:
    """True if a package is installed, and, `on_rocm`, whether PyTorch is a ROCm build."""
    return (torch.version.hip is not None or not on_rocm) and importlib.util.find_spec(package) is not None
