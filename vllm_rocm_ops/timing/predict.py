"""Predict the time of a call on a GPU that is not present.

Times are predictions with the error band of serving_benchmarks/timing_study/calibrate.py, never measurements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_rocm_ops.core.launch import Launch, code_object
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.emulator import cases as emulated
from vllm_rocm_ops.models import layers as model_layers

from . import CONTEXT, launch_time, machines
from .launch_time import Prediction
from .machines import Machine
from .trace import Recording, RecordingEmulator, aligned, record

BLOCKS = 64  # blocks to record per launch
DIES = int(machines.MI300X["xcds"])  # as in the traced code: kXcds in csrc/device/amd/tile_mma.h
MAX_WAVES = 2048  # up to which a launch runs whole if others read its output
SORTS = "_sort"  # in symbols that always run whole, as other kernels find their work in the output
TILED = "_tiled"  # in symbols of kernels whose compute units may be matrix-bound
CACHES, LENGTHS = ("key_cache", "value_cache", "kv_cache"), ("block_table", "seq_lens")
PARAMETERS = frozenset(("b", "w1", "w2", "weight", "bias", *CACHES))
"""Arguments that belong to the model or to requests. A decode step finds them in no cache, unlike the output of the kernel before."""


class Kernel(NamedTuple):
    """The prediction and recording of one launch of a call."""

    symbol: str
    prediction: Prediction
    recording: Recording


def _argument(name: str, value, experts: int, tokens: int):
    """Create a value for an argument on the meta device. Ids without values assign tokens to all experts in turn.

    Requests without values have the slots from 1 on, and equally many of the tokens.
    """
    if not isinstance(value, torch.Tensor):
        return value
    made = aligned(value if name in (*LENGTHS, "topk_ids") else value.to("meta"))
    if name == "topk_ids" and value.is_meta:
        made.copy_(torch.arange(value.numel()).reshape(value.shape) % experts)
    elif name in ("indices", "accepted") and value.is_meta:
        made.copy_(torch.arange(1, value.numel() + 1).reshape(value.shape) if name == "indices" else torch.ones(()))
    elif name == "row_starts" and value.is_meta:
        made.copy_(torch.arange(len(value)) * (tokens // max(len(value) - 1, 1)))
    elif name == "expert_map":
        made.copy_(torch.arange(value.numel()).where(torch.arange(value.numel()) < experts, -1))
    return made


def with_context(given: dict, context: int) -> dict:
    """Return attention arguments with a cache of `context` keys per request, pages in order."""
    caches = [name for name in CACHES if name in given]
    requests, page = len(given["block_table"]), given[caches[0]].shape[1]
    pages = -(-context // page)
    made = {
        name: torch.empty_strided(
            (requests * pages, *given[name].shape[1:]), given[name].stride(), dtype=given[name].dtype, device="meta"
        )
        for name in caches
    }
    table = torch.arange(requests * pages, dtype=given["block_table"].dtype).reshape(requests, pages)
    return given | made | {"block_table": table, "seq_lens": torch.full_like(given["seq_lens"], context, device="cpu")}


def predict_call(op: Op, given: dict, machine: Machine, context: int = CONTEXT, config=None) -> list[Kernel]:
    """Return the kernels of a call with arguments on the meta device, by default in the configuration that the call gets.

    For attention, each request has `context` keys. Raises ValueError if no kernel of the plugin serves the call.
    """
    if op in model_layers.ATTENTION:
        given = with_context(given, context)
    experts = len(given["w1"]) if "w1" in given else 1
    tokens = next(len(value) for value in given.values() if isinstance(value, torch.Tensor))
    values = {name: _argument(name, value, experts, tokens) for name, value in given.items()}
    emulator = RecordingEmulator(str(machine.arch), races=False)
    if config is None:
        launches = op.explain(**values, arch=emulator.arch).launches
    else:
        a = op.Arguments(**values)
        launches = op.plan(config, op.allocate(a), a, emulator.arch)
    planned = at_addresses(emulated.executable(launches), values)
    if not planned:
        raise ValueError(f"predict: no kernel serves this call of {op.name}; PyTorch runs it, see explain")
    cold = [value for name, value in values.items() if name in PARAMETERS and isinstance(value, torch.Tensor)]
    return [_kernel(emulator, machine, launch, launch is planned[-1], cold) for launch in planned]


def at_addresses(planned: Sequence[Launch], values: dict) -> list[Launch]:
    """Return the launches with outputs and workspaces at GPU-like addresses, consistent between launches."""
    storages = {value.untyped_storage().data_ptr() for value in values.values() if isinstance(value, torch.Tensor)}

    def moved(arg):
        if not isinstance(arg, torch.Tensor) or not arg.numel() or arg.untyped_storage().data_ptr() in storages:
            return arg
        return made.setdefault((arg.data_ptr(), arg.shape, arg.stride()), aligned(arg.to("meta")))

    made: dict = {}
    return [launch.with_each(moved) for launch in planned]


def recorded(
    emulator: RecordingEmulator, launch: Launch, last: bool, cold: list, most: int = BLOCKS, whole: int = MAX_WAVES
) -> Recording:
    """Record about `most` blocks of a launch.

    All blocks run if other launches read the output and it has at most `whole` waves or determines their work.
    """
    grid, path = math.prod(launch.grid), code_object(launch.module, emulator.arch.name)
    waves = grid * -(-math.prod(launch.block) // emulator.arch.wave_lanes)
    run_all = not last and (waves <= whole or SORTS in launch.symbol)
    # The first block often writes the input of later launches.
    tiles = _tiles(launch)
    columns = tiles > 0 and launch.grid[1] > 1 and grid > most
    blocks = sorted({0, *(of_columns(launch.grid, most) if columns else sampled(grid, most, tiles))})
    return record(emulator, path, launch, blocks, run_all=run_all, cold=cold)


def _tiles(launch: Launch) -> int:
    """Return the number of tiles that blocks share, from the launch's counters, or 0."""
    given = launch.named.items()
    return max(
        (value.numel() for name, value in given if str(name).endswith("counters") and value is not None), default=0
    )


