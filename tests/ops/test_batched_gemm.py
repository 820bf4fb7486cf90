"""batched_gemm: bugs that its cases catch, and what no case of test_ops.py says."""

from __future__ import annotations

import re

import pytest
import torch
from bugs.mutants import CSRC
from marks import AMD, full
from test_large_tensors import reserved
from test_planted_bugs import WRONG, few_of_bugs, kernels, plant, require_caught  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.objects import CodeObject

BATCHED = "gemm/batched.h"

BUGS = {
    "columns of a pair swapped": (
        BATCHED,
        "return r % 2 ? a >> 16",
        "return r % 2 == 0 ? a >> 16",
        "bf16-transposed-m1",
        "gfx942",
        WRONG,
    ),
    "waves' sums without a barrier": (
        BATCHED,
        "block_barrier();  // hazard: the waves' sums",
        "{}  // hazard: the waves' sums",
        "out-transposed",
        "gfx950",
        "read here|written here",
    ),
    "sums of the last tokens written over": (
        BATCHED,
        "if (t > 0) block_barrier();",
        "{}",
        "out-transposed",
        "gfx942",
        "read here|written here",
    ),
    "tokens of another head": (
        BATCHED,
        "p.a += head * a_head_stride;",
        "",
        "k-tail",
        "gfx950",
        WRONG,
    ),
}
MORE = {
    "every wave with the same K": (
        BATCHED,
        "first_k = wave::index() * mma::kDepth / 2 +",
        "first_k =",
        "fp16-transposed-m17",
        "gfx942",
        WRONG,
    ),
    "tokens behind the last stored": (
        BATCHED,
        "mem::store_if(token < p.m,",
        "mem::store_if(true,",
        "bf16-transposed-m17",
        "gfx950",
        "argument|its rows|is in no tensor|also written",
    ),
    "weights of another head": (
        BATCHED,
        "p.b += head * b_head_stride;",
        "",
        "heads-8-transposed",
        "gfx942",
        WRONG,
    ),
    "heads of out side by side": (
        BATCHED,
        "head * out_head_stride;",
        "head * a_head_stride;",
        "out",
        "gfx950",
        "its rows|NaNs differ|argument|also written",
    ),
    "the first tile in every block": (
        "ops/batched_gemm.hip",
        "{p, wave::block_id_y()}",
        "{p, 0}",
        "heads-8",
        "gfx942",
        WRONG,
    ),
}


def check_caught(bug: tuple, kernels, plant, monkeypatch) -> None:  # noqa: F811
    """With the one kernel that the case runs, which compiles in a tenth of the time."""
    *_, case_name, arch, _ = bug
    case = next(case for case in ops.batched_gemm.cases() if case.name == case_name)
    a = ops.batched_gemm.Arguments(*case.make("meta", torch.Generator(), archs.ARCHS[arch].fp8_dtype))
    [launched] = ops.batched_gemm.explain(*a, arch=arch).launches
    kind, form, tokens = re.search(r"_(bf16|fp16)_(\w+)_(\d+)$", launched.symbol).groups()
    source = (CSRC / "ops" / "batched_gemm.hip").read_text()
    head, macro, _ = source.partition("#define TOKENS")
    assert macro
    form = {"narrow": "WAVES", "transposed": "TRANSPOSED"}[form]
    instance = f"{form}({kind}, {'Bf16' if kind == 'bf16' else 'F16'}, {tokens})\n"
    (kernels.csrc / "ops" / "batched_gemm.hip").write_text(head + instance)
    require_caught(bug, plant, monkeypatch, ops.batched_gemm)


@pytest.mark.parametrize("bug", few_of_bugs(BUGS))
def test_planted_bug_is_caught(bug, kernels, plant, monkeypatch):  # noqa: F811
    check_caught(BUGS[bug], kernels, plant, monkeypatch)


@full
@pytest.mark.parametrize("bug", MORE)
def test_another_planted_bug_is_caught(bug, kernels, plant, monkeypatch):  # noqa: F811
    check_caught(MORE[bug], kernels, plant, monkeypatch)


@pytest.mark.parametrize("arch", AMD)
def test_nothing_is_spilled(arch):
    for name, kernel in CodeObject(launch.CODE / arch / "batched_gemm.co").kernels.items():
        assert not any(kernel.statistics[kind] for kind in ("scratch", "vgpr_spills", "sgpr_spills")), name


def test_weights_as_vllm_keeps_them():
    """Both projections of a head are rows of one tensor [heads * (K of the one + N of the other), latent]."""
    heads, nope, latent, v, rows = 3, 128, 512, 128, 5
    generator = generator_of("kv_b")
    kv_b = torch.randn(heads * (nope + v), latent, generator=generator).bfloat16()
    w_uk, w_uv = kv_b.t().view(latent, heads, nope + v).split([nope, v], -1)
    w_uk_t, w_uv = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)
    q = torch.randn(rows, heads, nope + 64, generator=generator).bfloat16()[..., :nope]
    emulator = Emulator("gfx942")
    for x, weights in ((q, w_uk_t), (torch.randn(rows, heads, latent, generator=generator).bfloat16(), w_uv)):
        explained = ops.batched_gemm.explain(x, weights, arch="gfx942")
        assert explained.launches, explained.source
        with launch.executor(emulator):
            found = ops.batched_gemm(x, weights)
        wanted = torch.einsum("mhk,hkn->mhn", x.double(), weights.double())
        assert (found.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


@pytest.mark.parametrize("transposed", [False, True])
def test_heads_behind_4_gb(transposed):
    """The last head's weight begins there."""
    heads, k, n, apart = 3, 128, 64, 3 * 2**29
    weights = reserved((heads, apart), torch.bfloat16)[:, : k * n].view(heads, *((k, n) if transposed else (n, k)))
    weights = weights if transposed else weights.transpose(1, 2)
    assert weights.stride(0) * 2 * (heads - 1) > 2**32
    generator = generator_of("far")
    values, x = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((heads, k, n), (2, heads, k)))
    weights.copy_(values)
    with launch.executor(Emulator("gfx950")):
        assert ops.batched_gemm.explain(x, weights, arch="gfx950").launches
        found = ops.batched_gemm(x, weights)
    torch.testing.assert_close(found, ops.batched_gemm.reference(x, values), rtol=2e-2, atol=2e-2)
