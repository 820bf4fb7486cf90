"""Time the plugin's kernels against vLLM's when a worker starts, for kernel_selection.py.

The layers of a shape are known from vLLM's profile run, which calls the seams with the model's own weights. Each shape
is timed at vLLM's kernel warm-up, before graphs are captured: in graphs of one call per layer, so that weights come
from HBM and not from a cache, plugin and vLLM in turn (clock.py).

Each pair is checked first, on a sample of rows and columns computed in float32 from dequantized weights. The plugin's
error may be at most `LARGEST_ERROR` times vLLM's, and the two whole results may differ by no more than
that allows. Replayed graphs must leave what eager calls leave.

One worker per machine times, the others wait for the file's lock and read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from vllm_rocm_ops.core import archs, envs, tables
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.selection import kernel_selection, report, watchdog
from vllm_rocm_ops.vllm.selection.comparison import Comparison, Refused, WrongBaseline, allowed, run_plugin
from vllm_rocm_ops.vllm.selection.kernel_selection import (
    UNTIMED,
    Choice,
    Decided,
    Measured,
    Record,
)
from vllm_rocm_ops.vllm.selection.key import Key
from vllm_rocm_ops.vllm.selection.replays import BrokenGraph, Mismatch, Replays, warn_broken

logger = logging.getLogger("vllm.vllm_rocm_ops")

SAMPLE_US = 500.0  # target duration of a graph's calls
MOST_SECONDS = 3600.0  # of VLLM_ROCM_OPS_MEASURE
SECONDS_COMPILING = 50.0  # that vLLM's kernels may take besides to be compiled, and that another process waits longer
FIRST_TOKENS = (1, 8, 32)  # between two token counts at which it won, the plugin serves too
FEW_ROUNDS = 5  # after which a kernel that was faster in each is selected
HOPELESS = 1.5  # times vLLM's time in one replay: not timed further
PROGRESS_SECONDS = 5.0
ROOF_SHARE, OPERATIONS_PER_US, LAUNCH_US = 0.5, 4e8, 3.0  # per call, for estimates
CAPTURE_US, REPLAY_US, CHECK_US = 15e3, 300.0, 10e3  # per graph, replay and check, besides calls


class GraphClock:
    """Time replays of captured graphs, with caches flushed in between."""

    finish = staticmethod(clocks.finish)
    """Waits for all launches, and raises their errors."""

    def __init__(self):
        self._flush = clocks.Flush()  # of all pairs

    def times(self, calls: dict[str, Callable], sets: list[tuple], replays: Replays) -> dict[str, list[float]]:
        """Return microseconds per call of each function, in turn, over the sets of arguments."""
        graphs = {}
        for name, call in calls.items():
            with watchdog.around(name):
                graphs[name] = clocks.capture(call, sets)
        replays.check(graphs)  # also prepares what a graph's first replay does
        samples = self._times(graphs, len(sets))
        replays.check(graphs)
        return samples

    def _times(self, graphs: dict, calls: int) -> dict[str, list[float]]:
        timed = functools.partial(clocks.replays, graphs, calls, around=watchdog.around, flush=self._flush)
        samples = timed(rounds=1)
        if min(samples["plugin"]) > HOPELESS * max(samples["baseline"]):
            return samples
        samples = timed(rounds=FEW_ROUNDS)
        if is_clear(samples):
            return samples
        more = timed(rounds=clocks.ROUNDS - FEW_ROUNDS)
        return {name: times + more[name] for name, times in samples.items()}


def limit_s() -> float:
    """Return the seconds per start to time all kernels in, waiting included. Raises ValueError for a wrong variable."""
    text = envs.VLLM_ROCM_OPS_MEASURE
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit <= MOST_SECONDS:
        raise ValueError(f"VLLM_ROCM_OPS_MEASURE must be 0 to {MOST_SECONDS:g} seconds, got {text}")
    return limit


def is_clear(times: dict[str, list[float]]) -> bool:
    """True if more samples would not change the choice: all of one kernel are below all of the other."""
    plugin, baseline = times["plugin"], times["baseline"]
    return max(plugin) * (1 + kernel_selection.MARGIN) < min(baseline) or min(plugin) > max(baseline)


def sizes(captured: Iterable[int], max_tokens: int) -> list[int]:
    """Return the token counts to time: 1, the captured sizes, powers of two above them, and a step's largest."""
    counts = {1, *(size for size in captured if size <= max_tokens)}
    power = 1 << max(counts).bit_length() if len(counts) > 1 else 2
    while power < max_tokens:
        counts.add(power)
        power *= 2
    return sorted(counts | {max_tokens})


