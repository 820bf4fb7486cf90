"""Measure an engine's start in each worker, with or without the plugin: `LLM(worker_extension_cls="engine_start.Extension")`.

vLLM imports this module after its plugins. Loading and warming up the model are then timed, with their peak memory: bytes allocated on
the GPU, or the process's maximum resident set on a CPU.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
from vllm.v1.worker.worker_base import WorkerWrapperBase

STEPS = {"load_model": "load", "compile_or_warm_up_model": "warm_up"}
"""A worker's methods, and their names in a report."""

_noted: dict[str, float] = {}

if "vllm_rocm_ops" in sys.modules:  # the side with the plugin
    from vllm_rocm_ops.vllm.worker import Extension as Base
else:
    Base = object


def peak_bytes() -> int:
    """Return the peak GPU memory in bytes since the last reset, or the process's peak resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def timed(method: str, step: str) -> None:
    """Wrap a worker's method, as the plugins left it, to record its time and peak memory."""
    own = vars(WorkerWrapperBase).get(method)

    def run(self, *arguments, **keywords):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = own(self, *arguments, **keywords) if own else getattr(self.worker, method)(*arguments, **keywords)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        _noted.update({f"{step}_s": time.perf_counter() - begin, f"{step}_peak_bytes": peak_bytes()})
        return result

    setattr(WorkerWrapperBase, method, run)


for method, step in STEPS.items():
    timed(method, step)


class Extension(Base):
    """Provide methods for `llm.collective_rpc(name)`."""

    def engine_start(self) -> dict[str, float]:
        """Return times and peaks of the start, and the memory in use now."""
        held = torch.cuda.memory_allocated() if torch.cuda.is_available() else peak_bytes()
        return {**_noted, "steady_bytes": held}
