"""The experts of a mixture-of-experts layer, from routed tokens to their weighted sum; kernels: csrc/ops/fused_experts.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops import quantization
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.launch import I64, Launch, Workspace
from vllm_rocm_ops.op import Case, Op, describe
from vllm_rocm_ops.ops import fused_experts_tiled as tiled
from vllm_rocm_ops.ops.experts import HALVES, intermediate, scale_strides, scheme, slots
from vllm_rocm_ops.ops.fused_experts_quantize import Rows, quantize
from vllm_rocm_ops.ops.fused_experts_tiled import TiledConfig
from vllm_rocm_ops.ops.gemm import BLOCK, OUT_TYPES
from vllm_rocm_ops.quantization import LIMIT

__all__ = ["fused_experts"]

MODULE = "fused_experts"
MOST_TOKENS, MOST_SLOTS = 64, 32  # that blocks group in LDS
TILED_FROM = 33  # tokens
NO_EXPERT = 2**15 - 1
TILE_ROWS, GATE_UP_ROWS = 16, 8  # of weights in a tile; of these the gate rows
TILE_TOKENS = {32: 8, 64: 16}  # by the lanes of a wave
GROUP = 128  # bytes of K that a wave takes at a time
UNIT = 4  # groups of down's K that a wave takes at a time
RESIDENT = {1: 3, 2: 2}  # blocks of gate_up on a compute unit, by the tiles of tokens
STREAMING_SHARE = {1: 0.85, 2: 0.75}  # of the bandwidth, by the tiles of tokens
LAUNCH_US = 2.0


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    dims = a.hidden.dim() == 2 and a.w1.dim() == a.w2.dim() == 3
    yield "hidden, w1, w2", "[M, H], [E, 2 I, H], [E, H, I]", describe(a.hidden), dims
    m, h = a.hidden.shape
    experts, n, _ = a.w1.shape
    holds = a.w1.shape[2] == h and n % 2 == 0 and a.w1.dtype in (*HALVES, *LIMIT)
    yield "w1", f"bf16, fp16 or e4m3 [E, 2 I, H={h}]", describe(a.w1), holds
    holds = a.w2.shape == (experts, h, n // 2) and a.w2.dtype == a.w1.dtype
    yield "w2", f"{a.w1.dtype} [E={experts}, H={h}, I={n // 2}]", describe(a.w2), holds
    wanted = HALVES if a.w1.dtype in LIMIT else (a.w1.dtype,)
    quantized = a.w1.dtype in LIMIT and a.hidden.dtype == a.w1.dtype
    yield "hidden", f"{' or '.join(map(str, wanted))} [M, H]", describe(a.hidden), quantized or a.hidden.dtype in wanted
    yield "out_dtype", "bfloat16 or float16", str(a.out_dtype), a.out_dtype in HALVES
    holds = a.topk_ids.shape == (m, a.topk_ids.shape[-1]) and a.topk_ids.dtype in (torch.int32, torch.int64)
    yield "topk_ids", f"int32 or int64 [M={m}, topk]", describe(a.topk_ids), holds
    holds = a.topk_weights.shape == a.topk_ids.shape and a.topk_weights.dtype == torch.float32
    yield "topk_weights", f"float32 {list(a.topk_ids.shape)}", describe(a.topk_weights), holds
    for name, weight, scale in (("w1_scale", a.w1, a.w1_scale), ("w2_scale", a.w2, a.w2_scale)):
        needed = weight.dtype in LIMIT
        wanted = "float32 [E], [E, N] or [E, ceil(N / 128), ceil(K / 128)]" if needed else "None"
        holds = (scale is not None) == needed and scheme(weight, scale) != "unknown"
        holds = holds and (scale is None or scale.dtype == torch.float32)
        yield name, wanted, "None" if scale is None else describe(scale), holds
    same = (scheme(a.w1, a.w1_scale) == "block") == (scheme(a.w2, a.w2_scale) == "block")
    yield "w1_scale and w2_scale", "both or neither per block", describe(a.w1), same
    if a.hidden_scale is not None or quantized:
        scale = a.hidden_scale
        shapes = ((m, -(-h // BLOCK)),) if scheme(a.w1, a.w1_scale) == "block" else ((m, 1), (1,), ())
        shapes = shapes if quantized else ((1,), ())
        holds = scale is not None and a.w1.dtype in LIMIT and tuple(scale.shape) in shapes
        holds = holds and scale.dtype == torch.float32
        got = "None" if scale is None else describe(scale)
        yield "hidden_scale", f"float32, one of {', '.join(str(list(s)) for s in shapes)}", got, holds
    if a.act_scale is not None:
        holds = a.w1.dtype in LIMIT and a.act_scale.numel() == 1 and a.act_scale.dtype == torch.float32
        yield "act_scale", "float32, one element, with e4m3 weights", describe(a.act_scale), holds
    if a.expert_map is not None:
        holds = a.expert_map.dim() == 1 and a.expert_map.dtype == torch.int32
        yield "expert_map", "int32 [global experts]", describe(a.expert_map), holds
    yield "shared_experts", f"0 to E={experts}", str(a.shared_experts), 0 <= a.shared_experts <= experts


def _quantized(x: Tensor, dtype: torch.dtype, per_block: bool, scale: Tensor | None) -> Tensor:
    """x as the products see it: quantised with its static scale, or a dynamic one per 128 columns or per row, and back."""
    if scale is not None:
        return quantization.static(x, scale, dtype).to(x.dtype) * scale.to(x.dtype).reshape(())
    rows, k = x.shape
    groups = (
        torch.nn.functional.pad(x, (0, -k % BLOCK)).reshape(rows, -(-k // BLOCK), BLOCK)
        if per_block
        else x.unsqueeze(1)
    )
    dynamic = quantization.scale_of(quantization.absmax(groups), dtype)
    return (quantization.cast(groups / dynamic, dtype).to(x.dtype) * dynamic).flatten(1)[:, :k]


def _dequantized(values: Tensor, scale: Tensor | None, exact: torch.dtype) -> Tensor:
    """values [N, K] of one expert times its scale."""
    values = values.to(exact)
    if scale is None:
        return values
    scale = scale.to(exact)
    if scale.dim() == 2 and scale.shape != (len(values), 1):
        scale = scale.repeat_interleave(BLOCK, 0)[: len(values)].repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return values * (scale.reshape(-1, 1) if scale.dim() == 1 else scale)


@dataclass(frozen=True)
class StreamedConfig:
    """For few tokens: an expert's weights are streamed once for so many tiles of its tokens."""

    tiles: int