def estimate(kernels: Comparison, layer: tuple, layers: int, tokens: int, bandwidth_gb_s: float) -> tuple[int, float]:
    """Return how many layers a graph calls, each once, and the seconds to time the pair."""
    us = call_us(*kernels.work(layer, tokens), bandwidth_gb_s)
    calls = max(1, min(layers, math.ceil(SAMPLE_US / us)))
    return calls, (2 * (CAPTURE_US + (FEW_ROUNDS + 6) * (calls * us + REPLAY_US)) + CHECK_US) / 1e6


def call_us(moved: float, operations: float, bandwidth_gb_s: float) -> float:
    """Return a pessimistic time of a call, in microseconds, from its bytes and operations."""
    return max(moved / (bandwidth_gb_s * 1e3 * ROOF_SHARE), operations / OPERATIONS_PER_US) + LAUNCH_US


def check_and_time(
    kernels: Comparison,
    layers: list[tuple],
    tokens: int,
    clock: GraphClock,
    marked: contextlib.AbstractContextManager,
    first_call: Callable[[float], None] = lambda seconds: None,
) -> Measured:
    """Check the plugin's kernel against vLLM's on a sample, and time both, with one layer for each call of a graph.

    `marked` is entered while the plugin runs. `first_call` gets the seconds of vLLM's first call, which may compile.
    """
    sets, judge, comparable, fresh = kernels.sample(layers, tokens)
    begin = time.monotonic()
    baseline = kernels.baseline(*fresh(sets[0]))
    clock.finish()
    first_call(time.monotonic() - begin)
    run = functools.partial(run_plugin, kernels)
    with marked:
        try:
            with watchdog.outstanding():
                plugin = run(*fresh(sets[0]))
                clock.finish()
        except Refused:
            return UNTIMED
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise Mismatch(f"{type(error).__name__}: {error}") from error
        errors = judge(plugin, baseline)
        del plugin, baseline
        calls = {"plugin": run, "baseline": kernels.baseline}
        times = clock.times(calls, sets, Replays(calls, sets, allowed(errors[1]), fresh, comparable))
    return Measured(statistics.median(times["plugin"]), statistics.median(times["baseline"]), *errors)


def priority(tokens: int) -> int:
    """Return the place of a token count: 0 for `FIRST_TOKENS`, 1 for other powers of two, 2 for those between."""
    return 0 if tokens in FIRST_TOKENS else 1 + (tokens & (tokens - 1) > 0)


def in_order(wanted: dict[Choice, list[int]], record: Record, bandwidth_gb_s: float) -> list[tuple[Choice, list[int]]]:
    """Return what a record lacks, the most valuable first.

    `FIRST_TOKENS` come first, then other powers of two, then the sizes between, few tokens before many. At each size the
    share of a step decides.
    The sizes of a shape with one choice are one item. Ops during whose timing a process died come last.
    """

    def place(item: tuple[Choice, list[int]]) -> tuple:
        choice, counts = item
        tokens = 1 if choice.key.has_one_choice else counts[0]
        share = len(choice.layers) * call_us(
            *choice.kernels.work(next(iter(choice.layers.values())), tokens), bandwidth_gb_s
        )
        return record.ended.get(choice.kernels.op.name, 0), priority(tokens), tokens, -share

    items = []
    for choice, counts in wanted.items():
        lacking = [m for m in counts if m not in record.shapes.get(choice.key, {})]
        is_whole = choice.key.has_one_choice
        items += [(choice, lacking)] if is_whole and lacking else [(choice, [m]) for m in lacking]
    return sorted(items, key=place)


