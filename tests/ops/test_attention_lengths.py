"""Test decode attention over many keys, over caches of more than 4 GB, and over keys and values without pages."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from marks import AMD, full
from test_large_tensors import reserved

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import check_case, generator_of
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.cases import executable

ARCHS = pytest.mark.parametrize("arch", AMD)
LLAMA = {"layout": "native", "wider": 0}
LONG = {
    "heads": (ops.paged_attention_decode, (131072,), (16, 1), 128, LLAMA),
    "heads fp8": (ops.paged_attention_decode, (131071, 3), (8, 1), 128, {"fp8": True, "page": 32}),
    "window": (ops.paged_attention_decode, (131072,), (4, 1), 64, {"window": 70000}),
    "constant parts": (ops.paged_attention_decode, (131072, 700), (4, 1), 64, {"fixed_split_size": 512}),
    "latent": (ops.mla_decode, (131072,), 16, {"fp8": True}),
    "latent rows": (ops.mla_decode, (131070, 1), 16, {"query_len": 2}),
}


SHORTER = {
    "4097 keys": (ops.paged_attention_decode, (4097,), (2, 1), 64, LLAMA),
    "33 requests": (ops.paged_attention_decode, tuple(range(33)), (2, 1), 64, LLAMA),
    "latent, 4097 keys": (ops.mla_decode, (4097,), 2, {"fp8": True, "wider": 0}),
    "latent, 33 requests": (ops.mla_decode, tuple(range(33)), 2, {"wider": 0}),
}


def check_lengths(the_op, sizes: tuple, arch: str) -> None:
    """Check a case of these sizes, in the default configuration."""
    of_op, emulator = importlib.import_module(f"vllm_rocm_ops.ops.{the_op.name}"), Emulator(arch, races=False)
    case = Case(str(sizes), functools.partial(of_op._inputs, *sizes))
    given = the_op.Arguments(*case.make("meta", torch.Generator(), emulator.arch.fp8_dtype))
    with launch.executor(emulator):
        check_case(the_op, case, "cpu", emulator.arch, [the_op.cheapest(given, emulator.arch)])


FIXED = {
    ops.paged_attention_decode: ((900,), (2, 1), 64, LLAMA | {"fixed_split_size": 256}),
    ops.mla_decode: ((900,), 2, {"wider": 0, "fixed_split_size": 256}),
}


@pytest.mark.parametrize("the_op", FIXED, ids=lambda o: o.name)
def test_fixed_splits_have_the_same_bits_whatever_the_block_table_has_room_for(the_op):
    emulator = Emulator("gfx942", races=False)
    of_op = importlib.import_module(f"vllm_rocm_ops.ops.{the_op.name}")
    case = Case("fixed", functools.partial(of_op._inputs, *FIXED[the_op]))
    given = the_op.Arguments(*case.make("cpu", generator_of("fixed"), emulator.arch.fp8_dtype))
    with launch.executor(emulator):
        narrow, wide = (
            the_op.call(*given._replace(block_table=torch.nn.functional.pad(given.block_table, (0, more))))
            for more in (0, 100)
        )
    assert all(map(torch.equal, narrow, wide))


def test_fixed_splits_of_latents_are_combined_alike_in_any_batch():
    """Waves that fill the GPU add all splits of their elements, in another order, but not if splits are fixed."""
    of_op, arch, found = importlib.import_module("vllm_rocm_ops.ops.mla_decode"), Emulator("gfx942").arch, {}
    for size in (0, 128):
        for requests in (1, 100):
            given = {"fixed_split_size": size, "wider": 50}
            case = Case("many", functools.partial(of_op._inputs, (1500,) * requests, 2, given))
            a = ops.mla_decode.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
            config = of_op._configs(a, arch)[-1]
            found[size, requests] = ops.mla_decode.plan(config, ops.mla_decode.allocate(a), a, arch)[-1].grid[1]
    assert found[128, 1] == found[128, 100] and found[0, 1] != found[0, 100]


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=full)])
@pytest.mark.parametrize("name", SHORTER)
def test_thousands_of_keys_and_many_requests(name, arch):
    the_op, *sizes = SHORTER[name]
    check_lengths(the_op, sizes, arch)


@full
@ARCHS
@pytest.mark.parametrize("name", LONG)
def test_131072_keys(name, arch):
    """A model's longest request has this length."""
    the_op, *sizes = LONG[name]
    check_lengths(the_op, sizes, arch)


