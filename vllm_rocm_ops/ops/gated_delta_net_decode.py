"""Run a decode step of Gated DeltaNet in one launch; kernels: csrc/ops/gated_delta_net_decode.hip.

The formulas are of "Gated Delta Networks" (arXiv 2412.06464), with the normalization, gates and output of Qwen3-Next. Padding, drafts
and the two states follow vLLM 0.33's causal_conv1d_update (model_executor/layers/mamba/ops/causal_conv1d.py), which rolls the
convolution's state, and fused_sigmoid_gating_delta_rule_update (third_party/flash_linear_attention/ops/fused_sigmoid_gating.py). In
vLLM 0.27 to 0.33 padding has the slot NULL_BLOCK_ID = 0, and slots below it are padding as well. vLLM rounds q, k, v and S q to bf16;
here they stay fp32, up to the only rounding of each result.

A scale per token is the maximum over all heads, so blocks would wait for each other: such a layer takes the bf16 result and quantizes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import aligned, apart_contract, describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention, gated_delta_net
from vllm_rocm_ops.ops.shared.gated_delta_net import is_tensor, sizes_of
from vllm_rocm_ops.ops.shared.gemm import OUT_TYPES, divisor

__all__ = ["gated_delta_net_decode"]

SIZE = 128  # of K and V, and columns per scale of out_scales
WIDTH = 4  # rows of the convolution
STATES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Threads of a block, which has a V head of a request."""

    threads: int


