"""Extend a server's workers for server_load.py, on top of the package's own extension."""

import contextlib
import os

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.vllm.worker import Extension as Base

SECONDS = "SERVER_LOAD_PAIR_SECONDS"
"""Variable that makes a server measure on a CPU too, with this time per pair of kernels."""

if SECONDS in os.environ and not torch.cuda.is_available():
    import on_cpu  # in tests/vllm

    on_cpu.measure(seconds=float(os.environ[SECONDS]))


class Extension(Base):
    """Provide methods for `/collective_rpc`."""

    def load_emulate(self, arch: str | None) -> None:
        """Run the code objects of an architecture in the emulator from now on; None restores the default."""
        from vllm_rocm_ops.emulator import Emulator

        if arch is None:
            self.load_emulation.close()
        else:
            self.load_emulation = contextlib.ExitStack()
            self.load_emulation.enter_context(launch.executor(Emulator(arch)))

    def load_fault(self, name: str, factor: float) -> None:
        """Multiply the results of an op's reference by a factor from now on."""
        op = getattr(ops, name)
        exact = op.reference
        op.reference = lambda *arguments: exact(*arguments) * factor
