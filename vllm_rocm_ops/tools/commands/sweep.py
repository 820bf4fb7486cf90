"""Time every configuration of each kernel, as `bench` times the one that is chosen; the fastest three are printed."""

from __future__ import annotations

from pathlib import Path

from vllm_rocm_ops.tools import options
from vllm_rocm_ops.tools.bench import lists
from vllm_rocm_ops.tools.commands import bench

add = bench.add


def run(
    shapes: str | None,
    op: list[str] | None,
    case: list[str] | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    peers: bool,
    output: Path | None,
) -> int:
    """Print the times; 1 if a result is wrong. Raises RuntimeError without a GPU."""
    found = options.shapes_of(shapes, op, case, model, tp, ep, batch)
    return bench.measure(found, lists.kind_of(shapes, model), peers, output, sweep=True)
