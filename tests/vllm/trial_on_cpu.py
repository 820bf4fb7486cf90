"""Make vLLM's CPU engine try kernels at its first start, in a child whose executor faults or hangs in one op."""

import os
import time

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.tools import first_start, smoke
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_trial

ARCH = archs.ARCHS["gfx942"]
NAMES = ("rms_norm", "scaled_mm", "silu_and_mul")


class Driver:
    """A driver that loads everything."""

    status, versions, load = "stands in".strip, dict, staticmethod(lambda *_: 1)


class Graph:
    """A graph that repeats the captured calls."""

    def __init__(self, call, sets):
        self.replay = lambda: [call(*arguments) for arguments in sets]
        self.replay()


class Executor:
    """An executor that aborts or sleeps in the kernels of one op's smallest case, and launches no other."""

    arch = ARCH

    def __init__(self, name: str, how: str):
        op, self.how = getattr(ops, name), how
        given = smoke.smallest(op, ARCH).make("meta", torch.Generator(), ARCH.fp8_dtype)
        self.symbols = {one.symbol for one in op.explain(*given, arch=ARCH, require_code=True).launches}

    def launch(self, kernel, uninitialized):
        if kernel.symbol not in self.symbols:
            raise launch.NotLaunched("there is no GPU")
        if self.how == "aborts":
            os.write(2, b"Memory access fault by GPU node-1\n")
            os.abort()
        time.sleep(600)


def child(name: str, how: str) -> None:
    """Run the child."""
    here, cuda = kernel_selection.machine(), torch.cuda
    kernel_selection.machine = lambda: here
    cuda.device_count, archs.product_of = lambda: 1, lambda index: "a GPU"
    archs.of_device, launch.runtime, smoke.clock.capture = lambda index: ARCH, lambda: (Driver, ""), Graph
    first_start.names = lambda: [*NAMES]
    launch._executor = Executor(name, how)
    if how == "sleeps":
        first_start.SECONDS = 3.0
    first_start.main()


def install(name: str, how: str) -> None:
    """Let workers of this process try the kernels."""
    kernel_trial.applies, kernel_trial.device_of = lambda: True, lambda worker: {}
    kernel_trial.SECONDS = 300.0  # a busy machine may take 30 s to import what a child needs
    kernel_trial.CODE = f"import trial_on_cpu; trial_on_cpu.child({name!r}, {how!r})"
