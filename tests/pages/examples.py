"""Define the example on each op page by a function with its file's name; tests/core/test_examples.py runs the pages."""

# ruff: noqa: F841, RUF059  the results are the reader's

from __future__ import annotations

import inspect
import textwrap

import torch

from vllm_rocm_ops import ops

SHOWN = """import torch
from vllm_rocm_ops import ops

torch.set_default_device("cuda")
"""
FP8 = "fp8 = torch.float8_e4m3fnuz  # gfx942; float8_e4m3fn on gfx950\n"


def of(file: str) -> str:
    """Return the example of an op file, as its page shows it."""
    _, _, body = inspect.getsource(globals()[file]).partition(":\n")
    return SHOWN + (FP8 if "fp8" in body else "") + textwrap.dedent(body)


def batched_gemm(fp8):
    x = torch.randn(8, 16, 128, dtype=torch.bfloat16)  # tokens, heads, K
    weights = torch.randn(16, 128, 512, dtype=torch.bfloat16)
    out = ops.batched_gemm(x, weights)  # [8, 16, 512]
    values, scales = torch.empty(8, 16, 128, dtype=fp8), torch.empty(8, 16)
    v_up = torch.randn(16, 128, 512, dtype=torch.bfloat16).transpose(1, 2)  # contiguous along K
    ops.batched_gemm(out, v_up, values, scales)  # quantized, with a scale per head


def batched_gemm_rope():
    q = torch.randn(8, 16, 192, dtype=torch.bfloat16)  # tokens, heads, K and rotary
    w_uk, positions = torch.randn(16, 128, 512, dtype=torch.bfloat16), torch.arange(8)
    angles = torch.randn(4096, 64, dtype=torch.bfloat16)  # cosines, then sines
    q_nope, q_pe = q.split([128, 64], -1)
    out = ops.batched_gemm_rope(q_nope, w_uk, q_pe, positions, angles, False)  # [8, 16, 512]; rotates q_pe


def block_scaled_mm(fp8):
    x, weight = torch.randn(4, 512), torch.randn(256, 512)
    a, scale_a = x.div(2).to(fp8), torch.full((4, 4), 2.0)  # per 1 x 128
    b, scale_b = weight.div(2).to(fp8), torch.full((2, 4), 2.0)  # per 128 x 128
    out = ops.block_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)  # x @ weight.t(), [4, 256]


def dequantize_int4():
    words = torch.randint(2**31, (2, 100, 8, 16), dtype=torch.int32)  # eight values per word
    scale_and_shift = torch.tensor([0.1, -0.8], dtype=torch.float16).view(torch.int32)
    keys = ops.dequantize_int4(torch.cat([scale_and_shift.expand(2, 100, 8, 1), words], -1))  # fp16[2, 100, 8, 128]


def flash_attention():
    q = torch.randn(1, 100, 8, 128, dtype=torch.bfloat16)  # batch, rows, heads, head size
    k, v = torch.randn(2, 1, 100, 2, 128, dtype=torch.bfloat16)  # GQA: four query heads per key head
    out, _, _ = ops.flash_attention(q, k, v, scale=128**-0.5, causal=True)


def fused_experts(fp8):
    hidden = torch.randn(4, 256, dtype=torch.bfloat16)
    w1 = torch.randn(8, 2 * 128, 256).to(fp8)  # 8 experts: gate, then up
    w2 = torch.randn(8, 256, 128).to(fp8)
    scales = {"w1_scale": torch.rand(8, 2, 2), "w2_scale": torch.rand(8, 2, 1)}
    weights, ids = ops.topk_softmax(torch.randn(4, 8), topk=2)
    out = ops.fused_experts(hidden, w1, w2, weights, ids, torch.bfloat16, **scales)  # [4, 256]


def gemm():
    a = torch.randint(-127, 128, (16, 256), dtype=torch.int8)
    b = torch.randint(-127, 128, (256, 64), dtype=torch.int8)
    scale_a, scale_b = torch.rand(16, 1), torch.rand(64)
    out = ops.gemm(a, b, torch.float16, scale_a, scale_b, activation="leaky_relu")  # [16, 64]


