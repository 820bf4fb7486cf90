"""Replace an all-reduce, alone or with the norm after it, by one launch where all ranks timed it together to be faster.

all_reduce_norm.py has the launch. all_reduce_timing.py times it and puts it in place: in the worker's communicator, in the
functions that models without a compiled graph call, and in compiled graphs (rewrite.py). This file has the seam, and the
norms that stay vLLM's because its pass fuses them with AITER's all-reduce.

AITER has a one-stage kernel for small tensors, and a two-stage kernel that is slower than an all-reduce and a norm. A
norm stays vLLM's where the pass matches its quantization and a decode step's tensors fit the one-stage kernel. Where
they do not, the pass is disabled.
"""

from __future__ import annotations

import logging

import torch

from vllm_rocm_ops.vllm import seam

logger = logging.getLogger("vllm.vllm_rocm_ops")

DECODE_TOKENS = 8  # tokens of a decode step that AITER's one-stage kernel must support


def takes_one_stage(communicator, config) -> bool:
    """True if AITER's one-stage kernel supports a decode step's all-reduce and norm, as vLLM says."""
    takes, model = getattr(communicator, "use_1stage_fused_ar_rms", None), config.model_config
    if takes is None:  # an older vLLM has no such method and keeps its fusion
        return True
    return takes(torch.empty(DECODE_TOKENS, model.get_hidden_size(), dtype=model.dtype, device="meta"))


def leave(config, compiles: bool, is_logging_rank: bool) -> tuple[frozenset, list[str]]:
    """Decide which norms stay fused with AITER's all-reduce.

    Disable vLLM's pass where AITER would use its two-stage kernel. The pass matches a norm alone, and a norm with a
    quantization per group.

    Returns:
        The keys of the quantizations that stay vLLM's, None for a norm alone, and lines for the compile cache's
            fingerprint.
    """
    from vllm_rocm_ops.vllm.graph import fused_quant

    passes = config.compilation_config.pass_config
    if not (passes.fuse_allreduce_rms and compiles):
        return frozenset(), []
    if seam.served_platform() != "rocm" or seam.names("norm"):
        return frozenset(), []
    from vllm._aiter_ops import rocm_aiter_ops

    communicator, hidden = rocm_aiter_ops.get_aiter_allreduce(), config.model_config.get_hidden_size()
    if communicator is None:  # without it the pass fuses nothing
        return frozenset(), []
    keys = {None}
    if takes_one_stage(communicator, config):
        text = (
            "vllm-rocm-ops: norms that vLLM fuses with AITER's all-reduce stay vLLM's "
            "(VLLM_ROCM_OPS_SEAMS=norm,all uses the plugin's)"
        )
        if getattr(communicator, "supports_per_group_quant", False):
            keys.add(fused_quant.kFp8Dynamic128Sym)
        said = []
    else:
        keys, passes.fuse_allreduce_rms = set(), False
        text = (
            "vllm-rocm-ops: disabled fuse_allreduce_rms, because AITER would use its slower two-stage kernel for "
            "%d tokens of hidden size %d (VLLM_ROCM_OPS_SEAMS=norm,all keeps it enabled)"
        )
        said = [DECODE_TOKENS, hidden]
    if is_logging_rank:
        logger.info(text, *said)
    return frozenset(keys), [f"all-reduce with norms {'on' if passes.fuse_allreduce_rms else 'off'}"]


def probe() -> None:
    """Raise `Unavailable` unless groups, a worker's steps and the replaced functions of vLLM are as expected."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker.worker_base import WorkerBase

    seam.require(hasattr(torch.ops.vllm, "all_reduce"), "torch.ops.vllm.all_reduce")
    seam.require_parameters(parallel_state.all_reduce, "tensor", "group_name")
    seam.require_parameters(parallel_state.GroupCoordinator._all_reduce_out_place, "input_")
    seam.require_parameters(parallel_state.GroupCoordinator.graph_capture, "graph_capture_context")
    for name in ("execute_model", "sample_tokens"):
        seam.require(hasattr(WorkerBase, name), f"WorkerBase.{name}")


def install() -> None:
    """Define the torch op that a graph from vLLM's compile cache may hold. Nothing is replaced before timing."""
    from vllm_rocm_ops.vllm.graph import all_reduce_norm  # noqa: F401


SEAM = seam.Seam(
    name="all_reduce",
    replaces="vllm.all_reduce with a norm in compiled graphs; all_reduce of a worker's communicator; fused_allreduce_(gemma_)rms_norm",
    probe=probe,
    install=install,
    ops=("all_reduce",),
)
