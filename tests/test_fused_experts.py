"""fused_experts beyond its cases: other routings through one plan, in a captured graph, and the same bits every run."""

import pytest
import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import launch, op
from vllm_rocm_ops.correctness import run_and_check
from vllm_rocm_ops.ops import fused_experts
from vllm_rocm_ops.ops.fused_experts import StreamedConfig
from vllm_rocm_ops.ops.fused_experts_tiled import TiledConfig

CASES = {case.name: case for case in fused_experts.cases()}
ROUTINGS = 4


def arguments(name: str, fp8_dtype: torch.dtype) -> tuple:
    return CASES[name].make("cpu", torch.Generator().manual_seed(1), fp8_dtype)


def routings(args: tuple):
    """The same arguments with other tokens and experts, and at last with no expert at all."""
    a = fused_experts.Arguments(*args)
    generator = torch.Generator().manual_seed(2)
    routed = len(a.w1) - a.shared_experts
    for _ in range(ROUTINGS):
        ids = torch.rand(a.hidden.shape[0], routed, generator=generator).topk(a.topk_ids.shape[1]).indices
        yield a._replace(hidden=a.hidden.roll(1, 0), topk_ids=ids.to(a.topk_ids.dtype))
    yield a._replace(topk_ids=torch.full_like(a.topk_ids, -1))


@pytest.mark.parametrize("arch", [a.name for a in archs.ARCHS.values()])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("local, inner", [(256, 256), (32, 2048)], ids=["tp8", "ep8"])
def test_deepseek_v3_streams_up_to_64_tokens(local, inner, shared, arch):
    """With experts divided either way, as the model fitted to H200 has it; streamed ones take no more than 64 tokens. A shared
    expert of full width gets many tokens sooner."""
    fp8, hidden, experts = archs.named(arch).fp8_dtype, 7168, local + shared

    def meta(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for m in (1, 8, 16, 32, 48, 64, 65, 128, 256):
        explained = fused_experts.explain(
            meta(m, hidden, dtype=torch.bfloat16),
            meta(experts, 2 * inner, hidden, dtype=fp8),
            meta(experts, hidden, inner, dtype=fp8),
            meta(m, 8),
            meta(m, 8, dtype=torch.int32),
            torch.bfloat16,
            meta(experts, inner // 64, hidden // 128),
            meta(experts, hidden // 128, inner // 128),
            expert_map=None if local == 256 else meta(256, dtype=torch.int32),
            shared_experts=shared,
            arch=arch,
        )
        most = 32 if shared and local == 32 else 64
        assert explained.config == (StreamedConfig(3) if m <= most else TiledConfig(64)), m


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["block", "bf16", "block-m65"])
def test_one_plan_serves_other_routings(name, arch):
    emulator = pytest.importorskip("emulator").Emulator(arch)
    args = arguments(name, emulator.arch.fp8_dtype)
    with launch.executor(emulator):
        fused_experts(*args)
        decided = set(fused_experts._executions)
        for other in routings(args):
            run_and_check(fused_experts, other, "cpu")
        assert set(fused_experts._executions) == decided


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a GPU")
@pytest.mark.parametrize("name", ["block", "channel", "bf16", "block-m65"])
def test_captured_graph_follows_the_routing(name):
    args = arguments(name, archs.of_device(0).fp8_dtype)
    held = fused_experts.Arguments(*(v.cuda() if isinstance(v, torch.Tensor) else v for v in args))
    fused_experts(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_experts(*held)
    for other in routings(args):
        held.topk_ids.copy_(other.topk_ids)
        held.hidden.copy_(other.hidden)
        graph.replay()
        expected = fused_experts(*(v.cuda() if isinstance(v, torch.Tensor) else v for v in other))
        assert torch.equal(out, expected)
    assert not any(kernel.startswith("fallback") for kernel in op.stats()["fused_experts"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a GPU")
@pytest.mark.parametrize("m", [1, 16, 64, 100])
def test_same_bits_in_1000_calls(m):
    fp8, generator = archs.of_device(0).fp8_dtype, torch.Generator("cuda").manual_seed(m)
    experts, hidden, inner, topk = 32, 1024, 256, 8

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    ids = randn(m, experts).topk(topk).indices.int()
    scales = [torch.full((experts, n // 128, k // 128), 0.02, device="cuda") for n, k in ((512, 1024), (1024, 256))]
    args = (
        randn(m, hidden).bfloat16(),
        randn(experts, 2 * inner, hidden).to(fp8),
        randn(experts, hidden, inner).to(fp8),
        torch.rand(m, topk, device="cuda"),
        ids,
        torch.bfloat16,
        *scales,
    )
    first = fused_experts(*args)
    differ = torch.zeros((), device="cuda")
    for _ in range(1000):
        differ += (fused_experts(*args) != first).sum()
    assert first.isfinite().all() and differ == 0
