"""What server_load.py asks of a server's workers besides the package's own extension."""

import contextlib
import os

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.vllm.worker import Extension as Base

SECONDS = "SERVER_LOAD_PAIR_SECONDS"
"""The variable that has a server measure on CPU too, so many seconds for each pair of kernels."""

if SECONDS in os.environ and not torch.cuda.is_available():
    import measured_on_cpu  # of tests/vllm

    measured_on_cpu.install(seconds=float(os.environ[SECONDS]))


class Extension(Base):
    def load_emulate(self, arch: str | None) -> None:
        """From now on the ops run the code objects for an architecture in the emulator; with None, as before."""
        from vllm_rocm_ops.emulator import Emulator

        if arch is None:
            self.load_emulation.close()
        else:
            self.load_emulation = contextlib.ExitStack()
            self.load_emulation.enter_context(launch.executor(Emulator(arch)))

    def load_fault(self, name: str, factor: float) -> None:
        """From now on what an op's reference returns is wrong by a factor."""
        op = getattr(ops, name)
        exact = op.reference
        op.reference = lambda *arguments: exact(*arguments) * factor
