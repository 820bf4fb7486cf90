"""Create the plugin's all-reduce with a given protocol and configuration, and check its results, for all_reduce.py."""

from __future__ import annotations

import torch

from vllm_rocm_ops import collectives
from vllm_rocm_ops.collectives import flagged, launches, wire
from vllm_rocm_ops.core.correctness import as_tuple

LIMIT_SECONDS = 20.0
WORDS = "words"  # the way in one shot; others are "STAGESxPARTS", "fp8-STAGESxPARTS", or the default of each


def create_way(way: str, values: int, group, device: torch.device):
    """Create an all-reduce for a way: in one shot of that number of values, or in stages."""
    words = {"capacity": values // launches.VALUES_IN_WORD, "payload": 0}
    stages = {"capacity": 0, "wires": (wire.FP8 if way.startswith(wire.FP8) else wire.BF16,)}
    return collectives.create(group, device, **(words if way == WORDS else stages), seconds=LIMIT_SECONDS)


def call_way(way: str, reduce, op, x: torch.Tensor, args: tuple) -> object:
    """Run a call in a way's configuration, by default the plugin's own. Raises StopIteration where that does not fit."""
    plugin_default = flagged.default

    def default(*call) -> flagged.Config:
        stages, parts = map(int, way.removeprefix(f"{wire.FP8}-").split("x"))
        return next(each for each in flagged.configs(*call) if (each.stages, each.parts) == (stages, parts))

    try:
        flagged.default = default if "x" in way else plugin_default
        return reduce(op, x, *args) if op else reduce.sum(x)
    finally:
        flagged.default = plugin_default


def judge(op, group, reduce, x: torch.Tensor, args: tuple, found: tuple, total: torch.Tensor) -> str:
    """Return the relative error of a way's sum `total` to the float64 sum, or "wrong".

    The first result in `found` must have the same bits on all ranks, and a relative error below 0.01 to PyTorch's.
    """
    import torch.distributed as dist

    def values(results: tuple) -> torch.Tensor:
        values, *scales = results
        if not scales or scales[0].dtype != torch.float32:
            return values.float()
        return values.float() * scales[0].repeat_interleave(x.shape[1] // scales[0].shape[1], 1)

    by_rank: list = [None] * dist.get_world_size(group)
    bits = found[0].contiguous().view(torch.uint8).cpu()
    dist.all_gather_object(by_rank, (x.cpu(), bits), group=group)
    inputs = [each.to(x.device) for each, _ in by_rank]
    sends_fp8 = reduce.wire(op, x, *args) == wire.FP8
    summed = wire.fp8_sum(inputs, reduce.arch.fp8_dtype) if sends_fp8 else launches.reference(None, inputs)
    expected = values(as_tuple(op.reference(summed, *args)))
    error = (values(found) - expected).abs().mean() / expected.abs().mean()
    if not error < 0.01 or not all(torch.equal(bits, other) for _, other in by_rank):
        return "wrong"
    exact = sum(each.double() for each in inputs)
    return f"{float((total.double() - exact).norm() / exact.norm()):.1e}"
