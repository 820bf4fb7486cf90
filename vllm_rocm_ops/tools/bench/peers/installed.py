"""What is installed that has peers of the ops, and its compiled ops."""

import contextlib
import functools
import importlib.util

import torch


@functools.cache
def load() -> None:
    """Registers vLLM's compiled ops if vLLM is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm._custom_ops")


def has_compiled(name: str) -> bool:
    """Whether vLLM's compiled op is there."""
    load()
    return hasattr(torch.ops._C, name)


def has(package: str, on_rocm: bool = False) -> bool:
    """Whether a package is installed, and, if it is asked for, PyTorch is that for ROCm."""
    return (torch.version.hip is not None or not on_rocm) and importlib.util.find_spec(package) is not None
