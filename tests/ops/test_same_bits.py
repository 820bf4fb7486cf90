"""Test bit-equal results: split-K GEMMs in any order of blocks and waves, and fused launches versus separate ones."""

import dataclasses

import pytest
import torch
from marks import CHIPS, FULL

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.launch import Counters
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared import rowwise
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig

CALLS = 100 if FULL else 25
TOKENS, ROWS, K = 3, 64, 1280


def arguments(fp8_dtype: torch.dtype, tokens: int = TOKENS) -> tuple:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, K, generator=generator).to(fp8_dtype) for rows in (tokens, ROWS))
    scale_a, scale_b = (torch.rand(rows, 1, generator=generator) + 0.5 for rows in (tokens, ROWS))
    return a, b.t(), scale_a, scale_b, torch.float32


@pytest.mark.parametrize("arch_name", CHIPS)
def test_any_order_gives_the_same_bits(arch_name, monkeypatch):
    """Calls of one signature share their counters, which the last block of each resets.

    Another split of K gives other bits, which shows that another order of summation would, too.
    """
    emulator = Emulator(arch_name, races=False)
    op, given = ops.scaled_mm, arguments(emulator.arch.fp8_dtype)
    a = op.Arguments(*given)
    planned = {config: op.plan(config, op.allocate(a), a, emulator.arch)[0] for config in op.configs(a, emulator.arch)}
    divided = [c for c, l in planned.items() if any(isinstance(arg, Counters) for arg in l.named.values())]
    most_divided = max(divided, key=lambda config: planned[config].grid)

    def results(config, seeds) -> set[bytes]:
        monkeypatch.setattr(op, "default", lambda *_: config)
        op.invalidate()
        found = set()
        for seed in seeds:
            emulator.options = dataclasses.replace(emulator.options, seed=seed)
            found.add(op(*given).numpy().tobytes())
        return found

    few = list(planned)[:: 1 if FULL else 8]
    with launch.executor(emulator):
        others = set().union(*(results(config, [None]) for config in few if config != most_divided))
        same = results(most_divided, range(CALLS))
    op.invalidate()
    assert len(same) == 1 and others - same


@pytest.mark.parametrize("arch_name", CHIPS)
def test_groups_of_tokens_give_the_bits_of_one(arch_name):
    """Blocks of a group share its tiles, and run in any order between other groups' blocks."""
    emulator = Emulator(arch_name, races=False)
    given, found = arguments(emulator.arch.fp8_dtype, 70), {}
    with launch.executor(emulator):
        for groups in (1, 2):
            with ops.scaled_mm.running(SkinnyConfig(64, 3, 3, groups)):
                for seed in range(8):
                    emulator.options = dataclasses.replace(emulator.options, seed=seed)
                    found[ops.scaled_mm(*given).numpy().tobytes()] = groups
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [TOKENS, 20])
@pytest.mark.parametrize("arch_name", CHIPS)
def test_one_launch_gives_the_bits_of_two(arch_name, tokens, dtype):
    """SwiGLU and quantization run in a GEMM's epilogue, on sums that are exact but too long for their type."""
    emulator, generator = Emulator(arch_name, races=False), torch.Generator().manual_seed(0)
    fp8 = emulator.arch.fp8_dtype
    a, b = (torch.randint(-8, 9, (rows, 1024), generator=generator).to(fp8) for rows in (tokens, ROWS))
    scales = torch.full((tokens, 1), 0.0625), torch.full((ROWS, 1), 0.0625)
    scale = torch.tensor([0.03])
    with launch.executor(emulator):
        both = ops.silu_and_mul_quant(ops.scaled_mm(a, b.t(), *scales, dtype), scale, fp8)
        one = ops.scaled_mm_silu_and_mul_quant(a, b.t(), *scales, scale, dtype)
    assert torch.equal(one.view(torch.uint8), both.view(torch.uint8))
    assert one.float().unique().numel() > 50


