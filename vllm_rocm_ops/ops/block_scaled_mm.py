"""Multiply FP8 matrices with a scale per 1x128 of the activations and per 128x128 of the weight, as in DeepSeek-V3."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, Workspace
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared import gemm, skinny_gemm, weight_layout
from vllm_rocm_ops.ops.shared import tiled_gemm as tiled
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.tiled_gemm import TiledConfig

__all__ = ["block_scaled_mm"]

UNIT = BLOCK // weight_layout.STEP  # steps in a block of K
E8M0 = torch.float8_e8m0fnu
THREADS = 256  # per block of the widening kernel


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield "a", "e4m3 [M, K]", describe(a.a), a.a.dim() == 2 and a.a.dtype in LIMIT
    k = a.a.shape[1]
    wanted = f"{a.a.dtype} [N, K={k}] or a shuffled weight of this K"
    yield "b", wanted, describe(a.b), a.b.dtype == a.a.dtype and gemm.is_weight(a.b, k)
    m, n, blocks = a.a.shape[0], gemm.weight(a.b).rows, -(-k // BLOCK)
    for name, scale, shape in (("scale_a", a.scale_a, (m, blocks)), ("scale_b", a.scale_b, (-(-n // BLOCK), blocks))):
        holds = scale.shape == shape and scale.dtype in (torch.float32, E8M0)
        yield name, f"float32 or float8_e8m0fnu {list(shape)}", describe(scale), holds
    yield "out_dtype", "bfloat16, float16 or float32", str(a.out_dtype), a.out_dtype in gemm.OUT_TYPES


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield f"a is {arch.fp8_dtype}, the FP8 dtype of {arch.name}", a.a.dtype == arch.fp8_dtype
    yield "scale_b is contiguous along K", a.scale_b.stride(1) == 1 or a.scale_b.shape[1] == 1
    yield "scale_b's row stride is below 2^31 elements", a.scale_b.stride(0) < 2**31
    reach = sum((size - 1) * stride for size, stride in zip(a.scale_a.shape, a.scale_a.stride()))
    yield "scale_a spans fewer than 2^29 elements", reach < 2**29
    yield from tiled.can_implement(*_operands(a))


def _operands(a) -> tuple[gemm.Operand, gemm.Operand]:
    return gemm.activations(a.a), gemm.weight(a.b)


def _plan(config, out: Tensor, a, arch: Arch) -> list[Launch]:
    if a.a.shape[0] == 0:
        return []
    alike = a.scale_a.dtype == a.scale_b.dtype
    scale_a, widening_a = _loadable(a.scale_a, alike)
    scale_b, widening_b = _loadable(a.scale_b, alike)
    product, is_e8m0 = gemm.Product(out, *_operands(a), scale_a, scale_b[:2]), alike and a.scale_a.dtype == E8M0
    if isinstance(config, TiledConfig):
        launches = tiled.launches(config, product, arch, "block_e8m0" if is_e8m0 else "block")
    else:
        launches = skinny_gemm.launch("block_scaled_mm", config, product, arch, UNIT, "e8m0" if is_e8m0 else "")
    return widening_a + widening_b + launches


def _loadable(scale: Tensor, alike: bool) -> tuple[tuple[Tensor | Workspace, int, int], list[Launch]]:
    """Return a scale and its strides as the kernels read it, and the launch that widens it to float32, if one is needed.

    Kernels read two scales of one dtype as they are.
    """
    if alike or scale.dtype != E8M0:
        return (scale, *scale.stride()), []
    count, blocks = scale.numel(), scale.shape[1]
    widened = Workspace(count * 4)
    args = {
        "scales": scale,
        "widened": widened,
        "row_stride": scale.stride(0),
        "block_stride": scale.stride(1),
        "blocks": blocks,
        **gemm.divisor(blocks),
        "count": count,
    }
    grid = (-(-count // THREADS), 1, 1)
    return (widened, blocks, 1), [Launch("block_scaled_mm", "block_scaled_mm_widen", grid, (THREADS, 1, 1), args)]


def _cases() -> Iterator[Case]:
    """Yield every instance, shared tiles, sizes around tiles and blocks, both orders of scale_a, both dtypes of scales."""
    case = case_maker(_inputs)
    for m in (1, 5, 16, 17, 33, 64):
        yield case(f"m{m}", m, 192, 1024)
    yield case("column-major-scales", 3, 130, 640, transposed=True)
    yield case("odd-sizes", 2, 200, 128 * 3 + 48)
    yield case("shuffled", 5, 144, 704, shuffled=True)
    yield case("fp32-out", 2, 64, 256, out_dtype=torch.float32)
    yield case("padded", 5, 96, 512, padding=256)
    yield case("shortest-k", 2, 17, 16)
    yield case("no-tokens", 0, 32, 128)
    yield case("tiles", 65, 131, 400, out_dtype=torch.float16)
    yield case("m97", 97, 131, 1040)
    yield case("tiles-padded", 129, 257, 528, padding=256, transposed=True)
    yield case("tiles-shuffled", 70, 272, 320, shuffled=True, out_dtype=torch.float32)
    yield case("tiles-long", 66, 100, 1680)
    both = {"e8m0_a": True, "e8m0_b": True}
    yield case("e8m0", 3, 130, 640, **both)
    yield case("e8m0-m12", 12, 144, 528, padding=64, **both)
    yield case("e8m0-m17-odd-sizes", 17, 200, 128 * 3 + 48, transposed=True, **both)
    yield case("e8m0-m64", 64, 272, 1024, out_dtype=torch.float32, **both)
    yield case("e8m0-a", 5, 192, 528, transposed=True, e8m0_a=True)
    yield case("e8m0-b", 2, 300, 1024, padding=32, e8m0_b=True)
    yield case("e8m0-m97", 97, 131, 528, **both)
    yield case("e8m0-tiles", 129, 257, 272, transposed=True, padding=128, **both)
    yield case("e8m0-tiles-long", 66, 131, 1680, **both)
    yield case("e8m0-b-tiles", 66, 131, 272, e8m0_b=True)


def _inputs(m, n, k, given, device, generator, fp8_dtype) -> tuple:
    padding = given.get("padding", 0)  # each tensor is padded differently

    def rows(count: int, padding: int) -> Tensor:
        values = torch.randn(count, k, generator=generator)
        return gemm.padded(values, padding).to(fp8_dtype).to(device)[:, :k]

    def scales(*shape: int, e8m0: bool, padding: int) -> Tensor:
        if e8m0:  # 2^-3 to 2^3
            drawn = torch.randint(124, 131, shape, generator=generator, dtype=torch.uint8)
        else:
            drawn = torch.rand(shape, generator=generator) + 0.5
        padded = gemm.padded(drawn, padding).to(device)[:, : shape[1]]
        return padded.view(E8M0) if e8m0 else padded

    blocks, e8m0_a, e8m0_b = -(-k // BLOCK), given.get("e8m0_a", False), given.get("e8m0_b", False)
    of_a, of_b = {"e8m0": e8m0_a, "padding": padding // 64}, {"e8m0": e8m0_b, "padding": padding // 32}
    scale_a = scales(blocks, m, **of_a).t() if given.get("transposed") else scales(m, blocks, **of_a)
    b = weight_layout.shuffle_weight(rows(n, 0)) if given.get("shuffled") else rows(n, 2 * padding)
    scale_b = scales(-(-n // BLOCK), blocks, **of_b)
    return rows(m, padding), b, scale_a, scale_b, given.get("out_dtype", torch.bfloat16)


def _linear(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    """Return a layer's arguments."""
    a, b = (inputs.values(rows, k, dtype=inputs.fp8_dtype) for rows in (tokens, n))
    blocks = -(-k // BLOCK)
    return a, b, inputs.scales(tokens, blocks), inputs.scales(-(-n // BLOCK), blocks), inputs.dtype


@functools.partial(
    Op,
    allocate=lambda a: a.a.new_empty((a.a.shape[0], gemm.weight(a.b).rows), dtype=a.out_dtype),
    contract=_contract,
    can_implement=_can_implement,
    configs=lambda a, arch: tiled.all_configs(*_operands(a), arch, UNIT),
    cost=lambda config, a, arch: tiled.any_cost(config, *_operands(a), arch, UNIT),
    plan=_plan,
    problem=lambda a: gemm.problem(*_operands(a)),
    cases=_cases,
    sums=True,
    product=True,
    linear=_linear,
)
def block_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute a @ b^T with one scale per block of 128 along K, summed in float32.

    Args:
        a: [M, K], e4m3, K innermost; rows may be strided.
        b: [N, K], a's dtype, K innermost; rows may be strided. Or `shuffle_weight(b)`.
        scale_a: [M, ceil(K / 128)], float32 or float8_e8m0fnu, row-major or column-major.
        scale_b: [ceil(N / 128), ceil(K / 128)], float32 or float8_e8m0fnu.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        [M, N], out_dtype.

    Source:
        vLLM's `w8a8_block_fp8_matmul`; the FP8 GEMM of RadeonFlow; amd-fp8-gemm.py of the Inference Sprint;
        03-matrix-multiplication of AMD perf-kernels.
    """
    exact = torch.float64 if out_dtype == torch.float64 else torch.float32
    weight = weight_layout.plain_weight(b)
    n, k = weight.shape
    values = a.to(exact) * scale_a.to(exact).repeat_interleave(BLOCK, 1)[:, :k]
    scales = scale_b.to(exact).repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return (values @ (weight.to(exact) * scales).t()).to(out_dtype)
