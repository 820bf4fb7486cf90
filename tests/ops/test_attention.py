"""The ops of attention: bugs that their cases catch, and what no case of test_ops.py says."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re

import pytest
import test_waits
import torch
from bugs.mutants import CSRC
from marks import AMD, CHIPS, full
from test_large_tensors import reserved
from test_planted_bugs import WRONG, few_of_bugs, kernels, plant, require_caught  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import launch, op, quantization
from vllm_rocm_ops.core.correctness import check_case, generator_of
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.objects import CodeObject

LEAVES = "leaves another "
DECODE, SUMS, MLA, MLA_64 = (
    "attention/decode.h",
    "attention/decode_sums.h",
    "attention/mla.h",
    "attention/amd/mla_in_lds.h",
)
PART, OUTPUT = "attention/part.h", "attention/output.h"

# As in test_planted_bugs.py.
BUGS = {
    "pairs rotated the wrong way": (
        "attention/rotation.h",
        "rounded_product(x, cos) - rounded_product(y, sin), rounded_product(y, cos) + rounded_product(x, sin)",
        "rounded_product(x, cos) + rounded_product(y, sin), rounded_product(y, cos) - rounded_product(x, sin)",
        ops.rope_and_cache,
        "gptj",
        "gfx942",
        LEAVES + "query",
    ),
    "halves rotated as neighbours": (
        "ops/rope_and_cache.hip",
        "p.is_neox ? vec * kChunk : 2 * vec * kChunk",
        "2 * vec * kChunk",
        ops.rope_and_cache_mla,
        "neox",
        "gfx950",
        LEAVES + "q_pe|argument",
    ),
    "keys unrotated in the cache": (
        "ops/rope_and_cache.hip",
        "store(p.key_cache, head, first, vecs[0]);",
        "store(p.key_cache, head, first, pack<T>(x));",
        ops.rope_and_cache,
        "bf16-native",
        "gfx942",
        LEAVES + "key_cache",
    ),
    "slot off by one": (
        "ops/rope_and_cache.hip",
        "mem::load<i64>(p.slots + token) : -1",
        "mem::load<i64>(p.slots + token) + 1 : -1",
        ops.rope_and_cache,
        "fp16-packed",
        "gfx950",
        LEAVES + "key_cache",
    ),
    "slot -1 written": (
        "ops/rope_and_cache.hip",
        "is_cached = at >= 0;",
        "is_cached = token < p.num_slots;",
        ops.rope_and_cache_mla,
        "bf16-fp8",
        "gfx942",
        "is in no tensor",
    ),
    "slots read behind the last": (
        "ops/rope_and_cache.hip",
        "token < p.num_slots ? mem::load",
        "token >= 0 ? mem::load",
        ops.rope_and_cache,
        "unmapped",
        "gfx942",
        "argument",
    ),
    "scale of K used for V": (
        "ops/rope_and_cache.hip",
        "cache.scale ? mem::load<float>(cache.scale) : 1.0f;",
        "mem::load<float>(p.key_cache.scale);",
        ops.rope_and_cache,
        "bf16-fp8-interleaved",
        "gfx950",
        LEAVES + "value_cache",
    ),
    "keys not normalized": (
        "ops/rope_and_cache.hip",
        "const float inverse_rms = numerics::rsqrt_approx(mean + p.epsilon);",
        "const float inverse_rms = is_key ? 1.0f : numerics::rsqrt_approx(mean + p.epsilon);",
        ops.qk_norm_rope_and_cache,
        "bf16-fp8-packed",
        "gfx950",
        "output key_out: " + WRONG,
    ),
    "keys' latent with another epsilon": (
        "ops/latent_norm_rope_and_cache.hip",
        "kv_size, inverse_kv_size, epsilon}",
        "kv_size, inverse_kv_size, 1.0f}",
        ops.latent_norm_rope_and_cache,
        "bf16-block",
        "gfx950",
        "output kv_out: " + WRONG,
    ),
    "one key masked wrongly": (
        DECODE,
        "const bool is_seen = u32(",
        "const bool is_seen = key != first + 7 && u32(",
        ops.paged_attention_decode,
        "lengths",
        "gfx942",
        WRONG,
    ),
    "a row sees the next token": (
        DECODE,
        "row_end = first_row_end + column",
        "row_end = first_row_end + 1 + column",
        ops.paged_attention_decode,
        "rows-8",
        "gfx950",
        WRONG,
    ),
    "a window one key too small": (
        DECODE,
        "p.window > 0 ? row_end - p.window : 0",
        "p.window > 0 ? row_end - p.window + 1 : 0",
        ops.paged_attention_decode,
        "window",
        "gfx942",
        WRONG,
    ),
    "a page read past the end": (
        PART,
        "return low < end ? low : own;",
        "return low;",
        ops.paged_attention_decode,
        "bf16-64-packed",
        "gfx950",
        "argument|is in no tensor|NaNs differ",
    ),
    "an early page behind the last key used": (
        PART,
        "wave::from_lane(early_pages, clamped(first + lane % kWaveKeys) - first)",
        "early_pages",
        ops.paged_attention_decode,
        "lengths",
        "gfx942",
        "argument|is in no tensor|NaNs differ",
    ),
    "the steps of a part side by side": (
        PART,
        "return step * kStepKeys + wave::index() * kWaveKeys % kStepKeys;",
        "return step / 2 * kStepKeys + wave::index() * kWaveKeys % kStepKeys;",
        ops.paged_attention_decode,
        "lengths-parts",
        "gfx950",
        WRONG,
    ),
    "groups of parts as single ones": (
        OUTPUT,
        "place = group;",
        "",
        ops.paged_attention_decode,
        "tree",
        "gfx942",
        WRONG,
    ),
    "a group added over the next": (
        OUTPUT,
        "first_slot + slots + group : -1",
        "first_slot + group : -1",
        ops.paged_attention_decode,
        "tree",
        "gfx950",
        "overwritten here",
    ),
    "slots behind the last key used": (
        DECODE,
        "as_operand<T>(values.vec[tile][l]) & valid;",
        "as_operand<T>(values.vec[tile][l]);",
        ops.paged_attention_decode,
        "bf16-fp8-64-native",
        "gfx942",
        WRONG,
    ),
    "a part left out of the combine": (
        OUTPUT,
        "if (i >= left) maximum[i] = kLowest;",
        "if (i >= left - 1) maximum[i] = kLowest;",
        ops.paged_attention_decode,
        "long",
        "gfx942",
        WRONG,
    ),
    "MLA: a part left out of those that a block adds": (
        OUTPUT,
        "factor[i] = i < members ? maximum : kLowest;",
        "factor[i] = i < members - 1 ? maximum : kLowest;",
        ops.mla_decode,
        "long",
        "gfx942",
        WRONG,
    ),
    "the last step of a part left out": (
        DECODE,
        "? parts : 0)) < end; step += parts",
        "? parts : 0)) < end - 128 * (step > 0); step += parts",
        ops.paged_attention_decode,
        "partition",
        "gfx950",
        WRONG,
    ),
    "rescale skipped": (
        DECODE,
        "if (wave::count(grows) > 0) {",
        "if (false) {",
        ops.paged_attention_decode,
        "long",
        "gfx950",
        WRONG,
    ),
    "parts added without their maxima": (
        OUTPUT,
        "factor = numerics::exp2_approx(maximum[i] - largest);",
        "factor = i < left;",
        ops.paged_attention_decode,
        "partition",
        "gfx942",
        WRONG,
    ),
    "MLA: parts added without their maxima": (
        OUTPUT,
        "factor[i] = numerics::exp2_approx(factor[i] - largest);",
        "factor[i] = i < members;",
        ops.mla_decode,
        "long",
        "gfx942",
        WRONG,
    ),
    "scale of K used for V in decode": (
        OUTPUT,
        "p.value_cache.scale ? mem::load<float>(p.value_cache.scale)",
        "p.value_cache.scale ? mem::load<float>(p.key_cache.scale)",
        ops.paged_attention_decode,
        "fp16-fp8-128-packed",
        "gfx950",
        WRONG,
    ),
    "a wave's sums missing": (
        SUMS,
        "for (int w = 0; w < kWaves; ++w)\n          total[i] +=",
        "for (int w = 1; w < kWaves; ++w)\n          total[i] +=",
        ops.paged_attention_decode,
        "llama",
        "gfx942",
        WRONG,
    ),
    "a wave's sums missing, of large heads": (
        SUMS,
        "for (int w = 0; w < kWaves; ++w) total += buffer.out",
        "for (int w = 1; w < kWaves; ++w) total += buffer.out",
        ops.paged_attention_decode,
        "bf16-256-packed",
        "gfx942",
        WRONG,
    ),
    "waves' sums without a barrier": (
        SUMS,
        "block_barrier();  // hazard: the waves' sums are read before they are written",
        "{}",
        ops.paged_attention_decode,
        "llama",
        "gfx950",
        "read here|written here|was never written",
    ),
    "sums of the last dims written over": (
        SUMS,
        "if (round > 0) block_barrier();",
        "{}",
        ops.paged_attention_decode,
        "fp16-256-packed",
        "gfx942",
        "read here|written here",
    ),
    "pages of the step before": (
        DECODE,
        "next_pages = pages;",
        "",
        ops.paged_attention_decode,
        "long",
        "gfx942",
        WRONG,
    ),
    "keys of another head": (
        OUTPUT,
        "{row, head * p.group + of_all - row * p.group}",
        "{row, of_all - row * p.group}",
        ops.paged_attention_decode,
        "heads-6-of-2",
        "gfx950",
        "is also written by",
    ),
    "two keys of the scores swapped": (
        "attention/amd/operands.h",
        "row / 4 * 8 + tile * 4 + row % 4",
        "row / 4 * 8 + tile * 4 + (row ^ 1) % 4",
        ops.paged_attention_decode,
        "fp16-64-native",
        "gfx942",
        WRONG,
    ),
    "a sink left out": (
        OUTPUT,
        "sum = sum * before + numerics::exp2_approx(sink - largest);",
        "sum = sum * before;",
        ops.paged_attention_decode,
        "sinks",
        "gfx942",
        WRONG,
    ),
    "heads of out side by side": (
        OUTPUT,
        "of.head * p.out_head_stride",
        "of.head * kD",
        ops.paged_attention_decode,
        "out",
        "gfx942",
        "between its rows",
    ),
    "scale of out left out": (
        OUTPUT,
        "values *= 1.0f / mem::load<float>(p.out_scale);",
        "",
        ops.paged_attention_decode,
        "out-fp8-of-fp8",
        "gfx950",
        "off by",
    ),
    "pairs of e4m3 swapped": (
        OUTPUT,
        "to_e4m3x4(values.lo, values.hi)",
        "to_e4m3x4(values.hi, values.lo)",
        ops.paged_attention_decode,
        "out-fp8",
        "gfx942",
        "off by",
    ),
    "MLA: rows of out as those of the query": (
        OUTPUT,
        "row * p.out_stride",
        "row * p.query_stride",
        ops.mla_decode,
        "out",
        "gfx950",
        "between its rows|problem.out",
    ),
    "MLA: one key masked wrongly": (
        MLA,
        "first + owned_key + i < row_end",
        "first + owned_key + i != 7 && first + owned_key + i < row_end",
        ops.mla_decode,
        "rows-8",
        "gfx942",
        WRONG,
    ),
    "MLA: a row sees the next token": (
        MLA,
        "row_end = first_row_end + this",
        "row_end = first_row_end + 1 + this",
        ops.mla_decode,
        "rows-8",
        "gfx950",
        WRONG,
    ),
    "MLA: a page read past the end": (
        PART,
        "return low < end ? low : own;",
        "return low;",
        ops.mla_decode,
        "bf16-3",
        "gfx950",
        "argument|is in no tensor|NaNs differ",
    ),
    "MLA: a part left out of the combine": (
        MLA,
        "part < parts; part += kWaves",
        "part < parts - 1; part += kWaves",
        ops.mla_decode,
        "partition-many",
        "gfx942",
        WRONG,
    ),
    "MLA: the last step of a part left out": (
        MLA,
        "if (step_key(step) < end) multiply",
        "if (step_key(step) < end - 32 * (step > 0)) multiply",
        ops.mla_decode,
        "partition-many",
        "gfx950",
        WRONG,
    ),
    "MLA: rescale skipped": (
        MLA,
        "if (wave::count(grows) > 0) {",
        "if (false) {",
        ops.mla_decode,
        "page-64-padded",
        "gfx942",
        WRONG,
    ),
    "MLA: the rotated part left out": (
        MLA,
        "if (tile == 0) score = mma::multiply_tile",
        "if (false) score = mma::multiply_tile",
        ops.mla_decode,
        "page-1",
        "gfx950",
        WRONG,
    ),
    "MLA: scale of scores left out": (
        MLA,
        "scale = p.scale * (p.key_cache.scale ? mem::load<float>(p.key_cache.scale) : 1.0f);",
        "scale = p.scale;",
        ops.mla_decode,
        "bf16-fp8-3",
        "gfx942",
        WRONG,
    ),
    "MLA: scale of values left out": (
        OUTPUT,
        "value_scale = p.value_cache.scale ? mem::load<float>(p.value_cache.scale) : 1.0f;",
        "value_scale = 1.0f;",
        ops.mla_decode,
        "fp16-fp8-3",
        "gfx950",
        WRONG,
    ),
    "MLA: values of other keys": (
        MLA,
        "weights[t].lo = from[mma::depth(own) / 16 * 2 + flip];",
        "weights[t].lo = from[mma::depth(own) / 16 * 2];",
        ops.mla_decode,
        "fp16-3",
        "gfx942",
        WRONG,
    ),
    "MLA: elements transposed to other places": (
        "attention/amd/operands.h",
        "return half * 4 + row % 4;",
        "return (half ^ 1) * 4 + row % 4;",
        ops.mla_decode,
        "bf16-17",
        "gfx950",
        WRONG,
    ),
    "MLA: pages of another step": (
        MLA,
        "load_pages(step_key(wave::uniform(step + kStages * parts)))",
        "load_pages(step_key(wave::uniform(step + (kStages - 1) * parts)))",
        ops.mla_decode,
        "long",
        "gfx950",
        WRONG,
    ),
    "MLA: scores without a barrier": (
        MLA,
        "block_barrier();  // hazard: scores of the waves",
        "{}  // hazard: scores of the waves",
        ops.mla_decode,
        "page-1",
        "gfx942",
        "read here|written here",
    ),
    "MLA: p without a barrier": (
        MLA,
        "block_barrier();  // hazard: p is read before",
        "{}  // hazard: p is read before",
        ops.mla_decode,
        "page-1",
        "gfx950",
        "read here|written here",
    ),
    "MLA of 64 columns: one key masked wrongly": (
        MLA_64,
        "first + mma::value_row(of.lane, i) < row_end",
        "first + mma::value_row(of.lane, i) != 7 && first + mma::value_row(of.lane, i) < row_end",
        ops.mla_decode,
        "heads-128",
        "gfx942",
        WRONG,
    ),
    "MLA of 64 columns: a row sees the next token": (
        MLA_64,
        "row_end = of.first_row_end + c.row;",
        "row_end = of.first_row_end + c.row + 1;",
        ops.mla_decode,
        "rows-4",
        "gfx942",
        WRONG,
    ),
    "MLA of 64 columns: sums are not multiplied by a new maximum": (
        MLA_64,
        "if (wave::count(grows) == 0) return;",
        "return;",
        ops.mla_decode,
        "rows-4",
        "gfx950",
        WRONG,
    ),
    "MLA of 64 columns: maxima of a lane, not of a column": (
        MLA_64,
        "largest = attention::reduce_rows(largest, max);",
        "",
        ops.mla_decode,
        "heads-128",
        "gfx950",
        WRONG,
    ),
    "MLA of 64 columns: what rounding changes is not taken back": (
        MLA_64,
        "float factor = rounded > 0.0f ? total / rounded : 0.0f;",
        "float factor = 1.0f;",
        ops.mla_decode,
        "bf16-64",
        "gfx942",
        WRONG,
    ),
    "MLA of 64 columns: values of the wrong row": (
        MLA_64,
        "of.lane / 16 * 4 + k, vec(r)",
        "of.lane / 16 * 4 + (k ^ 1), vec(r)",
        ops.mla_decode,
        "fp16-64",
        "gfx950",
        WRONG,
    ),
    "MLA of 64 columns: elements in other places": (
        MLA_64,
        "return r / 8 * 4 + r % 4;",
        "return r % 8;",
        ops.mla_decode,
        "bf16-64",
        "gfx950",
        "never written",
    ),
    "MLA of 64 columns: the rotated part left out": (
        MLA_64,
        "i < kLatent / 32 ? latent + element : rope + (element - kLatent)",
        "latent + element % kLatent",
        ops.mla_decode,
        "heads-128",
        "gfx942",
        WRONG,
    ),
    "MLA of 64 columns: a pair of vecs swapped": (
        MLA_64,
        "= crossed ? high : low;",
        "= low;",
        ops.mla_decode,
        "bf16-fp8-64",
        "gfx942",
        WRONG,
    ),
    "MLA of 64 columns: scale of scores left out": (
        MLA_64,
        "scale = p.scale * (p.key_cache.scale ? mem::load<float>(p.key_cache.scale) : 1.0f);",
        "scale = p.scale;",
        ops.mla_decode,
        "fp16-fp8-64",
        "gfx950",
        WRONG,
    ),
    "MLA of 64 columns: pages of another unit": (
        MLA_64,
        "load_page(stage, unit + kStages);",
        "load_page(stage, unit + kStages - 1);",
        ops.mla_decode,
        "rows-4",
        "gfx950",
        WRONG,
    ),
    "MLA of 64 columns: keys and weights without a barrier": (
        MLA_64,
        "block_barrier();  // hazard: weights are read before they are written, or keys",
        "{}  // hazard: weights are read before they are written, or keys",
        ops.mla_decode,
        "bf16-64",
        "gfx942",
        "read here|written here|barrier",
    ),
    "MLA of 64 columns: a slot is written over too early": (
        MLA_64,
        "if (d <= kLoads) store_keys(stage, slot, d);",
        "if (d <= kLoads) store_keys(stage, next_slot(slot), d);",
        ops.mla_decode,
        "bf16-64",
        "gfx950",
        "read here|written here",
    ),
    "MLA of 64 columns: blocks of another request": (
        MLA_64,
        "(index - tile * problem.requests) * problem.decode.column_tiles + tile;",
        "index - tile;",
        ops.mla_decode,
        "heads-128",
        "gfx942",
        WRONG,
    ),
    "MLA: a part left out where few are added": (
        MLA,
        "for (int part = 1; part < kWaves; ++part) of_parts[0].add",
        "for (int part = 2; part < kWaves; ++part) of_parts[0].add",
        ops.mla_decode,
        "partition-few",
        "gfx942",
        WRONG,
    ),
    "partial sums counted before they are complete": (
        "device/amd/sync.h",
        "__builtin_amdgcn_s_waitcnt(0x0f70);",
        "",
        ops.paged_attention_decode,
        "long",
        "gfx950",
        "was stored by .*no s_waitcnt",
    ),
}


def only(symbols: set[str], source: str) -> str:
    """The source of an op's kernels with some of them, which compile in a tenth of the time."""
    head, macro, _ = source.partition("#define SIZES" if "#define SIZES" in source else "#define COLUMNS")
    assert macro
    lines = []
    for symbol in symbols:
        kind, fp8, lds, *sizes = re.search(r"_(bf16|fp16)(_fp8)?(_lds)?_(\d+)_?(\w+)?$", symbol).groups()
        element = {"bf16": "Bf16", "fp16": "F16"}[kind]
        cache = "E4m3" if fp8 else element
        if symbol.startswith("mla_decode_combine"):
            lines.append(f"COMBINE({symbol}, MlaCombine, {element}, {sizes[0]})\n")
        elif lds:
            lines.append(f"DECODE_64({symbol}, {element}, {cache})\n")
        elif symbol.startswith("mla_decode"):
            lines.append(f"DECODE({symbol}, {element}, {cache}, {sizes[0]})\n")
        else:
            lines.append(f"INSTANCE({symbol}, {element}, {cache}, {sizes[0]}, {str(sizes[1] == 'native').lower()})\n")
    return head + "".join(sorted(lines))