def measure(
    wanted: dict[Choice, list[int]],
    clock: GraphClock,
    record: Record,
    path: Path,
    save: Callable,
    end: float,
) -> None:
    """Time what a record lacks at the wanted token counts of each choice, and add the results.

    The `.running` file next to `path` marks the current op. Nothing starts that would end after `end` by its estimate.
    The time in which a kernel of vLLM's is compiled does not count, as vLLM's warm-up compiles it otherwise.
    """
    start = comparable = time.monotonic()
    compiling = 0.0

    def compiled(seconds: float) -> None:
        nonlocal compiling, end
        more = min(seconds, SECONDS_COMPILING - compiling)
        compiling, end = compiling + more, end + more
        kernel_selection.session.spent -= more

    arch = archs.ARCHS.get(record.machine.get("arch", ""))
    bandwidth = arch.bandwidth_gb_s if arch else 1000.0
    todo, done, left = in_order(wanted, record, bandwidth), 0, []
    count, given_up = sum(len(counts) for _, counts in todo), set()
    if todo:
        shapes = len({choice for choice, _ in todo})
        text = (
            "vllm-rocm-ops: timing kernels against vLLM's: %d shapes, %d comparisons (VLLM_ROCM_OPS_MEASURE=0 disables); "
            "code objects: %s"
        )
        logger.info(text, shapes, count, launches.origin(arch.name) if arch else "none")
    for choice, counts in todo:
        op, layers = choice.kernels.op.name, list(choice.layers.values())
        if op in record.off or choice in given_up:
            continue
        estimates = [estimate(choice.kernels, layers[0], len(layers), tokens, bandwidth) for tokens in counts]
        now = time.monotonic()
        if now + sum(seconds for _, seconds in estimates) > end:
            left += [f"{choice.key.call} at {tokens}" for tokens in counts]
            continue
        if now - comparable > PROGRESS_SECONDS:
            comparable = now
            logger.info("vllm-rocm-ops: timed %d of %d comparisons in %.0f s", done, count, now - start)
        for tokens, (calls, _) in zip(counts, estimates):
            done += 1
            marked = watchdog.marker(path.with_suffix(".running"), f"{op}\n{choice.key} at {tokens} tokens")
            try:
                counted = () if choice.key.has_one_choice else (compiled,)
                result = check_and_time(choice.kernels, layers[:calls], tokens, clock, marked, *counted)
            except Refused:
                result = UNTIMED
            except WrongBaseline as error:
                result = Measured(None, None, *error.errors)
            except BrokenGraph as error:
                warn_broken(f"{choice.key.call}, {tokens} tokens", error)
                continue
            except Exception as error:  # noqa: BLE001  the other shapes are still timed
                why = f"{' '.join(str(error).split())[:500]} ({choice.key.call}, {tokens} tokens)"
                if isinstance(error, Mismatch):
                    record.off[op] = why
                    break
                logger.warning("vllm-rocm-ops: timing of %s failed: %s: %s", op, type(error).__name__, why)
                if not isinstance(error, ArithmeticError):
                    given_up.add(choice)
                    break
                result = UNTIMED
            record.shapes.setdefault(choice.key, {})[tokens] = result
        save()
    if left:
        logger.info(
            "vllm-rocm-ops: %d of %d comparisons did not fit into %.0f s, "
            "default token limits apply there until the next start (VLLM_ROCM_OPS_MEASURE=60 gives it more time): %s",
            len(left),
            count,
            time.monotonic() - start,
            ", ".join(left),
        )


