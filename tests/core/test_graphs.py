"""Test concurrent launches of one kernel, as from captured graphs on two streams or streams within a graph.

Each launch has its own counters, so none takes another's blocks for its own.
"""

from __future__ import annotations

import gc

import pytest
import torch
from marks import full

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.launch import Counters, Workspace
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.emulator import Devices
from vllm_rocm_ops.emulator.errors import EmulatorError

TOKENS, ROWS, K = 16, 2304, 16384


def arguments(kind: str, fp8_dtype: torch.dtype, seed: int, device="cpu", sizes=(TOKENS, ROWS, K)) -> tuple:
    """Return arguments of a GEMM whose tiles are shared by blocks, with other values for each seed."""
    tokens, rows, k = sizes
    generator = torch.Generator().manual_seed(seed)

    def scale(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(device)

    a, b = (torch.randn(size, k, generator=generator).to(device).to(fp8_dtype) for size in (tokens, rows))
    if kind == "block":
        return a, b, scale(tokens, k // 128), scale(-(-rows // 128), k // 128), torch.bfloat16
    return a, b.t(), scale(1, 1), scale(1, 1), torch.bfloat16


OF_KIND = {"tensor": ops.scaled_mm, "block": ops.block_scaled_mm}


def counted(planned) -> int:
    """Return the number of counters of launches."""
    return sum(arg for l in planned for arg in l.named.values() if isinstance(arg, Counters))


# In the emulator


def run_beside(arch_name: str, seed: int, op: Op, given: list[tuple], share: bool) -> list[torch.Tensor]:
    """Return the results of concurrent calls, in the configuration with the most blocks.

    With `share` they use the same counters, as they once did.
    """
    calls, counters, devices = [], None, Devices(arch_name, seed=seed)
    for arguments in given:
        a = op.Arguments(*arguments)
        out = op.allocate(a).fill_(float("nan"))
        plans = [op.plan(config, out, a, devices.arch)[0] for config in op.configs(a, devices.arch)]
        planned = max((plan for plan in plans if counted([plan])), key=lambda plan: plan.grid)
        if counters is None or not share:
            counters = torch.zeros(counted([planned]), dtype=torch.int32)

        def memory(arg, counters=counters):
            if isinstance(arg, Workspace):
                return torch.full((arg // 4,), float("nan"))
            return counters if isinstance(arg, Counters) else arg

        calls.append((planned.with_each(memory), out))
    for stream, (planned, _) in enumerate(calls):
        devices.enqueue(0, launch.code_object(planned.module, devices.arch.name), planned, stream=stream)
    devices.run()
    return [out for _, out in calls]


@pytest.mark.parametrize("arch_name", [pytest.param("gfx942", marks=full), "gfx950"])
@pytest.mark.parametrize("kind", OF_KIND)
def test_launches_that_run_at_once(kind, arch_name):
    """With their own counters, both results are right in every order of waves; with shared ones, not in all."""
    op, dtype = OF_KIND[kind], archs.ARCHS[arch_name].fp8_dtype
    given = [arguments(kind, dtype, seed, sizes=(3, 32, 1280)) for seed in (1, 2)]
    expected = [op.reference(*each).float() for each in given]
    wrong = 0
    for seed in range(4):
        for out, right in zip(run_beside(arch_name, seed, op, given, share=False), expected):
            torch.testing.assert_close(out.float(), right, rtol=0.02, atol=1.0)
        try:
            for out, right in zip(run_beside(arch_name, seed, op, given, share=True), expected):
                torch.testing.assert_close(out.float(), right, rtol=0.02, atol=1.0)
        except (AssertionError, EmulatorError):
            wrong += 1
    assert wrong


# On a GPU


REPLAYS, CAPTURES = 10_000, 1_000

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or archs.of_device(torch.cuda.current_device()) is None,
    reason="no GPU that there is code for",
)


class Work:
    """Calls of an op on one set of values.

    Each adds to `wrong` if the bits of its result differ from the first call's.
    """

    def __init__(self, kind: str, seed: int, calls: int = 4):
        self.calls = calls
        arch = archs.of_device(torch.cuda.current_device())
        self.op, self.arguments = OF_KIND[kind], arguments(kind, arch.fp8_dtype, seed, "cuda")
        assert counted(self.op.explain(*self.arguments).launches), "no tile of this size is shared on this GPU"
        self.expected = self.op(*self.arguments)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.check()  # loads what a first call needs
        torch.cuda.synchronize()

    def check(self) -> None:
        results = [self.op(*self.arguments) for _ in range(self.calls)]
        for result in results:
            self.wrong += (result != self.expected).any()

    def captured(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Return a graph of `check`, with its own pool."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            self.check()
            graph.capture_end()
        return graph


@needs_gpu
@pytest.mark.parametrize("kind", OF_KIND)
def test_gpu_graphs_of_one_stream_replayed_at_once(kind):
    """Two graphs captured on one stream, with different values, run on two streams, with eager calls on a third."""
    works = [Work(kind, seed) for seed in (1, 2)]
    captured_on, *streams = [torch.cuda.Stream() for _ in range(3)]
    graphs = [work.captured(captured_on) for work in works]
    eager = Work(kind, 3)
    for replay in range(REPLAYS):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        if replay % 100 == 0:
            with torch.cuda.stream(captured_on):
                eager.check()
    torch.cuda.synchronize()
    assert [int(work.wrong) for work in (*works, eager)] == [0, 0, 0]


@needs_gpu
@pytest.mark.parametrize("kind", OF_KIND)
def test_gpu_streams_of_one_capture(kind):
    """A second stream joins a capture, as vLLM's shared experts do."""
    works = [Work(kind, seed) for seed in (1, 2)]
    main, joined = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(main):
        graph.capture_begin()
        joined.wait_stream(main)
        works[0].check()
        with torch.cuda.stream(joined):
            works[1].check()
        main.wait_stream(joined)
        graph.capture_end()
        for _ in range(REPLAYS):
            graph.replay()
    torch.cuda.synchronize()
    assert [int(work.wrong) for work in works] == [0, 0]


@needs_gpu
def test_gpu_captures_leave_memory_flat():
    """Counters are freed with their graph, and are reused by the next."""
    work, stream, free = Work("tensor", 1, calls=32), torch.cuda.Stream(), []
    for capture in range(CAPTURES + 1):
        graph = work.captured(stream)
        with torch.cuda.stream(stream):
            graph.replay()
        if capture % (CAPTURES // 10) == 0:
            torch.cuda.synchronize()
            del graph
            gc.collect()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    assert int(work.wrong) == 0
    assert free[1] - free[-1] < 2**22, f"bytes free after each {CAPTURES // 10} captures: {free}"
