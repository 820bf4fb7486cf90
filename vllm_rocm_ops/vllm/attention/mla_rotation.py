"""Rotate the queries of an MLA layer in the launch of W_UK's product, for the seam mla_norms.py.

vLLM rotates q_pe in its graph, before attention. A layer whose norms the plugin serves can omit this: the op of mla_norms
keeps the step's positions, and attention rotates q_pe in place. In batches of decode rows whose product with W_UK the
plugin serves (mla_absorb.py), `batched_gemm_rope` does both in one launch. Otherwise a launch of it without a product
rotates all rows first: with prefills, with more rows than the kernels take, and before vLLM's torch.bmm.

Selected once for all token counts, before vLLM compiles (compiled_ops.py): where the launch was timed to be faster than
vLLM's compiled rotation followed by the product's own launch, or wherever it fits with VLLM_ROCM_OPS_ATTENTION=1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.vllm.attention import mla_absorb
from vllm_rocm_ops.vllm.attention.mla_pre_attention import MlaPreAttention
from vllm_rocm_ops.vllm.graph.compiled_ops import LayerPart
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import Baseline

OTHERS = "is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled"
"""Attributes of a layer whose product with W_UK is not torch.bmm."""


def shape_of(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> str:
    """Return the name of a layer's call for all token counts, as it is recorded; sizes are heads, K, N and q_pe's."""
    heads, k, n, rope = sizes
    return f"{heads}x{n}x{k}+{rope} {kernel_selection.types(dtype)}"


def unsupported_features(attn: torch.nn.Module) -> Iterator[str]:
    """Yield the features of an attention layer with which attention cannot rotate its queries."""
    weights = getattr(attn, "W_UK_T", None)
    if not isinstance(weights, Tensor) or weights.dim() != 3 or any(getattr(attn, name, False) for name in OTHERS):
        yield "another product than torch.bmm with W_UK"
    if getattr(attn, "q_pad_num_heads", None) is not None:
        yield "padded heads, for which vLLM copies q_pe before the product"


def rotation_of(decoder) -> QueryRotation | None:
    """Return the `QueryRotation` of a decoder's layer, None if vLLM's graph rotates its queries."""
    return getattr(decoder, "rotation", None)


class QueryRotation(LayerPart):
    """The rotation of a layer's queries in attention, and its comparison with vLLM's rotation and the product with W_UK.

    Inputs are q_pe [T, heads, rope], positions [T] and, up to the product's token limit, q_nope.
    """

    op = ops.batched_gemm_rope
    angles: tuple[Tensor, Tensor, bool] | None = None
    """Positions, cosines and sines, and the pairing, from mla_norms until attention in a step."""

    def __init__(self, pre_attention: MlaPreAttention, baseline: Baseline):
        self.pre_attention, self.attn, self.decoder = pre_attention, pre_attention.attn, pre_attention.decoder
        self.nope, self.rope = pre_attention.layer.qk_nope_head_dim, pre_attention.layer.qk_rope_head_dim
        heads, k, n = self.weights.shape
        shape = shape_of((heads, k, n, self.rope), self.weights.dtype)
        self.name(shape, baseline)

    @property
    def weights(self) -> Tensor:
        return self.attn.W_UK_T

    def has_kernels(self, dtype: torch.dtype) -> bool:
        heads, k, n = self.weights.shape
        q = torch.empty(2, heads, k + self.rope, dtype=dtype, device="meta")
        weights = torch.empty_strided(self.weights.shape, self.weights.stride(), dtype=dtype, device="meta")
        positions = torch.empty(2, dtype=torch.int64, device="meta")
        given = q[..., :k], weights, q[..., k:], positions, *self.pre_attention.angles(), q.new_empty(2, heads, n)
        return dtype == self.weights.dtype and linear_base.has_kernels(self.op, *given)

    # In attention

    def forward_impl(self, q: Tensor, k_c_normed, k_pe, kv_cache, attn_metadata, *rest, **keywords):
        """Rotate q_pe in a step of vLLM's attention, by W_UK's launch or before, and run it."""
        angles, self.angles = self.angles, None
        weights, fused = self.weights, False
        if angles is not None and attn_metadata is not None:
            tokens = attn_metadata.num_actual_tokens
            positions, *table = angles
            given = q[:tokens, :, self.nope :], positions[:tokens], *table
            fused = attn_metadata.num_decode_tokens == tokens and mla_absorb.is_served(weights, tokens)
            if fused:
                weights.rocm_ops_fused = functools.partial(self.product, given)
            else:
                self.rotate(*given)
        output = type(self.attn).forward_impl(
            self.attn, q, k_c_normed, k_pe, kv_cache, attn_metadata, *rest, **keywords
        )
        if fused and weights.rocm_ops_fused is not None:
            weights.rocm_ops_fused = None
            raise RuntimeError(
                "vllm-rocm-ops: queries were not rotated, as vLLM's attention did not multiply by W_UK_T: set "
                "VLLM_ROCM_OPS_DISABLE=mla_norms"
            )
        return output

    def product(self, rotated: tuple, x: Tensor, weights: Tensor, out: Tensor | None) -> Tensor:
        """Return the product with W_UK by the launch that rotates, once."""
        weights.rocm_ops_fused = None
        output = self.op.call(x.transpose(0, 1), weights, *rotated, None if out is None else out.transpose(0, 1))
        return output.transpose(0, 1) if out is None else out

    def rotate(self, q_pe: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> None:
        none = q_pe.new_empty((0, q_pe.shape[1], self.weights.shape[1]))
        with torch._C.DisableTorchFunctionSubclass():
            self.op.call(none, self.weights, q_pe, positions, cos_sin_cache, is_neox, None)

    # For timing

    def apply_decision(self, plugin_serves: bool) -> None:
        self.attn.__dict__.pop("forward_impl", None)
        self.decoder.rotation = self if plugin_serves or self.decoder.is_forced else None
        if self.decoder.rotation is not None:
            self.attn.__dict__["forward_impl"] = self.forward_impl

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        """Return the bytes and the operations of a call, in which vLLM's rotation may read and write whole queries."""
        heads, k, n = self.weights.shape
        product = k * n + tokens * (k + n) if tokens <= mla_absorb.MAX_TOKENS else 0
        moved = product + 2 * tokens * (self.nope + self.rope)
        return float(self.weights.element_size() * heads * moved), 2.0 * heads * bool(product) * tokens * k * n

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return random inputs; q_pe and q_nope are columns of one tensor."""
        heads, device = self.weights.shape[0], self.weights.device
        generator = torch.Generator(device).manual_seed(seed)
        shape, dtype = (tokens, heads, self.nope + self.rope), self.weights.dtype
        q = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        q_nope, q_pe = q.split([self.nope, self.rope], -1)
        positions = torch.randint(0, len(self.pre_attention.angles()[0]), (tokens,), generator=generator, device=device)
        return q_pe, positions, q_nope if tokens <= mla_absorb.MAX_TOKENS else None

    def out(self, q_nope: Tensor) -> Tensor:
        return q_nope.new_empty((*q_nope.shape[:2], self.weights.shape[2]))

    def plugin(self, q_pe: Tensor, positions: Tensor, q_nope: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        x = q_pe.new_empty((0, q_pe.shape[1], self.nope)) if q_nope is None else q_nope
        out = self.out(x)
        given = x, self.weights, q_pe, positions, *self.pre_attention.angles(), out
        with torch._C.DisableTorchFunctionSubclass():
            served = self.op.run_kernels(*given) is not None
        return (q_pe, None if q_nope is None else out) if served else None

    def graph_outputs(self, q_pe: Tensor, positions: Tensor) -> Tensor:
        return self.pre_attention.layer.rotary_emb.forward_native(positions, q_pe, q_pe[:, :1])[0]

    def baseline_outputs(self, rotated: Tensor, q_pe: Tensor, q_nope: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return q_pe and the product by `batched_gemm`, or by torch.bmm where no kernel supports it."""
        if q_nope is None:
            return rotated, None
        given = q_nope, self.weights
        with torch._C.DisableTorchFunctionSubclass():
            out = mla_absorb.COMPARISON.plugin(*given)
            return rotated, mla_absorb.COMPARISON.baseline(*given) if out is None else out

    def results(self, output: tuple, tokens: int) -> list[Tensor | None]:
        return [None if x is None else x.flatten(1) for x in output]

    def exact(self, q_pe: Tensor, positions: Tensor, q_nope: Tensor | None) -> list[Tensor | None]:
        rotated, product = q_pe.float(), None
        rotation.rotate(rotated, positions, *self.pre_attention.angles())
        if q_nope is not None:
            with torch._C.DisableTorchFunctionSubclass():
                product = torch.bmm(q_nope.float().transpose(0, 1), self.weights.float()).transpose(0, 1).flatten(1)
        return [rotated.flatten(1), product]


def rotations(pre_attention: MlaPreAttention, baseline: Baseline, dtype: torch.dtype) -> Iterator[QueryRotation]:
    """Yield the rotation of a layer's queries, if attention may do it."""
    if not any(unsupported_features(pre_attention.attn)):
        part = QueryRotation(pre_attention, baseline)
        if part.has_kernels(dtype):
            yield part
