"""Times our kernels against vLLM's native ones when a worker of vLLM's starts, for kernel_selection.py.

The layers of a shape are known from vLLM's profile run, which calls the seams with the model's own weights. At vLLM's kernel
warm-up, before graphs are captured, each shape is measured: graphs of one call per layer, which walk the model's weights, so
that no cache holds them, ours and native in turn (clock.py). Each pair is checked first: against a sample of rows and
columns that is computed in float32 from the dequantised weights, our error may be at most `LARGEST_ERROR` of the native
kernel's, and the two whole results may be no further apart than that allows.

One worker of a machine measures, the others wait at the file's lock and read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.core import tables
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.kernel_selection import (
    GROUP,
    NATIVE,
    Choice,
    Decided,
    Kernels,
    Measured,
    Record,
    Refused,
)

logger = logging.getLogger("vllm.vllm_rocm_ops")

LARGEST_ERROR = 2.0  # of the native kernel's own
NO_SAMPLE = 0.25  # a relative error of the native kernel that says that the sample is not what it computes
FLOOR = 1e-5  # a relative error that is always allowed: of a sum of float32 in another order
SAMPLED_GROUPS = 4  # of columns
ROWS_AT_A_TIME = 1024  # of two results that are compared
SAMPLE_US = 500.0  # that the calls of one graph are to take
MOST_SECONDS = 10.0  # of a start, for linear layers, experts, attention, norms and activations, and for waiting
MOST_SECONDS_WAITING = 60.0  # for another process that measures, which compiles too
FEW_ROUNDS = 5  # after which a kernel that was the faster in each is the faster
HOPELESS = 1.5  # times the native kernel's time in one replay: not measured further
PROGRESS_SECONDS = 5.0
ROOF_SHARE, OPERATIONS_PER_US, LAUNCH_US = 0.5, 4e8, 3.0  # of a call, when its time is estimated
CAPTURE_US, REPLAY_US, CHECK_US = 15e3, 300.0, 10e3  # of a graph and of a replay, besides its calls; of a check


class Mismatch(Exception):
    """Our result is not what it must be."""


class Clock(Protocol):
    """Times calls."""

    def times(self, calls: dict[str, Callable], sets: list[tuple]) -> dict[str, list[float]]:
        """Microseconds per call of each function on each set of arguments, in turn."""

    def finish(self) -> None:
        """Waits for all that was launched, which raises what went wrong."""


class GraphClock:
    """Replays of captured graphs between which caches are emptied."""

    def times(self, calls, sets):
        graphs = {name: clocks.capture(call, sets) for name, call in calls.items()}
        found = clocks.replays(graphs, len(sets), rounds=1)
        if min(found["ours"]) > HOPELESS * max(found["native"]):
            return found
        found = clocks.replays(graphs, len(sets), rounds=FEW_ROUNDS)
        if is_clear(found):
            return found
        more = clocks.replays(graphs, len(sets), rounds=clocks.ROUNDS - FEW_ROUNDS)
        return {name: times + more[name] for name, times in found.items()}

    def finish(self):
        torch.cuda.synchronize()


def is_clear(times: dict[str, list[float]]) -> bool:
    """Whether more samples would not change who serves: all of one kernel are below all of the other."""
    ours, native = times["ours"], times["native"]
    return max(ours) * (1 + kernel_selection.MARGIN) < min(native) or min(ours) > max(native)


def sizes(captured: Iterable[int], most: int) -> list[int]:
    """The numbers of tokens to measure: one, the captured sizes, powers of two above them, and the most of a step."""
    found = {1, *(size for size in captured if size <= most)}
    power = 1 << max(found).bit_length() if len(found) > 1 else 2
    while power < most:
        found.add(power)
        power *= 2
    return sorted(found | {most})


def estimate(kernels: Kernels, layer: tuple, layers: int, tokens: int, bandwidth_gb_s: float) -> tuple[int, float]:
    """How many layers a graph has a call of, and seconds for the pair."""
    us = call_us(*kernels.work(layer, tokens), bandwidth_gb_s)
    calls = calls_of_graph(us, layers)
    return calls, pair_seconds(us, calls)


def call_us(moved: float, operations: float, bandwidth_gb_s: float) -> float:
    """A pessimistic time of a call that moves so many bytes and has so many operations."""
    return max(moved / (bandwidth_gb_s * 1e3 * ROOF_SHARE), operations / OPERATIONS_PER_US) + LAUNCH_US


def calls_of_graph(us: float, layers: int) -> int:
    """Calls of one graph, each of a layer of its own."""
    return max(1, min(layers, math.ceil(SAMPLE_US / us)))


def pair_seconds(us: float, calls: int) -> float:
    """Seconds for one pair, each kernel in a graph of so many calls."""
    return (2 * (CAPTURE_US + (FEW_ROUNDS + 2) * (calls * us + REPLAY_US)) + CHECK_US) / 1e6


def sample(count: int, most: int) -> Tensor:
    """The first, the last and some numbers between."""
    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).long()


def relative(error: Tensor, size: Tensor) -> float:
    """The root of the sum of squares of an error, as a share of that of what it is an error of."""
    return float(error.square().sum().sqrt() / size.square().sum().sqrt().clamp_min(1e-30))


def distance(ours: Tensor, native: Tensor) -> float:
    """The same of two whole results, some rows at a time, as memory is short."""
    off = size = torch.zeros((), device=native.device)
    for ours_rows, native_rows in zip(ours.split(ROWS_AT_A_TIME), native.split(ROWS_AT_A_TIME)):
        off = off + (ours_rows.float() - native_rows.float()).square().sum()
        size = size + native_rows.float().square().sum()
    return float(off.sqrt() / size.sqrt().clamp_min(1e-30))


def check(ours: Tensor, native: Tensor, exact: Tensor, rows: Tensor, columns: Tensor) -> tuple[float, float]:
    """The relative errors of both kernels. Raises `Mismatch` where ours is not as near as it must be."""
    if ours.shape != native.shape or ours.dtype != native.dtype:
        raise Mismatch(f"{ours.dtype} {list(ours.shape)} in place of {native.dtype} {list(native.shape)}")

    def sampled(output: Tensor) -> Tensor:
        return output[rows][:, columns].float()

    error, native_error = (relative(sampled(output) - exact, exact) for output in (ours, native))
    if not native_error <= NO_SAMPLE:
        raise ArithmeticError(f"vLLM's own kernel is {native_error:.2g} off, so that ours cannot be judged")
    if not error <= LARGEST_ERROR * native_error + FLOOR:
        raise Mismatch(f"a relative error of {error:.2g}, vLLM's kernel has {native_error:.2g}")
    apart = distance(ours, native)
    if not apart <= (LARGEST_ERROR + 1) * native_error + FLOOR:
        raise Mismatch(f"{apart:.2g} away from vLLM's kernel, which has an error of {native_error:.2g}")
    return error, native_error


def compare(
    kernels, sets: list[tuple], judge: Callable, clock: Clock, marked: contextlib.AbstractContextManager, fresh=tuple
) -> Measured:
    """Check a call of ours against vLLM's, and time both on all sets of arguments.

    Args:
        kernels: Has `op`, `ours` and `theirs`, as `Kernels`.
        judge: Takes both results and returns their relative errors. Raises `Mismatch` where ours is wrong.
        marked: Is entered while ours runs.
        fresh: Returns the arguments of a call that may write them.
    """
    native = kernels.theirs(*fresh(sets[0]))
    clock.finish()
    run_ours = functools.partial(kernel_selection.run_ours, kernels)
    with marked:
        try:
            ours = run_ours(*fresh(sets[0]))
            clock.finish()
        except Refused:
            return NATIVE
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise Mismatch(f"{type(error).__name__}: {error}") from error
        errors = judge(ours, native)
        del ours, native
        times = clock.times({"ours": run_ours, "native": kernels.theirs}, sets)
    return Measured(statistics.median(times["ours"]), statistics.median(times["native"]), *errors)


def measure_pair(
    one: Choice, layers: list[tuple], tokens: int, clock: Clock, marked: contextlib.AbstractContextManager
) -> Measured:
    """Check and time ours against native for some tokens, as `compare`."""
    kernels = one.kernels
    columns_in, columns_out = kernels.columns(layers[0])
    device = next(value for value in layers[0] if isinstance(value, Tensor)).device
    generator = torch.Generator(device).manual_seed(tokens)
    dtype = next((value for value in layers[0] if isinstance(value, torch.dtype)), torch.bfloat16)  # of tokens
    x = torch.randn(tokens, columns_in, generator=generator, device=device).to(dtype)
    sets = [kernels.arguments(layer, x, seed) for seed, layer in enumerate(layers)]
    starts = sample(-(-columns_out // GROUP), SAMPLED_GROUPS) * GROUP
    columns = (starts[:, None] + torch.arange(GROUP)).flatten()
    columns = columns[columns < columns_out].to(device)

    def judge(*results) -> tuple[float, float]:
        ours, native = map(getattr(kernels, "shown", lambda output: output), results)
        bits = native.view(torch.uint8) if native.itemsize == 1 else native
        reached = bits.any(1).nonzero().flatten()  # not the tokens that have no expert here
        rows = reached[sample(len(reached), kernels.sampled_rows).to(device)]
        return check(ours, native, kernels.exact(sets[0], x, rows, columns), rows, columns)

    return compare(kernels, sets, judge, clock, marked)


@contextlib.contextmanager
def marker(path: Path, text: str) -> Iterator[None]:
    """While ours runs, and both are timed, a file says so; one that is left behind tells of a process that ended there."""
    with contextlib.suppress(OSError):
        path.write_text(text)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def take_marker(path: Path, record: Record, save: Callable) -> None:
    """Remember the op in whose measurement a process ended, before the next may end. It may have been killed: the op is measured
    again, behind all others. It is off when a second process has ended there before one came through."""
    try:
        op, _, what = path.read_text().partition("\n")
    except OSError:
        return
    if op:
        record.ended[op] = record.ended.get(op, 0) + 1
        if record.ended[op] > 1:
            record.off[op] = f"{record.ended[op]} processes ended while they measured it, the last one {what}"
        else:
            logger.warning("vllm-rocm-ops: a process ended while it measured %s, which is measured again", what)
        save()
    with contextlib.suppress(OSError):
        path.unlink()


def in_order(wanted: dict[Choice, list[int]], record: Record, bandwidth_gb_s: float) -> list[tuple[Choice, list[int]]]:
    """Return what a record lacks, the most valuable first: powers of two, few tokens before many, then the sizes between; at each
    size by their share of a step. Sizes for which one kernel is chosen are one item. Last come ops in whose measurement a
    process ended."""

    def place(item: tuple[Choice, list[int]]) -> tuple:
        one, at = item
        tokens = 1 if kernel_selection.is_whole(one.key) else at[0]
        share = len(one.layers) * call_us(*one.kernels.work(next(iter(one.layers.values())), tokens), bandwidth_gb_s)
        return record.ended.get(one.kernels.op.name, 0), tokens & (tokens - 1) > 0, tokens, -share

    items = []
    for one, at in wanted.items():
        lacking = [m for m in at if m not in record.shapes.get(one.key, {})]
        whole = kernel_selection.is_whole(one.key)
        items += [(one, lacking)] if whole and lacking else [(one, [m]) for m in lacking]
    return sorted(items, key=place)


def measure(
    wanted: dict[Choice, list[int]],
    clock: Clock,
    record: Record,
    path: Path,
    save: Callable,
    pair: Callable,
    end: float,
) -> None:
    """Measure what a record lacks of some choices, each at so many tokens, by `pair`, and put it there. `save()` keeps the record.
    Nothing is begun that would end after the time `end`, by its estimate."""
    start = shown = time.monotonic()
    arch = archs.ARCHS.get(record.machine.get("arch", ""))
    bandwidth = arch.bandwidth_gb_s if arch else 1000.0
    todo, done, left = in_order(wanted, record, bandwidth), 0, []
    count, given_up = sum(len(at) for _, at in todo), set()
    if todo:
        shapes = len({one for one, _ in todo})
        logger.info("vllm-rocm-ops: times its kernels against vLLM's: %d shapes, %d pairs", shapes, count)
    for one, at in todo:
        op, layers = one.kernels.op.name, list(one.layers.values())
        if op in record.off or one in given_up:
            continue
        estimates = [estimate(one.kernels, layers[0], len(layers), tokens, bandwidth) for tokens in at]
        now = time.monotonic()
        if now + sum(seconds for _, seconds in estimates) > end:
            left += [f"{one.shape} at {tokens}" for tokens in at]
            continue
        if now - shown > PROGRESS_SECONDS:
            shown = now
            logger.info("vllm-rocm-ops: measured %d of %d pairs in %.0f s", done, count, now - start)
        for tokens, (calls, _) in zip(at, estimates):
            done += 1
            marked = marker(path.with_suffix(".running"), f"{op}\n{one.key} at {tokens} tokens")
            try:
                found = pair(one, layers[:calls], tokens, clock, marked)
            except Exception as error:  # noqa: BLE001  the other shapes go on
                why = f"{str(error).partition(chr(10))[0]} ({one.shape}, {tokens} tokens)"
                if isinstance(error, Mismatch):
                    record.off[op] = why
                    break
                logger.warning("vllm-rocm-ops: %s is not measured: %s: %s", op, type(error).__name__, why)
                if not isinstance(error, ArithmeticError):
                    given_up.add(one)
                    break
                found = NATIVE
            record.shapes.setdefault(one.key, {})[tokens] = found
        save()
    if left:
        text = "vllm-rocm-ops: %d of %d pairs were not measured in %.0f s; fixed limits hold there until the next start: %s"
        logger.info(text, len(left), count, time.monotonic() - start, ", ".join(left))


def say_off(off: dict[str, str]) -> None:
    """Warn of ops that are off."""
    for op, why in off.items():
        logger.warning("vllm-rocm-ops: %s is off on this GPU, vLLM's own kernels run: %s", op, why)


def warm_up(
    captured: Iterable[int],
    most: int,
    clock: Clock | None,
    gather: Callable[[Decided], list[Decided]],
    says: bool = True,
) -> None:
    """Measure what this process's choices need, or read what another has; agree with the other ranks through `gather`; take it, and
    say what it is, if this process `says` so. No layer is noted from now on. Whatever fails leaves choices as they are, and the
    ranks in step."""
    wanted = {one: sizes(captured, min(most, one.most)) for one in kernel_selection.choices() if one.layers}
    record, decided = agree(wanted, clock, gather)
    kernel_selection.settle(decided)
    if says:
        say(record, decided, {one.key for one in kernel_selection.choices()})


def agree(
    wanted: dict[Choice, list[int]],
    clock: Clock | None,
    gather: Callable[[Decided], list[Decided]],
    pair: Callable = measure_pair,
    share: float = 1.0,
) -> tuple[Record, Decided]:
    """This machine's record, with what is `wanted` where there is a clock, and what all ranks decide. It may take its share of
    `MOST_SECONDS`, less what this start has spent."""
    record = Record({})
    begin = time.monotonic()
    try:
        record = _measured_here(wanted, clock, pair, begin + share * MOST_SECONDS - kernel_selection.spent())
    except Exception as error:  # noqa: BLE001  vLLM starts without it
        logger.warning("vllm-rocm-ops: nothing was measured: %s: %s", type(error).__name__, error)
    kernel_selection.spend(time.monotonic() - begin)
    return record, kernel_selection.agreed(gather(record.decided()))


def say(record: Record, decided: Decided, known: set[str]) -> None:
    """Warn of ops that are off, and log the table of the known shapes."""
    say_off(decided.off)
    lines = kernel_selection.table(
        Record(record.machine, record.off, {k: v for k, v in record.shapes.items() if k in known})
    )
    if lines:
        logger.info("vllm-rocm-ops: our kernels and vLLM's on this GPU\n%s", "\n".join(lines))


def _measured_here(wanted: dict[Choice, list[int]], clock: Clock | None, pair: Callable, end: float) -> Record:
    """This machine's record, with what is wanted, measured until `end` at most, where there is a clock."""
    here = kernel_selection.machine()
    path = kernel_selection.path_of(here)
    if clock is None or not wanted:
        return kernel_selection.read(path, here)
    with contextlib.ExitStack() as stack:
        keeps = True
        try:
            stack.enter_context(tables.locked(path.with_suffix(".lock"), MOST_SECONDS_WAITING))
        except TimeoutError as error:
            logger.warning("vllm-rocm-ops: only what is known is used, as another process measures: %s", error)
            return kernel_selection.read(path, here)
        except OSError as error:
            keeps = False
            logger.warning("vllm-rocm-ops: what is measured is not kept: %s", error)
        record = kernel_selection.read(path, here)

        def save() -> None:
            if keeps:
                kernel_selection.write(path, record)

        take_marker(path.with_suffix(".running"), record, save)
        with torch.inference_mode():
            measure(wanted, clock, record, path, save, pair, end)
        if record.ended:  # not by what was measured, which came to its end now
            record.ended.clear()
            save()
        return record
