"""Plan the one-shot launches of csrc/collectives/all_reduce.h, which sum rows of all ranks and normalize them.

No op, or a norm of ops/rms_norm.py, may follow the sum. `a` is the named tuple of that op's arguments with this rank's `input`
[..., hidden]; without an op it is a `Sum`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import wire
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Address, Launch
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.tensors import row_stride, rows_of
from vllm_rocm_ops.ops.shared import rowwise

RANKS = range(2, 9)
MAX_RANKS = RANKS[-1]
HEADER_BYTES = 128  # per inbox
BUFFERS, SLOTS = 2, MAX_RANKS + 1  # per inbox; slots: one per rank, and one for the blocks of the inbox's own rank
WORD_BYTES, VALUES_IN_WORD = 8, 2  # a word has two 16-bit values and a 32-bit epoch
CAPACITY = 512 * 1024 // 2 // VALUES_IN_WORD
"""Words per call: on two H200 stages (flagged.py) are faster from 1 MiB of values on, on MI300X from about 128 KiB (predicted)."""
MAX_BLOCK_THREADS, MAX_ROW_THREADS = 512, 1024
KERNEL_RANKS = (2, 4, 8)  # the largest group of each kernel
CHUNKS = (1, 2)  # vectors per thread
PARTS = (1, 2, 4, 8)
LARGEST_HIDDEN = MAX_ROW_THREADS * CHUNKS[-1] * rowwise.VECTOR
SUM, PER_TENSOR, PER_GROUP = "all_reduce", "all_reduce_quant", "all_reduce_group_quant"
MODULES = {
    "rms_norm": SUM,
    "fused_add_rms_norm": SUM,
    "rms_norm_static_fp8_quant": PER_TENSOR,
    "fused_add_rms_norm_static_fp8_quant": PER_TENSOR,
    "rms_norm_dynamic_per_token_quant": PER_TENSOR,
    "rms_norm_per_block_quant": PER_GROUP,
    "rms_norm_mxfp8_quant": PER_GROUP,
    "rms_norm_and_per_block_quant": PER_GROUP,
}
"""The file in csrc/ops, by op."""
NORM_AND_QUANT = ops.rms_norm_and_per_block_quant
"""The op whose results have the norm beside its quantization."""
NORMS: dict[str, Op] = {name: getattr(ops, name) for name in MODULES}
NAMES = (SUM, *(f"{SUM}_{name}" for name in NORMS))
"""The launches, as a machine's record names them."""


class Sum(NamedTuple):
    """The arguments of an all-reduce without an op."""

    input: Tensor


@dataclass(frozen=True)
class Group:
    """A rank's view of its group.

    Attributes:
        rank: This rank.
        inboxes: The addresses of all ranks' inboxes.
        counters: The address of this rank's counters for one-shot launches.
        report: The address of the word in host memory that receives errors.
        blocks: The most resident blocks of a launch.
        limit_us: The time limit of a wait for a rank.
        capacity: Words per call in one shot.
        flagged_counters: The address of this rank's counters for launches of flagged.py.
        payload: Bytes per buffer of an inbox for launches of flagged.py, 0 if there are none.
        wires: The wire formats of calls with more values than `capacity` (wire.py).
    """

    rank: int
    inboxes: tuple[int, ...]
    counters: int
    report: int
    blocks: int
    limit_us: int
    capacity: int = CAPACITY
    flagged_counters: int = 0
    payload: int = 0
    wires: tuple[str, ...] = (wire.BF16,)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.inboxes)

    def args(self) -> dict[str, object]:
        """Return the kernel arguments that describe the group."""
        inboxes = {f"inbox{rank}": None for rank in range(MAX_RANKS)}
        inboxes |= {f"inbox{rank}": Address(address) for rank, address in enumerate(self.inboxes)}
        return {
            **inboxes,
            "mine": Address(self.inboxes[self.rank]),
            "counters": Address(self.counters),
            "report": Address(self.report),
            "capacity": self.capacity,
            "rank": self.rank,
            "ranks": self.ranks,
            "limit_us": self.limit_us,
        }


