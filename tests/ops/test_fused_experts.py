"""Test fused_experts beyond its cases: other routings with one plan, in a captured graph, and bit-equal repetitions."""

import pytest
import torch
from marks import full
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.correctness import run_and_check
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops import fused_experts
from vllm_rocm_ops.ops.shared.experts_streamed import StreamedConfig
from vllm_rocm_ops.ops.shared.experts_tiled import TiledConfig

CASES = {case.name: case for case in fused_experts.cases()}
ROUTINGS = 4


def arguments(name: str, fp8_dtype: torch.dtype) -> tuple:
    return CASES[name].make("cpu", torch.Generator().manual_seed(1), fp8_dtype)


def routings(args: tuple):
    """Yield the same arguments with other tokens and experts, the last without any expert."""
    a = fused_experts.Arguments(*args)
    generator = torch.Generator().manual_seed(2)
    routed = len(a.w1) - a.shared_experts
    for _ in range(ROUTINGS):
        ids = torch.rand(a.hidden.shape[0], routed, generator=generator).topk(a.topk_ids.shape[1]).indices
        yield a._replace(hidden=a.hidden.roll(1, 0), topk_ids=ids.to(a.topk_ids.dtype))
    yield a._replace(topk_ids=torch.full_like(a.topk_ids, -1))


def layer(
    arch: str, m: int, topk: int, experts: int, hidden: int, inner: int, local: int | None = None, shared: int = 0
):
    """Return the arguments of a layer with block scales, with local and shared experts of a rank."""
    fp8, here = archs.named(arch).fp8_dtype, (local or experts) + shared

    def meta(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return fused_experts.Arguments(
        meta(m, hidden, dtype=torch.bfloat16),
        meta(here, 2 * inner, hidden, dtype=fp8),
        meta(here, hidden, inner, dtype=fp8),
        meta(m, topk),
        meta(m, topk, dtype=torch.int32),
        torch.bfloat16,
        meta(here, -(-2 * inner // 128), -(-hidden // 128)),
        meta(here, -(-hidden // 128), -(-inner // 128)),
        expert_map=None if local is None else meta(experts, dtype=torch.int32),
        shared_experts=shared,
    )


@pytest.mark.parametrize("arch", [a.name for a in archs.ARCHS.values()])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("local, inner", [(None, 256), (32, 2048)], ids=["tp8", "ep8"])
def test_deepseek_v3_streams_few_tokens(local, inner, shared, arch):
    """Experts are divided in either way. With a shared expert of full width, the tiled kernels begin at fewer tokens."""
    for m in (1, 8, 16, 32, 48, 64, 65, 128, 256):
        config = fused_experts.explain(*layer(arch, m, 8, 256, 7168, inner, local, shared), arch=arch).config
        streams = isinstance(config, StreamedConfig)
        if shared and local and 16 < m <= 64:
            continue  # allowed either way
        assert streams == (m <= 64) and (streams or config == TiledConfig(64)), m


@pytest.mark.parametrize("arch", [a.name for a in archs.ARCHS.values()])
def test_blocks_of_few_tiles_share_them(arch):
    """2048 output rows are 128 tiles, too few for any of the chips; one token of one expert has nothing to share."""
    config = fused_experts.explain(*layer(arch, 8, 8, 128, 2048, 768), arch=arch).config
    units = archs.named(arch).compute_units
    assert units < 128 * config.split_k <= 8 * units
    assert fused_experts.explain(*layer(arch, 1, 1, 128, 2048, 128), arch=arch).config.split_k == 1


def test_few_tokens_of_an_expert_each_are_streamed_many_are_not():
    """Mixtral's layers have 2 of 8 experts per token: the tokens per expert decide, not the call's tokens."""
    forms = {m: fused_experts.explain(*layer("sm_90", m, 2, 8, 6144, 2048), arch="sm_90").config for m in (16, 32)}
    assert isinstance(forms[16], StreamedConfig) and forms[32] == TiledConfig(64)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=full)])
@pytest.mark.parametrize("name", ["block", "bf16", "block-m65"])
def test_one_plan_serves_other_routings(name, arch):
    emulator = Emulator(arch)
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
    reset_stats()
    fused_experts(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = fused_experts(*held)
    for other in routings(args):
        held.topk_ids.copy_(other.topk_ids)
        held.hidden.copy_(other.hidden)
        graph.replay()
        expected = fused_experts(*(v.cuda() if isinstance(v, torch.Tensor) else v for v in other))
        assert torch.equal(out, expected)
    assert not any(kernel.startswith("fallback") for kernel in stats()["fused_experts"])


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


QUANTIZED = ["block", "block-m17-one-expert", "block-map", "block-quant-many", "channel-static-quant"]
QUANTIZED_BY_ARCH = [("gfx942", QUANTIZED), ("gfx950", [*QUANTIZED, "mx", "mx-quant"])]
FEW_QUANTIZED = ("gfx942", "block-map"), ("gfx950", "channel-static-quant"), ("gfx950", "mx-quant")


@pytest.mark.parametrize(
    "arch, name",
    [
        pytest.param(arch, name, marks=() if (arch, name) in FEW_QUANTIZED else full)
        for arch, names in QUANTIZED_BY_ARCH
        for name in names
    ],
)
def test_blocks_quantize_with_the_bits_of_a_launch(arch, name):
    """Results have the same bits whether blocks quantize the activation or a launch does."""
    emulator = Emulator(arch)
    args = arguments(name, emulator.arch.fp8_dtype)
    configs = fused_experts.configs(fused_experts.Arguments(*args), emulator.arch)
    results = {}
    for config in configs:
        if isinstance(config, StreamedConfig):
            with launch.executor(emulator), fused_experts.running(config):
                results[config] = fused_experts(*args)
    apart = {config.split_k: results[config] for config in results if config == StreamedConfig(config.split_k)}
    assert len(apart) < len(results)
    assert all(torch.equal(results[config], apart[config.split_k]) for config in results)
