"""How long a call, or a model's calls, would take on a GPU that is not here. Always a prediction, with the error band that
tests/timing/calibrate.py found, never a measured time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.emulator import cases as emulated
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.tools.bench.shapes import Shape

from . import CONTEXT, launch_time, machines
from .launch_time import Prediction
from .machines import Machine
from .trace import Recording, RecordingEmulator, aligned, record

BLOCKS = 64  # of a launch that are recorded
DIES = int(machines.MI300X["xcds"])  # as the traced code has it: kXcds in csrc/device/amd/tile_mma.h
MOST_WAVES = 2048  # of a launch that runs whole, as others read what it writes
SORTS = "_sort"  # ends the symbol of one that always runs whole, as others find their work in what it writes
CACHES, LENGTHS = ("key_cache", "value_cache", "kv_cache"), ("block_table", "seq_lens")
PARAMETERS = frozenset(("b", "w1", "w2", "weight", "bias", *CACHES))
"""Arguments of ops that are a model's or requests', and not in a cache when the next step needs them again. What the kernel before wrote
is."""


class Kernel(NamedTuple):
    """A launch of a call: its kernel, its time, and what it does."""

    symbol: str
    prediction: Prediction
    recording: Recording


def _argument(name: str, value, experts: int):
    """A value for an argument of the meta device. Tokens go to all experts in turn, if ids have no values."""
    if not isinstance(value, torch.Tensor):
        return value
    made = aligned(value if name in (*LENGTHS, "topk_ids") else value.to("meta"))
    if name == "topk_ids" and value.is_meta:
        made.copy_(torch.arange(value.numel()).reshape(value.shape) % experts)
    elif name == "expert_map":
        made.copy_(torch.arange(value.numel()).where(torch.arange(value.numel()) < experts, -1))
    return made


def with_context(given: dict, context: int) -> dict:
    """Arguments of attention with a cache that has pages for so many keys of each request, and these pages in turn."""
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
    """The kernels of a call with arguments of the meta device, and so many keys of each request where it is attention; in a
    configuration of the op, by default the one that a call gets. Raises ValueError where none of ours runs."""
    if op in model_layers.ATTENTION:
        given = with_context(given, context)
    experts = len(given["w1"]) if "w1" in given else 1
    values = {name: _argument(name, value, experts) for name, value in given.items()}
    emulator = RecordingEmulator(str(machine.arch), races=False)
    if config is None:
        launches = op.explain(**values, arch=emulator.arch).launches
    else:
        a = op.Arguments(**values)
        launches = op.plan(config, op.allocate(a), a, emulator.arch)
    planned = at_addresses(emulated.executable(launches), values)
    if not planned:
        raise ValueError(f"predict: {op.name} must run a kernel of ours, got a call that PyTorch runs: see explain")
    cold = [value for name, value in values.items() if name in PARAMETERS and isinstance(value, torch.Tensor)]
    return [_kernel(emulator, machine, one, one is planned[-1], cold) for one in planned]


def at_addresses(planned: Sequence[Launch], values: dict) -> list[Launch]:
    """The launches with outputs and workspaces where a GPU would have them, in all of them the same."""
    storages = {value.untyped_storage().data_ptr() for value in values.values() if isinstance(value, torch.Tensor)}

    def moved(arg):
        if not isinstance(arg, torch.Tensor) or not arg.numel() or arg.untyped_storage().data_ptr() in storages:
            return arg
        return made.setdefault((arg.data_ptr(), arg.shape, arg.stride()), aligned(arg.to("meta")))

    made: dict = {}
    return [one.with_each(moved) for one in planned]


def recorded(
    emulator: RecordingEmulator, one: Launch, last: bool, cold: list, most: int = BLOCKS, whole: int = MOST_WAVES
) -> Recording:
    """About so many of the blocks of a launch; all run, if others read what it writes and they have at most `whole` waves
    or find their work in it."""
    grid, path = math.prod(one.grid), launch.code_object(one.module, emulator.arch.name)
    waves = grid * -(-math.prod(one.block) // emulator.arch.wave_lanes)
    blocks = sorted({0, *sampled(grid, most, _tiles(one))})  # the first often writes what later launches read
    return record(
        emulator, path, one, blocks, run_all=not last and (waves <= whole or one.symbol.endswith(SORTS)), cold=cold
    )


def _tiles(one: Launch) -> int:
    """How many tiles a launch has that blocks share: its counters; 0 if they share none."""
    given = one.named.items()
    return max(
        (value.numel() for name, value in given if str(name).endswith("counters") and value is not None), default=0
    )


def sampled(grid: int, most: int, tiles: int) -> list[int]:
    """About so many blocks of a grid. Of those that share tiles, all of some tiles, as the last of a tile does more than the others. The
    blocks of a tile are neighbours, or, in the order in which neighbours are on one die (csrc/gemm/tiled/rasterize.h), neighbours or
    `tiles` apart."""
    sharing = -(-grid // tiles) if tiles else 1
    if sharing == 1 or grid <= most:
        return emulated.sample(grid, most)
    count = max(most // (3 * sharing), 1)
    first = max(tiles // 2 - count, 0)
    found = set(range(first * sharing, min((first + max(count, 2)) * sharing, grid)))
    for tile, part in itertools.product(range(first, first + count), range(sharing)):
        for index in (tile + part * tiles, tile * sharing + part):
            die, place = _on_die(min(index, grid - 1), grid)
            found.add(place * DIES + die)
    return sorted(found)


def _on_die(index: int, grid: int) -> tuple[int, int]:
    """The die that has an index, and its place there, where dies have equally many neighbouring ones, the first ones one more."""
    each, more = divmod(grid, DIES)
    if index < more * (each + 1):
        return divmod(index, each + 1)
    die, place = divmod(index - more * (each + 1), each)
    return more + die, place


def _kernel(emulator: RecordingEmulator, machine: Machine, one: Launch, last: bool, cold: list) -> Kernel:
    recording = recorded(emulator, one, last, cold)
    return Kernel(one.symbol, launch_time.predict(machine, recording), recording)


class Band(NamedTuple):
    """How far predictions of such kernels were from published times: all were within `ratio`, None where none was compared."""

    ratio: float | None
    text: str

    def __str__(self) -> str:
        return "unknown" if self.ratio is None else f"+-{self.ratio:.0%}"


ROWS = ("rms_norm", "fused_add_rms_norm", "layer_norm", "silu_and_mul")
COMPARED = {"GEMM": ("skinny GEMM",), "rows": ("add RMSNorm", "SwiGLU")}
"""By kind of op: the classes of published kernels that do the same."""


def band(op: Op, product: str = machines.COMPARED) -> Band:
    """The error band of an op's kernels, from all published times of kernels that do the same."""
    if product != machines.COMPARED:
        return Band(None, f"error unknown: no published decode time of {product} was compared")
    gemm = op in model_layers.LINEARS
    kinds = COMPARED["GEMM" if gemm else "rows"] if gemm or op.name.startswith(ROWS) else ()
    halves = [half for kind in kinds for half in machines.CALIBRATION["classes"][kind].values()]
    if not halves:
        return Band(None, "error unknown: no published time of such a kernel was compared")
    ratio, count = max(half["largest"] for half in halves), sum(half["points"] for half in halves)
    return Band(
        ratio, f"+-{ratio:.0%}, the largest error in {count} published times of other kernels: {' and '.join(kinds)}"
    )


