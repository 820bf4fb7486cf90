"""Run the all-reduce on GPUs for long: correct, bit-equal on all ranks, flat memory, no hang.

    python tests/all_reduce_on_gpu.py                        ranks are streams of this process on one GPU
    python tests/all_reduce_on_gpu.py --processes            ranks are processes, with a GPU each if there are enough

Two graphs with calls of different kernels and sizes are replayed in random order, with eager calls between, until each
rank has made --launches launches. Ranks are skewed at random: each sleeps before replays, and between calls of its
graphs. The first results are checked in float64 and against all ranks' bits; the GPU compares all later ones with the
first. Consecutive calls have different inputs, so that a word of another epoch shows. Then the last rank stays away,
and the error must name it and the epoch. Processes that share a GPU run in time slices: --launches 1000 takes seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from all_reduce_calls import arguments, as_summed, bits, check_results, generator_of, inputs_of, place_of_residual

from vllm_rocm_ops import collectives, ops
from vllm_rocm_ops.collectives import RankMissing
from vllm_rocm_ops.collectives import streams as streams_of_one
from vllm_rocm_ops.core import correctness

SIZES = ((1, 7168), (5, 1024), (2, 2944), (1, 16384), (4, 512), (3, 4096))
LARGE = ((64, 16384), (18, 7168), (292, 7168), (2, 2944), (8, 16384), (40, 4224))
"""Sizes with --large: 256 KiB to 4 MB, and calls in one shot between."""
OPS = (
    None,
    ops.rms_norm_dynamic_per_token_quant,
    ops.fused_add_rms_norm,
    ops.fused_add_rms_norm_static_fp8_quant,
    ops.rms_norm_per_block_quant,
    ops.rms_norm_and_per_block_quant,
    ops.rms_norm_mxfp8_quant,
)
CALLS, GRAPHS, EAGER_EVERY = 15, 2, 16  # calls per graph, graphs, rounds between eager calls
SKEW_CYCLES = 40_000  # 20 us at most
LIMIT_SECONDS, SHORT_SECONDS, MAX_SECONDS = 20.0, 1.0, 150.0
FEW_LAUNCHES = 1000


class Call:
    """A call that all ranks make, and its tensors on each rank."""

    def __init__(self, number: int, ranks: int, reduce, sizes=SIZES):
        self.op, (self.rows, self.hidden) = OPS[number % len(OPS)], sizes[number % len(sizes)]
        generator, dtype = generator_of("on GPUs", number, ranks), torch.bfloat16
        self.inputs = inputs_of(ranks, self.rows, self.hidden, dtype, generator)
        adds = number % 2 == 1
        self.args = arguments(self.op, reduce.arch, dtype, self.rows, self.hidden, generator, has_addend=adds)
        self.summed = as_summed(reduce, self.op, self.inputs, self.args)


class OnRank:
    """A call's tensors on a rank: `run` makes the call, `found` keeps its last results."""

    def __init__(self, call: Call, rank: int, reduce, device: torch.device):
        self.call, self.reduce = call, reduce
        self.input = call.inputs[rank].to(device)
        self.args = [correctness.clone(value, device) for value in call.args]
        self.place = place_of_residual(call.op)
        self.residual = None if self.place is None else self.args[self.place].clone()
        self.found: tuple[torch.Tensor, ...] = ()

    def restore(self) -> None:
        """Write the residual that the call updates."""
        if self.residual is not None:
            self.args[self.place].copy_(self.residual)

    def run(self) -> None:
        """Make the call."""
        op = self.call.op
        found = self.reduce(op, self.input, *self.args) if op else self.reduce.sum(self.input)
        residual = () if self.residual is None else (self.args[self.place],)
        self.found = (*correctness.as_tuple(found), *residual)

    def results(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the outputs and the residual, in host memory."""
        found = [each.cpu() for each in self.found]
        return (tuple(found), None) if self.residual is None else (tuple(found[:-1]), found[-1])


def packed(results: tuple) -> tuple:
    """Return outputs and residual as bytes with their types: PyTorch does not load a pickled FP8 tensor."""
    outputs, residual = results
    return [(each.view(torch.uint8) if each.element_size() == 1 else each, each.dtype) for each in outputs], residual


def unpacked(results: tuple) -> tuple:
    """Return what `packed` was given."""
    outputs, residual = results
    return tuple(data.view(dtype) for data, dtype in outputs), residual


class Rank:
    """A rank's stream, calls and graphs.

    Its counter `wrong` has the number of bytes that ever differed from the first results.
    """

    def __init__(self, rank: int, reduce, device: torch.device, calls: list[Call]):
        self.rank, self.reduce = rank, reduce
        self.stream = torch.cuda.Stream(device)
        self.random = random.Random(rank)
        self.calls = [OnRank(call, rank, reduce, device) for call in calls]
        self.expected: list[torch.Tensor] = []
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.reserve()
        with torch.cuda.stream(self.stream):  # loads what eager calls need
            torch.cuda._sleep(1)
            self._count(self._bytes(self.calls[:2], inputs=True), torch.zeros_like(self._bytes(self.calls[:2], True)))
            self.wrong.zero_()
        torch.cuda.synchronize(device)

    def reserve(self) -> None:
        """Reserve memory for eager calls: mapping more would wait for all kernels, which wait for this rank."""
        with torch.cuda.stream(self.stream):
            sizes = [2048] * 2048 + [1 << 21] * 16 + [1 << 25] * 16
            taken = [torch.empty(size, dtype=torch.uint8, device=self.wrong.device) for size in sizes]
            del taken

    @staticmethod
    def _bytes(calls: list[OnRank], inputs: bool = False) -> torch.Tensor:
        return torch.cat([bits(x).flatten() for call in calls for x in ((call.input,) if inputs else call.found)])

    def _count(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        self.wrong.add_((found != expected).sum())

    def skew(self) -> None:
        """Sleep on the GPU for a random time, half the time not at all."""
        if self.random.random() < 0.5:
            torch.cuda._sleep(self.random.randrange(SKEW_CYCLES))

    def eager(self, number: int) -> None:
        """Make a call outside a graph, and compare its results if they are known."""
        with torch.cuda.stream(self.stream):
            self.skew()
            call = self.calls[number]
            captured = call.found
            call.restore()
            call.run()
            if number < len(self.expected):
                self._count(self._bytes([call]), self.expected[number])
                call.found = captured

    def capture(self) -> None:
        """Capture the graphs, which compare their results with the known ones."""
        self.expected = [self._bytes([call]) for call in self.calls]
        for first in range(0, len(self.calls), CALLS):
            calls, graph = self.calls[first : first + CALLS], torch.cuda.CUDAGraph()
            expected = torch.cat(self.expected[first : first + CALLS])
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for call in calls:
                    call.restore()
                for call in calls:
                    self.skew()
                    call.run()
                self._count(self._bytes(calls), expected)
            graph.reads = expected  # freed memory may be unmapped before a replay
            self.graphs.append(graph)

    def replay(self, number: int) -> None:
        """Replay a graph."""
        with torch.cuda.stream(self.stream):
            self.skew()
            self.graphs[number].replay()


def in_flat_memory(device: torch.device, act: Callable[[], None], judges: bool) -> str:
    """Call `act`, and return by how much memory grew.

    Raise RuntimeError if it grew by more than the noise of other processes. Of few launches it is only told: under a
    sanitizer, the tool's memory grows too.
    """

    def used() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)

    before, host = used(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    act()
    grown = [now - then for now, then in zip(used(), before)]
    grown_host = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host) // 1024
    on_gpu = f"{grown[0]} bytes on the GPU beside PyTorch's cache, {grown[1]} of its tensors"
    told = f"memory grew by {on_gpu}, {grown_host} MiB on the host"
    if judges and (grown[0] > 32 << 20 or grown[1] > 0 or grown_host > 64):
        raise RuntimeError(told)
    return told


def calls_of(ranks: int, reduce, sizes) -> list[Call]:
    """Return the calls of all graphs."""
    return [Call(number, ranks, reduce, sizes) for number in range(CALLS * GRAPHS)]


def replay_all(members: list[Rank], launches: int, device: torch.device, seconds: float = 1e9) -> Iterator[str]:
    """Replay graphs until each rank has made `launches` launches or `seconds` have passed, and yield what was seen.

    All ranks replay the same graphs.
    """
    shared, begun, rounds, eager = random.Random(0), time.perf_counter(), 0, 0

    def act() -> None:
        nonlocal rounds, eager
        for number in range(-(-launches // CALLS)):
            graph, between = shared.randrange(GRAPHS), shared.randrange(CALLS * GRAPHS)
            for member in members:
                member.replay(graph)
                if number % EAGER_EVERY == 0:
                    member.eager(between)
            rounds, eager = rounds + 1, eager + (number % EAGER_EVERY == 0)
            if number % 64 == 63:  # the host is a few rounds ahead at most
                torch.cuda.synchronize(device)
                for member in members:
                    member.reduce.check()
                if time.perf_counter() - begun > seconds:
                    break
        torch.cuda.synchronize(device)

    for number in range(GRAPHS):  # first replays load what they need
        for member in members:
            member.replay(number)
        torch.cuda.synchronize(device)
    for member in members:
        member.reserve()
    torch.cuda.synchronize(device)
    memory = in_flat_memory(device, act, launches >= FEW_LAUNCHES)
    for member in members:
        member.reduce.check()
        if wrong := int(member.wrong):
            raise RuntimeError(f"rank {member.rank}: {wrong} bytes differed in {rounds} replays")
    took = time.perf_counter() - begun
    yield (
        f"{rounds * CALLS + eager} launches of each rank: {rounds} replays of {CALLS} and {eager} eager calls, in {took:.1f} s, "
        "all bits right"
    )
    yield memory


def missing(error: RankMissing | None, late: int, epoch: int, result: torch.Tensor, seconds: float) -> str:
    """Check the error that names a rank that stayed away, and that the other ranks have NaN."""
    text = str(error)
    assert f"rank {late} of " in text and f"did not come in epoch {epoch}:" in text, text
    assert result.isnan().all(), "a result without a rank is no NaN"
    assert seconds < 10 * SHORT_SECONDS, seconds
    return f"a rank that stays away, after {seconds:.2f} s: {text}"


def caught(reduce) -> RankMissing | None:
    """Return the exception that check raises."""
    try:
        reduce.check()
    except RankMissing as error:
        return error
    return None


def run_streams(ranks: int, launches: int, sizes=SIZES, wire: str = "bf16") -> Iterator[str]:
    """Run all ranks in this process."""
    os.environ |= streams_of_one.ENVIRONMENT | os.environ
    device = torch.device("cuda", 0)
    group = collectives.in_process(ranks, device, seconds=LIMIT_SECONDS, wires=(wire,))
    calls = calls_of(ranks, group[0], sizes)
    members = [Rank(rank, reduce, device, calls) for rank, reduce in enumerate(group)]
    streams_of_one.check_overlap([member.stream for member in members], device)
    for number, call in enumerate(calls):
        for member in members:
            member.eager(number)
        torch.cuda.synchronize(device)
        for member in members:
            member.reduce.check()
        found = [member.calls[number].results() for member in members]
        check_results(call.op, *call.summed, [outputs for outputs, _ in found], [r for _, r in found])
    yield f"{len(calls)} eager calls of {ranks} streams on {torch.cuda.get_device_name()} are right"
    for member in members:
        member.capture()
    yield from replay_all(members, launches, device, MAX_SECONDS)
    for reduce in group:
        reduce.close()
    for member in members:
        member.reserve()
    torch.cuda.synchronize(device)

    short = collectives.in_process(ranks, device, seconds=SHORT_SECONDS)
    x, streams = torch.ones(1, 1024, dtype=torch.bfloat16, device=device), [member.stream for member in members]

    def call_of(who: range) -> list[torch.Tensor]:
        results = []
        for rank in who:
            with torch.cuda.stream(streams[rank]):
                results.append(short[rank].sum(x))
        torch.cuda.synchronize(device)
        return results

    call_of(range(ranks))
    begun = time.perf_counter()
    results = call_of(range(ranks - 1))
    seconds = time.perf_counter() - begun
    for reduce, result in zip(short, results):
        told = missing(caught(reduce), ranks - 1, 2, result, seconds)
    yield told
    call_of(range(ranks - 1, ranks))
    assert caught(short[-1]), "the rank that comes late sees no error"
    yield "the rank that comes late fails too"


def run_process(rank: int, ranks: int, launches: int, sizes, wire: str, store: str) -> None:
    """Run one rank of a process group; the first rank prints."""
    import datetime

    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120)
    )
    group = dist.group.WORLD
    reduce = collectives.create(group, device, seconds=LIMIT_SECONDS, wires=(wire,))
    calls = calls_of(ranks, reduce, sizes)
    member = Rank(rank, reduce, device, calls)
    for number, call in enumerate(calls):
        member.eager(number)
        torch.cuda.synchronize(device)
        reduce.check()
        found: list = [None] * ranks
        dist.all_gather_object(found, packed(member.calls[number].results()))
        found = [unpacked(of_rank) for of_rank in found]
        if rank == 0:
            check_results(call.op, *call.summed, [outputs for outputs, _ in found], [r for _, r in found])
    gpus = f"{min(ranks, torch.cuda.device_count())} x {torch.cuda.get_device_name(device)}"
    said = [f"{len(calls)} eager calls of {ranks} processes on {gpus} are right"]
    member.capture()
    dist.barrier()
    said += replay_all([member], launches, device)
    reduce.close()
    short = collectives.create(group, device, seconds=SHORT_SECONDS)
    x = torch.ones(1, 1024, dtype=torch.bfloat16, device=device)
    short.sum(x)
    torch.cuda.synchronize(device)
    dist.barrier()
    if rank < ranks - 1:
        begun, result = time.perf_counter(), short.sum(x)
        torch.cuda.synchronize(device)
        said.append(missing(caught(short), ranks - 1, 2, result, time.perf_counter() - begun))
    dist.barrier()
    if rank == ranks - 1:
        short.sum(x)
        torch.cuda.synchronize(device)
        assert caught(short), "the rank that comes late sees no error"
    dist.barrier()
    if rank == 0:
        print("\n".join([*said, "the rank that comes late fails too"]), flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", action="store_true", help="ranks are processes; default: streams of one")
    add("--ranks", type=int, default=8, help="default: %(default)s")
    add("--launches", type=int, default=1_000_000, help="of each rank; default: %(default)s")
    add("--large", action="store_true", help="calls of 256 KiB to 4 MB, with payload and flag apart")
    add("--wire", choices=["bf16", "fp8"], default="bf16", help="what calls above 512 KiB send; default: %(default)s")
    options = parser.parse_args(argv)
    sizes = LARGE if options.large else SIZES
    if not options.processes:
        with torch.inference_mode():
            for line in run_streams(options.ranks, options.launches, sizes, options.wire):
                print(line, flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        args = options.ranks, options.launches, sizes, options.wire, f"{folder}/store"
        torch.multiprocessing.spawn(run_process, args, nprocs=options.ranks)


if __name__ == "__main__":
    main()
