"""Describe the part of an MLA layer between its projections as one op call, for the seam mla_norms.py.

It has the call's tensors, and what compiled_ops.py needs to time it against vLLM's layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import Baseline

KINDS = "static", "token", "block"
"""Quantizations of queries by their names in models and records, in the order of fused_quant.KEYS."""


def shape_of(
    sizes: tuple[int, int, int], dtype: torch.dtype, cache: str, kind: str, is_column_major: bool, is_bounded: bool
) -> str:
    """Return the name of a layer's call for all token counts, as it is recorded.

    `sizes` are the columns of q, kv and k_pe, q's 0 without a query latent; `kind` is of `KINDS`, or empty.
    """
    traits = f" {kind}" * bool(kind) + " column-major" * is_column_major + " bound" * is_bounded
    return f"{'+'.join(map(str, sizes))} {kernel_selection.types(dtype)} {cache}{traits}"


def shapes_of(parameters: tuple, dtype: torch.dtype) -> list[str]:
    """Return the names under which a model's call may be recorded: each cache dtype, scale order and bound."""
    latents, rope, kind = parameters[:3]
    traits = {"block": [(False, False), (True, False)], "token": [(False, False), (False, True)]}
    return [
        shape_of((*latents, rope), dtype, cache, kind if kind in KINDS else "", *each)
        for cache in attention.PLAIN + attention.E4M3
        for each in traits.get(kind, [(False, False)])
    ]