def _floats(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return x.dtype in (dtype, torch.float32) and x.shape == shape


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.state.dim() == 4 and is_wide_float(a.state) and 0 not in a.state.shape
    yield "state", "floating point of 16 bits or more, [slots, V heads, V, K]", describe(a.state), holds
    yield apart_contract("state", a.state)
    slots, heads, value, key = a.state.shape
    least = 2 * heads * value
    holds = a.qkvz.dim() == 2 and is_wide_float(a.qkvz) and a.qkvz.shape[1] > least
    holds = holds and (a.qkvz.shape[1] - least) % (2 * key) == 0 and heads % sizes_of(a).key_heads == 0
    wanted = f"floating point of 16 bits or more, [T, {least} + 2 * K heads * {key}], K heads a divisor of {heads}"
    yield "qkvz", wanted, describe(a.qkvz), holds
    rows, dtype, channels = a.qkvz.shape[0], a.qkvz.dtype, sizes_of(a).channels
    yield from gated_delta_net.gates_contract(a, dtype, rows, 2 * heads)
    w = a.conv_weight
    holds = w.dim() == 2 and w.dtype == dtype and w.shape[0] == channels and w.shape[1] > 0
    yield "conv_weight", f"{dtype} [{channels}, 1 or more]", describe(w), holds
    holds = a.indices.dim() == 2 and a.indices.dtype == torch.int32 and a.indices.shape[1] > 0
    yield "indices", "int32 [requests, columns]", describe(a.indices), holds
    (requests, columns), c = a.indices.shape, a.conv_state
    if rows:
        yield "indices", f"of a request or more, with T={rows} rows", "no request", requests > 0
    positions = w.shape[1] + columns - 2
    holds = c.dim() == 3 and c.dtype == dtype and c.shape[:2] == (slots, channels) and c.shape[2] >= positions
    yield "conv_state", f"{dtype} [slots={slots}, {channels}, {positions} or more]", describe(c), holds
    yield apart_contract("conv_state", c)
    yield "a_log", f"float32 [{heads}]", describe(a.a_log), is_tensor(a.a_log, torch.float32, heads)
    for name, x, count in (("dt_bias", a.dt_bias, heads), ("norm_weight", a.norm_weight, value)):
        yield name, f"{dtype} or float32 [{count}]", describe(x), _floats(x, dtype, (count,))
    if a.row_starts is None:
        yield "accepted", "None without row_starts", "a tensor", a.accepted is None
        yield "indices", f"at most T={rows} requests without row_starts", f"{requests} requests", requests <= rows
    else:
        holds = a.accepted is not None and is_tensor(a.accepted, torch.int32, requests)
        got = "None" if a.accepted is None else describe(a.accepted)
        yield "accepted", f"int32 [requests={requests}] with row_starts", got, holds
        holds = is_tensor(a.row_starts, torch.int32, requests + 1)
        yield "row_starts", f"int32 [requests + 1 = {requests + 1}]", describe(a.row_starts), holds
    yield from attention.scale_contract("out_scale", a.out_scale)
    quantizes = a.out_scale is not None or a.out_scales is not None
    kinds, what = (tuple(quantization.LIMIT), "e4m3") if quantizes else ((dtype,), str(dtype))
    holds = a.out.dtype in kinds and a.out.shape == (rows, heads * value)
    yield "out", f"{what} [T={rows}, {heads * value}]", describe(a.out), holds
    yield apart_contract("out", a.out)
    if a.out_scales is not None:
        yield "out_scales", "None with an out_scale", "both", a.out_scale is None
        wanted = rows, heads * value // SIZE
        holds = is_tensor(a.out_scales, torch.float32, *wanted) and heads * value % SIZE == 0
        yield "out_scales", f"float32 {list(wanted)}, one per {SIZE} columns", describe(a.out_scales), holds
        yield apart_contract("out_scales", a.out_scales)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    sizes = sizes_of(a)
    yield "qkvz is bfloat16", a.qkvz.dtype == torch.bfloat16
    yield "state is bfloat16 or float32", a.state.dtype in STATES
    yield f"K and V are {SIZE}", sizes.key == sizes.value == SIZE
    yield f"the convolution has {WIDTH} rows", a.conv_weight.shape[1] == WIDTH
    yield "qkvz's rows are contiguous and 16-byte aligned", a.qkvz.stride(1) == 1 and aligned(a.qkvz)
    yield from gated_delta_net.gates_rules(a)
    inner = a.state[0].is_contiguous()
    yield "a slot of state is contiguous and 16-byte aligned", inner and aligned(a.state.flatten(1) if inner else None)
    yield "conv_weight is contiguous", a.conv_weight.is_contiguous()
    yield "conv_weight is 8-byte aligned", a.conv_weight.data_ptr() % 8 == 0
    for name in ("a_log", "dt_bias", "norm_weight", "accepted", "row_starts"):
        x = getattr(a, name)
        yield f"{name} is contiguous", x is None or x.is_contiguous()
    is_fp8 = a.out.element_size() == 1
    yield f"out is {arch.fp8_dtype}, the FP8 dtype of {arch.name}", not is_fp8 or a.out.dtype == arch.fp8_dtype
    yield (
        "out's rows are contiguous and aligned to 8 elements",
        a.out.stride(1) == 1 and aligned(a.out, 8 * a.out.element_size()),
    )


def _configs(a, arch: Arch) -> list[GatedDeltaNetConfig]:
    supported = all(holds for _, holds in _can_implement(a, arch))
    return [GatedDeltaNetConfig(threads) for threads in (512, 256) if supported]


def _default(a, arch: Arch) -> GatedDeltaNetConfig:
    """Return 512 threads, and where their blocks would leave registers unused, 256 once each compute unit has a block.

    On H200 the best at 1 to 128 requests of 8 and 32 heads, within 4 %.
    """
    many = a.indices.shape[0] * sizes_of(a).heads > arch.compute_units
    return GatedDeltaNetConfig(256 if many and (a.state.dtype == torch.float32 or a.row_starts is not None) else 512)


def _plan(config: GatedDeltaNetConfig, outputs, a, arch: Arch) -> list[Launch]:
    sizes, (requests, columns) = sizes_of(a), a.indices.shape
    if requests == 0 or a.qkvz.shape[0] == 0:
        return []
    of_key_head = sizes.heads // sizes.key_heads
    q, v = SIZE, of_key_head * SIZE
    if a.is_interleaved:
        starts = {"key_start": q, "value_start": 2 * q, "z_start": 2 * q + v, "a_start": of_key_head}
        steps = {"key_step": 2 * (q + v), "value_step": 2 * (q + v), "gate_step": 2 * of_key_head}
    else:
        key = sizes.key_heads * q
        starts = {"key_start": key, "value_start": 2 * key, "z_start": 2 * key + sizes.heads * SIZE}
        starts["a_start"] = sizes.heads
        steps = {"key_step": q, "value_step": v, "gate_step": of_key_head}
    slot, channel, position = a.conv_state.stride()
    scales = (0, 0) if a.out_scales is None else a.out_scales.stride()
    args = {
        **{name: getattr(a, name) for name in ("qkvz", "conv_state", "conv_weight", "state", "a_log")},
        **{name: getattr(a, name) for name in ("dt_bias", "norm_weight", "indices", "accepted", "row_starts")},
        **{name: getattr(a, name) for name in ("out", "out_scale", "out_scales")},
        **starts,
        **steps,
        "qkvz_stride": a.qkvz.stride(0),
        **gated_delta_net.gates_arguments(a),
        "conv_slot_stride": slot,
        "conv_channel_stride": channel,
        "conv_position_stride": position,
        "state_stride": a.state.stride(0),
        "dt_bias_type": OUT_TYPES[a.dt_bias.dtype],
        "norm_weight_type": OUT_TYPES[a.norm_weight.dtype],
        "epsilon": float(a.epsilon),
        "indices_stride": a.indices.stride(0),
        "indices_step": a.indices.stride(1),
        "columns": columns,
        "requests": requests,
        "rows": a.qkvz.shape[0],
        "key_heads": sizes.key_heads,
        "value_heads": of_key_head,
        "value_divisor": divisor(of_key_head),
        "out_stride": a.out.stride(0),
        "out_scales_stride": scales[0],
        "out_scales_head_stride": scales[1],
        "counters": Counters(requests * sizes.key_heads) if of_key_head > 1 else None,
    }
    kind = "_ba" if a.ba is None else "" if a.row_starts is None else "_drafts"
    symbol = f"gated_delta_net_decode_{STATES[a.state.dtype]}{kind}_x{config.threads}"
    grid, block = (sizes.heads, requests, 1), (config.threads, 1, 1)
    return [Launch("gated_delta_net_decode", symbol, grid, block, fields("problem", args))]


def _problem(a) -> dict[str, object]:
    sizes = sizes_of(a)
    return {
        "requests": a.indices.shape[0],
        "rows": a.qkvz.shape[0],
        "heads": f"{sizes.key_heads}:{sizes.heads}",
        "state": str(a.state.dtype).removeprefix("torch."),
    }


# Cases


def _inputs(requests, heads, given, device, generator, fp8_dtype) -> tuple:
    """Return inputs whose slots are in random order; slot 0 and slots that no request has hold NaN in their states."""
    (key_heads, value_heads), size, width = heads, given.get("size", SIZE), given.get("width", WIDTH)
    dtype, counts = given.get("dtype", torch.bfloat16), given.get("counts")
    columns = given.get("columns", max(counts)) if counts else 1
    rows = (sum(counts) if counts else requests) + given.get("more", 0)
    channels, weights = (2 * key_heads + value_heads) * size, given.get("weights", dtype)

    def values(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype, padding: int = 0) -> Tensor:
        wide = torch.randn(*shape[:-1], shape[-1] + padding, generator=generator) * scale
        return wide.to(dtype).to(device)[..., : shape[-1]]

    qkvz = values(rows, channels + value_heads * size, padding=given.get("padding", 0))
    ba, of_ba = values(rows, 2 * value_heads, scale=2.0, padding=given.get("padding", 0)), ()
    if columns_of_token := given.get("tokens"):
        padding = given.get("padding", 0)
        gates = values(2 * value_heads, columns_of_token, scale=2.0 * columns_of_token**-0.5, padding=2 * padding)
        ba, of_ba = None, (values(rows, columns_of_token, padding=padding), gates)
    slots, positions = 2 + requests * columns, width - 1 + columns - 1 + given.get("spare", 0)
    of_state = given.get("state", torch.bfloat16)
    state = values(slots, value_heads * size * size, scale=0.3, dtype=of_state, padding=given.get("page", 0))
    conv = values(slots, channels * positions, padding=given.get("page", 0))
    indices = (torch.randperm(slots - 1, generator=generator)[: requests * columns] + 1).to(torch.int32).to(device)
    indices = indices.view(requests, columns)
    unused = torch.ones(slots, dtype=torch.bool, device=device)
    for padded, slot in given.get("padded", {}).items():
        indices[padded] = slot
    unused[indices.clamp(min=0).long().flatten()] = False
    unused[0] = True
    state[unused] = torch.nan
    state = state.unflatten(1, (value_heads, size, size))
    if given.get("dim_first"):
        conv = conv.unflatten(1, (channels, positions))
    else:
        conv = conv.unflatten(1, (positions, channels)).transpose(1, 2)
    drafts = ()
    if counts:
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
        drafts = torch.tensor(given["accepted"], dtype=torch.int32, device=device), starts
    kind = given.get("out", "plain")
    out = torch.full((rows, value_heads * size + given.get("out_padding", 0)), torch.nan, dtype=dtype, device=device)
    out = out[:, : value_heads * size].to(dtype if kind == "plain" else fp8_dtype)
    scale = torch.tensor([0.031], device=device) if kind == "static" else None
    scales = torch.full((value_heads, rows), torch.nan, device=device).t() if kind == "groups" else None
    return (
        qkvz,
        ba,
        given.get("interleaved", False),
        conv,
        values(channels, width, scale=0.5),
        state,
        (torch.rand(value_heads, generator=generator) * 3 - 1).to(device),
        values(value_heads, dtype=weights),
        (1 + 0.2 * torch.randn(size, generator=generator)).to(weights).to(device),
        given.get("epsilon", 1e-6),
        indices,
        out,
        *(drafts or (None, None)),
        scale,
        scales,
        *of_ba,
    )


def _cases() -> Iterator[Case]:
    """Yield every kernel and output, both layouts and orders of the convolution's state, padding, drafts, and what no kernel takes."""
    case, fp32 = case_maker(_inputs), {"state": torch.float32}
    yield case("qwen3.5", 2, (1, 4), **fp32, out="groups")
    yield case("next", 2, (2, 4), interleaved=True, dim_first=True, padded={1: 0})
    for kind in ("plain", "static", "groups"):
        yield case(f"bf16-{kind}", 1, (1, 1), out=kind, weights=torch.float32)
        yield case(f"fp32-{kind}", 1, (1, 1), **fp32, out=kind)
    yield case("padded", 4, (1, 2), padded={0: 0, 2: -1}, out="groups", page=64, padding=8)
    yield case("padded-static", 2, (1, 1), padded={0: 0, 1: -1}, out="static", **fp32)
    yield case("three-per-key", 1, (2, 6), interleaved=True, page=24, spare=1)
    yield case("more-rows", 1, (1, 2), more=2, out="groups", out_padding=8)
    yield case("tokens", 2, (2, 4), interleaved=True, tokens=2048, padded={1: 0})
    yield case("tokens-fp32", 2, (1, 4), **fp32, out="groups", tokens=4096, padding=8)
    yield case("tokens-short", 1, (1, 1), tokens=8, out="static", **fp32)
    yield case("tokens-tail", 1, (1, 3), tokens=2056)
    yield case("tokens-many-columns", 1, (1, 1), tokens=4104)
    drafts = {"counts": (3, 1, 2), "accepted": (2, 1, 3)}
    yield case("drafts", 3, (1, 2), **drafts, dim_first=True, more=1)
    yield case("drafts-fp32", 3, (1, 2), **drafts, **fp32, interleaved=True, out="groups", padded={1: 0}, spare=1)
    yield case("drafts-none", 3, (1, 1), counts=(2, 0, 0), accepted=(0, 1, 1), out="static", more=2)
    yield case("drafts-beyond", 2, (1, 1), counts=(2, 1), accepted=(3, 2), **fp32)
    yield case("drafts-over-columns", 2, (1, 1), counts=(3, 1), columns=2, accepted=(1, 2), out="groups")
    yield case("epsilon", 1, (1, 1), epsilon=1.0, **fp32)
    yield case("no-rows", 0, (1, 2))
    yield case("fp16", 1, (1, 2), dtype=torch.float16)
    yield case("size-64", 1, (1, 2), size=64, state=torch.float16)
    yield case("width-3", 1, (1, 2), width=3)


@functools.partial(
    Op,
    allocate=lambda a: None,
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    default=_default,
    plan=_plan,
    problem=_problem,
    cases=_cases,
    sums=True,
    mutates=("conv_state", "state"),
    writes=("out", "out_scales"),
    inexact=("state",),
)
def gated_delta_net_decode(
    qkvz: Tensor,
    ba: Tensor | None,
    is_interleaved: bool,
    conv_state: Tensor,
    conv_weight: Tensor,
    state: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    indices: Tensor,
    out: Tensor,
    accepted: Tensor | None = None,
    row_starts: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_scales: Tensor | None = None,
    tokens: Tensor | None = None,
    ba_weight: Tensor | None = None,
) -> None:
    """Advance the states of each request by its rows, and compute their gated, normalized outputs.

    Per row, with S [V, K] of each V head: q, k, v = silu(causal convolution); q and k are normalized to length 1 and q is divided by
    sqrt(K); S = exp(-exp(a_log) * softplus(a + dt_bias)) * S; S += sigmoid(b) * (v - S k) k^T; o = S q. The result is RMSNorm(o) times
    silu(z). A request is padding if the slot that it reads, or its first one, is 0 or less: its states stay, and its results are zero.
    Rows after the last request's have zeros, too.

    Args:
        qkvz: [T, 2 * K heads * K + 2 * V heads * V], bf16; rows may be strided.
        ba: [T, 2 * V heads], bf16: b and a; None with tokens.
        is_interleaved: q, k, v, z, and b, a, stand together per K head, as in Qwen3-Next; else all q's come first, as in Qwen3.5.
        conv_state: [slots, channels of q, k and v, at least width - 1 + columns - 1], bf16, any strides: the last rows.
        conv_weight: [channels, width], bf16; kernels take a width of 4.
        state: [slots, V heads, V, K], bf16 or float32; slots may be apart. Kernels take K = V = 128.
        a_log: [V heads], float32.
        dt_bias: [V heads], bf16 or float32.
        norm_weight: [V], bf16 or float32.
        epsilon: Added to the mean square of o.
        indices: [requests, columns], int32: the slots of a request's rows, of which there are at most `columns`.
        out: [T, V heads * V], bf16, or e4m3 with out_scale or out_scales; rows may be strided.
        accepted: [requests], int32, with row_starts: the rows of the last step that were accepted, 1 to columns. A request reads the
            state of the last one, at indices[accepted - 1], and its convolution begins at position accepted - 1 of indices[0].
        row_starts: [requests + 1], int32: the first row of each request; None for one row each. The state after each row is written to
            its slot.
        out_scale: float32, one element: the static scale of an e4m3 out.
        out_scales: [T, V heads * V / 128], float32, any strides: receives a dynamic scale per 128 columns of an e4m3 out.
        tokens: [T, columns], bf16, without row_starts: what ba is projected from, by
        ba_weight: [2 * V heads, columns], bf16. Kernels take up to 4096 columns, and do not round b and a.

    Source:
        vLLM's `causal_conv1d_update`, `fused_sigmoid_gating_delta_rule_update`, RMSNormGated and the quantization of out_proj's input.
    """
    a = gated_delta_net_decode.Arguments(
        qkvz, ba, is_interleaved, conv_state, conv_weight, state, a_log, dt_bias, norm_weight, epsilon, indices, out,
        accepted, row_starts, out_scale, out_scales, tokens, ba_weight,
    )  # fmt: skip
    y = gated_delta_net.advance(a)
    if out_scale is not None:
        out.copy_(quantization.static(y, out_scale, out.dtype))
    elif out_scales is not None:
        values, scales = quantization.per_token(y.unflatten(1, (-1, SIZE)), out.dtype, None)
        out.copy_(values.flatten(1))
        out_scales.copy_(scales.view(out_scales.shape))
    else:
        out.copy_(y)
