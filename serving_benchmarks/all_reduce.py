"""Benchmark all-reduce + residual + RMSNorm + FP8 quantization: the plugin's fused kernel against other all-reduces with a norm.

    python serving_benchmarks/all_reduce.py                     ranks are streams of this process on one GPU: no links
    python serving_benchmarks/all_reduce.py --processes         one rank per GPU: against NCCL, vLLM and FlashInfer

Calls are timed from captured graphs. Cold: each call has its own inputs, and other memory is read before a replay to flush the caches;
warm: all calls share inputs. All ranks synchronize before each replay. Times are of the slowest rank, medians over replays, in
microseconds per call. With streams, the table also has calls without an all-reduce: the norm with quantization in one launch and in three.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from serving_benchmarks.all_reduce_ways import LIMIT_SECONDS, WORDS, call_way, create_way, judge
from vllm_rocm_ops import collectives, ops
from vllm_rocm_ops.collectives import streams as streams_of_one
from vllm_rocm_ops.core import clock
from vllm_rocm_ops.core.correctness import as_tuple
from vllm_rocm_ops.tools.bench.baselines import BASELINES

OPS = {
    "static": ops.fused_add_rms_norm_static_fp8_quant,
    "token": ops.rms_norm_dynamic_per_token_quant,
    "block": ops.rms_norm_per_block_quant,
    "norm": ops.fused_add_rms_norm,
    "both": ops.rms_norm_and_per_block_quant,
}
OTHERS = ["nccl", "vllm", "flashinfer"]
CALLS, ROUNDS, EPSILON, SCALE = 32, 15, 1e-6, 0.05
DTYPE = torch.bfloat16

Call = Callable[[torch.Tensor, tuple], object]
"""Called with a rank's input and the op's further arguments."""


def arguments(op, rows: int, hidden: int, device: torch.device, fp8: torch.dtype) -> tuple:
    """Return the op's arguments after the input."""
    values = {
        "residual": torch.randn(rows, hidden, device=device, dtype=DTYPE),
        "weight": torch.rand(hidden, device=device, dtype=DTYPE) + 0.5,
        "scale": torch.tensor([SCALE], device=device),
        "epsilon": EPSILON,
        "quant_dtype": fp8,
        "group_size": 128,
        "is_scale_transposed": True,
        "scale_ub": None,
        "one_plus_weight": False,
        "addend": None,
        "addend_factor": 1.0,
    }
    return tuple(values[name] for name in op.Arguments._fields[1:])


