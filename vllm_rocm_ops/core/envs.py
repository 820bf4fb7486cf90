"""Every environment variable that the package reads. `envs.VLLM_ROCM_OPS_DISABLE` reads the variable at that moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_rocm_ops.core import archs


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its value if it is unset, and its meaning."""

    name: str
    default: str
    meaning: str


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("VLLM_ROCM_OPS_DISABLE", "", "comma list of ops whose kernels are not used; `all` for every op"),
        Variable("VLLM_ROCM_OPS_SEAMS", "all", "comma list of the vLLM seams to install; `none` for no seam"),
        Variable("VLLM_ROCM_OPS_ON_NVIDIA", "0", "development: 1 installs the seams on NVIDIA too, to measure them"),
        Variable("VLLM_ROCM_OPS_ON_CPU", "0", "tests: 1 installs the seams on CPU too, where PyTorch runs in them"),
        Variable("VLLM_ROCM_OPS_ANY_VERSION", "0", "1 installs the seams in untested vLLM versions too, as nightlies"),
        Variable(
            "VLLM_ROCM_OPS_SHUFFLE", "0", "1 shuffles FP8 weights where our GEMMs were measured to win at all sizes"
        ),
        Variable("VLLM_ROCM_OPS_MEASURE", "1", "0 keeps vLLM's workers from timing our kernels against its own"),
        Variable(
            "VLLM_ROCM_OPS_ALL_REDUCE_LIMIT",
            "60",
            "seconds that our all-reduce waits for a rank before it fails the step",
        ),
        Variable("VLLM_ROCM_OPS_ATTENTION", "0", "1 runs our decode attention wherever it fits, faster or not"),
        Variable(
            "VLLM_ROCM_OPS_TABLES", "", "folder of your tuned tables; `~/.config/vllm-rocm-ops/tables` by default"
        ),
        Variable("VLLM_ROCM_OPS_HIP_LIBRARY", "", "path of the libamdhip64 to use instead of the one found"),
        Variable("VLLM_ROCM_OPS_COMMIT", "", "the commit that results name, where the folder is no checkout"),
        Variable("VLLM_ROCM_OPS_CLANG", "", "build: the clang that compiles device code, before all others"),
        Variable("VLLM_ROCM_OPS_ARCHS", ",".join(archs.NAMES), "build: comma list of the archs to compile for"),
        Variable("VLLM_ROCM_OPS_DEBUG", "", "build: 1 compiles device code with line tables and little optimisation"),
    )
}


def __getattr__(name: str) -> str:
    if name not in VARIABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return os.environ.get(name, VARIABLES[name].default)


def tables() -> Path:
    """The folder of the user's tuned tables, which `vllm-rocm-ops tune` writes."""
    folder = __getattr__("VLLM_ROCM_OPS_TABLES")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "vllm-rocm-ops", "tables")
