"""Run collectives between the ranks of a group, fused with the ops that follow them."""

from vllm_rocm_ops.collectives.one_shot import OneShotAllReduce, RankMissing
from vllm_rocm_ops.collectives.peers import agree, create, in_process

__all__ = ["OneShotAllReduce", "RankMissing", "agree", "create", "in_process"]
