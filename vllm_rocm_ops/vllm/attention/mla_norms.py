"""Serve the part of an MLA layer between its first projection and q_b_proj in one launch.

`mla_norm_rope_and_cache` normalizes both latents, quantizes the query latent for q_b_proj, rotates k_pe and writes
the cache. In layers without a query latent, as in DeepSeek-V2-Lite, it covers the other latent's norm, the rotation and
the write.

vLLM lets a plugin replace `MultiHeadLatentAttentionWrapper`. The subclass calls one op with the layer's name, which
finds the cache and the slots as vLLM's unified_mla_kv_cache_update does, and then vLLM's attention without that update.
vLLM splits a compiled model at the cache update, because piecewise graphs do not pad slots. It also splits at this op,
whose outputs are allocated in the piece before, as attention's are. The rotation of queries stays vLLM's, after
q_b_proj, or is left to attention (mla_rotation.py).

Selected once for all token counts, before vLLM compiles (compiled_ops.py): where the op was timed to be faster than
vLLM's compiled norms, quantization and rotation and its cache write, or wherever it fits with
VLLM_ROCM_OPS_ATTENTION=1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends, mla_rotation, split
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention.mla import BACKENDS
from vllm_rocm_ops.vllm.attention.mla_pre_attention import MlaPreAttention
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops

UPDATE, NAME = "vllm::unified_mla_kv_cache_update", "mla_norms"
TORCH_OP = f"vllm_rocm_ops::{NAME}"
"""The ops at which vLLM splits a compiled model: vLLM's cache update, and the op that replaces it."""


def unsupported_features(layer: torch.nn.Module) -> Iterator[str]:
    """Yield the features of a layer that the op does not support."""
    attn = layer.mla_attn
    decoder = getattr(attn.impl, "rocm_ops", None)
    if layer.rotary_emb is None or layer.fuse_qkv_rmsnorm:
        yield "no rotation, or fuse_qkv_rmsnorm"
        return
    if decoder is None or getattr(layer, "dcp_q_replicate", False) or layer.is_sparse or layer.indexer is not None:
        yield "sparse attention, dcp_q_replicate or an unsupported backend"
        return
    if attn.use_direct_call or attn.use_pcp or getattr(attn, "hisparse_cache", None) is not None:
        yield "a cache written elsewhere"
    if attn.kv_cache_dtype not in attention.PLAIN + attention.E4M3:
        yield f"kv_cache_dtype={attn.kv_cache_dtype}"
    if getattr(layer.q_b_proj, "vllm_rocm_ops_is_mx", False):
        yield "queries in MX-FP8"
    if decoder.is_batch_invariant:
        yield "batch invariance"
    norms = [norm for norm in (layer.q_a_layernorm, layer.kv_a_layernorm) if norm is not None]
    if not all(hasattr(norm, "rocm_ops_forward") and not hasattr(norm, "bias") for norm in norms):
        yield "norms that the seam norm does not cover"
    elif norms[0].variance_epsilon != norms[-1].variance_epsilon:
        yield "two epsilons"
    table = getattr(layer.rotary_emb, "cos_sin_cache", None)
    if table is None or table.dim() != 2 or table.shape[1] != layer.qk_rope_head_dim:
        yield "a rotation without a table of its size"


def pre_attentions(model: torch.nn.Module, compiles: bool) -> Iterator[MlaPreAttention | mla_rotation.QueryRotation]:
    """Yield the pre-attention of each layer that the op supports, followed by the rotation of its queries if attention may do it.

    Models that vLLM does not compile have none unless the plugin is forced.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    settings = config.compilation_config
    if compiles and settings.pass_config.fuse_rope_kvcache_cat_mla and UPDATE not in (settings.splitting_ops or ()):
        return  # vLLM's pass fuses the rotation with the write
    for layer in model.modules():
        if not hasattr(layer, "rocm_ops_pre_attention") or any(unsupported_features(layer)):
            continue
        baseline, dtype = compilation.baseline_of(config, model)(True), config.model_config.dtype
        part = MlaPreAttention(layer, baseline)
        if (compiles or part.decoder.is_forced) and part.has_kernels(dtype):
            yield part
            yield from mla_rotation.rotations(part, baseline, dtype)


# The replacement of vLLM's layer


def mla_norms(
    qkv: Tensor,
    q_weight: Tensor | None,
    kv_weight: Tensor,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    q_out: Tensor | None,
    kv_out: Tensor,
    k_pe_out: Tensor,
    q_scale: Tensor | None,
    scales_out: Tensor | None,
    scale_ub: Tensor | None,
    layer_name,
) -> None:
    """Run `mla_norm_rope_and_cache` with the cache and slots that a layer has in this step."""
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    _, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    cache_arguments = step_cache(layer, cache, slots, qkv, kv_out, k_pe_out)
    if (queries := mla_rotation.rotation_of(layer.impl.rocm_ops)) is not None:
        queries.angles = positions, cos_sin_cache, is_neox
    given = qkv, q_weight, kv_weight, epsilon, positions, cos_sin_cache, is_neox, q_out, kv_out, k_pe_out
    MlaPreAttention.op.call(*given, *cache_arguments, q_scale, scales_out, scale_ub)


def step_cache(
    layer, cache: Tensor, slots: Tensor | None, qkv: Tensor, *written: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a layer's cache, viewed in the dtype of its elements, the slots [T], and the cache's scale.

    Without a cache, as in vLLM's profile run, slots are empty, so that nothing is written.
    """
    if slots is None or cache.numel() == 0:
        none = qkv.new_empty(0, dtype=torch.int64)
        return qkv.new_empty((1, 1, sum(x.shape[1] for x in written))), none, None
    decoder = layer.impl.rocm_ops
    return decoder.cache(cache), slots.flatten()[: len(qkv)], decoder.scale(layer)


