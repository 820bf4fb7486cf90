"""Plan fused_experts for few tokens: the weight-streaming kernels of csrc/ops/fused_experts.hip."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, Workspace, fields
from vllm_rocm_ops.ops.shared.experts import (
    columns_of,
    expected_hit,
    expected_tiles,
    intermediate,
    is_packed,
    is_plain,
    routing_arguments,
    scale_strides,
    scheme_of,
    slots,
    swiglu_arguments,
    weight_strides,
)
from vllm_rocm_ops.ops.shared.experts_quantize import Activations, UnquantizedRows, hidden_operand, operand, quantizing
from vllm_rocm_ops.ops.shared.gemm import BLOCK, OUT_TYPES
from vllm_rocm_ops.ops.shared.rowwise import ELEMENTS
from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_BYTES

MODULE = "fused_experts"
MAX_TOKENS, MAX_SLOTS = 64, 32  # limits of grouping in LDS
TILE_ROWS, GATE_UP_ROWS = 16, 8  # weight rows per tile, and the gate rows among them
WAVES = 4  # per block
SLICE_BYTES = 128  # of a K slice, the work of a wave's iteration
MAX_UNIT_SLICES = 4  # K slices per unit of down, the work of one wave
RESIDENT = {"gate_up": 3, "down": 4}  # blocks per compute unit
PACKED_RESIDENT = 4  # of gate_up with 4-bit weights, except INT4 in groups of 32, on NVIDIA: kGateUpResident of csrc/ops/fused_experts.hip
# The cost model, where archs agree; `arch.costs` has the rest. Fitted to H200 at the shares of tools/bench/experts.py: the share of
# bandwidth of gate_up, and of down with unlimited blocks; for a further tile of an expert's tokens, a constant and a share of the
# first tile's time, as caches may hold its bytes; a launch; the split-K sum; and each further wave of down's blocks.
GATE_UP_BANDWIDTH, DOWN_BANDWIDTH = 1.03, 1.55
FURTHER_TILE_US, FURTHER_TILE_COST = 0.2, 0.69
LAUNCH_US, SUM_US, ROUND_US = 3.1, 2.8, 1.0


@dataclass(frozen=True)
class StreamedConfig:
    """Blocks stream the weights of the experts that are hit.

    In the second GEMM `split_k` blocks share each tile of rows, and the last to arrive adds their partial sums. With `quantizes`
    each of these blocks quantizes the activation into its LDS, else a launch between the GEMMs does.
    """

    split_k: int
    quantizes: bool = False


def takes(a, arch: Arch) -> bool:
    """True if these kernels support the tokens, slots and experts. divide_by bounds items * tiles^2."""
    m, tiles = a.hidden.shape[0], intermediate(a) // GATE_UP_ROWS
    fits = m <= MAX_TOKENS and slots(a) <= MAX_SLOTS and m * slots(a) * tiles**2 < 2**31
    return fits and max(_gate_up_lds(a) + 2 * WAVES * 4 * arch.wave_lanes * 4, _down_lds(a)) <= arch.lds_bytes


def _lists_bytes(a) -> int:
    """Return the bytes of the pairs sorted by expert, which gate_up passes to down."""
    return 16 + 10 * _padded_pairs(a)


def _padded_pairs(a) -> int:
    return (a.hidden.shape[0] * slots(a) + 8) // 8 * 8


def _gate_up_lds(a) -> int:
    """Return the LDS bytes that group the pairs, without the sums of waves."""
    return _lists_bytes(a) + 6 * _padded_pairs(a) + 4 * len(a.w1)


def _down_lds(a, quantizes: bool = False) -> int:
    """Return the LDS bytes of the pairs, of each wave's sums and of the quantized activation."""
    lds = _lists_bytes(a) + WAVES * a.hidden.shape[0] * TILE_ROWS * 4
    return lds + a.hidden.shape[0] * slots(a) * _row_bytes(a) if quantizes else lds