def mla_norm_rope_and_cache():
    qkv = torch.randn(3, 1536 + 512 + 64, dtype=torch.bfloat16)  # three tokens of DeepSeek-V3
    q_weight, kv_weight = (torch.randn(size, dtype=torch.bfloat16) for size in (1536, 512))
    positions = slots = torch.tensor([0, 1, 2])
    cos_sin_cache = torch.randn(4096, 64, dtype=torch.bfloat16)
    q_out, kv_out, k_pe_out = (torch.empty(3, size, dtype=torch.bfloat16) for size in (1536, 512, 64))
    kv_cache = torch.zeros(10, 16, 512 + 64, dtype=torch.bfloat16)  # 10 pages of 16 tokens
    ops.mla_norm_rope_and_cache(
        *(qkv, q_weight, kv_weight, 1e-6, positions, cos_sin_cache, False),
        *(q_out, kv_out, k_pe_out, kv_cache, slots),
    )


def layer_norm(fp8):
    x = torch.randn(4, 1024, dtype=torch.bfloat16)
    weight, bias = torch.randn(2, 1024, dtype=torch.bfloat16)
    y = ops.layer_norm(x, weight, bias, 1e-5)
    values, scale = ops.layer_norm_dynamic_per_token_quant(x, weight, bias, 1e-5, fp8)  # fp8[4, 1024], fp32[4, 1]


def mla_decode():
    q_nope = torch.randn(2, 16, 512, dtype=torch.bfloat16)  # two requests, 16 heads
    q_pe = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    kv_cache = torch.randn(10, 16, 512 + 64, dtype=torch.bfloat16)  # 10 pages of 16 tokens
    block_table = torch.arange(10, dtype=torch.int32).view(2, 5)
    seq_lens = torch.tensor([70, 33], dtype=torch.int32)
    out, _ = ops.mla_decode(q_nope, q_pe, kv_cache, block_table, seq_lens, scale=192**-0.5)  # [2, 16, 512]


def moe_routing():
    logits = torch.randn(4, 256)
    bias = torch.randn(256)
    weights, ids = ops.topk_softmax(logits, topk=8, renormalize=True)  # fp32[4, 8], int32[4, 8]
    weights, ids = ops.grouped_topk(logits, 8, True, 8, 4, "sigmoid", 2.5, bias)  # DeepSeek-V3's routing


def mxfp8_scaled_mm():
    x = torch.randn(4, 512, 2, dtype=torch.bfloat16).flatten(1)
    a, scale_a = ops.silu_and_mul_mxfp8_quant(x)  # e4m3fn[4, 512], e8m0 as uint8[4, 16]
    b = torch.randn(256, 512).to(torch.float8_e4m3fn)
    scale_b = torch.full((256, 16), 120, dtype=torch.uint8)  # 2^(120 - 127)
    out = ops.mxfp8_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)  # [4, 256]


def paged_attention_decode():
    query = torch.randn(2, 8, 128, dtype=torch.bfloat16)  # two requests, 8 heads
    key_cache = torch.randn(10, 16, 2, 128, dtype=torch.bfloat16)  # 10 pages of 16 tokens, 2 key heads
    value_cache = torch.randn_like(key_cache)
    block_table = torch.arange(10, dtype=torch.int32).view(2, 5)
    seq_lens = torch.tensor([70, 33], dtype=torch.int32)
    out, _ = ops.paged_attention_decode(query, key_cache, value_cache, block_table, seq_lens, scale=128**-0.5)


def qk_norm_rope_and_cache():
    query = torch.randn(3, 8 * 128, dtype=torch.bfloat16)  # three tokens, 8 heads
    key, value = torch.randn(2, 3, 2 * 128, dtype=torch.bfloat16)  # 2 key heads
    q_weight, k_weight = torch.randn(2, 128, dtype=torch.bfloat16)
    positions = slots = torch.tensor([0, 1, 2])
    cos_sin_cache = torch.randn(4096, 128, dtype=torch.bfloat16)
    key_cache, value_cache = torch.zeros(2, 10, 16, 2, 128, dtype=torch.bfloat16)  # 10 pages of 16
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    ops.qk_norm_rope_and_cache(
        *(query, key, value, q_weight, k_weight, 1e-6, positions, cos_sin_cache, True),
        *(query_out, key_out, key_cache, value_cache, slots),
    )


