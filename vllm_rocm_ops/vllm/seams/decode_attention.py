"""Seam: in vLLM's attention backends our `paged_attention_decode` serves batches of decode rows where it is the faster, see
attention.py."""

from vllm_rocm_ops.vllm import attention, attention_backends, seam


def probe() -> None:
    """The backends of this platform are vLLM's own and as expected."""
    attention_backends.probe(attention_backends.served(attention.BACKENDS, attention.PLATFORMS))


def install() -> None:
    """Put our subclasses in the backends' places."""
    attention_backends.install(attention_backends.served(attention.BACKENDS, attention.PLATFORMS))


SEAM = seam.Seam(
    name="decode_attention",
    replaces="ROCM_ATTN, ROCM_AITER_FA and TRITON_ATTN of AttentionBackendEnum, by subclasses; on CPU CPU_ATTN",
    probe=probe,
    install=install,
)
