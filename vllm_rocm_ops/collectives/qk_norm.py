"""Plan the launches of csrc/ops/all_reduce_qk_norm.hip: `qk_norm_rope_and_cache` whose norms are over the heads of all ranks.

`a` is the named tuple of that op's arguments, with this rank's heads and its part of the weights. Only sums of squares are sent.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import wire
from vllm_rocm_ops.collectives.launches import KERNEL_RANKS, Group
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.ops.shared import attention, rotation

OP = ops.qk_norm_rope_and_cache
MODULE, NORMS = "all_reduce_qk_norm", 2  # words per token: of queries, and of keys
of_op = importlib.import_module(f"vllm_rocm_ops.ops.{OP.name}")


@dataclasses.dataclass(frozen=True)
class Config(rotation.RopeConfig):
    """As the op's. Values are sent as they are."""

    wire = wire.BF16


def rules(op, a, arch: Arch, group: Group) -> Iterator[tuple[str, bool]]:
    """Yield each rule of the kernels, and whether it holds."""
    yield from OP.can_implement(a, arch)
    yield "query is bfloat16", a.query.dtype == torch.bfloat16
    yield "norms are over all heads, of which a rank has more than one", of_op.is_over_all(a)
    tokens = len(a.query)
    yield f"there are at most {group.capacity // NORMS} tokens", tokens * NORMS <= group.capacity
    fits = tokens == 0 or any(blocks(config, a) <= group.blocks for config in OP.configs(a, arch))
    yield f"a launch has at most {group.blocks} blocks, so that all are resident", fits


def blocks(config: rotation.RopeConfig, a) -> int:
    """Return the blocks of a launch."""
    return len(a.query) * -(-of_op.items(config, a) // config.threads)


def default(a, arch: Arch, group: Group) -> Config:
    """Return the configuration."""
    return Config(OP.configs(a, arch)[0].threads)


def symbol(is_fp8: bool, ranks: int) -> str:
    """Return the kernel's name, for a cache of FP8 or bf16."""
    kernel_ranks = next(largest for largest in KERNEL_RANKS if ranks <= largest)
    return f"all_reduce_{OP.name}_bf16{'_fp8' * is_fp8}_{kernel_ranks}"


def plan(op, a, outputs, normed, config: Config, group: Group) -> Launch:
    """Return the launch."""
    count = blocks(config, a)
    problem = fields("problem", of_op.problem_args(config, a, group.ranks))
    args = group.args() | problem | {"threads": config.threads, "blocks": count}
    grid = len(a.query), count // len(a.query), 1
    return Launch(MODULE, symbol(attention.is_quantized(a.key_cache), group.ranks), grid, (config.threads, 1, 1), args)


def symbols() -> dict[str, set[str]]:
    """Return all kernels by their file in csrc/ops."""
    return {MODULE: {symbol(is_fp8, ranks) for is_fp8 in (False, True) for ranks in KERNEL_RANKS}}


def run_fallback(all_reduce: Callable[[Tensor], Tensor], ranks: int, args: tuple) -> None:
    """Run the op in plain PyTorch, with the mean squares of each rank's heads summed by `all_reduce`, as float32 [tokens, 2]."""
    a = OP.Arguments(*args)
    means = [of_op.mean_square(x, over_all=True).float().flatten() for x in of_op.queries_and_keys(a)]
    totals = all_reduce(torch.stack(means, 1)) / ranks
    of_op.run_with_means(a, [*totals[:, :, None, None].unbind(1)])
