"""Seam: in vLLM's backends of latent attention our `mla_decode` serves decode rows where it is the faster, and `batched_gemm` the
products before and behind it: see latent_attention.py and absorbed_products.py of the folder above."""

from vllm_rocm_ops.vllm import attention_backends, latent_attention

SEAM = attention_backends.seam_of(
    "latent_attention",
    "TRITON_MLA and ROCM_AITER_MLA of AttentionBackendEnum, by subclasses; on CPU CPU_MLA; torch.bmm with their W_UK_T and W_UV",
    latent_attention.BACKENDS,
    latent_attention.PLATFORMS,
    "mla_decode",
)