@full
@ARCHS
@pytest.mark.parametrize("fp8", [False, True])
def test_pages_of_a_latent_behind_4_gb(arch, fp8):
    """Slots are written there and read there."""
    emulator = Emulator(arch)
    page, row, tokens = 16, 576, 20
    pages = 2**32 // (page * row * (1 if fp8 else 2)) + 9
    cache = reserved((pages, page, row), emulator.arch.fp8_dtype if fp8 else torch.bfloat16)
    assert cache.stride(0) * (pages - 1) * cache.element_size() > 2**32
    table, scale = torch.tensor([[pages - 1, 5]], dtype=torch.int32), torch.tensor([0.05]) if fp8 else None
    slots = torch.arange(tokens)
    slots = table[0, slots // page].long() * page + slots % page
    q_nope, q_pe, latent, k_pe = (
        torch.randn(*shape, generator=generator_of(str(shape))).bfloat16()
        for shape in ((1, 2, 512), (1, 2, 64), (tokens, 512), (tokens, 64))
    )
    cos_sin = torch.cat((torch.ones(tokens, 32), torch.zeros(tokens, 32)), 1)
    rotated = q_pe.expand(tokens, -1, -1).contiguous()
    with launch.executor(emulator):
        ops.rope_and_cache_mla(rotated, k_pe, latent, torch.arange(tokens), cos_sin, True, cache, slots, scale)
        given = q_nope, q_pe, cache, table, torch.tensor([tokens], dtype=torch.int32), 0.05, 1, scale
        out, _ = ops.mla_decode(*given)
    keys = torch.cat((latent, k_pe), 1).float()
    weights = (torch.cat((q_nope, q_pe), 2)[0].float() @ keys.t() * 0.05).softmax(-1)
    near = 0.15 if fp8 else 2e-2
    torch.testing.assert_close(out[0].float(), weights @ latent.float(), rtol=near, atol=near)
    torch.testing.assert_close(ops.mla_decode.reference(*given)[0], out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=full)])
@pytest.mark.parametrize("lens", [(150, 1, 0, 37), pytest.param((4097, 4096, 513), marks=full)])
def test_keys_and_values_without_pages(arch, lens):
    """The layout is [requests, N, heads, size]: each request is one page, of any length."""
    requests, n, heads, size = len(lens), max(lens), 2, 64
    generator = generator_of(str(lens))
    query = torch.randn(requests, 4, size, generator=generator).bfloat16()
    keys, values = (torch.randn(requests, n, heads, size, generator=generator).bfloat16() for _ in range(2))
    places = torch.arange(requests, dtype=torch.int32)[:, None]
    with launch.executor(Emulator(arch)):
        given = query, keys, values, places, torch.tensor(lens, dtype=torch.int32), 0.125
        assert ops.paged_attention_decode.explain(*given, arch=arch).launches
        out, _ = ops.paged_attention_decode(*given)
    for r, length in enumerate(lens):
        k, v = (x[r, :length].double().repeat_interleave(2, 1) for x in (keys, values))
        weights = (torch.einsum("hd,nhd->hn", query[r].double(), k) * 0.125).softmax(-1)
        wanted = torch.einsum("hn,nhd->hd", weights, v)
        assert (out[r].double() - wanted).abs().max() < 0.02 if length else not out[r].any()


@pytest.mark.parametrize("name", ["paged_attention_decode", "mla_decode"])
def test_a_part_loads_no_other_parts_keys(name):
    """Iterations prefetched beyond a split's last one load its own keys; only a block's last lines may load others."""
    the_op, emulator, keys = getattr(ops, name), Emulator("gfx942", races=False, traffic=True), 1024
    table, lens = torch.arange(keys // 16, dtype=torch.int32)[None], torch.tensor([keys], dtype=torch.int32)
    if the_op is ops.mla_decode:
        cache = torch.zeros(keys // 16, 16, 576, dtype=torch.bfloat16)
        given = torch.zeros(1, 2, 512).bfloat16(), torch.zeros(1, 2, 64).bfloat16(), cache, table, lens, 0.1
    else:
        cache = torch.zeros(keys // 16, 1, 16, 16, 8, dtype=torch.bfloat16)
        given = torch.zeros(1, 2, 128).bfloat16(), cache, torch.zeros_like(cache).view(-1, 1, 128, 16), table, lens, 0.1
    first, *_ = executable(the_op.explain(*given, arch=emulator.arch).launches)
    blocks = first.grid[0] * first.grid[1]
    counted = emulator.run(launch.code_object(first.module, "gfx942"), first, (), list(range(blocks)))
    names = [f"argument {name}" for name in first.named if name.endswith("cache.data")]
    regions = [" and ".join(names)] if the_op is ops.mla_decode else names
    lines = [counted.traffic.lines_loaded(region) for region in regions]
    assert blocks >= 8 and all(cache.nbytes <= loaded * 128 < 1.15 * cache.nbytes for loaded in lines), lines
