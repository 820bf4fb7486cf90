"""Plausible mistakes in kernels and seams, each a change of one line, and the tests that catch it: python tests/bugs [names]

Those of seams are in seam_mutants.py, which has them imported. Each mutant of a kernel is compiled in a folder of its own, and tests
run on that code until one fails: those that it names, with --full; else all of tests/ops that concern an op which launches a kernel
of a module that includes the file, first as they run by default, and where none of these fails, with --full. A table
lists the tests that failed. The exit status is 1 if a mutant survives that is not marked as equivalent. Without names all
mutants run. The mistakes in test_planted_bugs.py run with every test command, and are not repeated here.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from load_build import load_build
from marks import AMD

from .seam_mutants import SEAM_MUTANTS, SeamMutant

TESTS = Path(__file__).resolve().parents[1]
CSRC = TESTS.parent / "csrc"
CODE = TESTS.parent / "vllm_rocm_ops" / "code"


class DoesNotFit(AssertionError):
    """The text that a mutant replaces is not in its file."""


class KernelCopy:
    """A copy of the kernels' sources and of the code objects that ship. Modules, or one kernel, can be built with a mistake in them."""

    def __init__(self, root: Path):
        shutil.copytree(CSRC, root / "csrc")
        self._build = load_build(root / "csrc")
        for path in CODE.glob("*/*.*"):
            link = self.code / path.relative_to(CODE)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)

    @property
    def code(self) -> Path:
        return self._build.CODE

    @property
    def csrc(self) -> Path:
        return self._build.CSRC

    def plant(self, file: str, text: str, replacement: str, modules: Iterable[str], archs: Iterable[str]) -> None:
        """Build the modules with one text replaced. The sources stay as they were."""
        with self._replaced(file, text, replacement):
            self._build.build(sorted(modules), list(archs))

    def compile(self, file: str, text: str, replacement: str, module: str, symbol: str, arch: str) -> Path:
        """One kernel with one text replaced, as a code object of its own: of a module's other kernels only their names are left."""
        stamp = json.loads((CODE / arch / f"{module}.json").read_text())
        others = [other for other in stamp["kernels"] if other != symbol]
        # A template that nobody calls is read, no more.
        left_out = "{0}(...)={0}(__VA_ARGS__); template <int> __attribute__((device)) void {0}_left_out(__VA_ARGS__)"
        code = self.code.with_name("kernels") / arch / f"{symbol}.co"
        with self._replaced(file, text, replacement):
            source = self.csrc / "ops" / f"{module}.hip"
            self._build.compile_source(source, arch, code, [left_out.format(other) for other in others])
        code.with_suffix(".json").write_text(json.dumps({"kernels": {symbol: stamp["kernels"][symbol]}}))
        return code

    @contextlib.contextmanager
    def _replaced(self, file: str, text: str, replacement: str) -> Iterator[None]:
        path = self.csrc / file
        original = path.read_text()
        if text not in original:
            raise DoesNotFit(f"{file} does not hold {text!r}")
        try:
            path.write_text(original.replace(text, replacement))
            yield
        finally:
            path.write_text(original)


@dataclass(frozen=True)
class Mutant:
    """`text` is replaced in csrc/`file`, and `module`, by default each that includes the file, is built for the archs that the tests
    name. `equivalent` is the reason why no test can see the change."""

    file: str
    text: str
    replacement: str
    module: str = ""
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def modules(self) -> list[str]:
        return [self.module] if self.module else [m.stem for m in CSRC.glob("ops/*.hip") if self.file in included(m)]

    @property
    def archs(self) -> list[str]:
        return [arch for arch in AMD if any(arch in test for test in self.tests)] or list(AMD)

    @property
    def change(self) -> str:
        return " ".join(f"{self.text} -> {self.replacement or '(nothing)'}".split()).replace("|", "\\|")


@functools.cache
def included(path: Path) -> frozenset[str]:
    """A source of kernels and all headers that it includes, by their paths in csrc."""
    found, left = set(), [path]
    while left:
        of = left.pop()
        if of not in found and of.exists():
            found.add(of)
            names = re.findall(r'^#include "(.*)"', of.read_text(), re.MULTILINE)
            left += [(of.parent / name).resolve() if (of.parent / name).exists() else CSRC / name for name in names]
    return frozenset(of.relative_to(CSRC).as_posix() for of in found)


@functools.cache
def launched_by() -> dict[str, set[str]]:
    """The ops of which a case launches a kernel of a module, by module."""
    import torch

    from vllm_rocm_ops.core import arch, op

    found = collections.defaultdict(set)
    for of, (the_op, case) in itertools.product(
        map(arch.named, AMD), ((o, c) for o in op.registered() for c in o.cases())
    ):
        a = the_op.Arguments(*case.make("meta", torch.Generator(), of.fp8_dtype))
        for config in the_op.configs(a, of):
            for launched in the_op.plan(config, the_op.allocate(a), a, of):
                found[launched.module].add(the_op.name)
    return found


