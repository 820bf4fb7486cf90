"""Test flash_attention beyond its cases, and bugs that its cases catch."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import pytest
import torch
from formulas import random_words
from marks import AMD, full
from op_tests import test_case  # noqa: F401
from test_large_tensors import reserved

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.correctness import check_case, generator_of
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.standalone import flash
from vllm_rocm_ops.tools.bench.attention import attention


def inputs(case_name: str):
    case = next(case for case in ops.flash_attention.cases() if case.name == case_name)
    return ops.flash_attention.Arguments(*case.make("cpu", generator_of(case_name), torch.float8_e4m3fn))


def test_random_words_are_the_published_ones():
    """The reference, and the formula that checks it, give the known answers of Random123."""
    ones, pi = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, words in (
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        found = flash.philox(tuple(torch.tensor(word) for word in counter), seed)
        assert tuple(int(word) for word in found) == random_words(counter, seed) == words


def test_dropout_keeps_its_share():
    given = inputs("dropout")._replace(dropout=0.3)
    *_, mask = ops.flash_attention.reference(*given)
    assert abs(mask.float().mean() - 0.7) < 0.02
    *_, other = ops.flash_attention.reference(*given._replace(seed=given.seed + 1))
    assert 0.4 < (mask == other).float().mean() < 0.7


def test_tiles_that_blocks_take_in_any_order_give_the_same_bits():
    """Two calls in a row show that the counter is left at zero."""
    emulator, given, found = Emulator("gfx950:1", races=False), inputs("persistent"), set()
    emulator_options = emulator.options
    for tiles in ("each", "fixed", "dynamic"):
        with launch.executor(emulator), ops.flash_attention.running(flash.FlashConfig(tiles)):
            for seed in (None, 1) if tiles == "dynamic" else (None,):
                emulator.options = dataclasses.replace(emulator_options, seed=seed)
                found.add(ops.flash_attention(*given)[0].view(torch.int16).numpy().tobytes())
    assert len(found) == 1


def test_the_plan_is_that_of_shapes():
    """A captured graph serves any lengths that fit."""
    emulator, given = Emulator("gfx942"), inputs("lengths")
    rows, keys = given.cu_seqlens_q, given.cu_seqlens_k
    executed = []
    with launch.executor(emulator):
        for begins in (rows, rows.clamp(max=8), torch.where(rows > 0, rows[-1], 0)):
            now = given._replace(cu_seqlens_q=begins.to(torch.int32), cu_seqlens_k=keys.flip(0).neg().add(keys[-1]))
            executed.append(ops.flash_attention._execution(tuple(now)))
            out, _, _ = ops.flash_attention(*now)
            wanted, _, _ = ops.flash_attention.reference(*now)
            some = slice(0, int(begins[-1]))
            torch.testing.assert_close(out[some], wanted[some], rtol=2e-2, atol=2e-2)
    assert len({id(one) for one in executed}) == 1


@full
def test_keys_behind_4_gb():
    """The keys are a batch's, then pages of a cache."""
    generator, size = generator_of("4 GB"), 64
    q = torch.randn(2, 3, 1, size, generator=generator).bfloat16()
    k, v = (torch.randn(2, 20, 1, size, generator=generator).bfloat16() for _ in range(2))
    wanted, _, _ = ops.flash_attention.reference(q, k, v, 0.1)
    far = [reserved((2**31 + 2**20,), torch.bfloat16).as_strided(k.shape, (2**31, size, size, 1)) for _ in range(2)]
    for one, values in zip(far, (k, v)):
        one.copy_(values)
    with launch.executor(Emulator("gfx942")):
        out, _, _ = ops.flash_attention(q, *far, 0.1)
        pages = 3 * 2**19
        both = reserved((pages, 1, 16, 2 * size), torch.bfloat16).transpose(1, 2)
        table = torch.tensor([[pages - 1, 5], [7, pages - 2]], dtype=torch.int32)
        for b in range(2):
            places = torch.arange(20)
            both[table[b, places // 16].long(), places % 16] = torch.cat((k[b], v[b]), -1)
        begins, lens = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([20, 20], dtype=torch.int32)
        caches = both.split(size, -1)
        options = {"layout": "thd", "cu_seqlens_q": begins, "block_table": table, "seq_lens": lens}
        paged, _, _ = ops.flash_attention(q.flatten(0, 1), *caches, 0.1, **options)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(paged.view(wanted.shape), wanted, rtol=2e-2, atol=2e-2)


def test_no_call_that_kernels_do_not_take_is_left_without_a_reason():
    arch = archs.ARCHS["gfx942"]
    for case, reason in (("fp32", "q is bfloat16"), ("full", "")):
        explanation = ops.flash_attention.explain(*inputs(case), arch=arch)
        assert explanation.is_fallback == bool(reason) and reason in explanation.source


def test_kernels_take_the_shapes_that_are_timed():
    """Work is counted once for each score that a causal row sees."""
    for shape in attention():
        arguments = shape.case.make("meta", torch.Generator(), torch.float8_e4m3fn)
        explanation = ops.flash_attention.explain(*arguments, arch="gfx942")
        (planned,) = explanation.launches
        assert "general" not in planned.symbol
    rows, keys = 1024, 1024
    full, causal = (
        next(s.sizes["flops"] for s in attention() if ("causal" in s.case.name) == is_causal)
        for is_causal in (False, True)
    )
    assert full == 4 * 16 * 128 * rows * keys and causal == full * (rows + 1) // (2 * rows)


# perf-kernels' shapes, at sizes for the emulator: batch, heads, key heads, rows, keys, size.
SHAPES = (
    *(
        (1, 4, 2, 102, 98, 128),
        (1, 4, 1, 155, 2, 128),
        (1, 2, 1, 7, 1621, 64),
        (2, 4, 2, 1, 1, 64),
        (2, 4, 4, 3, 3, 128),
    ),
    *(
        (1, 2, 2, 301, 290, 64),
        (1, 2, 1, 128, 128, 33),
        (2, 4, 2, 65, 101, 65),
        (2, 2, 2, 113, 123, 1),
        (1, 2, 1, 70, 90, 80),
    ),
    *((1, 2, 2, 70, 65, (192, 128)), (1, 2, 1, 65, 70, 256), (1, 1, 1, 129, 257, 256)),
)
KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "alibi": {"alibi": True, "causal": True},
    "bias": {"bias": torch.float16, "dtype": torch.float16},
    "int8": {"q": "int8", "kv": "int8", "dtype": torch.float16, "causal": True},
    "int8 weights": {"q": "int8", "kv": "int8", "p_scale": True, "dtype": torch.float16},
    "int8 keys": {"kv": "int8"},
    "fp8": {"q": "fp8", "kv": "fp8"},
    "bhsd transposed": {"layout": "bhsd", "transposed": True},
    "dropout": {"dropout": 0.2, "return_mask": True},
}


@full
@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_perf_kernels(shape, kind, arch):
    batch, heads, kv_heads, rows, keys, size = shape
    make = importlib.import_module("vllm_rocm_ops.ops.standalone.flash_attention")._inputs
    given = KINDS[kind] | {"batch": batch}
    case = Case(f"{shape} {kind}", functools.partial(make, rows, keys, (heads, kv_heads), size, given))
    emulator = Emulator(arch)
    with launch.executor(emulator):
        check_case(ops.flash_attention, case, "cpu", emulator.arch)


@full
@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_sequences(causal, arch):
    make = importlib.import_module("vllm_rocm_ops.ops.standalone.flash_attention")._inputs
    rows, keys = (1, 7, 128, 300, 0, 129), (1, 70, 128, 290, 5, 1000)
    for given in ({}, {"cache": "packed"}, {"cache": "native"}, {"cache": "packed", "kv": "fp8", "page": 64}):
        given = given | {"layout": "thd", "causal": causal}
        case = Case(f"lengths {given}", functools.partial(make, rows, keys, (2, 1), 128, given))
        emulator = Emulator(arch)
        with launch.executor(emulator):
            check_case(ops.flash_attention, case, "cpu", emulator.arch)