def sampled(grid: int, most: int, tiles: int) -> list[int]:
    """Return about `most` blocks of a grid.

    If blocks share tiles, all blocks of some tiles are included, as the last block of a tile does more work. The blocks of a tile are
    neighbors, or, in the die-aware order of csrc/gemm/tiled/rasterize.h, neighbors or `tiles` apart.
    """
    sharing = -(-grid // tiles) if tiles else 1
    if sharing == 1 or grid <= most:
        return emulated.sample(grid, most)
    count = max(most // (3 * sharing), 1)
    first = max(tiles // 2 - count, 0)
    blocks = set(range(first * sharing, min((first + max(count, 2)) * sharing, grid)))
    for tile, part in itertools.product(range(first, first + count), range(sharing)):
        for index in (tile + part * tiles, tile * sharing + part):
            die, place = _on_die(min(index, grid - 1), grid)
            blocks.add(place * DIES + die)
    return sorted(blocks)


def of_columns(grid: tuple[int, int, int], most: int) -> list[int]:
    """Return about `most` blocks of a grid in whole columns, whose blocks share a tile, as attention's splits of a request."""
    x, y = grid[0], grid[1] * grid[2]
    columns = max(min(most // y, x), 1)
    return sorted(place * x // columns + row * x for place in range(columns) for row in range(y))


def _on_die(index: int, grid: int) -> tuple[int, int]:
    """Return the die of an index and its place there, if dies have equal runs of neighbors, the first dies one more."""
    each, more = divmod(grid, DIES)
    if index < more * (each + 1):
        return divmod(index, each + 1)
    die, place = divmod(index - more * (each + 1), each)
    return more + die, place


def _kernel(emulator: RecordingEmulator, machine: Machine, launch: Launch, last: bool, cold: list) -> Kernel:
    recording = recorded(emulator, launch, last, cold)
    return Kernel(launch.symbol, timed(machine, recording), recording)


def timed(machine: Machine, recording: Recording) -> Prediction:
    """Return the time of a launch of the plugin, of tiled kernels at the clock under their matrix load."""
    prediction = launch_time.predict(machine, recording)
    if TILED not in recording.name:
        return prediction
    loaded = launch_time.loaded(machine, recording)
    return max(prediction, loaded, key=lambda each: each.us)


class Band(NamedTuple):
    """An error band: every compared prediction was within `ratio` of its published time; None if none was compared."""

    ratio: float | None
    text: str

    def __str__(self) -> str:
        return "unknown" if self.ratio is None else f"+-{self.ratio:.0%}"


ROWS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "sigmoid_and_mul")
COMPARED = {"GEMM": ("skinny GEMM",), "rows": ("add RMSNorm", "SwiGLU")}
"""By kind of op: classes of comparable published kernels."""


def band(op: Op, product: str = machines.COMPARED) -> Band:
    """Return the error band of an op's kernels, from all published times of comparable kernels."""
    if product != machines.COMPARED:
        return Band(None, f"error unknown: no published decode times of {product} to compare")
    gemm = op in model_layers.LINEARS
    kinds = COMPARED["GEMM" if gemm else "rows"] if gemm or op.name.startswith(ROWS) else ()
    halves = [half for kind in kinds for half in machines.CALIBRATION["classes"][kind].values()]
    if not halves:
        return Band(None, "error unknown: no published times of comparable kernels")
    ratio, count = max(half["largest"] for half in halves), sum(half["points"] for half in halves)
    return Band(
        ratio, f"+-{ratio:.0%}, the maximum error over {count} published times of other kernels: {' and '.join(kinds)}"
    )


def call_lines(op: Op, given: dict, machine: Machine, context: int = CONTEXT) -> Iterator[str]:
    """Format the prediction of a call."""
    kernels = predict_call(op, given, machine, context)
    total = sum(kernel.prediction.us for kernel in kernels)
    keys = f" with {context} keys per request" if op in model_layers.ATTENTION else ""
    yield f"{op.name}{keys} on {machine.name}: predicted {total:.1f} us, not measured; {band(op, machine.name).text}"
    for symbol, prediction, _ in kernels:
        yield f"  {symbol}: predicted {prediction.us:.1f} us; {prediction.details}"
