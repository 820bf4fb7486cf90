"""Test attention ops beyond their cases, and bugs that their cases catch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from pathlib import Path

import pytest
import test_waits
import torch
from marks import AMD, CHIPS, full
from test_large_tensors import reserved

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch, op, quantization
from vllm_rocm_ops.core.correctness import QUERIES, check_case, generator_of
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.objects import CodeObject


def inputs(the_op: op.Op, case_name: str, emulator: Emulator) -> tuple:
    case = next(case for case in the_op.cases() if case.name == case_name)
    return case.make("cpu", generator_of(case_name), emulator.arch.fp8_dtype)


DECODES = (ops.paged_attention_decode, ops.mla_decode)


@pytest.mark.parametrize("the_op", DECODES)
def test_parts_of_a_constant_size_give_a_request_the_same_bits_in_any_batch(the_op):
    """The block table may have any width, which may cut its last split."""
    emulator = Emulator("gfx942")
    given = the_op.Arguments(*inputs(the_op, "fixed-split", emulator))
    with launch.executor(emulator):
        outs, lses = the_op(*given)
        for r in range(3):
            at = slice(r, r + 1)
            of_request = {name: getattr(given, name)[at] for name in ("block_table", "seq_lens")}
            of_request |= {name: getattr(given, name)[at] for name in given._fields if name in QUERIES}
            for more in (0, 3) if r == 0 else (0,):
                table = torch.nn.functional.pad(given.block_table[at], (0, more), value=2**30)
                out, lse = the_op(*given._replace(**of_request | {"block_table": table}))
                assert torch.equal(out, outs[at]) and torch.equal(lse, lses[at])


@pytest.mark.parametrize(
    ("the_op", "chip", "splits"),
    [(DECODES[0], "gfx950", 16), *((DECODES[1], *each) for each in (("gfx950", 16), ("gfx950", 4), ("gfx942:3", 16)))],
    ids=["heads", "latent", "last-block", "few-units"],
)
def test_any_order_of_blocks_gives_the_same_bits(the_op, chip, splits):
    """Whichever block is last combines splits: of MLA up to four, of which its own are in registers.

    A second launch combines more of MLA, by waves that share the splits or, on a small chip, that have elements of their own.
    """
    emulator = Emulator(chip, races=False)
    given, found = inputs(the_op, "long", emulator), set()
    config = the_op.cheapest(the_op.Arguments(*given), emulator.arch)
    with launch.executor(emulator), the_op.running(dataclasses.replace(config, num_kv_splits=splits)):
        for seed in range(3):
            emulator.options = dataclasses.replace(emulator.options, seed=seed)
            out, lse = the_op(*given)
            found.add(out.view(torch.uint8).numpy().tobytes() + lse.numpy().tobytes())
    assert len(found) == 1
    torch.testing.assert_close(out, the_op.reference(*given)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("the_op", DECODES)
def test_an_out_that_cannot_be_written_is_refused(the_op):
    """Nothing is launched if it has another shape or type, overlapping elements, or memory of another argument."""
    given = the_op.Arguments(*inputs(the_op, "out", Emulator("gfx942")))
    query, out = given[0], given.out
    wrong = {
        "longer": torch.cat((out, out)),
        "flat": out.flatten(1),
        "fp16": out.half(),
        "spread": out[:1].expand_as(out),
        "e4m3 without a scale": out.to(torch.float8_e4m3fn),
    }
    for bad in wrong.values():
        with pytest.raises(ValueError, match=f"{the_op.name}: out must be .*, got "):
            the_op(*given._replace(out=bad))
    cache = next(name for name in given._fields if name.endswith("_cache"))
    for name, bad in (
        ("q", query),
        (cache, getattr(given, cache).as_strided(query.shape, (query[0].numel(), query.shape[2], 1))),
    ):
        with pytest.raises(ValueError, match=f"out must have memory of its own, got some of {name}.*'s"):
            the_op(*given._replace(out=bad))
    behind = torch.empty(2, *query.shape, dtype=query.dtype)
    the_op(*given._replace(**{given._fields[0]: behind[0].copy_(query)}, out=behind[1]))


def test_an_out_scale_without_an_out_for_it_is_refused():
    given = ops.paged_attention_decode.Arguments(*inputs(ops.paged_attention_decode, "out-fp8", Emulator("gfx942")))
    for out in (None, given.out.bfloat16()):
        with pytest.raises(ValueError, match="out must be (a tensor with an out_scale|e4m3)"):
            ops.paged_attention_decode(*given._replace(out=out))
    with pytest.raises(ValueError, match="out_scale must be float32 with one element"):
        ops.paged_attention_decode(*given._replace(out_scale=torch.ones(2)))


@pytest.mark.parametrize("arch", AMD)
def test_an_out_of_e4m3_is_as_vllm_rounds_it(arch):
    """With one key, the result is its value: exact but for the last rounding, and clamped to the type's limit."""
    emulator = Emulator(arch)
    dtype, size = emulator.arch.fp8_dtype, 64
    value = torch.linspace(-15, 15, size).bfloat16().view(1, 1, 1, size)
    scale, out = torch.tensor([0.03]), torch.empty(1, 1, size, dtype=dtype)
    given = value[0], value, value, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1.0
    with launch.executor(emulator):
        ops.paged_attention_decode(*given, out=out, out_scale=scale)
    assert torch.equal(out.float(), quantization.static(value[0].float(), scale, dtype).float())
    assert out.float().abs().max() == quantization.LIMIT[dtype]