def call_lines(op: Op, given: dict, machine: Machine, context: int = CONTEXT) -> Iterator[str]:
    """Lines for people about a call."""
    kernels = predict_call(op, given, machine, context)
    total = sum(kernel.prediction.us for kernel in kernels)
    of = f" of {context} keys a request" if op in model_layers.ATTENTION else ""
    yield f"{op.name}{of} on {machine.name}: predicted {total:.1f} us, not measured; {band(op, machine.name).text}"
    for symbol, prediction, _ in kernels:
        yield f"  {symbol}: predicted {prediction.us:.1f} us; {prediction.details}"


def shape_lines(found: Iterable[Shape], machine: Machine) -> Iterator[str]:
    """A line for people about each of these shapes; attention is left to `call_lines`, which is told how many keys there are."""
    yield f"{machine.name}: predicted times in us, not measured"
    for shape in found:
        name, op = f"{shape.op.name} {shape.case.name}", shape.op
        if op in model_layers.ATTENTION:
            yield f"  {name}: see vllm-rocm-ops predict {op.name} --context"
            continue
        made = shape.case.make("meta", torch.Generator(), machine.arch.fp8_dtype)
        try:
            kernels = predict_call(op, op.Arguments(*shape.layout(*made))._asdict(), machine)
        except ValueError as error:
            yield f"  {name}: {error}"
        else:
            us = sum(kernel.prediction.us for kernel in kernels)
            yield f"  {name}: predicted {us:.1f} us, band {band(op, machine.name)}"


class Predicted(NamedTuple):
    """A call of a model's step: its time in us and its kernels, None and 0 where no kernel of ours runs."""

    call: LayerCall
    us: float | None
    kernels: int
    band: Band


def step(calls: Sequence[LayerCall], tokens: int, machine: Machine, context: int = CONTEXT) -> Iterator[Predicted]:
    """The calls of a step of a model with so many tokens."""
    for call in calls:
        if not call.count:
            continue
        case = call.case(tokens).make("meta", torch.Generator(), machine.arch.fp8_dtype)
        try:
            kernels = predict_call(call.op, call.op.Arguments(*case)._asdict(), machine, context)
        except ValueError:
            yield Predicted(call, None, 0, Band(None, ""))
        else:
            yield Predicted(
                call, sum(kernel.prediction.us for kernel in kernels), len(kernels), band(call.op, machine.name)
            )