def cases(op: str, *names: str, arch: str = "gfx942") -> tuple[str, ...]:
    """Cases of an op in test_ops.py."""
    arch = {"gfx950": "gfx950:3"}.get(arch, arch)
    return tuple(f"test_ops.py::test_case[{arch}-{op}-{name}]" for name in names)


def gated(path: str, text: str, replacement: str, *names: str) -> Mutant:
    """Return a mutant of the kernels with SwiGLU in their epilogue."""
    op = "scaled_mm_silu_and_mul_quant"
    return Mutant(path, text, replacement, "scaled_mm", cases(op, *names))


def normed(text: str, replacement: str, *names: str) -> Mutant:
    """Return a mutant of the kernels that normalize, rotate and write."""
    op = "qk_norm_rope_and_cache"
    return Mutant("ops/rope_and_cache.hip", text, replacement, "rope_and_cache", cases(op, *names))


def latent(text: str, replacement: str, *names: str) -> Mutant:
    """Return a mutant of the kernels between latent attention's first projection and its scores."""
    op = "latent_norm_rope_and_cache"
    return Mutant(f"ops/{op}.hip", text, replacement, op, cases(op, *names))


def large(test: str) -> tuple[str, ...]:
    return (f"test_large_tensors.py::{test}",)


RMS, TILED = "ops/rms_norm.hip", "ops/scaled_mm_tiled.hip"
SCHEDULE, EPILOGUE, WAVE_SPLIT_K = (f"gemm/skinny/{file}.h" for file in ("schedule", "epilogue", "wave_split_k"))
EXPERTS, EXPERTS_TILED, ROUTING = "ops/fused_experts.hip", "ops/fused_experts_tiled.hip", "ops/moe_routing.hip"
GROUP_PAIRS = "gemm/group_pairs.h"
MX, FLOAT8, ROW_OUTPUT = "ops/mxfp8_scaled_mm.hip", "device/float8.h", "device/row_output.h"
PER_TOKEN, PER_BLOCK = "silu_and_mul_per_token_quant", "silu_and_mul_per_block_quant"
NO_MINIMUM = "numerics::kE4m3Max), 1e-30f)"  # but a little one, as a row of zeros is not divided by zero

