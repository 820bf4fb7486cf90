"""Seam: in vLLM's backends of latent attention our `mla_decode` serves decode rows where it is the faster, see latent_attention.py
of the folder above."""

from vllm_rocm_ops.vllm import attention_backends, latent_attention, seam


def probe() -> None:
    """The backends of this platform are vLLM's own and as expected."""
    attention_backends.probe(attention_backends.served(latent_attention.BACKENDS, latent_attention.PLATFORMS))


def install() -> None:
    """Put our subclasses in the backends' places."""
    attention_backends.install(attention_backends.served(latent_attention.BACKENDS, latent_attention.PLATFORMS))


SEAM = seam.Seam(
    name="latent_attention",
    replaces="TRITON_MLA and ROCM_AITER_MLA of AttentionBackendEnum, by subclasses; on CPU CPU_MLA",
    probe=probe,
    install=install,
)
