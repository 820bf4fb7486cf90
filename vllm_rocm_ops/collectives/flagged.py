"""Plan the launches of csrc/collectives/flagged.h: all-reduces of more rows than launches.py's, in one stage or in two.

A block's values, the payload, are stored first, then one flag. So a bf16 value is two bytes on the wire, not four as in a word with its
epoch, and an FP8 value (wire.py) one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from vllm_rocm_ops.collectives import launches, wire
from vllm_rocm_ops.collectives.launches import BUFFERS, MAX_BLOCK_THREADS, MAX_RANKS, PARTS, Group, Sum
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Address
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.tensors import rows_of
from vllm_rocm_ops.ops.shared import gemm, rowwise

PAYLOAD = 10 << 20
"""Bytes of payload per buffer: 4 MiB of values for each of two stages, with rows padded to whole threads."""
MAX_VALUES = (4 << 20) // 2  # per call: 4 MiB of bf16
CHUNKS = (1, 2, 4)  # vectors per thread
FP8_CHUNKS, FP8_KERNEL_RANKS = (4,), (2, 8)  # with FP8 on the wire: few kernels, as each takes a second to compile
STAGES, VECTOR_BYTES = (1, 2), 16
DTYPE = torch.bfloat16
"""The kernels' only dtype: those for fp16 would double 25 s of compiling per chip."""
MAX_BLOCKS, EXCHANGE_ROWS, EXCHANGES, MAX_WAVES = 512, 256, 2, {64: 16, 32: 32}