def test_an_out_that_kernels_cannot_store_to_is_the_references():
    emulator = Emulator("gfx942")
    given = ops.paged_attention_decode.Arguments(*inputs(ops.paged_attention_decode, "out", emulator))
    apart = torch.zeros(*given.out.shape[:2], 67, dtype=given.out.dtype)[..., 3:]
    with launch.executor(emulator), pytest.warns(UserWarning, match="out's heads are contiguous and 16-byte aligned"):
        empty, _ = ops.paged_attention_decode(*given._replace(out=apart))
    assert empty.numel() == 0
    assert torch.equal(apart, ops.paged_attention_decode.reference(*given._replace(out=None))[0])


@pytest.mark.parametrize("the_op", DECODES)
def test_the_plan_is_that_of_shapes(the_op):
    """A captured graph serves any lengths."""
    emulator = Emulator("gfx942")
    given = the_op.Arguments(*inputs(the_op, "lengths-parts", emulator))
    requests, executed = len(given.seq_lens), []
    caches = {name: getattr(given, name).nan_to_num() for name in given._fields if name.endswith("_cache")}
    with launch.executor(emulator):
        for lens in ([129, 0, 1, 130], [1, 1, 1, 1]):
            table = given.block_table.where(given.block_table < 2**20, 0)  # existing pages of other requests
            now = given._replace(seq_lens=torch.tensor(lens[:requests], dtype=torch.int32), block_table=table, **caches)
            executed.append(the_op._execution(tuple(now)))
            out, lse = the_op(*now)
            wanted, wanted_lse = the_op.reference(*now)
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    assert executed[0] is executed[1]


@pytest.mark.parametrize("layout", [pytest.param("packed", marks=full), "native"])
def test_pages_behind_4_gb(layout):
    """Slots are written there and read there."""
    pages, heads, page, size = 3 * 2**19, 1, 16, 128
    if layout == "packed":
        both = reserved((pages, heads, page, 2 * size), torch.bfloat16)
        caches = both.transpose(1, 2).split(size, -1)
    else:
        caches = (
            reserved((pages, heads, size // 8, page, 8), torch.bfloat16),
            reserved((pages, heads, size, page), torch.bfloat16),
        )
    assert caches[0].stride(0) * (pages - 1) * 2 > 2**32
    tokens = 20
    table = torch.tensor([[pages - 1, 2**18 + 3]], dtype=torch.int32)
    slots = torch.arange(tokens)
    slots = table[0, slots // page].long() * page + slots % page
    query, key, value = (torch.randn(tokens, size, generator=generator_of(name)).bfloat16() for name in "qkv")
    cos_sin = torch.cat((torch.ones(tokens, size // 2), torch.zeros(tokens, size // 2)), 1)
    emulator = Emulator("gfx942")
    with launch.executor(emulator):
        ops.rope_and_cache(query, key, value, torch.arange(tokens), cos_sin, True, *caches, slots)
        given = (query[-1:], *caches, table, torch.tensor([tokens], dtype=torch.int32), 0.1)
        out, _ = ops.paged_attention_decode(*given)
    weights = (query[-1:].float() @ key.float().t() * 0.1).softmax(-1)
    torch.testing.assert_close(out.float(), weights @ value.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ops.paged_attention_decode.reference(*given)[0], out, rtol=2e-2, atol=2e-2)


def keys_and_values_wait(path: Path) -> list[str]:
    """Return the kernels of heads in which a wait leaves neither all keys nor all values of an iteration in flight."""
    wrong, code = [], CodeObject(path)
    for name in code.kernels:
        (loop,) = test_waits.Flow(code, name).loops()
        fp8, size, _ = re.search(r"(_fp8)?_(\d+)_(\w+)$", name).groups()
        keys = (128 if size == "256" else int(size)) // (32 if fp8 else 16)  # two waves divide heads of 256
        values = loop.loads - keys - 1  # one load of pages
        left = [count for ins in loop.on_path if (count := test_waits.left_in_flight(ins)) is not None]
        if (fp8, size) == ("_fp8", "192"):
            continue  # these kernels wait once for each other's values of an iteration
        if values <= 0 or not left or min(left) < min(keys, values):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("arch", CHIPS)
def test_keys_or_values_stay_in_flight(arch):
    """All values are in flight while a wave waits for keys, and all keys while it waits for values; nothing is spilled."""
    path = launch.CODE / arch / "paged_attention_decode.co"
    assert not any(kernel.statistics["scratch"] for kernel in CodeObject(path).kernels.values())
    assert not keys_and_values_wait(path)


@pytest.mark.parametrize("arch", AMD)
def test_nothing_of_mla_is_spilled(arch):
    """Up to 16 packed-GQA rows, a compute unit holds two blocks."""
    for name, kernel in CodeObject(launch.CODE / arch / "mla_decode.co").kernels.items():
        spills = [kernel.statistics[kind] for kind in ("scratch", "vgpr_spills", "sgpr_spills")]
        assert not any(spills) and kernel.statistics["lds"] <= archs.ARCHS["gfx942"].lds_bytes, name
        assert kernel.statistics["vgprs"] <= (128 if name.endswith("_1") else 256), name


@full
@pytest.mark.parametrize("lens", [(4097,), (1, 0, 33, 1200, 64), tuple(range(97, 130))], ids=["long", "ragged", "many"])
@pytest.mark.parametrize(
    ("heads", "given", "arch"),
    [(16, {"fp8": True}, AMD[0]), (128, {"page": 64}, AMD[-1]), (16, {"query_len": 4}, AMD[-1])],
)
def test_long_and_many_requests_of_mla(heads, given, lens, arch):
    of_op, emulator = importlib.import_module("vllm_rocm_ops.ops.mla_decode"), Emulator(arch)
    case = Case(f"{heads} {lens}", functools.partial(of_op._inputs, lens, heads, given))
    with launch.executor(emulator):
        check_case(ops.mla_decode, case, "cpu", emulator.arch)
