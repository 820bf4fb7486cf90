"""What an engine's start takes in each worker: `LLM(worker_extension_cls="engine_start.Extension")`, with the ops and without.

Where this module is imported, which vLLM does when it has loaded its plugins, loading a model and warming it up are timed, and note
their peaks of memory: bytes allocated on the GPU, on CPU the process's largest resident set.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
from vllm.v1.worker.worker_base import WorkerWrapperBase

STEPS = {"load_model": "load", "compile_or_warm_up_model": "warm_up"}
"""Methods of a worker, and what they are called in a report."""

_noted: dict[str, float] = {}

if "vllm_rocm_ops" in sys.modules:  # the side with the ops
    from vllm_rocm_ops.vllm.worker import Extension as Base
else:
    Base = object


def peak_bytes() -> int:
    """Return the largest number of bytes held since the last reset, which a CPU does not have."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def timed(method: str, step: str) -> None:
    """Have a method of workers, as the plugins left it, note its time and peak."""
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
    """Methods for `llm.collective_rpc(name)`."""

    def engine_start(self) -> dict[str, float]:
        """Seconds and peaks of the start, and what is held now."""
        held = torch.cuda.memory_allocated() if torch.cuda.is_available() else peak_bytes()
        return {**_noted, "steady_bytes": held}
