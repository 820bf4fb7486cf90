"""Serve vLLM's fusions of rotary embedding and cache write, in the attention layers of the seam decode_attention.

`rope_and_cache` rotates queries and keys and writes the cache in one launch. `qk_norm_rope_and_cache` normalizes the
heads first.

vLLM's passes fuse_rope_kvcache and fuse_qk_norm_rope_kvcache call them if a backend supports the fusion. Without AITER
none of vLLM's backends does. The plugin's do with VLLM_ROCM_OPS_ATTENTION=1 only, because the fusion was never timed.

The user enables a pass, on ROCm only, by `-cc.pass_config.fuse_rope_kvcache=true
-cc.use_inductor_graph_partition=true`, or by fuse_qk_norm_rope_kvcache. The latter matches the norms of Qwen3 and GLM
from vLLM 0.31 on, and needs AITER installed, even if unused, because it names an op of AITER's. vLLM's pass for MLA
calls vLLM's op and asks no backend.
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

NORM_PARAMETERS = (
    *("layer", "qkv", "q_out", "k_out", "positions", "q_weight", "k_weight", "rms_norm_eps"),
    *("cos_sin_cache", "is_neox", "kv_cache", "layer_slot_mapping"),
)


def probe() -> None:
    """Raise `Unavailable` unless decode_attention is on and vLLM asks a backend for the fusions."""
    from vllm.config import PassConfig

    if "decode_attention" not in seam.active():
        raise seam.Unavailable("requires decode_attention")
    base = "vllm.v1.attention.backend.AttentionImpl"
    for name in ("rope_kvcache", "qk_norm_rope_kvcache"):
        seam.require(f"fuse_{name}" in PassConfig.__dataclass_fields__, f"PassConfig.fuse_{name}")
        attention_backends.require_method(base, f"fused_{name}_supported")
    attention_backends.require_method(base, "do_rope_and_kv_cache_update", *PARAMETERS)
    attention_backends.require_method(base, "do_qk_norm_rope_kvcache_update", *NORM_PARAMETERS)


def install() -> None:
    """Give the plugin's decoders the ops."""
    attention.HeadsDecoder.rope, attention.HeadsDecoder.norm_rope = ops.rope_and_cache, ops.qk_norm_rope_and_cache


SEAM = seam.Seam(
    name="rope_and_cache",
    replaces="do_rope_and_kv_cache_update and do_qk_norm_rope_kvcache_update of the backends of decode_attention, with "
    "VLLM_ROCM_OPS_ATTENTION=1",
    probe=probe,
    install=install,
    ops=("rope_and_cache", "qk_norm_rope_and_cache"),
    platforms=("rocm",),
    after=("decode_attention",),
)
