"""Read, write or copy memory to measure HBM bandwidth; kernels: csrc/ops/stream_memory.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import aligned, describe

__all__ = ["stream_memory"]

DIRECTIONS = ("read", "write", "copy")
WORDS = 4  # per access
THREADS = 256  # kThreads of the kernels
VALUE = 0x01010101
MAX_BLOCKS = 2**16


@dataclass(frozen=True)
class StreamConfig:
    """Threads of a block."""

    threads: int


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.words.dtype == torch.int32 and a.words.dim() == 1
    yield "words", "int32 [count]", describe(a.words), holds
    yield "direction", " or ".join(DIRECTIONS), str(a.direction), a.direction in DIRECTIONS
    yield "num_blocks", f"1 to {MAX_BLOCKS}", str(a.num_blocks), 1 <= a.num_blocks <= MAX_BLOCKS


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield "words are contiguous and 16-byte aligned", a.words.is_contiguous() and aligned(a.words)
    yield f"count is a multiple of {WORDS} words", a.words.numel() % WORDS == 0


def _plan(config: StreamConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    args = {"out": out, "vectors": a.words.numel() // WORDS, "blocks": a.num_blocks}
    args |= {"value": VALUE} if a.direction == "write" else {"words": a.words}
    symbol = f"stream_memory_{a.direction}"
    return [Launch("stream_memory", symbol, (a.num_blocks, 1, 1), (config.threads, 1, 1), args)]


def _cases() -> Iterator[Case]:
    """Yield fewer vectors than threads, whole groups of loads, tails, more blocks than vectors, no words."""

    def make(count: int, direction: str, blocks: int, device, generator, fp8_dtype) -> tuple:
        words = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
        return words.to(device), direction, blocks

    for direction in DIRECTIONS:
        for name, count, blocks in (("few", 100, 1), ("groups", 16384, 2), ("tail", 20004, 2), ("blocks", 1200, 5)):
            yield Case(f"{direction}-{name}", functools.partial(make, count, direction, blocks))
    yield Case("read-none", functools.partial(make, 0, "read", 2))


@functools.partial(
    Op,
    allocate=lambda a: a.words.new_empty(a.num_blocks if a.direction == "read" else a.words.shape),
    contract=_contract,
    can_implement=_can_implement,
    configs=lambda a, arch: [StreamConfig(THREADS)],
    default=lambda a, arch: StreamConfig(THREADS),
    plan=_plan,
    problem=lambda a: {"count": a.words.numel(), "direction": a.direction, "num_blocks": a.num_blocks},
    cases=_cases,
)
def stream_memory(words: Tensor, direction: str, num_blocks: int) -> Tensor:
    """Read, write or copy words with `num_blocks` blocks of 256 threads.

    Args:
        words: [count], int32; with "write" only the shape counts.
        direction: "read", "write" or "copy".
        num_blocks: Blocks; each has every num_blocks-th run of 1024 words.

    Returns:
        int32. "read": [num_blocks], the sum of each block's words modulo 2^32. "write": [count], all bytes 1. "copy":
        the words.

    Source:
        hbm-bw-test.py of AMD perf-kernels.
    """
    if direction == "copy":
        return words.clone()
    if direction == "write":
        return torch.full_like(words, VALUE)
    run = THREADS * WORDS
    runs = torch.nn.functional.pad(words, (0, -len(words) % (run * num_blocks))).view(-1, num_blocks, run)
    return runs.sum((0, 2), dtype=torch.int64).to(torch.int32)
