"""Plan the launches of csrc/collectives/flagged.h, which sum more rows than launches.py's, in one stage or in two.

Payload and flag are apart, so a value is two bytes on the wire, not four, or with FP8 (wire.py) one.
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
"""Bytes per buffer: 4 MiB of values in each of two stages, whose rows are padded to whole threads."""
MAX_VALUES = (4 << 20) // 2
CHUNKS = (1, 2, 4)  # vectors per thread
FP8_CHUNKS, FP8_KERNEL_RANKS = (4,), (2, 8)  # of kernels with FP8 on the wire: few, as each takes a second to compile
STAGES, VECTOR_BYTES = (1, 2), 16
DTYPE = torch.bfloat16
"""The kernels' only dtype: those for fp16 would double 25 s of compiling per chip."""
MAX_BLOCKS, EXCHANGE_ROWS, EXCHANGES, MAX_WAVES = 512, 256, 2, {64: 16, 32: 32}


@dataclasses.dataclass(frozen=True)
class Config(launches.Config):
    """As launches.Config; `row_blocks` times `parts` blocks take every row_blocks-th row, in one or two `stages`."""

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
        """Return the vectors of a block's row that a rank sends to another in the first stage, at most."""
        vectors, together = self.threads // self.parts * self.chunks, wire.VECTOR_GROUP if self.wire == wire.FP8 else 1
        return vectors if self.stages == 1 else -(-vectors // (ranks * together)) * together

    def payload(self, rows: int, ranks: int) -> int:
        """Return the bytes that all stages store in an inbox."""
        sums = self.threads // self.parts * self.chunks if self.stages == 2 else 0
        return rows * self.parts * (ranks * self.slot(ranks) + sums) * VECTOR_BYTES

    def args(self, a, group: Group) -> dict[str, object]:
        """Return the kernel arguments that only these kernels have, and their counters."""
        return {
            "counters": Address(group.flagged_counters),
            "row_blocks": self.row_blocks,
            "stages": self.stages,
            "slot": self.slot(group.ranks),
            "first": launches.words_bytes(group.capacity),
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
    """Return the bytes of a buffer: words of a row's blocks, flags, and the payload."""
    if not payload:
        return 0
    exchange = EXCHANGE_ROWS * EXCHANGES * max(MAX_WAVES.values()) * launches.WORD_BYTES
    return exchange + STAGES[-1] * MAX_RANKS * MAX_BLOCKS * 4 + payload


def stages_of(ranks: int, sent: str = wire.BF16) -> tuple[int, ...]:
    """Return the stages that kernels for this many ranks have, by what is sent.

    One stage was faster on two H200. With more than four ranks of AMD's the model has it slower, but for 3 of 432 sizes, there by 5 %
    at most.
    """
    return STAGES[:1] if ranks == 2 else STAGES if ranks <= 4 and sent == wire.BF16 else STAGES[1:]


def rules(op: Op | None, a, arch: Arch, group: Group) -> Iterator[tuple[str, bool]]:
    """Yield each rule of the kernels, and whether it holds."""
    yield from launches.common_rules(op, a, arch)
    above = f"more than {launches.CAPACITY * launches.VALUES_IN_WORD} values are bfloat16"
    yield above, a.input.dtype == DTYPE
    size = f"input has at most {MAX_VALUES} values ({MAX_VALUES * 2 >> 20} MiB)"
    yield size, a.input.numel() <= MAX_VALUES
    fits = rows_of(a.input) == 0 or bool(configs(a, arch, group))
    yield f"its rows fit in {group.payload} bytes of an inbox", fits


def configs(a, arch: Arch, group: Group) -> list[Config]:
    """Return the configurations that fit. They differ in `parts` and `stages` alone, which do not change results.

    Rows of FP8's kernels have more padding, so where they do not fit, bf16 is sent.
    """
    is_large = a.input.numel() > group.capacity * launches.VALUES_IN_WORD
    sends = (wire.FP8, wire.BF16) if group.wire == wire.FP8 and is_large else (wire.BF16,)
    return next(filter(None, (_configs(a, arch, group, sent) for sent in sends)), [])


def _configs(a, arch: Arch, group: Group, sent: str) -> list[Config]:
    vectors, rows = a.input.shape[-1] // rowwise.VECTOR, rows_of(a.input)
    of_wire = FP8_CHUNKS if sent == wire.FP8 else CHUNKS
    chunks = next((chunks for chunks in of_wire if vectors <= MAX_BLOCK_THREADS * chunks), of_wire[-1])
    threads = max(arch.wave_lanes, 1 << (-(-vectors // chunks) - 1).bit_length())
    most = min(group.blocks, MAX_BLOCKS)
    made = [
        Config(parts, threads, chunks, min(rows, most // parts), stages, sent)
        for stages in stages_of(group.ranks, sent)
        for parts in PARTS
        if parts == 1 or (parts <= most and threads // parts >= arch.wave_lanes and rows <= EXCHANGE_ROWS)
    ]
    return [each for each in made if each.payload(rows, group.ranks) <= group.payload]


def cost(config: Config, a, arch: Arch, group: Group) -> float:
    """Return the predicted microseconds of a launch, without its start."""
    costs, ranks, rows = arch.costs.collective, group.ranks, rows_of(a.input)
    row_bytes = a.input.shape[-1] * wire.VALUE_BYTES[config.wire]
    links = rows * row_bytes * (1 if config.stages == 1 else 2 / ranks) / costs.peer_bytes_per_us(ranks)
    sent, loaded = (ranks - 1, ranks) if config.stages == 1 else (2 * (ranks - 1) / ranks, 2)
    of_row = row_bytes * (sent + loaded) / config.parts / costs.unit_bytes_per_us
    of_row += costs.exchange_us if config.parts > 1 and not isinstance(a, Sum) else 0.0
    return links + of_row * -(-rows // config.row_blocks) + config.stages * costs.hop_us


def default(a, arch: Arch, group: Group) -> Config:
    """Return the configuration with the lowest cost; among equals the fewest blocks."""
    return min(configs(a, arch, group), key=lambda config: cost(config, a, arch, group))


def inbox_bytes(capacity: int, payload: int) -> int:
    """Return the bytes of an inbox: words of `capacity`, and buffers with `payload` bytes each."""
    return launches.words_bytes(capacity) + BUFFERS * buffer_bytes(payload)


def symbols() -> dict[str, set[str]]:
    """Return all kernels by their file in csrc/ops."""
    made = [Config(1, MAX_BLOCK_THREADS, chunks, 1, 1) for chunks in CHUNKS]
    made += [Config(1, MAX_BLOCK_THREADS, chunks, 1, 1, wire.FP8) for chunks in FP8_CHUNKS]
    return launches.symbols(made, (DTYPE,))
