"""Seam: in vLLM's attention backends our `paged_attention_decode` serves batches of decode rows where it is the faster, see
attention.py."""

from vllm_rocm_ops.vllm import attention, attention_backends

SEAM = attention_backends.seam_of(
    "decode_attention",
    "ROCM_ATTN, ROCM_AITER_FA and TRITON_ATTN of AttentionBackendEnum, by subclasses; on CPU CPU_ATTN",
    attention.BACKENDS,
    attention.PLATFORMS,
    "paged_attention_decode",
)
