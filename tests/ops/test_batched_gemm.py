"""Test batched_gemm beyond its cases, and bugs that its cases catch."""

from __future__ import annotations

import pytest
import torch
from marks import AMD
from op_tests import test_case  # noqa: F401
from test_large_tensors import reserved

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.objects import CodeObject


@pytest.mark.parametrize("arch", AMD)
def test_nothing_is_spilled(arch):
    for name, kernel in CodeObject(launch.CODE / arch / "batched_gemm.co").kernels.items():
        assert not any(kernel.statistics[kind] for kind in ("scratch", "vgpr_spills", "sgpr_spills")), name


def test_weights_as_vllm_keeps_them():
    """Both projections of a head are rows of one tensor [heads * (K of one + N of the other), latent]."""
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
