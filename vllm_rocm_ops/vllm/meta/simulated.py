"""Make this process look to vLLM like one on an AMD GPU: for what vLLM decides there, on a machine without one.

vLLM's own code decides, on its own platform class. Only its queries of the machine are answered here, so that no device
is initialized. It reads them at import: call `amd` before, in a process for nothing else.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types

COMPILED = "_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "_rocm_C", "vllm_flash_attn"
"""vLLM's compiled modules."""

_library = None  # holds the definition of an op of vLLM's extension, which is missing


class Pretended(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A stand-in for packages: every submodule exists, and functions return None, or for `aiter` that nothing is tuned."""

    def __init__(self, *packages: str):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        found = any(name == package or name.startswith(package + ".") for package in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__file__ = os.devnull
        module.AITER_CONFIGS = types.SimpleNamespace()
        for table in ("", "_BPRESHUFFLE", "_BLOCKSCALE_BPRESHUFFLE"):
            setattr(module.AITER_CONFIGS, f"AITER_CONFIG_GEMM_A8W8{table}_FILE", os.devnull)
        module.get_gemm_config = lambda *_: (None, False)
        module.__getattr__ = self.function
        return module

    @staticmethod
    def function(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None

    def exec_module(self, module):
        pass


def rocm_platform() -> types.ModuleType:
    """Import vllm.platforms.rocm without the build of vLLM's library that it names: on CPU it may be a second one."""
    hidden = {name: sys.modules.get(name) for name in ("vllm._C", "amdsmi")}
    sys.modules["vllm._C"], sys.modules["amdsmi"] = types.ModuleType("vllm._C"), None
    try:
        return importlib.import_module("vllm.platforms.rocm")
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module:
                sys.modules[name] = module


def define_missing_op() -> None:
    """Define the op of vLLM's extension that vLLM looks up at import."""
    import torch

    global _library
    _library = torch.library.Library("_C", "FRAGMENT")
    _library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")


def amd(arch: str, aiter: bool) -> None:
    """Fake a ROCm machine in torch with triton_kernels and Quark, and ROCm as vLLM's platform; with `aiter` that it is installed."""
    import torch

    sys.meta_path.insert(0, Pretended("triton_kernels", "quark"))
    if aiter:
        sys.meta_path.insert(0, Pretended("aiter"))
    device = types.SimpleNamespace(
        gcnArchName=arch, total_memory=192 << 30, multi_processor_count=304, major=9, minor=4
    )
    torch.cuda.get_device_properties = lambda *_: device
    torch.version.hip = "7.2.0"
    torch.cuda._device_count_amdsmi = lambda: 0  # PyTorch for CUDA has not imported what this asks
    define_missing_op()

    import vllm.platforms

    RocmPlatform = rocm_platform().RocmPlatform
    vllm.platforms._current_platform = vllm.platforms.current_platform = RocmPlatform()
    RocmPlatform.get_device_name = classmethod(lambda *_: "AMD_Instinct_MI300X")