MUTANTS = {
    # Scales and special values
    "divisor not bounded to the largest finite number": Mutant(
        FLOAT8,
        "value(__builtin_fminf(scale, __FLT_MAX__))",
        "value(scale)",
        "silu_and_mul",
        cases(PER_TOKEN, "bf16-special"),
    ),
    "infinite quotients of pairs refined": Mutant(
        FLOAT8,
        "return {refined.x == refined.x ? refined.x : quotient.x, refined.y == refined.y ? refined.y : quotient.y};",
        "return refined;",
        "silu_and_mul",
        cases(PER_TOKEN, "scale_ub-0.5"),
    ),
    "inverse of an infinite scale not 0": Mutant(
        FLOAT8,
        "inverse = scale == value ? refined : 0.0f;",
        "inverse = refined;",
        "silu_and_mul",
        cases(PER_TOKEN, "bf16-special"),
    ),
    "a bound below the least scale (norm, token)": Mutant(
        ROW_OUTPUT,
        "return absmax_to_scale(bounded(absmax));",
        "return bounded(absmax_to_scale(absmax));",
        "rms_norm",
        cases("rms_norm_dynamic_per_token_quant", "scale_ub-1e-09"),
    ),
    "a bound below the least scale (norm, block)": Mutant(
        ROW_OUTPUT,
        "return absmax_to_scale(bounded(absmax));",
        "return __builtin_fminf(absmax_to_scale(absmax), loaded_scale / numerics::kE4m3Max);",
        "rms_norm",
        cases("rms_norm_per_block_quant", "scale_ub-1e-09"),
    ),
    "an infinite quotient refined": Mutant(
        FLOAT8,
        "return refined == refined ? refined : quotient;",
        "return refined;",
        "rms_norm",
        cases("fused_add_rms_norm", "fp16-corners", "fp16-special"),
    ),
    "a bound below the least scale (activation)": Mutant(
        ROW_OUTPUT,
        "return __builtin_fmaxf(bounded(absmax_to_scale(absmax)), kMinScale);",
        "return bounded(absmax_to_scale(absmax));",
        "silu_and_mul",
        cases(PER_BLOCK, "scale_ub-1e-09"),
    ),
    "no least scale (activation)": Mutant(
        FLOAT8, "numerics::kE4m3Max), kMinScale)", NO_MINIMUM, "silu_and_mul", cases(PER_TOKEN, "bf16-corners")
    ),
    "no least scale (norm)": Mutant(
        FLOAT8,
        "numerics::kE4m3Max), kMinScale)",
        NO_MINIMUM,
        "rms_norm",
        cases("rms_norm_per_block_quant", "fp16-corners"),
    ),
    "least scale twice as large": Mutant(
        FLOAT8,
        "kE4m3Max * 512.0f",
        "kE4m3Max * 256.0f",
        "rms_norm",
        cases("rms_norm_per_block_quant", "fp16-corners"),
    ),
    "clamps in the other order": Mutant(
        "device/amd/numerics.h",
        "__builtin_fmaxf(__builtin_fminf(x, kE4m3Max), -kE4m3Max)",
        "__builtin_fminf(__builtin_fmaxf(x, -kE4m3Max), kE4m3Max)",
        "rms_norm",
        cases("fused_add_rms_norm_static_fp8_quant", "fp16-corners", "bf16-special"),
    ),
    "ties to bf16 rounded up": Mutant(
        "device/amd/numerics.h",
        "bits += ((bits >> 16) & 1) + 0x7fff;",
        "bits += 0x8000;",
        "rms_norm",
        cases("fused_add_rms_norm", "bf16"),
    ),
    "log2(e) to three places": Mutant(
        "device/vec.h", "-1.4426950408889634f", "-1.443f", "silu_and_mul", cases("silu_and_mul", "bf16")
    ),
    "ties at 448 rounded over": Mutant(
        "device/float8.h",
        "(1 << kMantissa) / 4 - 1",
        "(1 << kMantissa) / 4",
        "fused_experts_quantize",
        ("test_fused_experts_quantize.py::test_rows_are_quantised_per_32[32-dtype0]",),
    ),
    "e8m0 255 becomes infinity": Mutant(
        "device/scale.h",
        "return __builtin_fmaf(power, 0.0f, power);",
        "return power;",
        "block_scaled_mm",
        ("test_block_scaled_mm.py::test_every_e8m0_scale[skinny-a-gfx942]",),
    ),
    "2^-127 becomes 0": Mutant(
        "device/scale.h",
        "__builtin_elementwise_max(scale << 23, kSmallest)",
        "scale << 23",
        "block_scaled_mm",
        ("test_block_scaled_mm.py::test_every_e8m0_scale[widened-a-gfx942]",),
    ),
    # Rows
    "residual read at input's stride": Mutant(
        RMS,
        "(u16*)residual + index * residual_stride",
        "(u16*)residual + index * input_stride",
        "rms_norm",
        cases("fused_add_rms_norm", "strided", "bf16-general"),
    ),
    "a reduction reads a slot beyond its waves": Mutant(
        "device/reduce.h", "slot < waves ?", "slot <= waves ?", "rms_norm", cases("rms_norm", "bf16")
    ),
    "rows of a norm's output in 32 bits": Mutant(
        ROW_OUTPUT,
        "(u8*)out + row * columns *",
        "(u8*)out + int(row * columns) *",
        "rms_norm",
        large("test_last_of_many_rows[rms_norm-gfx942]"),
    ),
    "rows of an activation's output in 32 bits": Mutant(
        ROW_OUTPUT,
        "(u8*)out + row * columns *",
        "(u8*)out + int(row * columns) *",
        "silu_and_mul",
        large("test_last_of_many_rows[silu_and_mul_per_token_quant-gfx950]"),
    ),
    # Skinny GEMMs
    "a block that starts at its tile counts as starting earlier": Mutant(
        EPILOGUE,
        "schedule.first_step(first_block) < tile * p.steps_per_tile",
        "schedule.first_step(first_block) <= tile * p.steps_per_tile",
        "scaled_mm",
        (),
        "a block that starts at its tile's start and shares it has no other tile, so either place is free, and all blocks agree",
    ),
    "sums of two tiles in one buffer (wave split-K)": Mutant(
        WAVE_SPLIT_K, "parity ^= 1;", "", "block_scaled_mm", cases("block_scaled_mm", "m1", arch="gfx950")
    ),
    "the next tile reads the last one's weights (wave split-K)": Mutant(
        WAVE_SPLIT_K,
        "if (prefetch.tile != tile) tile_weights = weight_tile(prefetch.tile);",
        "",
        "block_scaled_mm",
        cases("block_scaled_mm", "m1", arch="gfx950"),
    ),
    "sums carried into the next tile (wave split-K)": Mutant(
        WAVE_SPLIT_K, "sum[t] = f32x4{};", "", "block_scaled_mm", cases("block_scaled_mm", "m1", arch="gfx950")
    ),
    "the next tile reads the last one's weights (streamed tile)": Mutant(
        "gemm/skinny/amd/streamed_tile.h",
        "if (next.tile != current.tile) tile_weights = weight_tile(next.tile);",
        "",
        "block_scaled_mm",
        cases("block_scaled_mm", "column-major-scales"),
    ),
    "sums carried into the next tile (streamed tile)": Mutant(
        "gemm/skinny/amd/streamed_tile.h",
        "end_tile(epilogue, sum);\n        sum = {};",
        "end_tile(epilogue, sum);",
        "block_scaled_mm",
        cases("block_scaled_mm", "column-major-scales"),
    ),
    "stride of scale_a along K dropped": Mutant(
        "gemm/skinny/amd/streamed_tile.h",
        "(token * p.scale_a_row + block_k * p.scale_a_k)",
        "(token * p.scale_a_row + block_k)",
        "block_scaled_mm",
        cases("block_scaled_mm", "column-major-scales"),
    ),
    "both split tiles of a block in one place": Mutant(
        EPILOGUE,
        "(b == first_block ? is_second_tile : 0)",
        "0",
        "block_scaled_mm",
        cases("block_scaled_mm", "m1", "odd-sizes", arch="gfx950"),
    ),
    "results close to zero flushed": Mutant(
        EPILOGUE,
        "sum[i][j] += added;",
        "sum[i][j] += added; for (int r = 0; r < kVec; ++r) if (sum[i][j][r] * sum[i][j][r] < 1e-6f) sum[i][j][r] = 0.0f;",
        "scaled_mm",
        cases("scaled_mm", "m16", "m64"),
    ),
    "counted before partial sums are stored": Mutant(
        "device/arrive.h", "if (stored) wait_for_stores();", "", "scaled_mm", cases("scaled_mm", "long-k", "m1")
    ),
    "partial sums stored to an XCD's own cache": Mutant(
        EPILOGUE,
        "mem::store_device(partials, at, partial_offset(schedule.block, v), sum",
        "mem::store((u8*)p.partials + partial_offset(schedule.block, v) + at, sum",
        "scaled_mm",
        cases("scaled_mm", "long-k", "m1"),
    ),
    "partial sums loaded from an XCD's own cache": Mutant(
        "device/amd/buffer.h",
        "raw_buffer_load_b128(from, at, offset, kDeviceScope)",
        "raw_buffer_load_b128(from, at, offset, 0)",
        "scaled_mm",
        cases("scaled_mm", "long-k", "m1", arch="gfx950"),
    ),
    "the end of K ignored": Mutant(
        SCHEDULE,
        "return (end < p.k ? end : p.k) - step * mma::kDepth;",
        "return end - step * mma::kDepth;",
        "block_scaled_mm",
        cases("block_scaled_mm", "odd-sizes", "column-major-scales"),
    ),
    "one bias too many": Mutant(
        EPILOGUE,
        "if (row + i < p.n) bias[i]",
        "if (row + i <= p.n) bias[i]",
        "scaled_mm",
        cases("scaled_mm", "bias-fp16"),
    ),
    "a wave split-K tile begun only with two steps left": Mutant(
        WAVE_SPLIT_K,
        "if (next.end > 0) begin_tile(epilogue, next.tile);",
        "if (next.end > 1) begin_tile(epilogue, next.tile);",
        "block_scaled_mm",
        (),
        "the steps of a block of a wave split-K kernel are a multiple of 8",
    ),
    "columns stored by the lanes that have up": gated(EPILOGUE, "&& !is_up(row[0])", "&& is_up(row[0])", "m1"),
    "a sum of gate that is not rounded": Mutant(
        EPILOGUE,
        "silu(round_to<T>(sum[i][0][r]))",
        "silu(sum[i][0][r])",
        "scaled_mm",
        ("test_same_bits.py::test_one_launch_gives_the_bits_of_two[gfx942-20-dtype0]",),
    ),
    "a sum of up from the other half of the wave": gated(EPILOGUE, "kVec == 2 ? 8 : 16;", "32;", "m1", "m16"),
    "scales of gate's channels for those of up": gated(
        EPILOGUE, "u64(gated_row(p, row[j] + i))", "u64(gated_column(row[j] + i))", "four-tiles"
    ),
    "columns past the last one": gated(
        "gemm/skinny/problem.h", "(column < columns ? column : columns - 1)", "column", "four-tiles"
    ),
    "a second token's columns behind N": gated(
        EPILOGUE, "* u32(columns) + u32(column)", "* u32(p.n) + u32(column)", "m2"
    ),
    "elements of a product in 32 bits (skinny)": Mutant(
        EPILOGUE,
        "u64(u32(token[i])) * u32(p.n) + u32(row[j])",
        "i64(token[i] * p.n + row[j])",
        "scaled_mm",
        large("test_last_of_a_large_product[skinny-gfx942]"),
    ),
    "strides of scales that are widened in 32 bits": Mutant(
        "ops/block_scaled_mm.hip",
        "row * row_stride",
        "row * int(row_stride)",
        "block_scaled_mm",
        large("test_e8m0_scales_far_apart[gfx942]"),
    ),
    "buffers of 1 GB": Mutant(
        "device/amd/buffer.h",
        "0x80000000u",
        "0x40000000u",
        "scaled_mm",
        large("test_skinny_products[5-scaled_mm-gfx942]"),
    ),
    # Tiled products
    "scale of a block beyond N": Mutant(
        TILED,
        "(n < p.n ? n : p.n - 1) / kScaleBlock",
        "n / kScaleBlock",
        "scaled_mm_tiled",
        cases("block_scaled_mm", "tiles-padded", arch="gfx950"),
    ),
    "longer slices lose a panel": Mutant(
        TILED,
        "last = first + p.panels_per_slice + (k_slice < p.remainder)",
        "last = first + p.panels_per_slice",
        "scaled_mm_tiled",
        cases("block_scaled_mm", "tiles"),
    ),
    "16 bytes beyond K copied": Mutant(
        "gemm/tiled/loader.h",
        "column < bytes",
        "column <= bytes",
        "scaled_mm_tiled",
        cases("block_scaled_mm", "tiles", "tiles-padded"),
    ),
    "the last group of tiles taken as full": Mutant(
        "gemm/tiled/rasterize.h",
        "const bool whole = tiles_m - first >= kGroupM;",
        "const bool whole = true;",
        "scaled_mm_tiled",
        cases("block_scaled_mm", "tiles"),
    ),
    "the last group of tiles taken as full (MX)": Mutant(
        "gemm/tiled/rasterize.h",
        "tiles_m - first < group_m ? tiles_m - first : group_m",
        "group_m",
        "mxfp8_scaled_mm",
        cases("mxfp8_scaled_mm", "m530", arch="gfx950"),
    ),
    "XCDs behind those with one tile more shifted too far": Mutant(
        "gemm/tiled/rasterize.h",
        "(xcd < remainder ? xcd : remainder)",
        "xcd",
        "scaled_mm_tiled",
        cases("block_scaled_mm", "tiles"),
    ),
    "rows of a weight at the tokens' stride": Mutant(
        TILED,
        "b_layout{p.b_tile, p.b_row, p.b_vec",
        "b_layout{p.b_tile, int(p.a_stride), p.b_vec",
        "scaled_mm_tiled",
        cases("scaled_mm", "tiles-padded"),
    ),
    "elements of a product in 32 bits (tiled)": Mutant(
        TILED,
        "i64(m) * p.n + n",
        "m * p.n + n",
        "scaled_mm_tiled",
        large("test_last_of_a_large_product[tiled-gfx942]"),
    ),
    "no wait state after writing M0": Mutant(
        "device/amd/lds_async.h",
        "s_nop 0\\n\\t",
        "",
        "scaled_mm_tiled",
        cases("scaled_mm", "tiles", arch="gfx950"),
    ),
    # MX-FP8
    "one block scale too many": Mutant(
        "device/amd/mx.h",
        "scale < count ? lane_offset",
        "scale <= count ? lane_offset",
        "mxfp8_scaled_mm",
        cases("mxfp8_scaled_mm", "m1", "k352", "k32", arch="gfx950"),
    ),
    "bias of the MX kernels dropped": Mutant(
        EPILOGUE,
        "added = kMx ? load_bias<kVec>(p, row[j]) : bias[j];",
        "added = bias[j];",
        "mxfp8_scaled_mm",
        cases("mxfp8_scaled_mm", "bias-fp16", arch="gfx950"),
    ),
    "sums carried into the next tile (MX)": Mutant(
        MX,
        "sum[t][0] = f32x4{};",
        "(void)t;",
        "mxfp8_scaled_mm",
        cases("mxfp8_scaled_mm", "m33", "tiles", arch="gfx950"),
    ),
    "a weight's block scales at the tokens' stride": Mutant(
        MX,
        "(row >> p.scale_b_shift) * p.scale_b_row, scale_at",
        "(row >> p.scale_b_shift) * p.scale_a_row, scale_at",
        "mxfp8_scaled_mm",
        cases("mxfp8_scaled_mm", "padded", arch="gfx950"),
    ),
    # Norms in front of a rotation
    "keys by the weight of queries": normed("is_key ? p.key_weight : p.query_weight", "p.query_weight", "bf16-packed"),
    "squares of half of a head": normed(
        "squares = __builtin_elementwise_fma(of_y.pair[i], of_y.pair[i], squares);", "", "bf16-packed"
    ),
    "a head of 256 summed over 8 lanes": normed("reduce_group<kLanes>(squares", "reduce_group<8>(squares", "bf16-256"),
    "the mean of all lanes' elements": normed("float(2 * kChunk * p.head_vecs)", "float(2 * kChunk * kLanes)", "part"),
    "no epsilon": normed("rsqrt_approx(mean + p.epsilon)", "rsqrt_approx(mean)", "epsilon"),
    "a norm that is not rounded before its rotation": Mutant(
        "ops/rope_and_cache.hip",
        "round_to<T>(x.pair[i] * inverse_rms * w.pair[i])",
        "x.pair[i] * inverse_rms * w.pair[i]",
        "rope_and_cache",
        ("test_same_bits.py::test_one_launch_gives_the_bits_of_three[gfx942-dtype0-False]",),
    ),
    "elements behind the pairs as halves": normed("p.is_neox && is_rotated;", "p.is_neox;", "glm-4.5"),
    "lanes behind a head read and write": normed("p.kv_heads && vec < p.head_vecs", "p.kv_heads", "odd-lanes"),
    "keys as far apart as tokens' queries": normed(
        "(is_key ? p.kv_heads : p.query_heads) + head", "p.query_heads + head", "qwen3"
    ),
    "the cache gets keys before their rotation": normed(
        "<true>(p.key_cache, head, first, vecs[0],",
        "<true>(p.key_cache, head, first, pack<T>(normalize<T>(x, x_weight, inverse_rms)),",
        "bf16-fp8-native",
    ),
    "values of a token's last head left out": normed(
        "of_all < p.kv_heads * p.value_vecs)", "of_all < p.kv_heads * p.value_vecs - 1)", "bf16-interleaved"
    ),
    "values by the scale of keys": normed(
        "element, elements, value_scale)", "element, elements, key_scale)", "bf16-fp8-256"
    ),
    "a key without a slot written": normed("if (is_key && cache.is_cached)", "if (is_key)", "bf16-packed"),
    # Latents' norms, rotation and write
    "keys' latent by the weight of queries": latent(
        "kv_weight, kv_size, inverse_kv_size", "q_weight, kv_size, inverse_kv_size", "bf16"
    ),
    "keys' mean over queries' elements": latent(
        "kv_size, inverse_kv_size, epsilon", "kv_size, inverse_q_size, epsilon", "bf16"
    ),
    "keys from the start of a row": latent("({row + q_size, nullptr", "({row, nullptr", "bf16"),
    "the last pairs left out": latent("is_here(vec < r.rotary_vecs)", "is_here(vec < r.rotary_vecs - 1)", "bf16"),
    "a part of a wave not summed": latent(
        "u32(kv_size + kOfWave - 1) / u32(kOfWave)", "u32(kv_size) / u32(kOfWave)", "one-wave"
    ),
    "halves taken for neighbours": latent(
        "first = r.is_neox ? vec * kChunk : 2 * vec * kChunk;", "first = 2 * vec * kChunk;", "neox"
    ),
    "the cache gets k_pe before its rotation": latent(
        "cache.write(kv_size + first, vecs[0])", "cache.write(kv_size + first, x)", "bf16"
    ),
    "half of k_pe over the latent": latent("cache.write(kv_size + second,", "cache.write(second,", "bf16-fp8"),
    "a token without a slot written": latent("if (!is_cached) return;", "", "bf16"),
    "slots read for tokens that have none": latent("token < cache.num_slots ?", "true ?", "one-wave"),
    "pages of 16 slots": latent("u32(page) * u32(cache.page_size)", "u32(page) * 16u", "one-wave"),
    "the cache's scale ignored": latent("E4m3) && cache.scale ?", "E4m3) && false ?", "bf16-fp8"),
    "latents of all tokens in one place": latent("(u16*)kv_out + token * kv_size", "(u16*)kv_out", "bf16"),
    "rotated parts of all tokens in one place": latent("(u16*)k_pe_out + token * k_pe_size", "(u16*)k_pe_out", "bf16"),
    "rows side by side": latent(
        "u32(wave::block_id_x()) * row_stride",
        "u32(wave::block_id_x()) * (q_size + kv_size + 16 * rotation.rotary_vecs)",
        "longer-keys",
    ),
    "the position of the first token": latent("r.positions + u32(wave::block_id_x())", "r.positions", "bf16"),
    "the last bit of a latent": Mutant(
        "ops/latent_norm_rope_and_cache.hip",
        "mem::store((u32x4*)out + index, y);",
        "mem::store((u32x4*)out + index, y + 1u);",
        "latent_norm_rope_and_cache",
        ("test_same_bits.py::test_one_launch_gives_the_bits_of_a_latents_three[gfx942-dtype0-False]",),
    ),
    # Experts
    "sums of the last wave left out": Mutant(
        EXPERTS,
        "for (int w = 0; w < mma::kWaves; ++w) total",
        "for (int w = 0; w < mma::kWaves - 1; ++w) total",
        "fused_experts",
        cases("fused_experts", "block"),
    ),
    "sums of two tiles in one buffer (experts)": Mutant(
        EXPERTS, "parity ^= 1;", "", "fused_experts", cases("fused_experts", "block", "bf16", arch="gfx950")
    ),
    "a negative expert not sorted out": Mutant(
        GROUP_PAIRS,
        "if (expert < 0 || expert >= p.routed)",
        "if (expert >= p.routed)",
        "fused_experts",
        cases("fused_experts", "block-map"),
    ),
    "a negative id looked up": Mutant(
        GROUP_PAIRS,
        "id >= 0 && id < p.mapped",
        "id < p.mapped",
        "fused_experts",
        cases("fused_experts", "block-map"),
    ),
    "an id equal to the map's length looked up": Mutant(
        GROUP_PAIRS,
        "id >= 0 && id < p.mapped",
        "id >= 0 && id <= p.mapped",
        "fused_experts",
        cases("fused_experts", "block-map", "mx-m40-map", arch="gfx950"),
    ),
    "the last weight of a repeated id only": Mutant(
        GROUP_PAIRS,
        "lists.router[pair] += lists.router[first + other]",
        "lists.router[pair] = lists.router[first + other]",
        "fused_experts",
        cases("fused_experts", "block-repeated"),
    ),
    "an id equal to the number of experts is one": Mutant(
        EXPERTS_TILED,
        "if (expert[i] >= p.routed) expert[i] = -1;",
        "if (expert[i] > p.routed) expert[i] = -1;",
        "fused_experts_tiled",
        ("test_fused_experts_tiled.py::test_pairs_are_sorted[even-gfx942]",),
    ),
    "a shared expert gets a router weight": Mutant(
        "gemm/expert_tiles.h",
        "p.router && slot < p.topk ?",
        "p.router ?",
        "fused_experts_tiled",
        ("test_fused_experts_tiled.py::test_case[gfx942-block-input-weight-m65-TiledConfig(tokens=64)]",),
    ),
    "all accumulator tiles have the first one's up scale": Mutant(
        "gemm/expert_tiles.h",
        "block_of(rows_n + wave_n + j * tile::kAccumulatorRows / 2)",
        "block_of(rows_n + wave_n)",
        "fused_experts_tiled",
        cases("fused_experts", "block-odd-m70"),
    ),
    "gate scale not clamped to the gate rows": Mutant(
        "gemm/expert_tiles.h",
        "block_of(wave_n < rows_n ? wave_n : rows_n - 1) * 4",
        "block_of(wave_n) * 4",
        "fused_experts_tiled",
        (),
        "waves beyond the gate rows drop their sums, and block_of clamps to N",
    ),
    "positions counted without the last expert": Mutant(
        EXPERTS_TILED,
        "i32x4{position + count, tile + tiles, 0, 0}",
        "i32x4{position, tile + tiles, 0, 0}",
        "fused_experts_tiled",
        cases("fused_experts", "block-m65"),
    ),
    "rows that are combined in 32 bits": Mutant(
        EXPERTS_TILED,
        "combine.results + token * routing.slots() * combine.columns",
        "combine.results + int(token) * routing.slots() * combine.columns",
        "fused_experts_tiled",
        large("test_last_tokens_that_are_combined[gfx942]"),
    ),
    "rows that are quantised in 32 bits": Mutant(
        ROW_OUTPUT,
        "(u8*)out + row * columns *",
        "(u8*)out + int(row * columns) *",
        "fused_experts_quantize",
        large("test_last_rows_that_are_quantised[channel-gfx950]"),
    ),
    # Routing
    "weights divided by a sum of 0": Mutant(
        ROUTING,
        "weight /= sum > 0.0f ? sum : 1.0f;",
        "weight /= sum;",
        "moe_routing",
        cases("topk_sigmoid", "not-finite"),
    ),
    "-0 stays -0": Mutant(ROUTING, "kLowest) + 0.0f", "kLowest)", "moe_routing", cases("grouped_topk", "equal")),
    "a NaN logit stays NaN": Mutant(
        ROUTING,
        "if (i >= own.count || x[i] != x[i])",
        "if (i >= own.count)",
        "moe_routing",
        cases("grouped_topk", "not-finite"),
    ),
    "the other lane's second largest dropped": Mutant(
        ROUTING,
        "second = __builtin_fmaxf(second, other_second);",
        "",
        "moe_routing",
        cases("grouped_topk", "deepseek-v3"),
    ),
    "a loss without a wave's fifth token": Mutant(
        ROUTING,
        "sum += log_sum * log_sum;",
        "if (token < 4 * p.tokens_apart()) sum += log_sum * log_sum;",
        "moe_routing",
        cases("router_z_loss", "many-tokens"),
    ),
    "a balancing loss without a wave's fifth token": Mutant(
        ROUTING,
        "probability[i] += e.value[i] * inverse;",
        "probability[i] += token < 4 * p.tokens_apart() ? e.value[i] * inverse : 0.0f;",
        "moe_routing",
        cases("load_balancing_loss", "many-tokens", arch="gfx950"),
    ),
    "tokens of topk's output in 32 bits": Mutant(
        ROUTING,
        "mem::store(p.ids + token * p.topk + lane, id);",
        "mem::store(p.ids + i64(int(token * p.topk * 4)) / 4 + lane, id);",
        "moe_routing",
        large("test_last_of_many_tokens[gfx942]"),
    ),
    **{
        name: Mutant(**mutant)
        for name, mutant in json.loads(Path(__file__).with_name("mutants.json").read_text()).items()
    },
    **SEAM_MUTANTS,
}