def _envelope(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    experts, n, h = a.w1.shape
    size = a.w1.element_size()
    yield f"{arch.name} multiplies the weights' dtype", a.w1.dtype in (*HALVES, arch.fp8_dtype)
    yield "H and I are multiples of 16 bytes, I of 8", h * size % 16 == n // 2 * size % 16 == n // 2 % 8 == 0
    for name in ("hidden", "w1", "w2"):
        tensor = getattr(a, name)
        holds = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        holds = holds and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        yield f"{name}'s rows are contiguous and 16-byte aligned", holds
    for name in ("w1", "w2"):
        weight = getattr(a, name)
        yield f"an expert's {name} reaches over less than 2 GB", weight.shape[1] * weight.stride(1) * size < 2**31
    for name in ("topk_weights", "topk_ids", "hidden_scale", "w1_scale", "w2_scale", "act_scale", "expert_map"):
        tensor = getattr(a, name)
        yield f"{name} is contiguous", tensor is None or tensor.is_contiguous()
    yield f"there are fewer than {NO_EXPERT} experts", experts < NO_EXPERT
    if not _is_streamed(a):
        yield from tiled.envelope(a, arch)


def _is_streamed(a) -> bool:
    return a.hidden.shape[0] <= MOST_TOKENS and slots(a) <= MOST_SLOTS


class Tokens(NamedTuple):
    """What a product multiplies with weights: rows so many bytes apart, and their scales, so many elements apart."""

    rows: Tensor | Workspace
    row_bytes: int
    scale: Tensor | Workspace | None = None
    scale_row: int = 0


def _tokens(a, x: Rows, static: Tensor | None, present: Workspace | None, arch: Arch) -> tuple[Tokens, list[Launch]]:
    """The tokens of a product as its kernel takes them, and the launch that quantises them if there must be one."""
    if a.w1.dtype in HALVES:
        return Tokens(x.buffer, x.stride * x.dtype.itemsize), []
    quantized = quantize(x, scheme(a.w1, a.w1_scale) == "block", static, arch, present)
    return Tokens(quantized.values, x.columns, quantized.scale, quantized.scale_row), [quantized.launch]


def _hidden(a, arch: Arch) -> tuple[Tokens, list[Launch]]:
    x = a.hidden
    if x.dtype not in LIMIT:
        return _tokens(a, Rows(x, *x.shape, x.stride(0), x.dtype), a.hidden_scale, None, arch)
    scale_row = 0 if a.hidden_scale.numel() == 1 else a.hidden_scale.shape[1]
    return Tokens(x, x.stride(0), a.hidden_scale, scale_row), []


def _configs(a, arch: Arch) -> list[StreamedConfig | TiledConfig]:
    streamed = [StreamedConfig(tiles) for tiles in (1, 2)] if _is_streamed(a) else []
    can_tile = all(holds for _, holds in tiled.envelope(a, arch))
    is_worth = not streamed or a.hidden.shape[0] >= TILED_FROM
    return streamed + (tiled.configs(a, arch) if can_tile and is_worth else [])


def _cost(config: StreamedConfig | TiledConfig, a, arch: Arch) -> dict[str, float]:
    """The time to stream the experts that so many tokens hit if all are as likely, and again if an expert has more tokens than a
    tile; two tiles take registers that keep loads in flight."""
    if isinstance(config, TiledConfig):
        return tiled.cost(config, a, arch)
    experts, m = len(a.w1), a.hidden.shape[0]
    hit = experts * (1.0 - (1.0 - slots(a) / experts) ** m) if slots(a) < experts else experts
    passes = max(1.0, m * slots(a) / max(hit, 1.0) / (config.tiles * TILE_TOKENS[arch.wave_lanes]))
    expert_bytes = (a.w1.numel() + a.w2.numel()) // experts * a.w1.element_size()
    rate = arch.bandwidth_gb_s * 1e3 * STREAMING_SHARE[config.tiles]
    launches = 2 if a.w1.dtype in HALVES else 3 if a.hidden.dtype in LIMIT else 4
    return {"streaming": hit * passes * expert_bytes / rate, "launches": launches * LAUNCH_US}


def _plan(config: StreamedConfig | TiledConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    if isinstance(config, TiledConfig):
        return tiled.launches(config, out, a, arch)
    m, h = a.hidden.shape
    if m == 0:
        return []
    inner, pairs = intermediate(a), m * slots(a)
    act, present = Workspace(pairs * inner * 2), Workspace(4)
    hidden, quantize_hidden = _hidden(a, arch)
    activation, quantize_act = _tokens(a, Rows(act, pairs, inner, inner, a.out_dtype), a.act_scale, present, arch)
    tiles = inner // GATE_UP_ROWS
    blocks = min(pairs * tiles, RESIDENT[config.tiles] * arch.compute_units)
    groups = -(-inner * a.w1.element_size() // GROUP)
    unit = min(UNIT, groups)
    stage = functools.partial(_stage, config, a, arch)
    gate_up = stage("gate_up", hidden, a.w1, a.w1_scale, act, present if quantize_act else None, blocks, blocks, tiles)
    down = stage("down", activation, a.w2, a.w2_scale, out, None, -(-h // TILE_ROWS), unit, -(-groups // unit))
    return [*quantize_hidden, gate_up, *quantize_act, down]


def _stage(config, a, arch, name, tokens, weight, scale, out, present, blocks, step, per_item) -> Launch:
    """The launch of one of the two products."""
    experts, rows, k = weight.shape
    m, kind, size = a.hidden.shape[0], scheme(weight, scale), weight.element_size()
    args = (
        tokens.rows,
        weight,
        out,
        tokens.scale,
        scale,
        a.topk_ids,
        a.topk_weights,
        present,
        a.expert_map,
        *(I64(n) for n in (weight.stride(0) * size, scale_strides(weight, scale)[0])),
        tokens.row_bytes,
        weight.stride(1) * size,
        m,
        rows,
        k * size,
        tokens.scale_row,
        scale_strides(weight, scale)[1],
        a.topk_ids.shape[1],
        a.shared_experts,
        experts - a.shared_experts,
        0 if a.expert_map is None else len(a.expert_map),
        a.topk_ids.element_size() // 4,
        2**20 // slots(a) + 1,
        OUT_TYPES[a.out_dtype],
        int(a.apply_router_weight_on_input == (name == "gate_up")),
        step,
        per_item,
        2**31 // per_item + 1 - 2**32 * (per_item == 1),  # as the 32 bits of an unsigned int
    )
    lds = 16 * ((m * slots(a) + 4) // 4 * 4) + 16 + (4 * 4 * m * TILE_ROWS if name == "down" else 0)
    named = {"none": "bf16" if weight.dtype == torch.bfloat16 else "fp16", "block": "block"}.get(kind, "row")
    symbol = f"{MODULE}_{name}_{named}_{config.tiles}"
    return Launch(MODULE, symbol, (blocks, 1, 1), (4 * arch.wave_lanes, 1, 1), args, lds)


def _problem(a) -> dict[str, int]:
    experts, n, h = a.w1.shape
    return {"m": a.hidden.shape[0], "topk": slots(a), "experts": experts, "hidden": h, "intermediate": n // 2}


def _cases() -> Iterator[Case]:
    """Every instance; tokens around a tile of them; experts without tokens and with all; sizes around blocks of 128."""

    def case(name: str, m: int, topk: int, experts: int, hidden: int, intermediate: int, **given) -> Case:
        return Case(name, functools.partial(_inputs, m, topk, experts, hidden, intermediate, given))

    yield case("block", 3, 2, 8, 256, 128)
    yield case("block-m1", 1, 3, 8, 384, 256)
    yield case("block-m17-one-expert", 17, 1, 4, 256, 128, one=True)
    yield case("block-quantized", 5, 2, 4, 256, 128, quantized=True)
    yield case("block-odd", 4, 2, 6, 208, 80, shared_experts=1)
    yield case("block-map", 6, 3, 5, 256, 128, mapped=True, ids=torch.int64, shared_experts=1)
    yield case("block-input-weight", 3, 1, 4, 128, 128, apply_router_weight_on_input=True)
    yield case("block-repeated", 3, 3, 2, 128, 64, repeated=True)
    yield case("block-m40", 40, 4, 16, 128, 64, shared_experts=1)
    yield case("block-m65", 65, 2, 8, 256, 128)
    yield case("channel", 4, 2, 4, 192, 96, scheme="channel")
    yield case("tensor-static", 4, 2, 4, 128, 96, scheme="tensor", static=True, out_dtype=torch.float16)
    yield case("tensor", 9, 2, 4, 128, 64, scheme="tensor")
    yield case("bf16", 5, 2, 4, 128, 72, scheme="none")
    yield case("fp16", 18, 2, 4, 136, 64, scheme="none", out_dtype=torch.float16, shared_experts=1)
    yield case("bf16-m70", 70, 2, 4, 128, 64, scheme="none")
    yield case("block-odd-m70", 70, 2, 6, 208, 80, out_dtype=torch.float16, shared_experts=2)
    yield case("channel-m70", 70, 2, 3, 208, 80, scheme="channel", out_dtype=torch.float16)
    yield case("channel-static-m65", 65, 2, 4, 144, 96, scheme="channel", static=True)
    yield case("fp16-m70", 70, 2, 4, 136, 72, scheme="none", out_dtype=torch.float16, shared_experts=1)
    yield case("no-tokens", 0, 2, 4, 128, 128)


def _inputs(m, topk, experts, hidden, intermediate, given, device, generator, fp8_dtype) -> tuple:
    kind, shared = given.get("scheme", "block"), given.get("shared_experts", 0)
    out_dtype = given.get("out_dtype", torch.bfloat16)
    dtype = out_dtype if kind == "none" else fp8_dtype

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def scale(n: int, k: int, times: float) -> Tensor | None:
        shape = {"block": (-(-n // BLOCK), -(-k // BLOCK)), "channel": (n,), "tensor": (), "none": None}[kind]
        return None if shape is None else (rand(experts, *shape) + 0.5) * times

    def weight(n: int, k: int) -> Tensor:
        return (randn(experts, n, k) * (k**-0.5 if kind == "none" else 1.0)).to(dtype)

    routed = (experts - shared) * 2 if given.get("mapped") else experts - shared
    ids = rand(m, routed).topk(topk).indices if topk <= routed else None
    if given.get("one") or given.get("repeated") or ids is None:
        ids = torch.full((m, topk), min(1, routed - 1), device=device)
        if given.get("repeated"):
            ids[:, 1:2] = 0
    expert_map = None
    if given.get("mapped"):
        expert_map = torch.full((routed,), -1, dtype=torch.int32)
        expert_map[1::2] = torch.arange(experts - shared, dtype=torch.int32)
        expert_map = expert_map.to(device)
    x, x_scale = randn(m, hidden).to(out_dtype), None
    if given.get("quantized"):
        x, x_scale = randn(m, hidden).to(dtype), rand(m, -(-hidden // BLOCK)) + 0.5
    if given.get("static"):
        x_scale = torch.full((1,), 0.02).to(device)
    return (
        x,
        weight(2 * intermediate, hidden),
        weight(hidden, intermediate),
        rand(m, topk),
        ids.to(given.get("ids", torch.int32)),
        out_dtype,
        scale(2 * intermediate, hidden, hidden**-0.5),
        scale(hidden, intermediate, intermediate**-0.5),
        x_scale,
        torch.full((1,), 0.05).to(device) if given.get("static") else None,
        expert_map,
        shared,
        given.get("apply_router_weight_on_input", False),
    )


def _op(reference) -> Op:
    return Op(
        reference,
        allocate=lambda a: a.hidden.new_empty(a.hidden.shape, dtype=a.out_dtype),
        contract=_contract,
        envelope=_envelope,
        configs=_configs,
        cost=_cost,
        plan=_plan,
        problem=_problem,
        cases=_cases,
        sums=True,
    )


@_op
def fused_experts(
    hidden: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out_dtype: torch.dtype,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
    act_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    shared_experts: int = 0,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """sum over a token's experts of weight * w2[expert] @ (silu(gate) * up), where [gate, up] = w1[expert] @ hidden.

    hidden [M, H] bf16 or fp16, or e4m3 with hidden_scale; w1 [E, 2 I, H], gate rows first, and w2 [E, H, I] of one type;
    topk_weights float32 and topk_ids int32 or int64 [M, topk]. Ids that are no expert count nothing: with expert_map, int32
    [global experts], those that it maps to -1. The last `shared_experts` of E take every token with weight 1 and are no
    target of ids. With apply_router_weight_on_input a weight scales hidden, not the result.

    e4m3 weights come with float32 scales, [E], [E, N], or [E, ceil(N / 128), ceil(K / 128)]. With scales per block, hidden and
    the activation are quantised per 1x128, else per token or, given a static scale of one element, hidden_scale or act_scale,
    by that; e4m3 hidden has its scales [M, ceil(H / 128)], [M, 1] or [1]. Between the products the activation is of
    out_dtype, bf16 or fp16. Returns [M, H].
    """
    exact = torch.float64 if out_dtype == torch.float64 else torch.float32
    per_block = scheme(w1, w1_scale) == "block"
    x = hidden.to(exact)
    if hidden.dtype in LIMIT:
        scale = hidden_scale.to(exact)
        x = x * (scale.repeat_interleave(BLOCK, 1)[:, : hidden.shape[1]] if per_block else scale)
    elif w1.dtype in LIMIT:
        x = _quantized(x, w1.dtype, per_block, hidden_scale)
    routed = len(w1) - shared_experts
    local = topk_ids.long()
    if expert_map is not None:
        known = (local >= 0) & (local < len(expert_map))
        local = torch.where(known, expert_map.long()[local.clamp(0, len(expert_map) - 1)], -1)
    local = torch.where((local >= 0) & (local < routed), local, -1)
    total = torch.zeros(hidden.shape, dtype=exact, device=hidden.device)
    for expert in range(len(w1)):
        chosen = local == expert
        weight = (topk_weights.to(exact) * chosen).sum(1) if expert < routed else total.new_ones(len(total))
        w1_values = _dequantized(w1[expert], None if w1_scale is None else w1_scale[expert], exact)
        w2_values = _dequantized(w2[expert], None if w2_scale is None else w2_scale[expert], exact)
        gate_up = x @ w1_values.t()
        if apply_router_weight_on_input:
            gate_up = gate_up * weight[:, None]
        gate, up = gate_up.chunk(2, 1)
        inner = (gate / (1.0 + torch.exp(-gate)) * up).to(out_dtype).to(exact)
        if w1.dtype in LIMIT:
            inner = _quantized(inner, w1.dtype, per_block, act_scale)
        result = inner @ w2_values.t()
        if not apply_router_weight_on_input:
            result = result * weight[:, None]
        total += result if expert >= routed else torch.where(chosen.any(1, keepdim=True), result, 0.0)
    return total.to(out_dtype)
