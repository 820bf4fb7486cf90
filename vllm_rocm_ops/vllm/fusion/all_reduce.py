"""Seam: an all-reduce, alone or with the norm behind it, is one launch of ours where all ranks have measured together that it wins.

reduced.py has the launch, measured_all_reduce.py measures and puts it in place: in the worker's communicator, in the functions that models
without a compiled graph call, and in compiled graphs (graph.py). Below are norms that stay vLLM's because its pass fuses them with AITER's
all-reduce in front of them.

AITER has a one-stage kernel for small tensors and a two-stage kernel, which is slower than an all-reduce and a norm. A norm stays vLLM's
where the pass has a pattern for its quantization and a decode step's tensors are small enough; where they are not, the pass is off.
"""

from __future__ import annotations

import logging

import torch

from vllm_rocm_ops.vllm import seam

logger = logging.getLogger("vllm.vllm_rocm_ops")

DECODE_TOKENS = 8  # up to which AITER's one-stage kernel has to take an all-reduce with a norm


def takes_one_stage(communicator, config) -> bool:
    """Return whether AITER's one-stage kernel takes the all-reduce and norm of a decode step, as vLLM's communicator says."""
    takes, model = getattr(communicator, "use_1stage_fused_ar_rms", None), config.model_config
    if takes is None:  # an older vLLM does not say, and keeps its fusion
        return True
    return takes(torch.empty(DECODE_TOKENS, model.get_hidden_size(), dtype=model.dtype, device="meta"))


def leave(config, compiles: bool, says: bool) -> tuple[frozenset, list[str]]:
    """Return the quantizations behind norms that vLLM fuses with AITER's all-reduce in one stage, None for a norm alone; or have it fuse
    none. Its pass has patterns for a norm alone and for one with a quantization by groups."""
    from vllm_rocm_ops.vllm.fusion import fused_quant

    passes = config.compilation_config.pass_config
    if not (passes.fuse_allreduce_rms and compiles):
        return frozenset(), []
    if seam.served_platform() != "rocm" or seam.names("norm"):
        return frozenset(), []
    from vllm._aiter_ops import rocm_aiter_ops

    communicator, hidden = rocm_aiter_ops.get_aiter_allreduce(), config.model_config.get_hidden_size()
    if communicator is None:  # the pass fuses nothing
        return frozenset(), []
    keys = {None}
    if takes_one_stage(communicator, config):
        text = "vllm-rocm-ops: norms stay vLLM's where it fuses them with AITER's all-reduce. VLLM_ROCM_OPS_SEAMS=norm,all has ours"
        if getattr(communicator, "supports_per_group_quant", False):
            keys.add(fused_quant.kFp8Dynamic128Sym)
        said = []
    else:
        keys, passes.fuse_allreduce_rms = set(), False
        text = "vllm-rocm-ops: vLLM's fusion of AITER's all-reduce with norms is off: %d tokens of %d take its two-stage kernel"
        said = [DECODE_TOKENS, hidden]
    if says:
        logger.info(text, *said)
    return frozenset(keys), [f"all-reduce with norms {'on' if passes.fuse_allreduce_rms else 'off'}"]


def probe() -> None:
    """Ranks of a group find each other as we need it, and a worker's steps and vLLM's functions have the names that we replace."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker.worker_base import WorkerBase

    seam.require(hasattr(torch.ops.vllm, "all_reduce"), "torch.ops.vllm.all_reduce")
    seam.require_parameters(parallel_state.all_reduce, "tensor", "group_name")
    seam.require_parameters(parallel_state.GroupCoordinator._all_reduce_out_place, "input_")
    seam.require_parameters(parallel_state.GroupCoordinator.graph_capture, "graph_capture_context")
    for name in ("execute_model", "sample_tokens"):
        seam.require(hasattr(WorkerBase, name), f"WorkerBase.{name}")


def install() -> None:
    """Define the torch op that a compiled graph from vLLM's cache may hold. Nothing is replaced until it was measured."""
    from vllm_rocm_ops.vllm.fusion import reduced  # noqa: F401


SEAM = seam.Seam(
    name="all_reduce",
    replaces="vllm.all_reduce with a norm in compiled graphs; all_reduce of a worker's communicator; fused_allreduce_(gemma_)rms_norm",
    probe=probe,
    install=install,
    ops=("all_reduce",),
)