@dataclass(frozen=True)
class Result:
    name: str
    verdict: str  # the test that failed, or why none did
    caught: bool
    said: str
    seconds: float


class FirstFailure:
    """A pytest plugin that keeps the name and the message of the first test that fails. With `ops` it leaves out what concerns none of
    them, and what plants bugs of its own."""

    test = said = ""

    def __init__(self, ops: set[str] | None = None):
        self.ops = ops

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.ops is not None:
            items[:] = sorted(filter(self.concerns, items), key=lambda item: item.path.stem != "test_ops")

    def concerns(self, item: pytest.Item) -> bool:
        """Whether a test has one of the ops as a parameter, or else its file names one."""
        given = getattr(item, "callspec", None)
        of = given and (given.params.get("the_op") or given.params.get("name"))
        named = getattr(of, "name", of) in self.ops
        in_file = any(re.search(rf"\b{op}\b", source_of(item.path)) for op in self.ops)
        return "planted" not in item.name and (named if given and "the_op" in given.params else in_file)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        yield
        if call.excinfo is not None and not self.test and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.test = item.nodeid.rpartition("/")[2]
            self.said = " ".join(f"{call.excinfo.typename}: {call.excinfo.value}".split())


@functools.cache
def source_of(path: Path) -> str:
    return path.read_text()


