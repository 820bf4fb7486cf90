"""Seam: in the layers of the seam decode_attention our `rope_and_cache` rotates queries and keys and writes the cache, in one launch.

vLLM's pass fuse_rope_kvcache puts rotation and write into one call of a backend that says that it can. Without AITER none of
vLLM's does; ours does with VLLM_ROCM_OPS_ATTENTION=1, as this was never measured. The user asks for the pass, which ROCm alone
has, by `-cc.pass_config.fuse_rope_kvcache=true -cc.use_inductor_graph_partition=true`. The pass for latent attention calls
vLLM's op and asks no backend.
"""

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends as attention_backends
from vllm_rocm_ops.vllm.attention import decoder as attention

PARAMETERS = (
    "layer",
    "query",
    "key",
    "value",
    "positions",
    "cos_sin_cache",
    "is_neox",
    "kv_cache",
    "layer_slot_mapping",
)


def probe() -> None:
    """Our backends are there, and vLLM asks a backend for the fusion."""
    from vllm.config import PassConfig

    if "decode_attention" not in seam.active():
        raise seam.Unavailable("it needs decode_attention")
    seam.require("fuse_rope_kvcache" in PassConfig.__dataclass_fields__, "PassConfig.fuse_rope_kvcache")
    base = "vllm.v1.attention.backend.AttentionImpl"
    attention_backends.require_method(base, "fused_rope_kvcache_supported")
    attention_backends.require_method(base, "do_rope_and_kv_cache_update", *PARAMETERS)


def install() -> None:
    """Give our backends the op."""
    attention.HeadsDecoder.rope = ops.rope_and_cache


SEAM = seam.Seam(
    name="rope_and_cache",
    replaces="do_rope_and_kv_cache_update of the backends of decode_attention, with VLLM_ROCM_OPS_ATTENTION=1",
    probe=probe,
    install=install,
    ops=("rope_and_cache",),
    platforms=("rocm",),
    after=("decode_attention",),
)
