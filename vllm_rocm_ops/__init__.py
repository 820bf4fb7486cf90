"""Provide FP8 decode ops for AMD Instinct GPUs, and the vLLM plugin that uses them.

The ops are `torch.ops.vllm_rocm_ops.<name>` and `vllm_rocm_ops.ops.<name>`. Importing the package neither initializes a GPU nor
imports vLLM.
"""

import importlib.util
import warnings

__version__ = "0.2.0"
__all__ = ["__version__", "fallbacks", "ops", "reset_stats", "stats"]

if importlib.util.find_spec("torch"):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # the emulator alone needs it, and says so
        import torch  # noqa: F401
    from vllm_rocm_ops import ops
    from vllm_rocm_ops.core.stats import fallbacks, reset_stats, stats  # the function shadows its module
else:

    def __getattr__(name: str):
        raise ImportError(f"vllm_rocm_ops.{name} needs torch, which this Python lacks")
