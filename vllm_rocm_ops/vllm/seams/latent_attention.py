"""Seam: in vLLM's backends of latent attention our `mla_decode` serves decode rows where it is the faster, see latent_attention.py
of the folder above."""

from vllm_rocm_ops.vllm import attention_backends, latent_attention

SEAM = attention_backends.seam_of(
    "latent_attention",
    "TRITON_MLA and ROCM_AITER_MLA of AttentionBackendEnum, by subclasses; on CPU CPU_MLA",
    latent_attention.BACKENDS,
    latent_attention.PLATFORMS,
)