def warm_up(
    captured: Iterable[int],
    max_tokens: int,
    clock: GraphClock | None,
    gather: Callable[[Decided], list[Decided]],
    is_logging_rank: bool = True,
) -> None:
    """Time what this process's choices need, or read it from the record, and apply what all ranks agree on.

    Recording ends here. On failure no choice changes, and all ranks still take part in `gather`. Without a clock only the
    record is used.
    """
    wanted = {
        choice: sizes(captured, min(max_tokens, choice.max_tokens))
        for choice in kernel_selection.all_choices()
        if choice.layers
    }
    record, decided = agree(wanted, clock, gather)
    kernel_selection.apply_decisions(decided)
    if is_logging_rank:
        log_results(record, decided, {choice.key for choice in kernel_selection.all_choices()})
        if advised := report.advice(record):
            text = "vllm-rocm-ops: `vllm-rocm-ops advise` compared AITER's switch:\n%s"
            logger.info(text, "\n".join(report.columns(advised)))


def agree(
    wanted: dict[Choice, list[int]],
    clock: GraphClock | None,
    gather: Callable[[Decided], list[Decided]],
    share: float = 1.0,
) -> tuple[Record, Decided]:
    """Return this machine's record, and the decision of all ranks.

    It may take a share of `limit_s`, minus the time that this start has spent. Without a clock only the record is used.
    """
    record = Record({})
    begin = time.monotonic()
    with seam.surviving("kernel timing failed"):
        record = _measured_here(wanted, clock, begin + share * limit_s() - kernel_selection.session.spent)
    kernel_selection.session.spent += time.monotonic() - begin
    return record, kernel_selection.agreed(gather(record.decided()))


def log_results(record: Record, decided: Decided, known: set[Key]) -> None:
    """Warn of ops that are off, of wrong baselines, and of named backends where the plugin serves. Log FP8 sums and tables."""
    text = "vllm-rocm-ops: %s is off on this GPU and vLLM's kernels run (`vllm-rocm-ops doctor` tells how to retry): %s"
    for op, why in decided.off.items():
        logger.warning(text, op, why)
    here = dataclasses.replace(record, shapes={key: times for key, times in record.shapes.items() if key in known})
    for line in report.wrong_baselines(here):
        logger.warning("vllm-rocm-ops: %s. vLLM's kernel serves, as without the plugin", line)
    for line, serves in report.beside_named(here).items():
        logger.log(logging.WARNING if serves else logging.INFO, "vllm-rocm-ops: %s", line)
    for line in report.fp8_sums(here):
        logger.info("vllm-rocm-ops: %s", line)
    if lines := report.table(here):
        logger.info("vllm-rocm-ops: selected kernels on this GPU:\n%s", "\n".join(lines))
        logger.info("vllm-rocm-ops: what serves:\n%s", "\n".join(report.columns(report.summary(here))))


def _measured_here(wanted: dict[Choice, list[int]], clock: GraphClock | None, end: float) -> Record:
    """Return this machine's record, with what is wanted timed until `end` if there is a clock."""
    here = kernel_selection.machine()
    path = kernel_selection.path_of(here)
    if clock is None or not wanted:
        return kernel_selection.read(path, here)
    with contextlib.ExitStack() as stack:
        keeps = True
        try:
            stack.enter_context(tables.locked(path.with_suffix(".lock"), limit_s() + SECONDS_COMPILING))
        except TimeoutError as error:
            logger.warning(
                "vllm-rocm-ops: only recorded results are used, because another process is timing: %s", error
            )
            return kernel_selection.read(path, here)
        except OSError as error:
            keeps = False
            logger.warning("vllm-rocm-ops: results are not saved: %s", error)
        record = kernel_selection.read(path, here)

        def save() -> None:
            if keeps:
                kernel_selection.write(path, record)

        watchdog.take_marker(path.with_suffix(".running"), record.off, record.ended, save)
        with torch.inference_mode():
            measure(wanted, clock, record, path, save, end)
        if record.ended:  # timing succeeded this time
            record.ended.clear()
            save()
        return record
