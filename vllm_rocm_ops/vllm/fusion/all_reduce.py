"""Which norms stay vLLM's because its pass fuses them with AITER's all-reduce in front of them, under tensor parallelism.

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
