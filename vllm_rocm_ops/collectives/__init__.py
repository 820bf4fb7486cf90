"""Run collectives between the ranks of a group, fused with the ops that follow them."""

from vllm_rocm_ops.collectives import flagged, launches, qk_norm
from vllm_rocm_ops.collectives.all_reduce import AllReduce, RankMissing
from vllm_rocm_ops.collectives.peers import agree, create, in_process

__all__ = ["AllReduce", "RankMissing", "agree", "create", "in_process", "kernels"]


def kernels() -> dict[str, set[str]]:
    """Return all kernels of these launches by their file in csrc/ops."""
    return launches.symbols() | flagged.symbols() | qk_norm.symbols()