def sets_of(op, rows: int, hidden: int, device: torch.device, fp8: torch.dtype, is_cold: bool) -> list[tuple]:
    """Return the input and arguments of each call of a graph."""
    count = CALLS if is_cold else 1
    made = [
        (torch.randn(rows, hidden, device=device, dtype=DTYPE), arguments(op, rows, hidden, device, fp8))
        for _ in range(count)
    ]
    return made * (CALLS // count)


def clones(args: tuple) -> tuple:
    """Return copies of a call's tensors."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def capture(call: Call, sets: list[tuple], stream: torch.cuda.Stream | None = None, around=contextlib.nullcontext):
    """Return a graph with a call for each set."""
    graph = torch.cuda.CUDAGraph()
    with around(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for x, args in sets:
            call(x, args)
    graph.reads = sets  # freed memory may be unmapped before a replay
    return graph


def timed(graph: torch.cuda.CUDAGraph, meet: Callable[[], None], flush: Callable[[], None]) -> float:
    """Return the median microseconds per call of a graph on the current stream."""
    times = []
    for number in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush()
        meet()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number > 1:
            times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def flusher(is_cold: bool, device: torch.device) -> Callable[[], None]:
    """Return a function that flushes a graph's memory from the caches, or does nothing if warm."""
    if not is_cold:
        return lambda: None
    other, total = _other(device), torch.zeros((), device=device)
    return lambda: torch.sum(other, dim=0, out=total)


@functools.cache
def _other(device: torch.device) -> torch.Tensor:
    return torch.zeros(clock.COLD_BYTES // 4, device=device)


def sizes(options: argparse.Namespace) -> Iterable[tuple[int, int, bool]]:
    """Return each hidden size and number of tokens, with cold and with warm caches."""
    if options.kib:
        pairs = [(hidden, kib * 1024 // 2 // hidden) for hidden in options.hidden for kib in options.kib]
    else:
        pairs = list(itertools.product(options.hidden, options.tokens))
    return [(*pair, is_cold) for pair in pairs for is_cold in ((True,) if options.cold else (True, False))]


def table(title: str, columns: list[str], rows: list[tuple[int, int, bool, dict[str, float | str]]]) -> None:
    """Print the times of each size."""
    print(f"\n{title}\n{'hidden':>6} {'tokens':>6} {'caches':>6}  " + "  ".join(f"{c:>14}" for c in columns))
    for hidden, tokens, is_cold, times in rows:
        cells = (f"{v:14.2f}" if isinstance(v := times.get(c, "-"), float) else f"{v:>14}" for c in columns)
        print(f"{hidden:6} {tokens:6} {'cold' if is_cold else 'warm':>6}  " + "  ".join(cells), flush=True)


def merged(rows: list[tuple]) -> list[tuple]:
    """Return rows of `table` with one row per size."""
    by_size: dict[tuple, dict] = {}
    for *size, cells in rows:
        by_size.setdefault((*size,), {}).update(cells)
    return [(*size, cells) for size, cells in by_size.items()]


# Streams of one process


def quantized_apart(op, reduce, x: torch.Tensor, args: tuple) -> None:
    """Add, norm and quantize to FP8 in a launch each, with PyTorch, the plugin, and vLLM or PyTorch."""
    a = op.Arguments(x, *args)
    y = ops.rms_norm(torch.add(x, a.residual), a.weight, EPSILON)
    try:
        from vllm._custom_ops import scaled_fp8_quant
    except ImportError:
        y.to(reduce.arch.fp8_dtype)
    else:
        scaled_fp8_quant(y, _one(x.device))


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)


def time_streams(options: argparse.Namespace, op) -> None:
    """Print times with ranks as streams of this process, which share one GPU's compute units and memory."""
    os.environ |= streams_of_one.ENVIRONMENT | os.environ
    device, ranks = torch.device("cuda", 0), options.ranks
    group = collectives.in_process(ranks, device, seconds=LIMIT_SECONDS)
    streams, rows = [torch.cuda.Stream(device) for _ in group], []
    streams_of_one.check_overlap(streams, device)
    fp8, x0 = group[0].arch.fp8_dtype, torch.zeros(1, 512, dtype=DTYPE, device=device)
    for hidden, tokens, is_cold in sizes(options):
        flush, times = flusher(is_cold, device), {}
        rows.append((hidden, tokens, is_cold, times))
        sets = [sets_of(op, tokens, hidden, device, fp8, is_cold) for _ in group]
        alone = {
            "norm": lambda x, args: op(x, *args),
            "3 launches": lambda x, args: quantized_apart(op, group[0], x, args),
        }
        for name, call in alone.items():
            call(*sets[0][0])
            times[name] = timed(capture(call, sets[0]), lambda: None, flush)
        if group[0].unsupported(op, sets[0][0][0], *sets[0][0][1]):
            times[f"{ranks} ranks"] = "unsupported"
            continue
        reserve(streams, device)
        for reduce, stream, own in zip(group, streams, sets):
            with torch.cuda.stream(stream):
                reduce(op, own[0][0], *own[0][1])
        torch.cuda.synchronize(device)
        calls = [functools.partial(lambda reduce, x, args: reduce(op, x, *args), reduce) for reduce in group]
        graphs = [capture(*each) for each in zip(calls, sets, streams)]
        reserve(streams, device)
        times[f"{ranks} ranks"] = replay_together(group, graphs, streams, flush, x0)
    title = f"{ranks} ranks as streams of one {torch.cuda.get_device_name()}, {op.name}: us per call, without links"
    table(title, [f"{ranks} ranks", *alone], rows)
    for reduce in group:
        reduce.check()
        reduce.close()


def reserve(streams: list, device: torch.device) -> None:
    """Reserve memory for calls: mapping more would wait for all kernels, which wait for a rank's next call."""
    torch.cuda.synchronize(device)
    for stream in streams:
        with torch.cuda.stream(stream):
            sizes = [2048] * 64 + [1 << 22] * 4
            taken = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            del taken
    torch.cuda.synchronize(device)


def replay_together(group, graphs: list, streams: list, flush: Callable[[], None], x0: torch.Tensor) -> float:
    """Return the median over rounds of the slowest rank's microseconds per call."""
    rounds = []
    for number in range(ROUNDS + 2):
        flush()
        torch.cuda._sleep(400_000)  # queues all graphs before the first begins
        ready, events = torch.cuda.Event(), []
        ready.record()
        for reduce, graph, stream in zip(group, graphs, streams):
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                reduce.sum(x0)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                events.append((start, end))
        torch.cuda.synchronize()
        if number > 1:
            rounds.append(max(start.elapsed_time(end) for start, end in events) * 1000 / CALLS)
    return statistics.median(rounds)


# Processes, one GPU each


class Others:
    """The available all-reduces of other libraries: calls by name, and the context to capture their graphs in."""

    def __init__(self, options: argparse.Namespace, op, reduce, group, device: torch.device):
        self.op, self.reduce, self.group, self.device, self.options = op, reduce, group, device, options
        self.calls: dict[str, Call] = {}
        self.around: dict[str, Callable] = {}
        self.why: list[str] = []
        self.errors: list[tuple] = []  # of the plugin's ways, as rows of `table`
        self.kept: list[torch.cuda.CUDAGraph] = []  # other processes have mapped their memory
        for name in options.beside:
            self._try(name)

    def _try(self, name: str) -> None:
        """Add a library's calls, on all ranks or on none."""
        import torch.distributed as dist

        try:
            made, why = getattr(self, f"_{name}")(), ""
        except Exception as error:  # noqa: BLE001  the library is then unavailable
            made, why = {}, f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        of_ranks: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(of_ranks, why, group=self.group)
        if reasons := list(filter(None, of_ranks)):
            self.why.append(reasons[0][:300])
        else:
            self.calls |= made

    def _norms(self, name: str, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Call]:
        op, of_vllm = self.op, BASELINES.get(self.op.name, {}).get("vllm")
        made: dict[str, Call] = {f"{name}+ours": lambda x, args: op(all_reduce(x), *args)}
        if of_vllm and of_vllm.is_there():
            made[f"{name}+vllm"] = lambda x, args: of_vllm.call(*of_vllm.prepare(all_reduce(x), *args))
        return made

    def _nccl(self) -> dict[str, Call]:
        import torch.distributed as dist

        nccl = dist.new_group(backend="nccl", timeout=datetime.timedelta(seconds=60))

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=nccl)
            return x

        all_reduce(torch.ones(512, device=self.device))
        torch.cuda.synchronize(self.device)
        return self._norms("nccl", all_reduce)

    def _vllm(self) -> dict[str, Call]:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        custom = CustomAllreduce(self.group, self.device)
        if custom.disabled:
            raise RuntimeError("CustomAllreduce is disabled")
        made = self._norms("vllm", lambda x: custom.custom_all_reduce(x))
        self.around |= dict.fromkeys(made, custom.capture)
        return made

    def _flashinfer(self) -> dict[str, Call]:
        import torch.distributed as dist
        from flashinfer import comm

        patterns = comm.AllReduceFusionPattern
        if self.op is OPS["static"]:
            pattern = patterns.kARResidualRMSNormFP8Quant
        elif self.op is OPS["norm"]:
            pattern = patterns.kARResidualRMSNorm
        else:
            raise RuntimeError(f"no fusion pattern for {self.op.name}")
        workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=dist.get_world_size(self.group),
            rank=dist.get_rank(self.group),
            max_token_num=max(self.options.tokens),
            hidden_dim=max(self.options.hidden),
            dtype=DTYPE,
            group=self.group,
        )
        fp8, inverse_scale = self.reduce.arch.fp8_dtype, torch.tensor([1 / SCALE], device=self.device)

        def call(x: torch.Tensor, args: tuple) -> object:
            a = self.op.Arguments(x, *args)
            out = torch.empty_like(x, dtype=fp8) if pattern == patterns.kARResidualRMSNormFP8Quant else None
            comm.allreduce_fusion(
                input=x,
                workspace=workspace,
                pattern=pattern,
                launch_with_pdl=True,
                residual_in=a.residual,
                residual_out=torch.empty_like(x),
                norm_out=torch.empty_like(x),
                quant_out=out,
                rms_gamma=a.weight,
                rms_eps=EPSILON,
                scale_factor=inverse_scale,
                use_oneshot=None if self.options.kib else True,
                fp32_acc=True,
            )
            return out

        call(*sets_of(self.op, 1, min(self.options.hidden), self.device, fp8, False)[0])
        torch.cuda.synchronize(self.device)
        return {"flashinfer": call}


def time_process(rank: int, options: argparse.Namespace, store: str) -> None:
    """Time one rank; the first rank prints."""
    import torch.distributed as dist

    os.environ.setdefault("VLLM_SKIP_P2P_CHECK", "1")  # the check is slow
    ranks, device = options.ranks, torch.device("cuda", rank)
    torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    group, op, stream = dist.group.WORLD, OPS[options.op], torch.cuda.Stream(device)
    reduce = collectives.create(group, device, seconds=LIMIT_SECONDS)
    x0, rows = torch.zeros(1, 512, dtype=DTYPE, device=device), []
    with torch.inference_mode(), torch.cuda.stream(stream):
        others = Others(options, op, reduce, group, device)
        ways = {
            "plugin": reduce,
            **{way: create_way(way, max(options.hidden) * max(options.tokens), group, device) for way in options.ways},
        }
        calls: dict[str, Call] = {way: functools.partial(call_way, way, of_way, op) for way, of_way in ways.items()}
        calls |= others.calls
        for size in sizes(options):
            times = {
                name: time_call(name, call, size, others, reduce, x0, ways.get(name)) for name, call in calls.items()
            }
            of_ranks: list = [None] * ranks
            dist.all_gather_object(of_ranks, times)
            slowest = {}
            for name in times:
                values = [each[name] for each in of_ranks]
                failures = [value for value in values if isinstance(value, str)]
                slowest[name] = failures[0] if failures else max(values)
            rows.append((*size, slowest))
    for of_way in ways.values():
        of_way.check()
    if rank == 0:
        print("\n".join(others.why))
        table(f"{ranks} x {torch.cuda.get_device_name(device)}, {op.name}: us per call", list(calls), rows)
        table("relative errors of the plugin's sums beside float64", list(ways), merged(others.errors))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of other communicators


def time_call(name: str, call: Call, size: tuple, others: Others, reduce, x0: torch.Tensor, way) -> float | str:
    """Time one call at one size on this rank, or return why it failed. All ranks fail alike or none does.

    `way` is the plugin's all-reduce, None for another library's.
    """
    import torch.distributed as dist

    hidden, tokens, is_cold = size
    device, op = others.device, others.op
    torch.manual_seed(dist.get_rank())
    sets = sets_of(op, tokens, hidden, device, reduce.arch.fp8_dtype, is_cold)
    if way is not None and way.unsupported(op, sets[0][0], *sets[0][1]):
        return "unsupported"
    try:
        x = sets[0][0]
        torch.manual_seed(0)  # all ranks have the same further arguments
        args = arguments(op, tokens, hidden, device, reduce.arch.fp8_dtype)
        found = as_tuple(call(x.clone(), clones(args)))
        torch.cuda.synchronize(device)
        if way is not None:
            total = call_way(name, way, None, x.clone(), ())
            error = judge(op, others.group, way, x, clones(args), found, total)
            others.errors.append((hidden, tokens, is_cold, {name: error}))
            if error == "wrong":
                return error
        graph = capture(call, sets, torch.cuda.current_stream(device), others.around.get(name, contextlib.nullcontext))
    except StopIteration:  # on all ranks
        return "unsupported"
    except Exception as error:  # noqa: BLE001  reported in the table
        print(f"rank {dist.get_rank()}: {name}, {tokens} x {hidden}: {type(error).__name__}: {error}", flush=True)
        return "failed"
    others.kept.append(graph)
    dist.barrier()
    return timed(graph, lambda: reduce.sum(x0), flusher(is_cold, device))


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", action="store_true", help="one rank per GPU (default: streams on one GPU)")
    add("--ranks", type=int, help="number of ranks (default: all GPUs, or 8 streams)")
    add("--op", choices=list(OPS), default="static", help="op after the all-reduce (default: %(default)s)")
    beside = "libraries to compare, with --processes (default: installed)"
    add("--beside", choices=OTHERS, nargs="*", default=OTHERS, help=beside)
    tokens = [1, 2, 4, 8, 16, 32, 64]
    add("--tokens", type=int, nargs="+", default=tokens, help="numbers of tokens (default: %(default)s)")
    add("--kib", type=int, nargs="+", help="KiB of a rank's input, in place of --tokens")
    add("--cold", action="store_true", help="no warm caches")
    ways = f"also the plugin's kernels in a given way: {WORDS}, fp8, or stages x blocks per row, such as 2x1 or fp8-2x1"
    add("--ways", nargs="*", default=[], help=ways)
    add("--hidden", type=int, nargs="+", default=[16384, 7168], help="hidden sizes (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.kib:
        options.tokens = [max(options.kib) * 1024 // 2 // min(options.hidden)]
    options.ranks = options.ranks or (torch.cuda.device_count() if options.processes else 8)
    if not options.processes:
        with torch.inference_mode():
            time_streams(options, OPS[options.op])
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_process, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