def wrapper_class(wrapper: type) -> type:
    """Return the subclass of vLLM's layer."""
    from vllm.utils.torch_utils import _encode_layer_name

    from vllm_rocm_ops.vllm.graph import fused_quant

    class RocmOpsMlaAttention(wrapper):
        """Run `mla_norms` between the projections of vLLM's layer where it was selected."""

        rocm_ops_pre_attention: MlaPreAttention | None = None

        def forward(self, positions, hidden_states, llama_4_scaling=None):
            pre_attention = self.rocm_ops_pre_attention
            if pre_attention is None or llama_4_scaling is not None:
                return super().forward(positions, hidden_states, llama_4_scaling)
            if self.q_lora_rank is None:  # both projections before the split: their input is quantized once
                qkv, projected_q = self.kv_a_proj_with_mqa(hidden_states)[0], self.q_proj(hidden_states)[0]
            else:
                qkv = self.fused_qkv_a_proj(hidden_states)[0]
            q, kv, k_pe, scales = pre_attention.outputs(qkv)
            static, bound = pre_attention.scales()
            name = _encode_layer_name(self.mla_attn.layer_name)
            angles = positions, *pre_attention.angles()
            outputs = q, kv, k_pe, static, scales, bound
            torch.ops.vllm_rocm_ops.mla_norms(qkv, *pre_attention.norms(), *angles, *outputs, name)
            if pre_attention.kind:
                scale = static if scales is None else scales
                q = fused_quant.Quantized(q, scale, qkv.dtype, q.shape, pre_attention.input_key)
            q = projected_q if q is None else self.q_b_proj(q)[0]
            q = q.view(-1, self.num_heads, self.qk_head_dim)
            if mla_rotation.rotation_of(pre_attention.decoder) is None:
                nope = self.qk_nope_head_dim
                # The compiler removes this unneeded rotation of keys.
                unrotated = qkv[:, -self.qk_rope_head_dim :].unsqueeze(1)
                q[..., nope:], _ = self.rotary_emb(positions, q[..., nope:], unrotated)
            shape = hidden_states.shape[0], self.num_heads * self.v_head_dim
            output = torch.empty(shape, dtype=q.dtype, device=q.device)
            torch.ops.vllm.unified_mla_attention_with_output(
                q, kv, k_pe.unsqueeze(1), output, name, kv_cache_dummy_dep=kv
            )
            if self.g_proj is not None:
                output = output * self.g_proj(hidden_states)[0].sigmoid()
            return self.o_proj(output)[0]

    return RocmOpsMlaAttention


def probe() -> None:
    """Raise `Unavailable` unless the seam fits this vLLM.

    A plugin may replace vLLM's layer, and its parts, ops and split are as expected.
    """
    from vllm.model_executor.layers import mla
    from vllm.model_executor.layers.attention import mla_attention

    wrapper = seam.replaceable(mla, "MultiHeadLatentAttentionWrapper", "PluggableLayer")
    seam.require_parameters(wrapper.forward, "positions", "hidden_states", "llama_4_scaling")
    names = "q", "kv_c_normed", "k_pe", "output", "layer_name", "output_scale", "output_block_scale"
    seam.require_parameters(mla_attention.unified_mla_attention_with_output, *names, "kv_cache_dummy_dep")
    names = "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata"
    seam.require_parameters(mla_attention.MLAAttention.forward_impl, *names)
    for name in ("num_actual_tokens", "num_decode_tokens"):
        seam.require(name in mla_attention.MLACommonMetadata.__dataclass_fields__, f"MLACommonMetadata.{name}")
    split.probe_layer_ops()
    update = "kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale"
    method = "vllm.v1.attention.backend.MLAAttentionImpl", "do_kv_cache_update"
    backends.require_method(*method, *update, may=("skip_scale",))  # True where the scale is one
    for backend in BACKENDS.values():
        if backend.on_gpu:
            own = backends.methods(f"{backend.module}.{backend.impl}")
            seam.require("do_kv_cache_update" not in own, f"{backend.impl} with the common write of the cache")


def install() -> None:
    """Define the op, have vLLM split compiled models at it, and replace vLLM's layer."""
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    split.define(mla_norms, "q_out", "kv_out", "k_pe_out", "scales_out")
    seam.replace(MultiHeadLatentAttentionWrapper, wrapper_class(MultiHeadLatentAttentionWrapper))
    split.also_at(TORCH_OP, UPDATE)
    compiled_ops.pattern_finders.append(pre_attentions)


SEAM = seam.Seam(
    name=NAME,
    replaces="MultiHeadLatentAttentionWrapper, through PluggableLayer.register_oot; CompilationConfig.set_splitting_ops_for_v1; "
    "MLAAttention.forward_impl of layers whose queries attention rotates",
    probe=probe,
    install=install,
    ops=("mla_norm_rope_and_cache", "batched_gemm_rope"),
    requires=("mla_attention", "norm"),
)
