"""Make random arguments of a model's ops, with the sizes of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.models.config import BLOCKS, EXPERTS, STATIC, TOKEN
from vllm_rocm_ops.ops.mxfp8_scaled_mm import BLOCK as MX_BLOCK
from vllm_rocm_ops.ops.shared.gemm import BLOCK


class Inputs(NamedTuple):
    """Makes random tensors by a generator, on its device; tensors on the meta device have no values."""

    device: str
    generator: torch.Generator
    fp8_dtype: torch.dtype
    dtype: torch.dtype

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal values in the model's dtype or another."""
        return self._tensor(torch.randn, shape, dtype or self.dtype)

    def scales(self, *shape: int) -> Tensor:
        """Return float32 values in [0.5, 1.5)."""
        scales = self._tensor(torch.rand, shape, torch.float32)
        return scales if scales.is_meta else scales + 0.5

    def exponents(self, *shape: int) -> Tensor:
        """Return e8m0 scales as uint8, from 2^-2 to 2^3."""
        return (self.scales(*shape) * 6 + 122).to(torch.uint8)

    def _tensor(self, random: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = random(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(dtype).to(self.device)


def scaled(tokens: int, inputs: Inputs, n: int, k: int, per_row: bool, *has_bias: bool) -> tuple:
    """Return arguments of `scaled_mm`, with scales per row or per tensor."""
    a, b = (inputs.values(rows, k, dtype=inputs.fp8_dtype) for rows in (tokens, n))
    scales = (inputs.scales(rows if per_row else 1, 1) for rows in (tokens, n))
    return a, b.t(), *scales, inputs.dtype, *(inputs.values(n) for _ in has_bias)


def gated(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    """Return arguments of `scaled_mm_silu_and_mul_quant`; the result's scale keeps most results within FP8's limit."""
    *product, dtype = scaled(tokens, inputs, n, k, False)
    return *product, inputs.scales(1) * (k / 16), dtype


def int8_scaled(tokens: int, inputs: Inputs, n: int, k: int, per_token: bool, *has_bias: bool) -> tuple:
    """Return arguments of `gemm` in int8, with scales per output channel and per token or tensor."""
    a, b = ((40 * inputs.values(rows, k)).clamp(-127, 127).to(torch.int8) for rows in (tokens, n))
    scales = inputs.scales(tokens if per_token else 1, 1), inputs.scales(n, 1)
    return a, b.t(), inputs.dtype, *scales, *(inputs.values(n) for _ in has_bias)


def block_scaled(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    """Return arguments of `block_scaled_mm`."""
    a, b = (inputs.values(rows, k, dtype=inputs.fp8_dtype) for rows in (tokens, n))
    blocks = -(-k // BLOCK)
    return a, b, inputs.scales(tokens, blocks), inputs.scales(-(-n // BLOCK), blocks), inputs.dtype


def mx_scaled(tokens: int, inputs: Inputs, n: int, k: int, *has_bias: bool) -> tuple:
    """Return arguments of `mxfp8_scaled_mm`."""
    a, b = (inputs.values(rows, k, dtype=torch.float8_e4m3fn) for rows in (tokens, n))
    scales = (inputs.exponents(rows, k // MX_BLOCK) for rows in (tokens, n))
    return a, b, *scales, inputs.dtype, *(inputs.values(n) for _ in has_bias)


def unquantized(tokens: int, inputs: Inputs, n: int, k: int, *has_bias: bool) -> tuple:
    """Return arguments of `unquantized_gemm`."""
    return inputs.values(tokens, k), inputs.values(n, k), *(inputs.values(n) for _ in has_bias)


def norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    """Return arguments of an unquantized RMSNorm."""
    rows = [inputs.values(tokens, hidden) for _ in range(2 if residual else 1)]
    return *rows, inputs.values(hidden), epsilon


def static_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    """Return arguments of an RMSNorm with a static scale."""
    *tensors, epsilon = norm(tokens, inputs, hidden, residual, epsilon)
    return *tensors, inputs.scales(1), epsilon, inputs.fp8_dtype


def token_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    """Return arguments of an RMSNorm with dynamic scales per token."""
    x, *rest, weight, epsilon = norm(tokens, inputs, hidden, residual, epsilon)
    return x, weight, epsilon, inputs.fp8_dtype, None, *(rest or [None])


def block_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    """Return arguments of an RMSNorm with dynamic scales per block."""
    *quantized, upper_bound, rest = token_norm(tokens, inputs, hidden, residual, epsilon)
    return *quantized, BLOCK, False, upper_bound, rest


def both_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    """Return arguments of `rms_norm_and_per_block_quant`."""
    *quantized, _, rest = token_norm(tokens, inputs, hidden, residual, epsilon)
    return *quantized, rest


def mx_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    """Return arguments of an RMSNorm to MX-FP8."""
    x, *rest, weight, epsilon = norm(tokens, inputs, hidden, residual, epsilon)
    return x, weight, epsilon, *(rest or [None])


def mla_norms(
    tokens: int, inputs: Inputs, latents: tuple[int, int], rope: int, quantization: str, epsilon: float
) -> tuple:
    """Return arguments of `mla_norm_rope_and_cache`, optionally without a query latent; one page per token."""
    q, kv = latents
    weights = [inputs.values(size) if size else None for size in latents]
    groups = {TOKEN: 1, BLOCKS: -(-q // BLOCK)}.get(quantization)
    is_quantized = quantization in (STATIC, TOKEN, BLOCKS)
    places = torch.arange(tokens, device=inputs.device)
    outs = (
        inputs.values(tokens, q, dtype=inputs.fp8_dtype if is_quantized else None),
        *(inputs.values(tokens, size) for size in (kv, rope)),
    )
    return (
        inputs.values(tokens, q + kv + rope),
        *weights,
        epsilon,
        places,
        inputs.values(max(tokens, PAGE), rope),
        False,
        *(out if out.numel() or not tokens else None for out in outs),
        inputs.values(tokens, PAGE, kv + rope),
        places * PAGE,
        None,
        inputs.scales(1) if quantization == STATIC else None,
        inputs.scales(tokens, groups) if groups else None,
        None,
    )


def activation(tokens: int, inputs: Inputs, hidden: int) -> tuple:
    """Return arguments of an unquantized SwiGLU, or one to MX-FP8."""
    return (inputs.values(tokens, 2 * hidden),)


def static_activation(tokens: int, inputs: Inputs, hidden: int) -> tuple:
    """Return arguments of a SwiGLU with a static scale."""
    return inputs.values(tokens, 2 * hidden), inputs.scales(1), inputs.fp8_dtype


def dynamic_activation(tokens: int, inputs: Inputs, hidden: int) -> tuple:
    """Return arguments of a SwiGLU with dynamic scales."""
    return inputs.values(tokens, 2 * hidden), inputs.fp8_dtype


def routing(tokens: int, inputs: Inputs, experts: int, topk: int, renormalize: bool, *rest) -> tuple:
    """Return arguments of `grouped_topk`."""
    *options, has_bias = rest
    return inputs.values(tokens, experts), topk, renormalize, *options, inputs.scales(experts) if has_bias else None


def router(tokens: int, inputs: Inputs, experts: int, hidden: int, topk: int, renormalize: bool, *rest) -> tuple:
    """Return arguments of `router_gemm_topk`."""
    _, *options = routing(tokens, inputs, experts, topk, renormalize, *rest)
    return *unquantized(tokens, inputs, experts, hidden), *options


def softmax_routing(tokens: int, inputs: Inputs, experts: int, topk: int, renormalize: bool) -> tuple:
    """Return arguments of `topk_softmax`."""
    return inputs.values(tokens, experts), topk, renormalize, None


def experts(
    tokens: int,
    inputs: Inputs,
    experts: int,
    here: int,
    topk: int,
    hidden: int,
    intermediate: int,
    quantization: str,
    is_quantized: bool = False,
    has_bias: bool = False,
    *swiglu: float | bool | None,
) -> tuple:
    """Return arguments of `fused_experts` with uniform routing over all experts; the rank has the first `here`.

    With `is_quantized`, hidden is already quantized per 128 columns. `swiglu` are the op's last arguments.
    """
    w1, w2 = (here, 2 * intermediate, hidden), (here, hidden, intermediate)
    scheme = EXPERTS[quantization]
    make = inputs.scales if torch.float32 in scheme.scales else inputs.exponents
    scales = [make(*scheme.shape(*size)) if scheme.scaled else None for size in (w1, w2)]

    weights, ids = inputs.scales(tokens, experts).topk(topk)
    expert_map = None
    if here < experts:
        numbers = torch.arange(experts, dtype=torch.int32, device=weights.device)
        expert_map = torch.where(numbers < here, numbers, -1)
    static = [inputs.scales(1) if quantization == STATIC else None for _ in range(2)]
    tokens_dtype = inputs.fp8_dtype if is_quantized else None
    if is_quantized:
        static[0] = inputs.scales(tokens, hidden // BLOCK)
    values = (
        inputs.values(tokens, hidden, dtype=tokens_dtype),
        *(inputs.values(*size, dtype=scheme.weight_dtype(inputs.dtype, inputs.fp8_dtype)) for size in (w1, w2)),
    )
    given = *values, weights, ids.int(), inputs.dtype, *scales, *static, expert_map
    if not has_bias and not swiglu:
        return given
    biases = (inputs.values(*size[:2]) if has_bias else None for size in (w1, w2))
    return *given, 0, False, False, False, *biases, *swiglu


PAGE = 16  # tokens per page in vLLM


def heads_attention(
    tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, positions: int, rocm_cache_layout: bool
) -> tuple:
    """Return arguments of decode attention: one token per request, `positions` keys, ROCM_ATTN's or TRITON_ATTN's cache."""
    places, width = _pages(tokens, inputs, positions)
    return (
        inputs.values(tokens, heads, size),
        *_caches(tokens * width, inputs, kv_heads, size, rocm_cache_layout),
        *places,
        size**-0.5,
    )


def quantized_attention(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, *rest) -> tuple:
    """Return the same with an e4m3 result, with a static scale or a dynamic scale per head."""
    *cache, kind = rest
    given = heads_attention(tokens, inputs, heads, kv_heads, size, *cache)
    out = inputs.values(tokens, heads, size, dtype=inputs.fp8_dtype)
    scales = (inputs.scales(1), None) if kind == "static" else (None, inputs.scales(tokens, heads))
    return *given, 1, None, None, None, 0, 0, False, out, *scales


def rotation(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, *rest) -> tuple:
    """Return arguments of `rope_and_cache`; queries, keys and values are columns of one qkv tensor."""
    *rows, places = _rows_of_heads(tokens, inputs, heads, kv_heads, size)
    return *rows, places, *_angles_and_cache(tokens, inputs, kv_heads, size, *rest), places


def normed_rotation(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, *rest) -> tuple:
    """Return arguments of `qk_norm_rope_and_cache`."""
    *rows, places = _rows_of_heads(tokens, inputs, heads, kv_heads, size)
    norm = inputs.values(size), inputs.values(size), 1e-6
    table, is_neox, *caches = _angles_and_cache(tokens, inputs, kv_heads, size, *rest)
    outs = (inputs.values(tokens, count, size) for count in (heads, kv_heads))
    return *rows, *norm, places, table, is_neox, *outs, *caches, places


def _rows_of_heads(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values of one tensor, and a number per token, its position and slot."""
    qkv = inputs.values(tokens, (heads + 2 * kv_heads) * size)
    return *qkv.split([heads * size, kv_heads * size, kv_heads * size], 1), torch.arange(tokens, device=inputs.device)


def _angles_and_cache(
    tokens: int, inputs: Inputs, kv_heads: int, size: int, rotary: int, positions: int, rocm_cache_layout: bool
) -> tuple:
    _, width = _pages(tokens, inputs, positions)
    caches = _caches(tokens * width, inputs, kv_heads, size, rocm_cache_layout)
    return inputs.values(positions, rotary), True, *caches


def _caches(pages: int, inputs: Inputs, kv_heads: int, size: int, rocm_cache_layout: bool) -> tuple[Tensor, ...]:
    """Return the key and the value cache."""
    x = 16 // inputs.dtype.itemsize
    shapes = (
        ((kv_heads, size // x, PAGE, x), (kv_heads, size, PAGE)) if rocm_cache_layout else ((PAGE, kv_heads, size),) * 2
    )
    return tuple(inputs.values(pages, *shape) for shape in shapes)


def mla_attention(tokens: int, inputs: Inputs, heads: int, latent: int, rope: int, size: int, positions: int) -> tuple:
    """Return arguments of `mla_decode`."""
    places, width = _pages(tokens, inputs, positions)
    queries = inputs.values(tokens, heads, latent), inputs.values(tokens, heads, rope)
    return *queries, inputs.values(tokens * width, PAGE, latent + rope), *places, size**-0.5


def absorbed(tokens: int, inputs: Inputs, heads: int, k: int, n: int, transposed: bool) -> tuple:
    """Return arguments of `batched_gemm`; weights are contiguous along N if transposed, else along K."""
    weights = inputs.values(heads, k, n) if transposed else inputs.values(heads, n, k).transpose(1, 2)
    return inputs.values(tokens, heads, k), weights


def quantized_v_up(tokens: int, inputs: Inputs, heads: int, k: int, n: int, transposed: bool, kind: str) -> tuple:
    """Return the same with an e4m3 result and a dynamic scale per head, the only `kind`."""
    out, scales = inputs.values(tokens, heads, n, dtype=inputs.fp8_dtype), inputs.scales(tokens, heads)
    return *absorbed(tokens, inputs, heads, k, n, transposed), out, scales


def rotated_absorbed(tokens: int, inputs: Inputs, heads: int, k: int, n: int, rope: int) -> tuple:
    """Return arguments of `batched_gemm_rope`; x and q_pe are columns of one tensor."""
    q = inputs.values(tokens, heads, k + rope)
    places, table = torch.arange(tokens, device=inputs.device), inputs.values(max(tokens, PAGE), rope)
    return q[..., :k], inputs.values(heads, k, n), q[..., k:], places, table, False


def _pages(tokens: int, inputs: Inputs, positions: int) -> tuple[tuple[Tensor, Tensor], int]:
    """Return the block table and lengths of requests, and the pages per request."""
    width = -(-positions // PAGE)
    table = torch.arange(tokens * width, dtype=torch.int32, device=inputs.device).view(tokens, width)
    return (table, torch.full((tokens,), positions, dtype=torch.int32, device=inputs.device)), width
