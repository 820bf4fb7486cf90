"""Run shapes on this machine: check results, time the plugin's kernels, and time other kernels.

All configurations and baselines of a shape are timed in turn, as in the tuner (clock.py). Bytes count every tensor, and twice those updated
in place. FLOPs are counted for GEMMs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.core.op import Explanation, Op
from vllm_rocm_ops.tools.bench.baselines import prepare
from vllm_rocm_ops.tools.bench.report import Line
from vllm_rocm_ops.tools.bench.shapes import Shape

PROFILED_CALLS = 10
HBM_BYTES = tuple(2**i for i in range(20, 33, 2))
READ_COLUMNS = 8192


def run(
    shapes: Iterable[Shape],
    clock: Clock | None,
    once: bool = False,
    profile: bool = False,
    sweep: bool = False,
    baselines: bool = False,
) -> Iterator[list[Line]]:
    """Yield the lines of each shape, checked and timed: one, or in a sweep one per configuration, fastest first.

    With `once` the op is called once and checked; with `profile` it is only called, a few times. Without a clock the reference
    runs on the CPU, unchecked and untimed. Fallbacks are not timed; `baselines` are timed too.
    """
    device = clock.device if clock else "cpu"
    for shape in shapes:
        op = shape.op
        given = shape.arguments(device, clock.arch.fp8_dtype if clock else torch.float8_e4m3fn)
        ours = shape.layout(*given)
        explained = op.explain(*ours, arch=clock and clock.arch, require_code=True)
        kernel = " + ".join(launch.symbol for launch in explained.launches) or explained.source
        sizes = shape.sizes or op.problem(op.Arguments(*ours))
        line = Line(op.name, shape.case.name, kernel, "", sizes=sizes, group=shape.group)
        if profile or clock is None:
            for _ in range(PROFILED_CALLS if profile else 1):
                op(*ours)
            yield [line]
        elif once:
            yield [_with(line, shape.check([given], device, {})())]
        else:
            yield _timed(shape, clock, given, explained, line, sweep, baselines)
        torch.cuda.empty_cache()  # frees the graphs' memory


def _with(line: Line, checked: dict[str, object], **fields) -> Line:
    """Return the line with the fields that a check found."""
    wrong = checked.pop("wrong", "")
    return dataclasses.replace(line, wrong=wrong, details=checked, **fields)


def _timed(
    shape: Shape, clock: Clock, given: tuple, explained: Explanation, line: Line, sweep: bool, with_baselines: bool
) -> list[Line]:
    op, runs = shape.op, bool(explained.launches)
    sets = shape.sets(clock, given) if runs or with_baselines else [given]
    ours = [shape.layout(*arguments) for arguments in sets]
    configs = [explained.config] if runs else []
    if sweep and runs:
        configs = list(dict.fromkeys((*configs, *op.configs(op.Arguments(*ours[0]), clock.arch))))
    baselines = shape.baselines(sets) if with_baselines else {}
    check = shape.check(sets, clock.device, baselines)
    prepared, checks = {}, {}
    for config in configs:
        with op.running(config):
            checks[config] = check()
            prepared[config] = clock.prepare(op, ours)
    of_baselines, unavailable = prepare(baselines, clock, sets)
    samples = clock.samples(prepared | of_baselines) if prepared or of_baselines else {}
    medians = {name: statistics.median(samples[name]) for name in of_baselines}
    line = dataclasses.replace(
        line,
        bytes_moved=shape.bytes_moved(sets),
        flops=shape.flops(line.sizes),
        baselines=medians,
        unavailable=unavailable,
    )
    if not runs:
        return [_with(line, check(), config=f"none: {explained.source}")]
    timed = [
        _with(line, checks[c], samples=tuple(samples[c]), config=str(c), chosen=c == explained.config) for c in configs
    ]
    return sorted(timed, key=lambda line: line.median)


# HBM bandwidth


def bandwidths(clock: Clock, op: Op, size: int) -> dict[str, float]:
    """Return the GB/s of moving `size` bytes of HBM.

    The calls are a copy (read and written), PyTorch's sum, and `op`, the plugin's `unquantized_gemm`, which multiplies one token
    with them as the weight.
    """
    count = clock.calls(size)
    sources = [torch.ones(size // 2, dtype=torch.bfloat16, device=clock.device) for _ in range(count)]
    total = torch.zeros((), dtype=torch.bfloat16, device=clock.device)
    token = torch.ones(1, READ_COLUMNS, dtype=torch.bfloat16, device=clock.device)
    weights = [(token, source.view(-1, READ_COLUMNS)) for source in sources]
    prepared = {
        "copy": clock.prepare(
            lambda source: source[: size // 4].copy_(source[size // 4 :]), [(source,) for source in sources]
        ),
        "sum": clock.prepare(lambda source: torch.sum(source, dim=0, out=total), [(source,) for source in sources]),
        op.name: clock.prepare(op, weights),
    }
    return {name: size / statistics.median(us) / 1e3 for name, us in clock.samples(prepared).items()}


def hbm(clock: Clock, op: Op) -> Iterator[str]:
    """Yield a table of bandwidth by size, line by line."""
    yield f"{'MB':>8} {'copy':>8} {'sum':>8} {op.name:>18}  GB/s"
    for size in HBM_BYTES:
        rates = bandwidths(clock, op, size)
        yield f"{size / 1e6:8.0f} {rates['copy']:8.0f} {rates['sum']:8.0f} {rates[op.name]:18.0f}"
    usual = clock.arch.bandwidth_gb_s
    yield f"the cost model uses {usual:.0f} GB/s read bandwidth on {clock.arch.name}"
