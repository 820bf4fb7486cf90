"""Plan fused_experts for many tokens: the kernels of csrc/ops/fused_experts_tiled.hip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, Workspace, fields
from vllm_rocm_ops.core.quantization import E5M2
from vllm_rocm_ops.ops.shared.experts import (
    are_e4m3_or_halves,
    expected_hit,
    expected_pairs,
    expected_tiles,
    intermediate,
    is_plain,
    routing_arguments,
    scale_strides,
    scheme_of,
    slots,
    swiglu_arguments,
    weight_strides,
)
from vllm_rocm_ops.ops.shared.experts_quantize import (
    MAX_COLUMNS,
    Activations,
    UnquantizedRows,
    hidden_operand,
    operand,
    quantizing,
)
from vllm_rocm_ops.ops.shared.gemm import OUT_TYPES
from vllm_rocm_ops.ops.shared.rowwise import ELEMENTS, VECTOR
from vllm_rocm_ops.ops.shared.tiled_gemm import FLOPS_PER_BYTE, PANEL, RATE, RESIDENT, SINGLE_BLOCK_RATE, lds_bytes

MODULE = "fused_experts_tiled"
BYTES_MODULE = "fused_experts_tiled_bytes"  # 8-bit weights other than e4m3 with e4m3
TOKENS, ROWS = (64, 128), 128  # per tile: pairs of one expert, rows of its weight
THREADS, COMBINE_THREADS = 256, 256
SORT_THREADS, FEW_IDS = (256, 1024), 8  # per block; a sort of few ids has at most 8 per expert
RUN_PANELS = 16  # of tiles next to each other, at most, that a block of down multiplies
MAX_EXPERTS = 1024
# Fitted to H200 at the shares of tools/bench/experts.py: the GEMM rate relative to scaled_mm_tiled; the share of bandwidth; each
# further round of blocks, with a block per tile; a launch.
MULTIPLYING = {64: 1.07, 128: 0.85}
STREAMING, ROUND_US, LAUNCH_US = {64: 0.92, 128: 0.55}, 0.93, 2.3


@dataclass(frozen=True)
class TiledConfig:
    """Tiles of `tokens` pairs of one expert."""

    tokens: int


def can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield the rules that tiled kernels add to the streamed ones'."""
    holds = is_plain(a) or are_e4m3_or_halves(a)
    yield "gate_up is silu(gate) * up without a bias, or weights are bf16, fp16 or e4m3", holds
    (m, h), inner, experts = a.hidden.shape, intermediate(a), len(a.w1)
    yield f"there are at most {MAX_EXPERTS} experts", experts <= MAX_EXPERTS
    yield "a token has a slot, and there are fewer than 2^28 pairs", 0 < slots(a) and m * slots(a) < 2**28
    yield "a token's results have less than 2 GB", slots(a) * h * 4 < 2**31
    kind = scheme_of(a.w1, a.w1_scale)
    yield "weight scales are float32", not kind.native
    yield "weight-only scales are per row or per tensor", not a.weight_only or not kind.group
    yield "out_dtype is the dtype of unscaled weights", kind.scaled or a.out_dtype == a.w1.dtype
    columns = [h] if a.hidden_scale is None else []
    columns += [inner] if a.act_scale is None else []
    if a.w1.dtype == torch.int8:
        columns = [h, inner]  # one block per row, also with a static scale
    holds = kind.group > 0 or quantizing(a) == 0 or max(columns, default=0) <= MAX_COLUMNS
    yield f"rows quantized per token have at most {MAX_COLUMNS} columns", holds


def configs(a, arch: Arch) -> list[TiledConfig]:
    """Return every tile size, the smallest if gate_up has another activation or a bias."""
    return [TiledConfig(tokens) for tokens in (TOKENS if is_plain(a) else TOKENS[:1])]


