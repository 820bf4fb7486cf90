"""Define the example on each op page by a function with its file's name; tests/core/test_examples.py runs the pages."""

# ruff: noqa: F841, RUF059  the results are the reader's

from __future__ import annotations

import inspect
import textwrap

import torch

from vllm_rocm_ops import ops

SHOWN = """import torch
from vllm_rocm_ops import ops

device = "cuda"
"""
FP8 = "fp8 = torch.float8_e4m3fnuz  # gfx942; float8_e4m3fn on gfx950\n"


def of(file: str) -> str:
    """Return the example of an op file, as its page shows it."""
    _, _, body = inspect.getsource(globals()[file]).partition(":\n")
    return SHOWN + (FP8 if "fp8" in body else "") + "\n" + textwrap.dedent(body)


def batched_gemm(device):
    x = torch.randn(8, 16, 128, dtype=torch.bfloat16, device=device)  # tokens, heads, K
    weights = torch.randn(16, 128, 512, dtype=torch.bfloat16, device=device)
    out = ops.batched_gemm(x, weights)  # [8, 16, 512]
    q_pe = torch.randn(8, 16, 64, dtype=torch.bfloat16, device=device)
    positions = torch.arange(8, device=device)
    cos_sin_cache = torch.randn(4096, 64, dtype=torch.bfloat16, device=device)
    out = ops.batched_gemm_rope(x, weights, q_pe, positions, cos_sin_cache, False)  # [8, 16, 512]; rotates q_pe


def block_scaled_mm(device, fp8):
    x, weight = torch.randn(4, 512, device=device), torch.randn(256, 512, device=device)
    a, scale_a = x.div(2).to(fp8), torch.full((4, 4), 2.0, device=device)  # per 1 x 128
    b, scale_b = weight.div(2).to(fp8), torch.full((2, 4), 2.0, device=device)  # per 128 x 128
    out = ops.block_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)  # x @ weight.t(), [4, 256]


def dequantize_int4(device):
    words = torch.randint(2**31, (2, 100, 8, 16), dtype=torch.int32, device=device)  # eight values per word
    scale_and_shift = torch.tensor([0.1, -0.8], dtype=torch.float16, device=device).view(torch.int32)
    keys = ops.dequantize_int4(torch.cat([scale_and_shift.expand(2, 100, 8, 1), words], -1))  # fp16[2, 100, 8, 128]


def flash_attention(device):
    q = torch.randn(1, 100, 8, 128, dtype=torch.bfloat16, device=device)  # batch, rows, heads, head size
    k, v = torch.randn(2, 1, 100, 2, 128, dtype=torch.bfloat16, device=device)  # GQA: four query heads per key head
    out, _, _ = ops.flash_attention(q, k, v, scale=128**-0.5, causal=True)


def fused_experts(device, fp8):
    hidden = torch.randn(4, 256, dtype=torch.bfloat16, device=device)
    w1 = torch.randn(8, 2 * 128, 256, device=device).to(fp8)  # 8 experts: gate, then up
    w2 = torch.randn(8, 256, 128, device=device).to(fp8)
    scales = {"w1_scale": torch.rand(8, 2, 2, device=device), "w2_scale": torch.rand(8, 2, 1, device=device)}
    weights, ids = ops.topk_softmax(torch.randn(4, 8, device=device), topk=2)
    out = ops.fused_experts(hidden, w1, w2, weights, ids, torch.bfloat16, **scales)  # [4, 256]


def gemm(device):
    a = torch.randint(-127, 128, (16, 256), dtype=torch.int8, device=device)
    b = torch.randint(-127, 128, (256, 64), dtype=torch.int8, device=device)
    scale_a, scale_b = torch.rand(16, 1, device=device), torch.rand(64, device=device)
    out = ops.gemm(a, b, torch.float16, scale_a, scale_b, activation="leaky_relu")  # [16, 64]


def mla_norm_rope_and_cache(device):
    qkv = torch.randn(3, 1536 + 512 + 64, dtype=torch.bfloat16, device=device)  # three tokens of DeepSeek-V3
    q_weight, kv_weight = (torch.randn(size, dtype=torch.bfloat16, device=device) for size in (1536, 512))
    positions = slots = torch.tensor([0, 1, 2], device=device)
    cos_sin_cache = torch.randn(4096, 64, dtype=torch.bfloat16, device=device)
    q_out, kv_out, k_pe_out = (torch.empty(3, size, dtype=torch.bfloat16, device=device) for size in (1536, 512, 64))
    kv_cache = torch.zeros(10, 16, 512 + 64, dtype=torch.bfloat16, device=device)  # 10 pages of 16 tokens
    ops.mla_norm_rope_and_cache(
        *(qkv, q_weight, kv_weight, 1e-6, positions, cos_sin_cache, False),
        *(q_out, kv_out, k_pe_out, kv_cache, slots),
    )


def layer_norm(device, fp8):
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)
    weight, bias = torch.randn(2, 1024, dtype=torch.bfloat16, device=device)
    y = ops.layer_norm(x, weight, bias, 1e-5)
    values, scale = ops.layer_norm_dynamic_per_token_quant(x, weight, bias, 1e-5, fp8)  # fp8[4, 1024], fp32[4, 1]


def mla_decode(device):
    q_nope = torch.randn(2, 16, 512, dtype=torch.bfloat16, device=device)  # two requests, 16 heads
    q_pe = torch.randn(2, 16, 64, dtype=torch.bfloat16, device=device)
    kv_cache = torch.randn(10, 16, 512 + 64, dtype=torch.bfloat16, device=device)  # 10 pages of 16 tokens
    block_table = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)
    seq_lens = torch.tensor([70, 33], dtype=torch.int32, device=device)
    out, _ = ops.mla_decode(q_nope, q_pe, kv_cache, block_table, seq_lens, scale=192**-0.5)  # [2, 16, 512]


