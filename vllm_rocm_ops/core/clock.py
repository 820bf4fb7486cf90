"""Time calls as a decode step runs them: from a captured graph, with cold caches."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable
from typing import Protocol

import torch

from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.arch import Arch

ROUNDS = 15
COLD_BYTES = 640_000_000  # more than twice the largest last-level cache, 256 MB on MI300X and MI355X
MAX_CALLS = 64  # per graph
ERROR_MODE = "thread_local"  # a query by RCCL's watchdog thread ends a capture in global mode, HIP 7.0 to 7.2.0


class Clock(Protocol):
    """Times calls on tensors of `device` with kernels of `arch`, in `unit`."""

    arch: Arch
    device: str
    unit: str

    def calls(self, bytes_of_call: int) -> int:
        """Return the calls per sample, each on its own inputs."""

    def prepare(self, call: Callable, sets: list[tuple]) -> object:
        """Return what `samples` times: the call on each set of arguments. Runs the call, and raises its errors."""

    def samples(self, prepared: dict[object, object]) -> dict[object, list[float]]:
        """Return times per call of what `prepare` returned, interleaved so that disturbances affect all of them."""


def capture(call: Callable, sets: list[tuple]) -> torch.cuda.CUDAGraph:
    """Return a CUDA or HIP graph with one call per set of arguments. `outputs` has what the first and the last returned."""
    call(*sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=ERROR_MODE):
        graph.outputs = run_all(call, sets)
    graph.reads = sets  # freed memory may be unmapped before a replay
    return graph


def run_all(call: Callable, sets: list[tuple]) -> tuple[object, object]:
    """Run a call on each set of arguments, and return what the first and the last returned."""
    first = last = call(*sets[0])
    for arguments in sets[1:]:
        last = call(*arguments)
    return first, last


def finish() -> None:
    """Wait for all launches, and raise their errors."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Flush:
    """Reads other memory, to flush the caches. It is allocated by the first read, and kept."""

    def __init__(self, device: str = "cuda"):
        self._device = device

    @functools.cached_property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(COLD_BYTES // 4, device=self._device), torch.zeros((), device=self._device)

    def __call__(self) -> None:
        other, total = self._memory
        torch.sum(other, dim=0, out=total)


def replays(
    graphs: dict,
    calls: int,
    rounds: int = ROUNDS,
    around: Callable = contextlib.nullcontext,
    flush: Flush | None = None,
) -> dict[object, list[float]]:
    """Return microseconds per call for every replay of graphs with `calls` calls each.

    The graphs take turns; `around(name)` is entered for each replay and the wait for it. Before each replay `flush`, by default a
    new one, reads other memory, which also hides the graph's launch.
    """
    flush = flush or Flush()
    times: dict[object, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush()
            with around(name):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    return times


def measure(graphs: dict, calls: int) -> dict[object, float]:
    """Return the median microseconds per call of each graph in `replays`."""
    return {name: statistics.median(times) for name, times in replays(graphs, calls).items()}


def calls_of_graph(bytes_of_call: int) -> int:
    """Return the calls whose inputs exceed the last-level cache, between 4 and `MAX_CALLS`."""
    return min(max(math.ceil(COLD_BYTES / max(bytes_of_call, 1)), 4), MAX_CALLS)


class GpuClock:
    """Times graph replays by events on this process's first GPU. Raises RuntimeError if it has no kernels."""

    device, unit = "cuda", "us"

    def __init__(self):
        if not torch.cuda.is_available():
            raise RuntimeError("no GPU found")
        runtime, why = launch.runtime()
        if runtime is None:
            raise RuntimeError(why)
        self.arch = archs.of_device(0)
        if self.arch is None:
            raise RuntimeError(f"there are no kernels for {archs.product_of(torch.cuda.current_device())}")

    def calls(self, bytes_of_call: int) -> int:
        return calls_of_graph(bytes_of_call)

    def prepare(self, call: Callable, sets: list[tuple]) -> tuple[torch.cuda.CUDAGraph, int]:
        return capture(call, sets), len(sets)

    def samples(self, prepared: dict[object, tuple[torch.cuda.CUDAGraph, int]]) -> dict[object, list[float]]:
        counts = {count for _, count in prepared.values()}
        if len(counts) != 1:
            raise ValueError(f"graphs must have equal numbers of calls, got {sorted(counts)}")
        return replays({name: graph for name, (graph, _) in prepared.items()}, counts.pop())


def tensor_bytes(*values) -> int:
    """Return the bytes of all tensors among the values."""
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