@pytest.mark.parametrize("bug", few_of_bugs(BUGS))
def test_planted_bug_is_caught(bug, kernels, plant, monkeypatch):  # noqa: F811
    *_, the_op, case_name, arch, _ = BUGS[bug]
    if the_op in (ops.mla_decode, ops.paged_attention_decode):
        case = next(case for case in the_op.cases() if case.name == case_name)
        arguments = the_op.Arguments(*case.make("meta", torch.Generator(), archs.ARCHS[arch].fp8_dtype))
        configs = the_op.configs(arguments, archs.ARCHS[arch])
        plans = [the_op.plan(config, the_op.allocate(arguments), arguments, archs.ARCHS[arch]) for config in configs]
        symbols = {launched.symbol for plan in plans for launched in plan}
        copy = kernels.csrc / "ops" / f"{the_op.name}.hip"
        copy.write_text(only(symbols, (CSRC / "ops" / copy.name).read_text()))
    require_caught(BUGS[bug], plant, monkeypatch)


def inputs(the_op: op.Op, case_name: str, emulator: Emulator) -> tuple:
    case = next(case for case in the_op.cases() if case.name == case_name)
    return case.make("cpu", generator_of(case_name), emulator.arch.fp8_dtype)


DECODES = (ops.paged_attention_decode, ops.mla_decode)