@dataclasses.dataclass(frozen=True)
class Config(launches.Config):
    """As launches.Config, with `row_blocks` * `parts` blocks, of which each has its part of every row_blocks-th row."""

    row_blocks: int
    stages: int
    wire: str = wire.BF16

    @property
    def prefix(self) -> str:
        return "flagged_fp8_" if self.wire == wire.FP8 else "flagged_"

    @property
    def kernel_ranks(self) -> tuple[int, ...]:
        return FP8_KERNEL_RANKS if self.wire == wire.FP8 else launches.KERNEL_RANKS

    def slot(self, ranks: int) -> int:
        """Return the vectors per slot, where a rank stores its values of one row's part for another in the first stage."""
        vectors, multiple = self.threads // self.parts * self.chunks, wire.GROUP_VECTORS if self.wire == wire.FP8 else 1
        return vectors if self.stages == 1 else -(-vectors // (ranks * multiple)) * multiple

    def payload(self, rows: int, ranks: int) -> int:
        """Return the bytes of an inbox that a launch uses: the first stage's slots, and the second stage's sums."""
        sums = self.threads // self.parts * self.chunks if self.stages == 2 else 0
        return rows * self.parts * (ranks * self.slot(ranks) + sums) * VECTOR_BYTES

    def args(self, a, group: Group) -> dict[str, object]:
        """Return the kernel arguments that one-shot kernels do not have, and the counters in place of theirs."""
        return {
            "counters": Address(group.flagged_counters),
            "row_blocks": self.row_blocks,
            "stages": self.stages,
            "slot": self.slot(group.ranks),
            "first": launches.word_slots_bytes(group.capacity),
            "buffer": buffer_bytes(group.payload),
            **gemm.divisor(group.ranks),
        }

    def module(self, module: str) -> str:
        """Return the file in csrc/ops, for one of launches.MODULES."""
        return module.replace(launches.SUM, f"{launches.SUM}_flagged", 1)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return the launch's grid."""
        return self.row_blocks, self.parts, 1


def buffer_bytes(payload: int) -> int:
    """Return the bytes of a buffer: exchanged reductions of a row's blocks, flags, and the payload."""
    if not payload:
        return 0
    exchange = EXCHANGE_ROWS * EXCHANGES * max(MAX_WAVES.values()) * launches.WORD_BYTES
    return exchange + STAGES[-1] * MAX_RANKS * MAX_BLOCKS * 4 + payload


def supported_stages(ranks: int, wire_format: str = wire.BF16) -> tuple[int, ...]:
    """Return the numbers of stages for which there are kernels for this many ranks.

    Two ranks have one stage, which was faster on two H200. More than four have two: for AMD the cost model predicts one stage to be
    slower at 429 of 432 sizes, and at most 5 % faster at the others.
    """
    return STAGES[:1] if ranks == 2 else STAGES if ranks <= 4 and wire_format == wire.BF16 else STAGES[1:]


def rules(op: Op | None, a, arch: Arch, group: Group) -> Iterator[tuple[str, bool]]:
    """Yield each rule of the kernels, and whether it holds."""
    yield from launches.common_rules(op, a, arch)
    dtype_rule = f"more than {launches.CAPACITY * launches.VALUES_IN_WORD} values are bfloat16"
    yield dtype_rule, a.input.dtype == DTYPE
    size_rule = f"input has at most {MAX_VALUES} values ({MAX_VALUES * 2 >> 20} MiB)"
    yield size_rule, a.input.numel() <= MAX_VALUES
    fits = rows_of(a.input) == 0 or bool(configs(a, arch, group))
    yield f"its rows fit in {group.payload} bytes of an inbox", fits


def configs(a, arch: Arch, group: Group) -> list[Config]:
    """Return the configurations that fit, of the group's wire formats. `parts` and `stages` do not change results.

    FP8 needs more padding of rows.
    """
    is_large = a.input.numel() > group.capacity * launches.VALUES_IN_WORD
    formats = [each for each in group.wires if is_large or each == wire.BF16]
    return [config for each in formats for config in _configs(a, arch, group, each)]


def _configs(a, arch: Arch, group: Group, wire_format: str) -> list[Config]:
    vectors, rows = a.input.shape[-1] // rowwise.VECTOR, rows_of(a.input)
    options = FP8_CHUNKS if wire_format == wire.FP8 else CHUNKS
    chunks = next((chunks for chunks in options if vectors <= MAX_BLOCK_THREADS * chunks), options[-1])
    threads = max(arch.wave_lanes, 1 << (-(-vectors // chunks) - 1).bit_length())
    max_blocks = min(group.blocks, MAX_BLOCKS)
    candidates = [
        Config(parts, threads, chunks, min(rows, max_blocks // parts), stages, wire_format)
        for stages in supported_stages(group.ranks, wire_format)
        for parts in PARTS
        if parts == 1 or (parts <= max_blocks and threads // parts >= arch.wave_lanes and rows <= EXCHANGE_ROWS)
    ]
    return [each for each in candidates if each.payload(rows, group.ranks) <= group.payload]


def cost(config: Config, a, arch: Arch, group: Group) -> float:
    """Return the predicted microseconds of a launch, without its fixed part."""
    costs, ranks, rows = arch.costs.collective, group.ranks, rows_of(a.input)
    row_bytes = a.input.shape[-1] * wire.VALUE_BYTES[config.wire]
    link_us = rows * row_bytes * (1 if config.stages == 1 else 2 / ranks) / costs.peer_bytes_per_us(ranks)
    stored, loaded = (ranks - 1, ranks) if config.stages == 1 else (2 * (ranks - 1) / ranks, 2)  # rows per row
    row_us = row_bytes * (stored + loaded) / config.parts / costs.unit_bytes_per_us
    row_us += costs.exchange_us if config.parts > 1 and not isinstance(a, Sum) else 0.0
    if config.wire == wire.FP8:
        waves = config.threads / config.parts / arch.wave_lanes
        row_us += config.stages * costs.fp8_us * max(1.0, waves / costs.fp8_waves)
    return link_us + row_us * -(-rows // config.row_blocks) + config.stages * costs.hop_us


def default(a, arch: Arch, group: Group) -> Config:
    """Return the configuration with the lowest cost; among equals the fewest blocks."""
    return min(configs(a, arch, group), key=lambda config: cost(config, a, arch, group))


def inbox_bytes(capacity: int, payload: int) -> int:
    """Return the bytes of an inbox: slots of `capacity` words, and buffers of `payload` bytes."""
    return launches.word_slots_bytes(capacity) + BUFFERS * buffer_bytes(payload)


def symbols() -> dict[str, set[str]]:
    """Return all kernels by their file in csrc/ops."""
    configs = [Config(1, MAX_BLOCK_THREADS, chunks, 1, 1) for chunks in CHUNKS]
    configs += [Config(1, MAX_BLOCK_THREADS, chunks, 1, 1, wire.FP8) for chunks in FP8_CHUNKS]
    return launches.symbols(configs, (DTYPE,))