@pytest.mark.parametrize("slices", [1, 3, 9])
@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("arch_name", CHIPS)
def test_a_router_gives_the_bits_of_its_two_launches(arch_name, tokens, slices):
    """A GEMM with the same slices of K, whose sums round, and routing in a launch of its own give the same results."""
    emulator, generator = Emulator(arch_name, races=False), torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(rows, 9 * 256, generator=generator).bfloat16() / 48 for rows in (tokens, 256))
    how = 8, True, 8, 4, "sigmoid", 2.5, torch.rand(256, generator=generator)
    config = SkinnyConfig(16, slices, 16 * slices)
    with launch.executor(emulator), ops.unquantized_gemm.running(config), ops.router_gemm_topk.running(config):
        logits = ops.unquantized_gemm(x, weight)
        found = ops.router_gemm_topk(x, weight, *how)
        wanted = logits, *ops.grouped_topk(logits, *how)
    for ours, two in zip(found, wanted, strict=True):
        assert torch.equal(ours, two)
    assert found[2].unique().numel() > 7


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch_name", CHIPS)
def test_one_launch_gives_the_bits_of_three(arch_name, dtype, fp8):
    """Norms of queries and keys, rotation and cache write are fused, on squares whose sums are exact."""
    require_bits_of_three(arch_name, dtype, fp8, over_all=False)


@pytest.mark.parametrize("arch_name", CHIPS)
def test_one_launch_with_norms_over_all_heads_gives_the_bits_of_three(arch_name):
    require_bits_of_three(arch_name, torch.bfloat16, True, over_all=True)


