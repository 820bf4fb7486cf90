"""Declare every environment variable that the package reads. `envs.VLLM_ROCM_OPS_DISABLE` reads it at access."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_rocm_ops.core import archs


@dataclass(frozen=True)
class Variable:
    """An environment variable: its name, its default, and its meaning."""

    name: str
    default: str
    meaning: str


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("VLLM_ROCM_OPS_DISABLE", "", "comma list of ops that run without kernels; `all` for every op"),
        Variable("VLLM_ROCM_OPS_SEAMS", "all", "comma list of vLLM seams to install; `none` for no seam"),
        Variable("VLLM_ROCM_OPS_ON_NVIDIA", "0", "development: 1 installs the seams on NVIDIA too, to measure them"),
        Variable("VLLM_ROCM_OPS_ON_CPU", "0", "tests: 1 installs the seams on CPU too, where PyTorch runs the ops"),
        Variable(
            "VLLM_ROCM_OPS_ANY_VERSION", "0", "1 installs the seams in untested vLLM versions too, as in nightlies"
        ),
        Variable(
            "VLLM_ROCM_OPS_SHUFFLE",
            "0",
            "1 shuffles FP8 weights of layers whose GEMMs were faster at all measured batch sizes",
        ),
        Variable(
            "VLLM_ROCM_OPS_MEASURE",
            "10",
            "seconds of a start in which vLLM's workers time the plugin's kernels against vLLM's; 0 stops that",
        ),
        Variable(
            "VLLM_ROCM_OPS_ALL_REDUCE_LIMIT",
            "60",
            "seconds that the plugin's all-reduce waits for a rank before it fails the step",
        ),
        Variable(
            "VLLM_ROCM_OPS_ALL_REDUCE_WIRE",
            "bf16",
            "`fp8` has the plugin's all-reduce send [FP8](all_reduce.md#fp8-on-the-wire) in calls above 512 KiB that are predicted to be faster with it: half the bytes, less exact",
        ),
        Variable(
            "VLLM_ROCM_OPS_ATTENTION",
            "0",
            "1 runs the plugin's decode attention wherever it is supported, faster or not",
        ),
        Variable(
            "VLLM_ROCM_OPS_NAMED_BACKEND",
            "",
            "`keep` leaves layers to the backends that vLLM's options name, such as `--moe-backend triton`",
        ),
        Variable(
            "VLLM_ROCM_OPS_TABLES", "", "folder of your tuned tables; `~/.config/vllm-rocm-ops/tables` by default"
        ),
        Variable("VLLM_ROCM_OPS_HIP_LIBRARY", "", "path of the libamdhip64 to use instead of the one found"),
        Variable("VLLM_ROCM_OPS_COMMIT", "", "the commit that results name, if the folder is not a checkout"),
        Variable("VLLM_ROCM_OPS_CLANG", "", "build: the clang that compiles device code, in place of ziglang's"),
        Variable(
            "VLLM_ROCM_OPS_ARCHS",
            ",".join(n for n, of in archs.ARCHS.items() if of.vendor == "amd"),
            "build: comma list of archs to compile for, in place of AMD's",
        ),
        Variable("VLLM_ROCM_OPS_DEBUG", "", "build: 1 compiles device code with line tables and little optimization"),
    )
}


def __getattr__(name: str) -> str:
    if name not in VARIABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return os.environ.get(name, VARIABLES[name].default)


def of_child(changes: dict[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this one's, with changes. It imports the packages that this process does."""
    paths = os.pathsep.join(path for path in sys.path if path)  # without the current folder
    return {**os.environ, "PYTHONPATH": paths, **changes}


def hand_down(changes: dict[str, str]) -> None:
    """Change the environment of this process, and so of those that it starts."""
    os.environ.update(changes)


def tables() -> Path:
    """Return the folder of the user's tuned tables, which `vllm-rocm-ops tune` writes."""
    folder = __getattr__("VLLM_ROCM_OPS_TABLES")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "vllm-rocm-ops", "tables")