def _run(config: TiledConfig, a, weight: Tensor) -> int:
    """Return the tiles along the rows of a weight that a block computes one after the other."""
    runs = weight is a.w2 and config.tokens == TOKENS[0] and are_e4m3_or_halves(a)
    return max(min(RUN_PANELS // _panels(weight), _tiles_n(weight)), 1) if runs else 1


def _panels(weight: Tensor) -> int:
    """Return the panels along K that a tile multiplies."""
    return -(-weight.shape[2] * weight.element_size() // PANEL)


def _tiles_n(weight: Tensor) -> int:
    """Return the tiles along the rows of an expert's weight, gate and up rows together."""
    return -(-weight.shape[1] // ROWS)


def cost(config: TiledConfig, a, arch: Arch) -> dict[str, float]:
    """Return the microseconds by the model of scaled_mm_tiled.

    A GEMM takes the longer of the busiest compute unit's multiplications and its HBM bytes; other launches take their bytes.
    """
    (m, h), inner, size = a.hidden.shape, intermediate(a), a.w1.element_size()
    pairs, tiles = expected_pairs(a), expected_tiles(a, config.tokens)
    bandwidth = arch.bandwidth_gb_s * 1e3  # bytes / us
    # A panel of bf16 has half the multiplications, and takes as long.
    rate = MULTIPLYING[config.tokens] * RATE[config.tokens] * FLOPS_PER_BYTE * bandwidth / arch.compute_units
    hit = expected_hit(a) / len(a.w1)
    at_once = RESIDENT[ROWS] * arch.compute_units
    terms = {}
    for name, weight, rows, k in (("gate_up", a.w1, 2 * inner, h), ("down", a.w2, h, inner)):
        blocks = tiles * _tiles_n(weight)
        of_unit = math.ceil(blocks / arch.compute_units)
        single = of_unit % RESIDENT[ROWS]
        of_block = 2 * config.tokens * ROWS * PANEL * _panels(weight) / rate
        moved = weight.numel() * size * hit + pairs * (k * size + rows * 4)
        terms[name] = max(
            (of_unit - single + single / SINGLE_BLOCK_RATE) * of_block, moved / (STREAMING[config.tokens] * bandwidth)
        )
        terms[name] += blocks / at_once * ROUND_US
    terms["rest"] = (pairs * (h * 4 + inner * 3) + m * h * 5) / bandwidth + (4 + quantizing(a)) * LAUNCH_US
    return terms


def _kernels(a, weight: Tensor, scale: Tensor | None, tokens: torch.dtype) -> tuple[str, str]:
    """Return the module, and the part of symbols for dtypes and scales; `tokens` is the dtype before quantization."""
    name = "int8" if weight.dtype == torch.int8 else "e5m2" if weight.dtype in E5M2 else "e4m3"
    kind = scheme_of(weight, scale).infix("row", weight.dtype)
    if a.weight_only:
        return BYTES_MODULE, f"{name}_with_{ELEMENTS[tokens]}"
    return {"int8": (BYTES_MODULE, name), "e5m2": (BYTES_MODULE, f"{name}_{kind}")}.get(name, (MODULE, kind))


def launches(config: TiledConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    """Return the launches of a call; out [M, H] is contiguous."""
    (m, h), inner, topk = a.hidden.shape, intermediate(a), a.topk_ids.shape[1]
    if m == 0:
        return []
    pairs, experts = m * slots(a), len(a.w1)
    routing = {**routing_arguments(a), "tokens": m}
    max_tiles = min(pairs, pairs // config.tokens + experts)
    order, tiles = Workspace(pairs * 4), Workspace((1 + max_tiles) * 16)
    args = {"routing": routing, "sorted": order, "tiles": tiles, "experts": experts, "tile": config.tokens}
    threads = SORT_THREADS[m * topk > FEW_IDS * experts]
    sort = Launch(MODULE, f"{MODULE}_sort_{threads}", (experts, 1, 1), (threads, 1, 1), fields("sort", args))
    act = UnquantizedRows(Workspace(pairs * inner * a.out_dtype.itemsize), pairs, inner, inner, a.out_dtype)
    results = Workspace(pairs * h * 4)
    tokens, quantize_hidden = hidden_operand(a, arch)
    activations, quantize_act = operand(a, act, a.act_scale, arch, tiles)  # tiles begin with the number of rows

    def product(
        name: str, x: Activations, dtype: torch.dtype, weight: Tensor, scale: Tensor | None, to, router
    ) -> Launch:
        _, rows, k = weight.shape
        size, (scale_expert, scale_row) = weight.element_size(), scale_strides(weight, scale)
        b_tile, b_row, b_vec = weight_strides(a, weight)
        tiles_n, run = _tiles_n(weight), _run(config, a, weight)
        args = {
            "a": x.rows,
            "b": weight,
            "out": to,
            "sorted": order,
            "tiles": tiles,
            "scale_a": x.scale,
            "scale_b": scale,
            "router": router,
            "a_stride": x.row_bytes,
            "b_expert": weight.stride(0) * size,
            "scale_b_expert": scale_expert,
            "b_tile": b_tile,
            "b_row": b_row,
            "b_vec": b_vec,
            "n": rows,
            "k": k * (a.hidden.element_size() if a.weight_only else size),
            "scale_a_row": x.scale_row,
            "scale_a_k": x.scale_k,
            "scale_b_row": scale_row,
            "slots": slots(a),
            "topk": topk,
            "out_type": OUT_TYPES[a.out_dtype],
            "tiles_n": tiles_n,
            "run": run,
        }
        module, kind = _kernels(a, weight, scale, dtype)
        is_clamped = name == "gate_up" and not is_plain(a)
        more = swiglu_arguments(a) if is_clamped else {}
        symbol = f"{module}_{name}{'_clamped' * is_clamped}{'_run' * (run > 1)}_{kind}_{config.tokens}"
        lds, grid = lds_bytes(config.tokens, ROWS, arch), (max_tiles * -(-tiles_n // run), 1, 1)
        return Launch(module, symbol, grid, (THREADS, 1, 1), fields("problem", args) | more, lds)

    on_input, on_output = (a.topk_weights, None) if a.apply_router_weight_on_input else (None, a.topk_weights)
    gate_up = product("gate_up", tokens, a.hidden.dtype, a.w1, a.w1_scale, act.buffer, on_input)
    down = product("down", activations, a.out_dtype, a.w2, a.w2_scale, results, None)
    args = {
        "routing": routing,
        "results": results,
        "router": on_output,
        "out": out,
        "columns": h,
        "out_type": OUT_TYPES[a.out_dtype],
    }
    grid, more = (m, -(-h // (VECTOR * COMBINE_THREADS)), 1), {} if a.w2_bias is None else {"bias": a.w2_bias}
    symbol = f"{MODULE}_combine{'_biased' * bool(more)}"
    combine = Launch(MODULE, symbol, grid, (COMBINE_THREADS, 1, 1), fields("combine", args) | more)
    return [sort, *quantize_hidden, gate_up, *quantize_act, down, combine]
