"""How calls are timed: as a decode step runs them, from a captured graph, on weights that no cache holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Protocol

import torch

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.arch import Arch

ROUNDS = 15
COLD_BYTES = 640_000_000  # more than twice the largest last-level cache, 256 MB of MI300X and MI355X
MOST_CALLS = 64  # of a graph


class Clock(Protocol):
    """Times calls on tensors of `device`, for kernels of `arch`. Its numbers are in `unit`."""

    arch: Arch
    device: str
    unit: str

    def calls(self, bytes_of_call: int) -> int:
        """How many calls, each on inputs of its own, make one sample."""

    def prepare(self, call: Callable, sets: list[tuple]) -> object:
        """What `samples` times: the call on each set of arguments. Runs it; raises what the call raises."""

    def samples(self, prepared: dict[object, object]) -> dict[object, list[float]]:
        """Times per call of what `prepare` gave. All are timed in turn, so that what disturbs one disturbs all."""


def capture(call: Callable, sets: list[tuple]) -> torch.cuda.CUDAGraph:
    """A CUDA or HIP graph of one call per set of arguments."""
    call(*sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            call(*arguments)
    graph.reads = sets  # what is freed may be unmapped before a replay
    return graph


def replays(graphs: dict, calls: int, rounds: int = ROUNDS) -> dict[object, list[float]]:
    """Microseconds per call of every replay of graphs that hold so many calls. The graphs take turns; before each replay other
    memory is read until no cache holds theirs, which also hides the launch of the graph."""
    other, total = torch.zeros(COLD_BYTES // 4, device="cuda"), torch.zeros((), device="cuda")
    times: dict[object, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.sum(other, dim=0, out=total)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    return times


def measure(graphs: dict, calls: int) -> dict[object, float]:
    """Median microseconds per call of each of `replays`."""
    return {name: statistics.median(times) for name, times in replays(graphs, calls).items()}


def calls_of_graph(bytes_of_call: int) -> int:
    """Enough calls for their inputs to exceed the last-level cache, within reason."""
    return min(max(math.ceil(COLD_BYTES / max(bytes_of_call, 1)), 4), MOST_CALLS)


class GpuClock:
    """Events around replays of graphs on this process's first GPU. Raises RuntimeError where there is none with kernels."""

    device, unit = "cuda", "us"

    def __init__(self):
        if not torch.cuda.is_available():
            raise RuntimeError("there is no GPU")
        runtime, why = launch.runtime()
        if runtime is None:
            raise RuntimeError(why)
        self.arch = archs.of_device(0)
        if self.arch is None:
            raise RuntimeError(f"there are no kernels for {torch.cuda.get_device_name()}")

    def calls(self, bytes_of_call: int) -> int:
        return calls_of_graph(bytes_of_call)

    def prepare(self, call: Callable, sets: list[tuple]) -> tuple[torch.cuda.CUDAGraph, int]:
        return capture(call, sets), len(sets)

    def samples(self, prepared: dict[object, tuple[torch.cuda.CUDAGraph, int]]) -> dict[object, list[float]]:
        counts = {count for _, count in prepared.values()}
        if len(counts) != 1:
            raise ValueError(f"graphs must have equally many calls, got {sorted(counts)}")
        return replays({name: graph for name, (graph, _) in prepared.items()}, counts.pop())


def tensor_bytes(*values) -> int:
    """Bytes of all tensors among the values."""
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