@dataclass(frozen=True)
class Config:
    """`threads` threads per row in `parts` blocks, each with `chunks` vectors of 8 elements."""

    parts: int
    threads: int
    chunks: int
    prefix = ""  # of a kernel's name
    kernel_ranks = KERNEL_RANKS
    wire = wire.BF16

    def args(self, a, group: Group) -> dict[str, object]:
        """Return the kernel arguments that only kernels of one protocol have."""
        return {}

    def module(self, module: str) -> str:
        """Return the file in csrc/ops, for one of `MODULES`."""
        return module

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return the launch's grid."""
        return rows, self.parts, 1


def word_slots_bytes(capacity: int) -> int:
    """Return the bytes of an inbox's header and slots of `capacity` words."""
    return HEADER_BYTES + BUFFERS * SLOTS * capacity * WORD_BYTES


def common_rules(op: Op | None, a, arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield each rule that kernels of all protocols have, and whether it holds."""
    if op is None:
        yield "input is bfloat16 or float16", a.input.dtype in rowwise.ELEMENTS
    else:
        yield f"{op.name} is one of {', '.join(MODULES)}", op.name in MODULES
        yield from op.can_implement(a, arch)
    hidden = a.input.shape[-1]
    yield "input's rows have one stride", row_stride(a.input) is not None
    tensors = (a.input, *(getattr(a, name, None) for name in ("residual", "weight", "addend")))
    yield "hidden is a multiple of 8, and rows are 16-byte aligned", rowwise.is_vector(hidden, *tensors)
    yield f"hidden is at most {LARGEST_HIDDEN}", hidden <= LARGEST_HIDDEN


def rules(op: Op | None, a, arch: Arch, group: Group) -> Iterator[tuple[str, bool]]:
    """Yield each rule of the kernels, and whether it holds."""
    yield from common_rules(op, a, arch)
    values, rows = group.capacity * VALUES_IN_WORD, rows_of(a.input)
    rule = f"input has at most {values} values ({values * 2 // 1024} KiB, twice that between ranks)"
    yield rule, a.input.numel() <= values
    fits = rows == 0 or bool(configs(a, arch, group))
    yield f"rows have at most {group.blocks} blocks, so that all are resident", fits


def configs(a, arch: Arch, group: Group) -> list[Config]:
    """Return the configurations that fit, fewest blocks first. They differ in `parts` only, so results have the same bits."""
    vectors, rows = a.input.shape[-1] // rowwise.VECTOR, rows_of(a.input)
    # With two ranks a thread can load the words of two chunks at once, so that half the threads suffice.
    one_chunk = vectors <= MAX_BLOCK_THREADS or (group.ranks > 2 and vectors <= MAX_ROW_THREADS)
    chunks = CHUNKS[0 if one_chunk else 1]
    threads = max(arch.wave_lanes, 1 << (-(-vectors // chunks) - 1).bit_length())
    fitting = (parts for parts in PARTS if arch.wave_lanes <= threads // parts <= MAX_BLOCK_THREADS)
    return [Config(parts, threads, chunks) for parts in fitting if rows * parts <= group.blocks]


def cost(config: Config, a, arch: Arch, group: Group) -> float:
    """Return the predicted microseconds of a launch, without its fixed part."""
    costs = arch.costs.collective
    row_bytes = a.input.shape[-1] // VALUES_IN_WORD * WORD_BYTES
    link_us = rows_of(a.input) * row_bytes / costs.peer_bytes_per_us(group.ranks)
    read_us = (group.ranks - 1) * row_bytes / config.parts / costs.unit_bytes_per_us
    return link_us + read_us + (costs.exchange_us if config.parts > 1 and not isinstance(a, Sum) else 0.0)


def default(a, arch: Arch, group: Group) -> Config:
    """Return the configuration with the lowest cost; among equals the fewest blocks."""
    return min(configs(a, arch, group), key=lambda config: cost(config, a, arch, group))


def symbol(op: Op | None, dtype: torch.dtype, ranks: int, config: Config) -> str:
    """Return the kernel's name."""
    kernel_ranks = next(largest for largest in config.kernel_ranks if ranks <= largest)
    norm = "" if op is None else op.name.removeprefix("fused_add_") + "_"
    return f"all_reduce_{config.prefix}{norm}{rowwise.ELEMENTS[dtype]}_{kernel_ranks}_x{config.chunks}"


def plan(op: Op | None, a, outputs, normed: Tensor | None, config: Config, group: Group) -> Launch:
    """Return the launch that writes `outputs`, the op's, and to `normed` the norm before its quantization, if given."""
    vectors, rows = a.input.shape[-1] // rowwise.VECTOR, rows_of(a.input)
    args = group.args() | {
        "input": a.input,
        "input_stride": row_stride(a.input),
        "rows": rows,
        "row_chunks": vectors,
        "parts": config.parts,
        "row_threads": config.threads,
        **config.args(a, group),
    }
    if op is None:
        args["out"] = outputs
    else:
        residual, addend = getattr(a, "residual", None), getattr(a, "addend", None)
        if op is NORM_AND_QUANT:
            normed, outputs = outputs[0], outputs[1:]
        args |= {
            "residual": residual,
            "residual_stride": 0 if residual is None else row_stride(residual),
            "weight": a.weight,
            "hidden": a.input.shape[-1],
            "inverse_hidden": 1.0 / a.input.shape[-1],
            "epsilon": float(a.epsilon),
            "one_plus_weight": int(a.one_plus_weight and a.weight is not None),
            "normed": normed,
            "addend": addend,
            "addend_factor": float(getattr(a, "addend_factor", 1.0)),
            **rowwise.output_args(a, outputs),
        }
    module = config.module(SUM if op is None else MODULES[op.name])
    name = symbol(op, a.input.dtype, group.ranks, config)
    return Launch(module, name, config.grid(rows), (config.threads // config.parts, 1, 1), args)


def symbols(
    configs: Iterable[Config] = tuple(Config(1, MAX_BLOCK_THREADS, chunks) for chunks in CHUNKS),
    dtypes: Iterable[torch.dtype] = tuple(rowwise.ELEMENTS),
) -> dict[str, set[str]]:
    """Return the kernels of these configurations and dtypes by their file in csrc/ops."""
    by_module: dict[str, set[str]] = {}
    for op in (None, *NORMS.values()):
        for dtype, ranks, config in itertools.product(dtypes, KERNEL_RANKS, configs):
            module = config.module(SUM if op is None else MODULES[op.name])
            by_module.setdefault(module, set()).add(symbol(op, dtype, ranks, config))
    return by_module


def reference(op: Op | None, inputs: list[Tensor], *args):
    """Return a rank's result in plain PyTorch: the sum of all ranks' inputs in their order, rounded once, then the op.

    An addend, equal on all ranks, is added to each rank's input before.
    """
    by_rank = [with_addend(op, (each, *args)) for each in inputs]
    inputs, args = [rank_args[0] for rank_args in by_rank], by_rank[0][1:]
    total = rowwise.exact(inputs[0])
    for each in inputs[1:]:
        total = total + rowwise.exact(each)
    total = total.to(inputs[0].dtype)
    return total if op is None else op.reference(total, *args)


def with_addend(op: Op | None, args: tuple) -> tuple:
    """Return an op's arguments with addend_factor * addend added to the input, and the addend None."""
    a = op and op.Arguments(*args)
    if getattr(a, "addend", None) is None:
        return args
    return tuple(a._replace(input=torch.add(a.input, a.addend, alpha=a.addend_factor), addend=None))