@contextlib.contextmanager
def silent():
    """Discard pytest's report and the compilers' warnings."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def find(test: str) -> str:
    """A test's name with the path of its file, from a name without the folder."""
    file, separator, rest = test.partition("::")
    (path,) = TESTS.rglob(file)
    return f"{path}{separator}{rest}"


def judge(name: str) -> Result:
    """Run a mutant's tests on its code, in this process. The process is not used again."""
    from vllm_rocm_ops.core import launch

    mutant, start, first = MUTANTS[name], time.monotonic(), FirstFailure()

    def result(verdict: str, caught: bool, said: str = "") -> Result:
        return Result(name, verdict, caught, said, time.monotonic() - start)

    try:
        if isinstance(mutant, SeamMutant):
            return judge_seam(mutant, first, result)
        with tempfile.TemporaryDirectory() as folder, silent():
            copy = KernelCopy(Path(folder))
            copy.plant(mutant.file, mutant.text, mutant.replacement, mutant.modules, mutant.archs)
            if mutant.equivalent:
                return result(f"equivalent: {mutant.equivalent}", True)
            launch.CODE = copy.code
            if not mutant.tests:
                return judge_by_ops(mutant, result)
            selection = [find(test) for test in mutant.tests]
            take_tests("1")  # a test that is named runs, also where it is not among the default ones
            status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *selection], plugins=[first])
    except DoesNotFit as error:
        return result(f"does not fit: {error}", False)
    except RuntimeError as error:
        return result(" ".join(f"does not build: {error}".split()), False)
    if status == pytest.ExitCode.OK:
        return result("SURVIVED", False)
    if status != pytest.ExitCode.TESTS_FAILED:
        return result(f"no such tests: {' '.join(mutant.tests)}", False)
    unseen = first.said.startswith("UnsupportedInstruction")  # the emulator, not the test
    return result(first.test, not unseen, first.said)