def rms_norm(fp8):
    x = torch.randn(4, 1024, dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.randn(1024, dtype=torch.bfloat16)
    y = ops.fused_add_rms_norm(x, residual, weight, 1e-5)  # also updates residual
    values, scale = ops.rms_norm_per_block_quant(x, weight, 1e-5, fp8, group_size=128)  # fp8[4, 1024], fp32[4, 8]


def rope_and_cache():
    query = torch.randn(3, 8 * 128, dtype=torch.bfloat16)  # three tokens, 8 heads
    key, value = torch.randn(2, 3, 2 * 128, dtype=torch.bfloat16)  # 2 key heads
    positions = slots = torch.tensor([0, 1, 2])
    cos_sin_cache = torch.randn(4096, 128, dtype=torch.bfloat16)
    key_cache, value_cache = torch.zeros(2, 10, 16, 2, 128, dtype=torch.bfloat16)  # 10 pages of 16
    ops.rope_and_cache(query, key, value, positions, cos_sin_cache, True, key_cache, value_cache, slots)


def rope_and_cache_mla():
    q_pe, k_pe = torch.randn(3, 16, 64, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
    kv_c = torch.randn(3, 512, dtype=torch.bfloat16)  # three tokens of DeepSeek-V3
    positions = slots = torch.tensor([0, 1, 2])
    cos_sin_cache = torch.randn(4096, 64, dtype=torch.bfloat16)
    kv_cache = torch.zeros(10, 16, 512 + 64, dtype=torch.bfloat16)  # 10 pages of 16 tokens
    ops.rope_and_cache_mla(q_pe, k_pe, kv_c, positions, cos_sin_cache, False, kv_cache, slots)


def router_gemm_topk():
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    weight = torch.randn(256, 512, dtype=torch.bfloat16) / 16
    bias = torch.randn(256)
    logits, weights, ids = ops.router_gemm_topk(x, weight, 8, True, 8, 4, "sigmoid", 2.5, bias)  # DeepSeek-V3's router


def router_loss():
    logits = torch.randn(64, 256)
    _, ids = ops.topk_softmax(logits, topk=8)
    loss = ops.load_balancing_loss(logits, ids) + ops.router_z_loss(logits)


def scaled_mm(fp8):
    a, weight = torch.randn(4, 512).to(fp8), torch.randn(256, 512).to(fp8)
    scale_a = torch.rand(4, 1)  # per token
    scale_b = torch.rand(256, 1)  # per output channel
    out = ops.scaled_mm(a, weight.t(), scale_a, scale_b, torch.bfloat16)  # [4, 256]


def silu_and_mul(fp8):
    x = torch.randn(4, 2 * 1024, dtype=torch.bfloat16)  # gate, then up
    y = ops.silu_and_mul(x)  # [4, 1024]
    values, scale = ops.silu_and_mul_per_token_quant(x, fp8)  # fp8[4, 1024], fp32[4, 1]


def silu_and_mul_with_clamp(fp8):
    x = torch.randn(4, 2 * 1024, dtype=torch.bfloat16)  # gate, then up
    y = ops.silu_and_mul_with_clamp(x, 7.0, 1.702, 1.0)  # gpt-oss's constants, [4, 1024]
    values, scale = ops.silu_and_mul_with_clamp_per_token_quant(x, 7.0, fp8)  # fp8[4, 1024], fp32[4, 1]


def softmax():
    x = torch.randn(4, 1024, dtype=torch.bfloat16)
    y = ops.softmax(x)


def stream_memory():
    words = torch.arange(2**16, dtype=torch.int32)
    copied = ops.stream_memory(words, "copy", num_blocks=64)
    sums = ops.stream_memory(words, "read", num_blocks=64)  # int32[64]


def unquantized_gemm():
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    weight = torch.randn(256, 512, dtype=torch.bfloat16)
    out = ops.unquantized_gemm(x, weight)  # x @ weight.t(), [4, 256]
