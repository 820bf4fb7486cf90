"""Time calls that the ranks of a group make together, from captured graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.vllm.selection.replays import Replays, raise_for

ROUNDS = 9  # replays


class GraphClock:
    """Time replays of graphs that vLLM's communicator captures."""

    finish = staticmethod(clocks.finish)
    """Waits for all launches, and raises their errors."""

    def times(
        self, group, agree: Callable, calls: dict[str, Callable], sets: list[tuple], replays: Replays
    ) -> dict[str, list[float]]:
        """Return this rank's microseconds per call of each function, in turn. All ranks start a replay together."""

        def capture(call: Callable) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with (
                group.graph_capture() as context,
                torch.cuda.graph(graph, stream=context.stream, capture_error_mode=clocks.ERROR_MODE),
            ):
                graph.outputs = clocks.run_all(call, sets)
            return graph

        def check() -> None:
            of_ranks = agree(lambda: replays.differing(graphs))
            raise_for({name for names in of_ranks for name in names})

        graphs, times = {}, {name: [] for name in calls}
        for name, call in calls.items():
            graphs[name] = agree(functools.partial(capture, call), keep=True)

        def replay(name: str) -> None:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            calls["baseline"](*sets[0])  # synchronizes the ranks
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / len(sets))

        check()
        for _ in range(ROUNDS):
            for name in graphs:
                agree(functools.partial(replay, name))
        check()
        return times
