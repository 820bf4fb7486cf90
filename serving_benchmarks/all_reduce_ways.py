"""Make the plugin's all-reduce in a given way, and check its results, for all_reduce.py."""

from __future__ import annotations

import torch

from vllm_rocm_ops import collectives
from vllm_rocm_ops.collectives import flagged, launches
from vllm_rocm_ops.core.correctness import as_tuple

LIMIT_SECONDS = 20.0
WORDS = "words"


def create_way(way: str, values: int, group, device: torch.device):
    """Return an all-reduce for one way of the plugin's: its words for that number of values, or stages and blocks per row."""
    words = {"capacity": values // launches.VALUES_IN_WORD, "payload": 0}
    return collectives.create(group, device, **(words if way == WORDS else {"capacity": 0}), seconds=LIMIT_SECONDS)


def call_way(way: str, reduce, op, x: torch.Tensor, args: tuple) -> object:
    """Call the plugin in its own or a given configuration. Raises StopIteration where that does not fit."""
    usual = flagged.default

    def default(*of) -> flagged.Config:
        stages, parts = map(int, way.split("x"))
        return next(each for each in flagged.configs(*of) if (each.stages, each.parts) == (stages, parts))

    try:
        flagged.default = default if "x" in way else usual
        return reduce(op, x, *args)
    finally:
        flagged.default = usual


def is_right(op, group, x: torch.Tensor, args: tuple, found: tuple) -> bool:
    """True if a call's first result has the same bits on all ranks, and is the one in PyTorch but for roundings."""
    import torch.distributed as dist

    def values(results: tuple) -> torch.Tensor:
        values, *scales = results
        if not scales or scales[0].dtype != torch.float32:
            return values.float()
        return values.float() * scales[0].repeat_interleave(x.shape[1] // scales[0].shape[1], 1)

    every: list = [None] * dist.get_world_size(group)
    bits = found[0].contiguous().view(torch.uint8).cpu()
    dist.all_gather_object(every, (x.cpu(), bits), group=group)
    wanted = values(as_tuple(launches.reference(op, [each.to(x.device) for each, _ in every], *args)))
    error = (values(found) - wanted).abs().mean() / wanted.abs().mean()
    return bool(error < 0.01) and all(torch.equal(bits, other) for _, other in every)