class MlaPreAttention(compiled_ops.LayerPart):
    """The fused norms, RoPE and cache write of one MLA layer, and its comparison with vLLM's kernels.

    Its inputs are the first projection's result, positions, slots, and a cache whose pages have one slot.
    """

    op = ops.mla_norm_rope_and_cache

    def __init__(self, layer: torch.nn.Module, baseline: Baseline):
        from vllm_rocm_ops.vllm.graph import fused_quant

        self.layer, self.attn = layer, layer.mla_attn
        self.decoder: attention.Decoder = self.attn.impl.rocm_ops
        keys = fused_quant.runnable(fused_quant.NORMS)
        self.input_key = fused_quant.key_of(layer.q_b_proj, layer.q_lora_rank or 0, keys)
        self.kind = dict(zip(fused_quant.KEYS, KINDS)).get(self.input_key, "")
        self.is_column_major = self.kind == "block" and layer.q_b_proj.vllm_rocm_ops_column_major_scales
        self.dtype = layer.kv_a_layernorm.weight.dtype
        self.sizes = layer.q_lora_rank or 0, layer.kv_lora_rank, layer.qk_rope_head_dim
        traits = self.is_column_major, self.scales()[1] is not None
        shape = shape_of(self.sizes, self.dtype, self.attn.kv_cache_dtype, self.kind, *traits)
        self.name(shape, baseline)

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the static scale of queries, and the upper bound of their dynamic scales."""
        linear = self.layer.q_b_proj
        return (
            linear.input_scale if self.kind == "static" else None,
            getattr(linear, "input_scale_ub", None) if self.kind == "token" else None,
        )

    def norms(self) -> tuple[Tensor | None, Tensor, float]:
        """Return the weights of both norms, and their epsilon."""
        q, kv = self.layer.q_a_layernorm, self.layer.kv_a_layernorm
        return None if q is None else q.weight.data, kv.weight.data, kv.variance_epsilon

    def split(self, qkv: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        q, kv, k_pe = qkv.split(self.sizes, 1)
        return q if self.sizes[0] else None, kv, k_pe

    def angles(self) -> tuple[Tensor, bool]:
        """Return the table of cosines and sines, and whether the rotation is NeoX-style."""
        return self.layer.rotary_emb.cos_sin_cache, self.layer.rotary_emb.is_neox_style

    def outputs(self, qkv: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Allocate q, kv, k_pe, and the dynamic scales of q if it has any."""
        from vllm_rocm_ops.vllm.graph import fused_quant

        def made(columns: int, dtype: torch.dtype) -> Tensor | None:
            return torch.empty((qkv.shape[0], columns), dtype=dtype, device=qkv.device) if columns else None

        dtypes, scales = (fused_quant.QUANT_DTYPE if self.kind else qkv.dtype, qkv.dtype, qkv.dtype), None
        if self.kind in ("token", "block"):
            groups = self.sizes[0] // fused_quant.GROUP if self.kind == "block" else 1
            shape = (groups, qkv.shape[0]) if self.is_column_major else (qkv.shape[0], groups)
            scales = torch.empty(shape, dtype=torch.float32, device=qkv.device)
            scales = scales.t() if self.is_column_major else scales
        return *map(made, self.sizes, dtypes), scales

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """True if kernels support the first projection's result in this dtype."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        qkv, tokens = empty(2, sum(self.sizes), dtype=dtype), empty(2, dtype=torch.int64)
        *outs, scales = self.outputs(qkv)
        cache = empty(2, 16, sum(self.sizes[1:]), dtype=torch.uint8 if self.decoder.is_fp8 else self.dtype)
        rest = *outs, self.decoder.cache(cache), tokens, self.decoder.scale(self.attn), self.scales()[0], scales
        return linear_base.has_kernels(self.op, qkv, *self.norms(), tokens, *self.angles(), *rest)

    # For timing

    def apply_decision(self, plugin_serves: bool) -> None:
        self.layer.rocm_ops_pre_attention = self if plugin_serves or self.decoder.is_forced else None

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        return 3.0 * tokens * sum(self.sizes) * self.dtype.itemsize, 0.0

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = self.layer.kv_a_layernorm.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        qkv = torch.randn(tokens, sum(self.sizes), generator=generator, device=device).to(self.dtype)
        positions = torch.randint(0, len(self.angles()[0]), (tokens,), generator=generator, device=device)
        dtype = torch.uint8 if self.decoder.is_fp8 else self.dtype
        cache = torch.zeros(tokens, 1, sum(self.sizes[1:]), dtype=dtype, device=device)
        return qkv, positions, torch.arange(tokens, device=device), cache

    def plugin(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> tuple | None:
        *outs, scales = self.outputs(qkv)
        static, bound = self.scales()
        of_cache = self.decoder.cache(cache), slots, self.decoder.scale(self.attn)
        given = qkv, *self.norms(), positions, *self.angles(), *outs, *of_cache, static, scales, bound
        if self.op.run_kernels(*given) is None:
            return None
        return outs[0], static if scales is None else scales, *outs[1:], cache

    def graph_outputs(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        """Return q, its scale, kv and k_pe by vLLM's layers, as its compiler sees them.

        The rotation has a single key head.
        """
        (q, kv, k_pe), scale = self.split(qkv), None
        if q is not None:
            q = self.layer.q_a_layernorm.vllm_forward(q)
        if self.kind:
            q, scale = self.layer.q_b_proj.vllm_rocm_ops_quantize(q)
        kv, k_pe = self.layer.kv_a_layernorm.vllm_forward(kv), k_pe.unsqueeze(1)
        _, k_pe = self.layer.rotary_emb.forward_native(positions, k_pe, k_pe)
        return q, scale, kv, k_pe.squeeze(1)

    def baseline_outputs(self, of_graph: tuple, qkv: Tensor, slots: Tensor, cache: Tensor) -> tuple:
        *_, kv, k_pe = of_graph
        where = slots, self.attn.kv_cache_dtype, self.attn._k_scale
        self.attn.impl.do_kv_cache_update(kv, k_pe.unsqueeze(1), cache, *where)
        return *of_graph, cache

    def results(self, output: tuple, tokens: int) -> list[Tensor | None]:
        q, scale, kv, k_pe, cache = output
        q = q if scale is None else compiled_ops.dequantized(q[:tokens], scale)
        rows = self.decoder.cache(cache)[:, 0].float()
        return [q, kv, k_pe, rows * self.attn._k_scale if self.decoder.is_fp8 else rows]

    def exact(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> list[Tensor | None]:
        """Return q, kv, k_pe and their row of the cache in float32.

        q is not quantized, but clamped to the range of its quantized values.
        """
        from vllm_rocm_ops.vllm.graph import fused_quant

        q, kv, k_pe = self.split(qkv.float())
        q_weight, kv_weight, epsilon = self.norms()
        kv = ops.rms_norm.reference(kv, kv_weight, epsilon)
        q = None if q is None else ops.rms_norm.reference(q, q_weight, epsilon)
        static, limit = self.scales()
        if static is not None:
            limit = static.float().abs() * LIMIT[fused_quant.QUANT_DTYPE]
        rotated, (table, is_neox) = k_pe.unsqueeze(1).clone(), self.angles()
        rotation.rotate(rotated, positions, table, is_neox)
        rows = torch.cat([kv, rotated.squeeze(1)], 1)
        return [q if limit is None else q.clamp(-limit, limit), kv, rotated.squeeze(1), rows]