def moe_routing(device):
    logits = torch.randn(4, 256, device=device)
    bias = torch.randn(256, device=device)
    weights, ids = ops.topk_softmax(logits, topk=8, renormalize=True)  # fp32[4, 8], int32[4, 8]
    weights, ids = ops.grouped_topk(logits, 8, True, 8, 4, "sigmoid", 2.5, bias)  # DeepSeek-V3's routing


def mxfp8_scaled_mm(device):
    x = torch.randn(4, 512, 2, dtype=torch.bfloat16, device=device).flatten(1)
    a, scale_a = ops.silu_and_mul_mxfp8_quant(x)  # e4m3fn[4, 512], e8m0 as uint8[4, 16]
    b = torch.randn(256, 512, device=device).to(torch.float8_e4m3fn)
    scale_b = torch.full((256, 16), 120, dtype=torch.uint8, device=device)  # 2^(120 - 127)
    out = ops.mxfp8_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)  # [4, 256]


def paged_attention_decode(device):
    query = torch.randn(2, 8, 128, dtype=torch.bfloat16, device=device)  # two requests, 8 heads
    key_cache = torch.randn(10, 16, 2, 128, dtype=torch.bfloat16, device=device)  # 10 pages of 16 tokens, 2 key heads
    value_cache = torch.randn_like(key_cache)
    block_table = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)
    seq_lens = torch.tensor([70, 33], dtype=torch.int32, device=device)
    out, _ = ops.paged_attention_decode(query, key_cache, value_cache, block_table, seq_lens, scale=128**-0.5)


def qk_norm_rope_and_cache(device):
    query = torch.randn(3, 8 * 128, dtype=torch.bfloat16, device=device)  # three tokens, 8 heads
    key, value = torch.randn(2, 3, 2 * 128, dtype=torch.bfloat16, device=device)  # 2 key heads
    q_weight, k_weight = torch.randn(2, 128, dtype=torch.bfloat16, device=device)
    positions = slots = torch.tensor([0, 1, 2], device=device)
    cos_sin_cache = torch.randn(4096, 128, dtype=torch.bfloat16, device=device)
    key_cache, value_cache = torch.zeros(2, 10, 16, 2, 128, dtype=torch.bfloat16, device=device)  # 10 pages of 16
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    ops.qk_norm_rope_and_cache(
        *(query, key, value, q_weight, k_weight, 1e-6, positions, cos_sin_cache, True),
        *(query_out, key_out, key_cache, value_cache, slots),
    )


def rms_norm(device, fp8):
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)
    residual, weight = torch.randn_like(x), torch.randn(1024, dtype=torch.bfloat16, device=device)
    y = ops.fused_add_rms_norm(x, residual, weight, 1e-5)  # also updates residual
    values, scale = ops.rms_norm_per_block_quant(x, weight, 1e-5, fp8, group_size=128)  # fp8[4, 1024], fp32[4, 8]


def rope_and_cache(device):
    query = torch.randn(3, 8 * 128, dtype=torch.bfloat16, device=device)  # three tokens, 8 heads
    key, value = torch.randn(2, 3, 2 * 128, dtype=torch.bfloat16, device=device)  # 2 key heads
    positions = slots = torch.tensor([0, 1, 2], device=device)
    cos_sin_cache = torch.randn(4096, 128, dtype=torch.bfloat16, device=device)
    key_cache, value_cache = torch.zeros(2, 10, 16, 2, 128, dtype=torch.bfloat16, device=device)  # 10 pages of 16
    ops.rope_and_cache(query, key, value, positions, cos_sin_cache, True, key_cache, value_cache, slots)


def router_loss(device):
    logits = torch.randn(64, 256, device=device)
    _, ids = ops.topk_softmax(logits, topk=8)
    loss = ops.load_balancing_loss(logits, ids) + ops.router_z_loss(logits)


def scaled_mm(device, fp8):
    a, weight = torch.randn(4, 512, device=device).to(fp8), torch.randn(256, 512, device=device).to(fp8)
    scale_a = torch.rand(4, 1, device=device)  # per token
    scale_b = torch.rand(256, 1, device=device)  # per output channel
    out = ops.scaled_mm(a, weight.t(), scale_a, scale_b, torch.bfloat16)  # [4, 256]


def silu_and_mul(device, fp8):
    x = torch.randn(4, 2 * 1024, dtype=torch.bfloat16, device=device)  # gate, then up
    y = ops.silu_and_mul(x)  # [4, 1024]
    values, scale = ops.silu_and_mul_per_token_quant(x, fp8)  # fp8[4, 1024], fp32[4, 1]


def silu_and_mul_with_clamp(device, fp8):
    x = torch.randn(4, 2 * 1024, dtype=torch.bfloat16, device=device)  # gate, then up
    y = ops.silu_and_mul_with_clamp(x, 7.0, 1.702, 1.0)  # gpt-oss's constants, [4, 1024]
    values, scale = ops.silu_and_mul_with_clamp_per_token_quant(x, 7.0, fp8)  # fp8[4, 1024], fp32[4, 1]


def softmax(device):
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)
    y = ops.softmax(x)


def stream_memory(device):
    words = torch.arange(2**16, dtype=torch.int32, device=device)
    copied = ops.stream_memory(words, "copy", num_blocks=64)
    sums = ops.stream_memory(words, "read", num_blocks=64)  # int32[64]


def unquantized_gemm(device):
    x = torch.randn(4, 512, dtype=torch.bfloat16, device=device)
    weight = torch.randn(256, 512, dtype=torch.bfloat16, device=device)
    out = ops.unquantized_gemm(x, weight)  # x @ weight.t(), [4, 256]