@pytest.mark.parametrize("the_op", DECODES)
def test_parts_of_a_constant_size_give_a_request_the_same_bits_in_any_batch(the_op):
    """And with a block table of any width, whose last part may be cut."""
    emulator = Emulator("gfx942")
    given = the_op.Arguments(*inputs(the_op, "partition", emulator))
    with launch.executor(emulator):
        outs, lses = the_op(*given)
        for r in range(3):
            at = slice(r, r + 1)
            of_request = {name: getattr(given, name)[at] for name in ("block_table", "seq_lens")}
            of_request |= {
                name: getattr(given, name)[at] for name in given._fields if name.startswith("q") and name != "query_len"
            }
            for more in (0, 3) if r == 0 else (0,):
                table = torch.nn.functional.pad(given.block_table[at], (0, more), value=2**30)
                out, lse = the_op(*given._replace(**of_request | {"block_table": table}))
                assert torch.equal(out, outs[at]) and torch.equal(lse, lses[at])


@pytest.mark.parametrize("the_op", DECODES)
def test_any_order_of_blocks_gives_the_same_bits(the_op):
    emulator = Emulator("gfx950", races=False)
    given, found = inputs(the_op, "long", emulator), set()
    with (
        launch.executor(emulator),
        the_op.running(the_op.cheapest(the_op.Arguments(*given), emulator.arch)),
    ):
        for seed in range(4):
            emulator.options = dataclasses.replace(emulator.options, seed=seed)
            found.add(the_op(*given)[1].numpy().tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("the_op", DECODES)
def test_an_out_that_cannot_be_written_is_refused(the_op):
    """Before anything is launched: of another shape or type, with elements in one place, or in memory that another argument has."""
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
        with pytest.raises(ValueError, match="out must be (a tensor where there is an out_scale|e4m3)"):
            ops.paged_attention_decode(*given._replace(out=out))
    with pytest.raises(ValueError, match="out_scale must be float32 with one element"):
        ops.paged_attention_decode(*given._replace(out_scale=torch.ones(2)))


@pytest.mark.parametrize("arch", AMD)
def test_an_out_of_e4m3_is_as_vllm_rounds_it(arch):
    """One key, whose value is the result: exact but for the last rounding. Values beyond the type's limit are clamped."""
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
    with launch.executor(emulator), pytest.warns(UserWarning, match="out's heads lie at multiples of 16 bytes"):
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
            table = given.block_table.where(given.block_table < 2**20, 0)  # pages of other requests, which are there
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


def keys_and_values_wait(code: CodeObject) -> list[str]:
    """The kernels of heads in which a wait leaves neither all keys nor all values of a step under way."""
    wrong = []
    for name in code.kernels:
        (loop,) = test_waits.Flow(code, name).loops()
        fp8, size, _ = re.search(r"(_fp8)?_(\d+)_(\w+)$", name).groups()
        keys = int(size) // (32 if fp8 else 16)
        values = loop.loads - keys - 1  # one of pages
        left = [count for ins in loop.on_path if (count := test_waits.left_in_flight(ins)) is not None]
        if (fp8, size) == ("_fp8", "192"):
            continue  # there values of a step wait for each other once
        if values <= 0 or not left or min(left) < min(keys, values):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("arch", CHIPS)
def test_keys_or_values_stay_in_flight(arch):
    """While a wave waits for its keys, all values are under way, and while for its values all keys; nothing is spilled."""
    code = CodeObject(launch.CODE / arch / "paged_attention_decode.co")
    assert not any(kernel.statistics["scratch"] for kernel in code.kernels.values())
    assert not keys_and_values_wait(code)


def test_planted_wait_for_all_keys_is_seen(kernels):  # noqa: F811
    name, text = "paged_attention_decode_bf16_64_native", "attention::compute_now(score[t][tile]);"
    drained = f"{text}\n__builtin_amdgcn_s_waitcnt(0x0f70);"
    copy = kernels.csrc / "ops" / "paged_attention_decode.hip"  # which other tests have changed
    copy.write_text(only({name}, (CSRC / "ops" / copy.name).read_text()))
    code = CodeObject(kernels.compile(DECODE, text, drained, "paged_attention_decode", name, "gfx942"))
    assert keys_and_values_wait(code) == [name]


@pytest.mark.parametrize("arch", AMD)
def test_nothing_of_mla_is_spilled(arch):
    """And of up to 16 columns a compute unit has two blocks."""
    for name, kernel in CodeObject(launch.CODE / arch / "mla_decode.co").kernels.items():
        spills = [kernel.statistics[kind] for kind in ("scratch", "vgpr_spills", "sgpr_spills")]
        assert not any(spills) and kernel.statistics["lds"] <= archs.ARCHS["gfx942"].lds_bytes, name
        assert kernel.statistics["vgprs"] <= (128 if name.endswith("_1") else 256), name


def test_keys_of_mla_that_only_some_ways_load_are_seen(kernels):  # noqa: F811
    copy = kernels.csrc / "ops" / "mla_decode.hip"
    copy.write_text(only({"mla_decode_bf16_1", "mla_decode_fp16_fp8_1"}, (CSRC / "ops" / copy.name).read_text()))
    for which in ("", "!"):
        text = f"if constexpr ({which}kFp8) load(keys, next);"
        replacement = f"if constexpr ({which}kFp8) if (step_key(step) < end) load(keys, next);"
        kernels.plant(MLA, text, replacement, ["mla_decode"], ["gfx942"])
        loops = test_waits.streaming_loops(kernels.code / "gfx942" / "mla_decode.co")
        wrong = {name: bool(test_waits.faults(loop)) for name, loop in loops}
        planted, other = ("mla_decode_bf16_1", "mla_decode_fp16_fp8_1")[:: 1 if which else -1]
        assert wrong.get(planted, True) and not wrong[other]  # without loads on its steady path a loop does not stream


@full
@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("lens", [(4097,), (1, 0, 33, 1200, 64), tuple(range(97, 130))], ids=["long", "ragged", "many"])
@pytest.mark.parametrize(("heads", "given"), [(16, {"fp8": True}), (128, {"page": 64}), (16, {"query_len": 4})])
def test_long_and_many_requests_of_mla(heads, given, lens, arch):
    of_op, emulator = importlib.import_module("vllm_rocm_ops.ops.mla_decode"), Emulator(arch)
    case = Case(f"{heads} {lens}", functools.partial(of_op._inputs, lens, heads, given))
    with launch.executor(emulator):
        check_case(ops.mla_decode, case, "cpu", emulator.arch)