def judge_by_ops(mutant: Mutant, result: Callable[..., Result]) -> Result:
    """Run the tests of the ops that a mutant may reach, as they run by default and then with --full."""
    ops = set().union(*(launched_by()[module] for module in mutant.modules))
    for how, full in (("by default", ""), ("with --full", "1")):
        status, test, said = apart(run_tests_of, ops, full)
        if status != pytest.ExitCode.OK:
            return result(f"{test} {how}", status == pytest.ExitCode.TESTS_FAILED, said)
    return result("SURVIVED", False)


def take_tests(full: str) -> None:
    """Have this process run the default tests, or all."""
    os.environ["FULL_TESTS"] = full
    sys.modules.pop("marks", None)  # which has read it


def run_tests_of(ops: set[str], full: str) -> tuple[int, str, str]:
    take_tests(full)
    first = FirstFailure(ops)
    with silent():
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", str(TESTS / "ops")], plugins=[first])
    return int(status), first.test, first.said


def judge_seam(mutant: SeamMutant, first: FirstFailure, result: Callable[..., Result]) -> Result:
    """The same for a mistake in Python."""
    if not mutant.fits():
        raise DoesNotFit(f"{mutant.file} does not hold {mutant.text!r}")
    mutant.plant()
    with silent():
        status = pytest.main(
            ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", find(mutant.test)], plugins=[first]
        )
    if status == pytest.ExitCode.OK:
        return result("SURVIVED", False)
    if status != pytest.ExitCode.TESTS_FAILED:
        return result(f"no such tests: {mutant.test}", False)
    return result(first.test, True, first.said)


