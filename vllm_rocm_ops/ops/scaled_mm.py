"""FP8 matrix product with scales per tensor or per row, for few tokens; kernels: csrc/ops/scaled_mm.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.launch import I64, Counters, Launch, Workspace
from vllm_rocm_ops.op import Case, Op, describe

__all__ = ["scaled_mm"]

OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
ROWS = {8: 16, 16: 32, 32: 32, 64: 16}  # of b in a tile, by the most tokens that a kernel takes
DEPTH = 64  # bytes of K that a slice is a multiple of
WAVES = 4  # of a block
SLICES = (1, 2, 3, 4, 6, 8, 12, 16)
SHORTEST_SLICE = 832  # bytes of K
RESIDENT = 3  # blocks that a compute unit runs at once


@dataclass(frozen=True)
class SkinnyConfig:
    """K is cut into `slices`; `blocks` blocks share the work."""

    slices: int
    blocks: int


def _sizes(a) -> tuple[int, int, int]:
    """M, N, K."""
    return a.a.shape[0], a.b.shape[1], a.a.shape[1]


def _allocate(a) -> Tensor:
    return a.a.new_empty((a.a.shape[0], a.b.shape[1]), dtype=a.out_dtype)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    fp8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    yield "a", "[M, K] float8_e4m3", describe(a.a), a.a.dim() == 2 and a.a.dtype in fp8
    holds = a.b.dim() == 2 and a.b.dtype == a.a.dtype and a.b.shape[0] == a.a.shape[1]
    yield "b", f"{a.a.dtype} [K={a.a.shape[1]}, N] like a", describe(a.b), holds
    for name, scale, rows in (("scale_a", a.scale_a, a.a.shape[0]), ("scale_b", a.scale_b, a.b.shape[1])):
        holds = scale.dtype == torch.float32 and scale.numel() in (1, rows)
        yield name, f"float32 with 1 or {rows} elements", describe(scale), holds
    yield "out_dtype", "bfloat16, float16 or float32", str(a.out_dtype), a.out_dtype in OUT_TYPES
    if a.bias is not None:
        holds = a.bias.shape == (a.b.shape[1],) and a.bias.dtype == a.out_dtype
        yield "bias", f"{a.out_dtype} [N={a.b.shape[1]}]", describe(a.bias), holds
    for name, value in a._asdict().items():
        if isinstance(value, Tensor):
            yield name, f"on {a.a.device}", f"on {value.device}", value.device == a.a.device


def _envelope(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    m, n, k = _sizes(a)
    yield f"{arch.name} multiplies a's dtype ({arch.fp8_dtype})", a.a.dtype == arch.fp8_dtype
    yield f"M is at most {max(ROWS)}", m <= max(ROWS)
    yield "N and K are at least 1 and below 2^31", 0 < n < 2**31 and 0 < k < 2**31
    yield "K is a multiple of 16", k % 16 == 0
    for name, rows in (("a", a.a), ("b", a.b.t())):
        address = 0 if rows.is_meta else rows.data_ptr()
        holds = rows.shape[1] == 1 or rows.stride(1) == 1
        yield f"{name} has K innermost", holds
        yield (
            f"rows of {name} are 16-byte aligned",
            address % 16 == 0 and (rows.shape[0] == 1 or rows.stride(0) % 16 == 0),
        )
    yield "scales and bias are contiguous", all(t is None or t.is_contiguous() for t in (a.scale_a, a.scale_b, a.bias))


def _tokens(m: int) -> int:
    return next(tokens for tokens in ROWS if tokens >= m)


def _tiles(a) -> int:
    m, n, _ = _sizes(a)
    return -(-n // ROWS[_tokens(m)])


def _configs(a, arch: Arch) -> list[SkinnyConfig]:
    _, _, k = _sizes(a)
    configs = []
    for slices in SLICES:
        if slices == 1 or k >= slices * DEPTH:
            blocks = min(_tiles(a) * slices, RESIDENT * arch.compute_units)
            configs += [SkinnyConfig(slices, b) for b in sorted({-(-blocks // RESIDENT), blocks})]
    return configs


def _default(a, arch: Arch) -> SkinnyConfig:
    """The fewest slices that give nearly every compute unit two items, unless they would be too short to stream; all the
    blocks that are resident at once. Measured on H200, M = 1 and 8: within 4 % of the best of all that was tried."""
    _, _, k = _sizes(a)
    long_enough = [s for s in SLICES if s == 1 or k >= s * SHORTEST_SLICE]
    slices = next((s for s in long_enough if _tiles(a) * s >= 1.9 * arch.compute_units), long_enough[-1])
    return SkinnyConfig(slices, min(_tiles(a) * slices, RESIDENT * arch.compute_units))


def _plan(config: SkinnyConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    m, n, k = _sizes(a)
    if m == 0:
        return []
    tiles, rows, threads = _tiles(a), ROWS[_tokens(m)], WAVES * arch.wave_lanes
    slice = -(-k // (config.slices * DEPTH)) * DEPTH
    slices = -(-k // slice)
    args = (
        a.a,
        a.b,
        out,
        Workspace(slices * tiles * rows * m * 4) if slices > 1 else None,
        Counters(tiles) if slices > 1 else None,
        a.scale_a,
        a.scale_b,
        a.bias,
        I64(a.a.stride(0) if m > 1 else k),
        I64(a.b.stride(1) if n > 1 else k),
        m,
        n,
        k,
        int(a.scale_a.numel() > 1),
        int(a.scale_b.numel() > 1),
        OUT_TYPES[a.out_dtype],
        slices,
        slice,
        tiles * slices,
        min(config.blocks, tiles * slices),
    )
    grid = (min(config.blocks, tiles * slices), 1, 1)
    return [Launch("scaled_mm", f"scaled_mm_skinny_{rows}x{_tokens(m)}", grid, (threads, 1, 1), args)]


def _cases() -> Iterator[Case]:
    """Every instance, all slice counts with their tails, M around the tiles, scales and bias in every mix, padding."""

    def case(name: str, m: int, n: int, k: int, **given) -> Case:
        return Case(name, functools.partial(_inputs, m, n, k, given))

    for m in (1, 7, 8, 9, 16, 17, 33, 64):
        yield case(f"m{m}", m, 48, 1024)
    yield case("per-tensor", 3, 40, 256, per_row=False)
    yield case("bias-fp16", 4, 33, 512, out_dtype=torch.float16, bias=True)
    yield case("fp32-out", 2, 16, 320, out_dtype=torch.float32, bias=True)
    yield case("padded", 5, 32, 512, padding=256)
    yield case("k-tail", 2, 32, 16 * 67)
    yield case("long-k", 2, 32, 2048 + 16)
    yield case("one-column", 2, 1, 128)
    yield case("shortest-k", 2, 17, 16)
    yield case("spikes", 2, 32, 1040, spikes=True)
    yield case("no-tokens", 0, 32, 64)


def _inputs(m, n, k, given, device, generator, fp8_dtype) -> tuple:
    def rows(count: int) -> Tensor:
        values = torch.randn(count, k, generator=generator)
        if given.get("spikes"):
            values = values * 0.01
            values[:, [0, k // 2, k - 1]] = torch.tensor([100.0, -100.0, 50.0])
        storage = torch.zeros(count, k + given.get("padding", 0))
        storage[:, :k] = values
        return storage.to(fp8_dtype).to(device)[:, :k]

    per_row = given.get("per_row", True)
    out_dtype = given.get("out_dtype", torch.bfloat16)
    scale_a = torch.rand(m if per_row else 1, 1, generator=generator).to(device) + 0.5
    scale_b = torch.rand(n if per_row else 1, 1, generator=generator).to(device) * 0.01
    bias = torch.randn(n, generator=generator).to(out_dtype).to(device) if given.get("bias") else None
    return rows(m), rows(n).t(), scale_a, scale_b, out_dtype, bias


def _op(reference) -> Op:
    return Op(
        reference,
        allocate=_allocate,
        contract=_contract,
        envelope=_envelope,
        configs=_configs,
        default=_default,
        plan=_plan,
        problem=lambda a: dict(zip("mnk", _sizes(a))),
        cases=_cases,
        sums=True,
    )


@_op
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """(a @ b) * scale_a * scale_b^T + bias, summed in fp32.

    a [M, K] and b [K, N] are e4m3 of one format with K innermost (b is the view `weight.t()`), rows may be strided;
    scale_a has 1 or M elements, scale_b 1 or N, float32; bias [N] is of out_dtype: bf16, fp16 or fp32. Returns [M, N].
    """
    exact = torch.float64 if out_dtype == torch.float64 else torch.float32
    product = (a.to(exact) @ b.to(exact)) * scale_a.to(exact).reshape(-1, 1) * scale_b.to(exact).reshape(1, -1)
    if bias is not None:
        product = product + bias.to(exact)
    return product.to(out_dtype)