def _row_scales(a) -> int:
    """Return the scales of a row of the activation in LDS. A static scale stays in HBM."""
    return scheme_of(a.w1, a.w1_scale).groups(intermediate(a)) if a.act_scale is None else 0


def _row_bytes(a) -> int:
    """Return the LDS bytes of a quantized row of the activation and its scales."""
    return intermediate(a) + _row_scales(a) * (0 if a.w2_scale is None else a.w2_scale.element_size())


def _can_quantize(a, arch: Arch) -> bool:
    """True if blocks of down can quantize the activation and leave room in LDS for RESIDENT blocks, and add no bias."""
    in_groups = scheme_of(a.w1, a.w1_scale).group > 0
    fits = _down_lds(a, quantizes=True) <= arch.lds_bytes // RESIDENT["down"]
    can = quantizing(a) > 0 and in_groups == (a.act_scale is None) and intermediate(a) % BLOCK == 0
    return can and fits and a.w2_bias is None


def configs(a, arch: Arch) -> list[StreamedConfig]:
    """Return whole tiles, and split-K that fills the GPU once or twice; each wave has at least one unit.

    Blocks of down quantize the activation, or do not.
    """
    at_once, (_, units) = RESIDENT["down"] * arch.compute_units, _units(a)
    most = -(-a.hidden.shape[0] * slots(a) * units // WAVES)
    split_k = {max(min(rounds * at_once // _down_tiles(a), most), 1) for rounds in (0, 1, 2)}
    quantizes = (False, True) if _can_quantize(a, arch) else (False,)
    return [StreamedConfig(n, q) for n in sorted(split_k) for q in quantizes]


def _down_tiles(a) -> int:
    return -(-a.hidden.shape[1] // TILE_ROWS)


def _units(a) -> tuple[int, int]:
    """Return the K slices per unit of down and the units per item, as even as possible."""
    slices = -(-intermediate(a) * a.w2.element_size() // SLICE_BYTES)
    units = -(-slices // MAX_UNIT_SLICES)
    return -(-slices // units), units


def cost(config: StreamedConfig, a, arch: Arch) -> dict[str, float]:
    """Return the time to stream the experts hit under uniform routing, of further tiles per expert, and of launches."""
    (m, h), bandwidth, costs = a.hidden.shape, arch.bandwidth_gb_s * 1e3, arch.costs.experts
    hit, tiles = expected_hit(a), expected_tiles(a, costs.tile_tokens)
    most = RESIDENT["down"] * arch.compute_units
    blocks = _down_tiles(a) * config.split_k
    w1, w2 = (weight.numel() // len(weight) * weight.element_size() for weight in (a.w1, a.w2))  # bytes per expert
    us = w1 / (GATE_UP_BANDWIDTH * bandwidth)
    us += w2 * (1 / (DOWN_BANDWIDTH * bandwidth) + 1 / (costs.block_bytes_per_us * min(blocks, most)))
    terms = {
        "streaming": hit * us,
        "further tiles": (tiles - hit) * (FURTHER_TILE_US + FURTHER_TILE_COST * us),
        "launches": (2 + quantizing(a) - config.quantizes) * LAUNCH_US + (-(-blocks // most) - 1) * ROUND_US,
    }
    if config.quantizes:
        terms["quantization by blocks"] = m * slots(a) * intermediate(a) * costs.quantize_us
    if config.split_k > 1:
        terms["sum"] = SUM_US + 8 * config.split_k * m * h / bandwidth
    return terms


def _resident(a, arch: Arch) -> int:
    """Return the blocks of gate_up per compute unit."""
    kind = scheme_of(a.w1, a.w1_scale)
    spills = kind.group == 32 and torch.bfloat16 in kind.scales
    return PACKED_RESIDENT if arch.vendor == "nvidia" and is_packed(a.w1) and not spills else RESIDENT["gate_up"]


def launches(config: StreamedConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    """Return the launches of a call; out [M, H] is contiguous."""
    m = a.hidden.shape[0]
    if m == 0:
        return []
    inner, pairs = intermediate(a), m * slots(a)
    act, lists, num_rows = Workspace(pairs * inner * 2), Workspace(_lists_bytes(a)), Workspace(4)
    hidden, quantize_hidden = hidden_operand(a, arch)
    if config.quantizes:
        activation, quantize_act = Activations(act, inner, a.act_scale, _row_scales(a)), []
    else:
        rows = UnquantizedRows(act, pairs, inner, inner, a.out_dtype)
        activation, quantize_act = operand(a, rows, a.act_scale, arch, num_rows)
    tiles = inner // GATE_UP_ROWS
    blocks = min(pairs * tiles, _resident(a, arch) * arch.compute_units)
    product, grid = functools.partial(_product, a, arch, lists), (_down_tiles(a), config.split_k, 1)
    given = num_rows if quantize_act else None
    gate_up = product("gate_up", hidden, a.w1, a.w1_scale, act, given, (blocks, 1, 1), blocks, tiles)
    name = "down_quant" if config.quantizes else "down"
    down = product(name, activation, a.w2, a.w2_scale, out, None, grid, *_units(a))
    return [*quantize_hidden, gate_up, *quantize_act, down]


def _product(
    a,
    arch: Arch,
    lists: Workspace,
    name: str,
    tokens: Activations,
    weight: Tensor,
    scale: Tensor | None,
    out: Tensor | Workspace,
    num_rows: Workspace | None,
    grid: tuple[int, int, int],
    step: int,
    work_per_item: int,
) -> Launch:
    """Return the launch of one of the two GEMMs."""
    m, rows, size = a.hidden.shape[0], weight.shape[1], weight.element_size()
    scale_size = 0 if scale is None else scale.element_size()
    scale_expert, scale_row = (scale_size * n for n in scale_strides(weight, scale))
    tile, row, vector = weight_strides(a, weight)
    splits = grid[1] > 1
    args = {
        "tokens": tokens.rows,
        "weights": weight,
        "out": out,
        "partials": Workspace(grid[0] * grid[1] * m * TILE_ROWS * 4) if splits else None,
        "counters": Counters(grid[0]) if splits else None,
        "scale_a": tokens.scale,
        "scale_b": scale,
        **routing_arguments(a),
        "router": a.topk_weights,
        "lists": lists,
        "num_rows": num_rows,
        "expert_bytes": weight.stride(0) * size,
        "expert_scales": scale_expert,
        "token_bytes": tokens.row_bytes,
        "row_bytes": row,
        "tile_bytes": tile,
        "spread": vector // FRAGMENT_BYTES,
        "m": m,
        "n": rows,
        "k": columns_of(weight) * size,
        "pairs": m * slots(a),
        "scale_a_row": tokens.scale_row * scale_size,
        "scale_b_row": scale_row,
        "per_slot": 2**20 // slots(a) + 1,
        "out_type": OUT_TYPES[a.out_dtype],
        "apply_weights": int(a.apply_router_weight_on_input == (name == "gate_up")),
        "step": step,
        "split_k": grid[1],
        "work_per_item": work_per_item,
        "work_per_item_inverse": 2**31 // work_per_item + 1,
    }
    quantizes, more = name == "down_quant", {}
    lds = _gate_up_lds(a) if name == "gate_up" else _down_lds(a, quantizes)
    scheme = scheme_of(weight, scale, a.weight_only)
    kind = scheme.infix("static" if quantizes else "row", weight.dtype)
    if name == "gate_up" and not is_plain(a):
        name, more = "gate_up_clamped", swiglu_arguments(a)
    elif name == "down" and a.w2_bias is not None:
        name, more = "down_biased", {"bias": a.w2_bias}
    symbol = f"{MODULE}_{name}_{kind}" + (f"_{ELEMENTS[a.out_dtype]}" if quantizes else "")
    return Launch(MODULE, symbol, grid, (WAVES * arch.wave_lanes, 1, 1), fields("experts", args) | more, lds)