FORK = multiprocessing.get_context("fork")


def apart(call: Callable, *arguments):
    """The result of a call in a process of its own, whose tests may start others."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: send.send(call(*arguments)))
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bugs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help="parts of mutants' names, or of their files'")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many run at a time")
    arguments = parser.parse_args()
    found = [n for n, m in MUTANTS.items() if any(part in f"{n} {m.file}" for part in arguments.names or [""])]
    if not found:
        parser.error(f"names must be parts of {', '.join(MUTANTS)}")
    os.environ |= {
        "VLLM_ROCM_OPS_TABLES": os.devnull,
        "FULL_TESTS": "1",
    }  # the tests that mutants name run, whatever takes long
    import torch

    from vllm_rocm_ops import ops  # noqa: F401  once, before the processes divide

    if any(isinstance(MUTANTS[name], SeamMutant) for name in found):
        with silent():
            from vllm import LLM  # noqa: F401  once, too; it imports nothing of ours
    torch.set_num_threads(1)
    if not all(MUTANTS[name].tests for name in found):
        launched_by()  # once, too
    print("| Mutant | File | Change | Caught by | Seconds |\n|---|---|---|---|---|")
    lived = 0
    with ThreadPool(arguments.jobs) as pool:
        for of in pool.imap(functools.partial(apart, judge), found, chunksize=1):
            mutant = MUTANTS[of.name]
            lived += not of.caught
            print(f"| {of.name} | {mutant.file} | `{mutant.change}` | {of.verdict} | {of.seconds:.0f} |", flush=True)
            if of.said:
                print(f"    {of.said[:200]}", file=sys.stderr, flush=True)
    print(f"{len(found) - lived} of {len(found)} mutants are caught or equivalent")
    return int(lived > 0)