def require_bits_of_three(arch_name: str, dtype: torch.dtype, fp8: bool, over_all: bool) -> None:
    emulator, generator = Emulator(arch_name, races=False), torch.Generator().manual_seed(0)
    size, heads, slots = 128, (16 if over_all else 8, 2), torch.tensor([5, -1, 17])
    qkv = torch.randint(-8, 9, (TOKENS, sum(heads) + heads[1], size), generator=generator).to(dtype).flatten(1)
    query, key, value = qkv.split([size * n for n in (*heads, heads[1])], 1)
    rows = [size * n if over_all else size for n in heads]  # of the norms
    weights = [(torch.rand(n, generator=generator) + 0.5).to(dtype) for n in rows]
    angles = torch.rand(50, size // 2, generator=generator) * 6
    rotation = torch.tensor([7, 1, 49]), torch.cat((angles.cos(), angles.sin()), 1).to(dtype), True
    kind = emulator.arch.fp8_dtype if fp8 else dtype
    one, three = ([torch.zeros(2, 16, heads[1], size).to(kind) for _ in range(2)] for _ in range(2))
    scales = [torch.tensor([s]) if fp8 else None for s in (0.03, 0.02)]
    outs = [torch.full((TOKENS, n * size), torch.nan, dtype=dtype) for n in heads]
    with launch.executor(emulator):
        ops.qk_norm_rope_and_cache(query, key, value, *weights, 1e-6, *rotation, *outs, *one, slots, *scales)
        by_head = (x.unflatten(1, (-1, n)) for x, n in zip((query, key), rows))
        normed = [ops.rms_norm(x, weight, 1e-6).flatten(1) for x, weight in zip(by_head, weights)]
        ops.rope_and_cache(*normed, value, *rotation, *three, slots, *scales)
    for ours, separate in zip((*outs, *one), (*normed, *three)):
        assert torch.equal(ours.view(torch.uint8), separate.view(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch_name", CHIPS)
def test_one_launch_gives_the_bits_of_a_latents_three(arch_name, dtype, fp8):
    """Both latents' norms, the queries' quantization, rotation and cache write are fused, on any numbers."""
    emulator, generator = Emulator(arch_name, races=False), torch.Generator().manual_seed(0)
    q_size, kv_size, size, slots = 1536, 512, 64, torch.tensor([5, -1, 17])
    fp8_dtype, static = emulator.arch.fp8_dtype, torch.tensor([0.03])
    qkv = torch.randn(TOKENS, q_size + kv_size + size, generator=generator).to(dtype)
    q, kv, k_pe = qkv.split([q_size, kv_size, size], 1)
    q_weight, kv_weight = ((torch.rand(n, generator=generator) + 0.5).to(dtype) for n in (q_size, kv_size))
    angles = torch.rand(50, size // 2, generator=generator) * 6
    behind = torch.tensor([7, 1, 49]), torch.cat((angles.cos(), angles.sin()), 1).to(dtype), False
    scale = torch.tensor([0.02]) if fp8 else None
    how = {
        "plain": ({}, lambda: (ops.rms_norm(q, q_weight, 1e-6),)),
        "static": ({"q_scale": static}, lambda: (ops.rms_norm_static_fp8_quant(q, q_weight, static, 1e-6, fp8_dtype),)),
        "token": ({"scales_out": True}, lambda: ops.rms_norm_dynamic_per_token_quant(q, q_weight, 1e-6, fp8_dtype)),
        "block": (
            {"scales_out": True},
            lambda: ops.rms_norm_per_block_quant(q, q_weight, 1e-6, fp8_dtype, 128, True),
        ),
    }
    for kind, (more, norm) in how.items():
        one, three = (torch.zeros(2, 16, kv_size + size).to(fp8_dtype if fp8 else dtype) for _ in range(2))
        with launch.executor(emulator):
            latent, rotated = ops.rms_norm(kv, kv_weight, 1e-6), k_pe.clone()
            ops.rope_and_cache_mla(k_pe.clone().unsqueeze(1), rotated, latent, *behind, three, slots, scale)
            separate = *norm(), latent, rotated
            outs = [torch.full_like(x.float(), torch.nan).to(x.dtype) for x in separate]
            given = {"scales_out": outs.pop(1)} if "scales_out" in more else more
            ops.mla_norm_rope_and_cache(qkv, q_weight, kv_weight, 1e-6, *behind, *outs, one, slots, scale, **given)
        ours = outs if len(separate) == 3 else [outs[0], given["scales_out"], *outs[1:]]
        for mine, other in zip((*ours, one), (*separate, three), strict=True):
            assert torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), kind


@pytest.mark.parametrize("is_column_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch_name", CHIPS)
def test_one_launch_gives_the_bits_of_a_product_and_its_quantization(arch_name, dtype, is_column_major):
    """A head's product is rounded in between: its sums are exact in any order, but not in 16 bits."""
    emulator, generator = Emulator(arch_name, races=False), torch.Generator().manual_seed(0)
    x = torch.randint(-9, 10, (TOKENS, 2, 512), generator=generator).to(dtype)
    weights = torch.randint(-9, 10, (2, 128, 512), generator=generator).to(dtype).transpose(1, 2)
    out = torch.full((TOKENS, 2, 128), torch.nan).to(emulator.arch.fp8_dtype)
    scales = torch.full((2, TOKENS) if is_column_major else (TOKENS, 2), torch.nan)
    scales = scales.t() if is_column_major else scales
    with launch.executor(emulator):
        ops.batched_gemm(x, weights, out, scales)
        product = ops.batched_gemm(x, weights)
    assert (product.double() != torch.bmm(x.double().transpose(0, 1), weights.double()).transpose(0, 1)).any()
    values, wanted = rowwise.per_block(product.flatten(1), out.dtype, None, 128, False)
    assert torch.equal(out.view(torch.uint8).flatten(1), values.view(torch.uint8))
    assert torch.equal(scales, wanted)


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch_name", CHIPS)
def test_one_launch_gives_the_bits_of_a_product_and_a_rotation(arch_name, dtype, is_neox):
    """W_UK's product and the rotation of q_pe are fused, as columns of one tensor."""
    emulator, generator = Emulator(arch_name, races=False), torch.Generator().manual_seed(0)
    heads, nope, latent, size = 4, 128, 128, 64
    q = torch.randn(TOKENS, heads, nope + size, generator=generator).to(dtype)
    weights = torch.randn(heads, nope, latent, generator=generator).to(dtype)
    angles = torch.rand(50, size // 2, generator=generator) * 6
    behind = torch.tensor([7, 1, 49]), torch.cat((angles.cos(), angles.sin()), 1).to(dtype), is_neox
    none = torch.zeros(1, 1, latent + size, dtype=dtype), torch.zeros(0, dtype=torch.int64)
    one, two = q.clone(), q.clone()
    with launch.executor(emulator):
        fused = ops.batched_gemm_rope(one[..., :nope], weights, one[..., nope:], *behind)
        separate = ops.batched_gemm(two[..., :nope], weights)
        key, kv = (torch.zeros(TOKENS, columns, dtype=dtype) for columns in (size, latent))
        ops.rope_and_cache_mla(two[..., nope:], key, kv, *behind, *none)
    for mine, other in ((fused, separate), (one, two)):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert not torch.equal(one, q)
