"""Share code between the kernels of fused_experts: sizes, weight scales, and the op's contract on its arguments `a`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.launch import fields
from vllm_rocm_ops.core.quantization import E5M2, LIMIT, MX_BLOCK, MX_SCALES
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared.gemm import BLOCK, HALVES
from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, fits, unshuffled

TOKENS = {torch.int8: torch.int8, **{e4m3: e4m3 for e4m3 in LIMIT}, **E5M2}
"""The dtype that tokens are quantized to, by the dtype of scaled weights."""


@dataclass(frozen=True)
class Scheme:
    """One way to scale weights [E, N, K] of experts, and the tokens that they multiply."""

    name: str  # in kernels' symbols if scales have groups; in names of cases, in messages and in keys of timings
    weights: tuple[torch.dtype, ...]
    rows: int = 0  # of a weight that share a scale, 0 for all of an expert
    group: int = 0  # columns of weights and of tokens that share a scale, 0 for all
    scales: tuple[torch.dtype, ...] = (torch.float32,)
    scaled: bool = True
    native: bool = False  # matrix instructions scale groups: whole ones, no static scale, no tiled kernels
    quantizer: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # of tokens, if not to `LIMIT` by float32 scales
    numbers: Callable[[Tensor], Tensor] | None = None  # of two values in a byte, for bf16 tokens
    alone: bool = False  # weights of 8 bits for bf16 tokens, where a call is weight-only

    @property
    def converted(self) -> bool:
        """True if kernels convert weights to bf16, and multiply groups' sums by scales."""
        return self.alone or self.numbers is not None

    def groups(self, columns: int) -> int:
        """Return the scales of a row."""
        return -(-columns // self.group) if self.group else 1

    def columns(self, k: int) -> int:
        """Return the columns of a weight whose rows have k elements."""
        return 2 * k if self.numbers else k

    def shape(self, experts: int, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of the scales of weights [E, N, K] of K columns."""
        return experts, *(-(-size // shared) for size, shared in ((n, self.rows), (k, self.group)) if shared)

    def weight_dtype(self, half: torch.dtype, fp8_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of weights in a model of this 16-bit dtype, on a GPU of this e4m3 dtype."""
        return next(dtype for dtype in (half, fp8_dtype, *LIMIT, *self.weights) if dtype in self.weights)

    def tokens(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype that tokens of weights of this dtype are quantized to, None if they are not."""
        return TOKENS.get(dtype)

    def infix(self, row: str, dtype: torch.dtype | None = None) -> str:
        """Return the part of symbols that names scales, `row` if they have no groups, or the dtype of unscaled weights."""
        return HALVES.get(dtype) or (self.name if self.group else row)

    def fits(
        self,
        weight: torch.Size,
        dtype: torch.dtype,
        scale: torch.Size,
        scale_dtype: torch.dtype,
        weight_only: bool = False,
    ) -> bool:
        """True if weights and scales of these shapes and dtypes are scaled this way. A scale per row may have two shapes."""
        if self.alone != weight_only and (self.alone or self.native):
            return False
        k = self.columns(weight[2])
        shape, whole = self.shape(*weight[:2], k), not (self.native or self.converted) or k % self.group == 0
        shapes = (shape, (*shape, 1)) if self.rows == 1 and not self.group else (shape,)
        return self.scaled and whole and dtype in self.weights and scale_dtype in self.scales and scale in shapes

    def dequantized(self, values: Tensor, scale: Tensor | None, exact: torch.dtype, rows: int | None = None) -> Tensor:
        """Return values [N, K] of one expert times their scales; tokens [M, K] with 1 for `rows`."""
        values = (self.numbers(values) if self.numbers and rows is None else values).to(exact)
        if scale is None:
            return values
        scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype in MX_SCALES else scale).to(exact)
        if not self.group or scale.dim() < 2:
            return values * scale.reshape(-1, 1)
        scale = scale.repeat_interleave(self.rows if rows is None else rows, 0)[: len(values)]
        return values * scale.repeat_interleave(self.group, 1)[:, : values.shape[1]]

    def rounded(self, x: Tensor, dtype: torch.dtype, static: Tensor | None) -> Tensor:
        """Return tokens, quantized with a static scale or dynamic ones, and dequantized."""
        if dtype == torch.int8:
            values, scale = quantization.int8(x, static)
        elif static is not None:
            values, scale = quantization.static(x, static, dtype), static
        elif self.quantizer:
            values, scale = self.quantizer(x)
        else:
            k, group = x.shape[1], self.group or x.shape[1]
            groups = torch.nn.functional.pad(x, (0, -k % group)).unflatten(1, (-1, group))
            values, scale = quantization.per_token(groups, dtype, None)
            values, scale = values.flatten(1)[:, :k], scale.view(groups.shape[:2])
        return self.dequantized(values, scale, x.dtype, 1)


_HALF_SCALES = (torch.bfloat16, torch.float16, torch.float64)  # the last of an oracle
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("none", tuple(HALVES), scaled=False),
        Scheme("block", (*LIMIT, *E5M2), BLOCK, BLOCK),
        Scheme("channel", tuple(TOKENS), 1),
        Scheme("tensor", tuple(TOKENS)),
        Scheme("mx", (torch.float8_e4m3fn,), 1, MX_BLOCK, MX_SCALES, native=True, quantizer=quantization.mx),
        Scheme("int4_32", (torch.uint8,), 1, 32, _HALF_SCALES, numbers=quantization.int4_numbers),
        Scheme("int4_128", (torch.uint8,), 1, 128, _HALF_SCALES, numbers=quantization.int4_numbers),
        Scheme("mxfp4", (torch.uint8,), 1, MX_BLOCK, MX_SCALES, numbers=quantization.fp4_numbers),
        Scheme("mxfp8", (torch.float8_e4m3fn,), 1, MX_BLOCK, MX_SCALES, alone=True),
    )
}
"""The formats of experts' weights, which cases, arguments of a model's layers, shapes to time and kernels' names ask."""
CONVERTED = {name: scheme for name, scheme in SCHEMES.items() if scheme.converted}
MEANINGS = {
    "hidden": "[M, H], bf16 or fp16, bf16 for 4-bit weights; or already quantized, e4m3 or int8, with hidden_scale.",
    "w1": "[E, 2 I, H], gate rows first, unless interleaved; bf16, fp16, e4m3, e5m2 or int8. Or 4-bit weights, uint8\n"
    "        [E, 2 I, H / 2], the first of two in a byte's lower half: INT4, 0 to 15 for -8 to 7, or E2M1 of MXFP4.",
    "w2": "[E, H, I], or [E, H, I / 2]; w1's dtype.",
    "w1_scale": "float32 [E] (per tensor), [E, N] (per channel) or [E, ceil(N / 128), ceil(K / 128)] (per block); uint8\n"
    "        or float8_e8m0fnu [E, N, K / 32] for MX-FP8 and MXFP4; bf16 [E, N, K / 32] or [E, N, K / 128] for INT4. int8 has\n"
    "        no block scales.",
    "weight_only": "W8A16: 8-bit weights, activations stay bf16 or fp16, bf16 with MX-FP8, whose NaN is 480 in e4m3fnuz.",
}
"""Arguments of `fused_experts` whose texts depend on formats."""


def scheme_of(weight: Tensor, scale: Tensor | None, weight_only: bool = False) -> Scheme:
    """Return how a weight [E, N, K] is scaled, by a scheme for no weights if no row of SCHEMES fits."""
    if scale is None:
        return SCHEMES["none"]
    return _fitting_scheme(weight.shape, weight.dtype, scale.shape, scale.dtype, weight_only)


def weight_of(weights: Tensor, scales: Tensor | None, expert: int, shuffled: bool, exact: torch.dtype) -> Tensor:
    """Return the numbers [N, K] of one expert's weight."""
    values = unshuffled(weights[expert]) if shuffled else weights[expert]
    return scheme_of(weights, scales).dequantized(values, None if scales is None else scales[expert], exact)


@functools.lru_cache
def _fitting_scheme(*operands: torch.Size | torch.dtype | bool) -> Scheme:
    return next((scheme for scheme in SCHEMES.values() if scheme.fits(*operands)), Scheme("unknown", ()))


def is_packed(weight: Tensor) -> bool:
    """True if a weight has two values in a byte."""
    return any(weight.dtype in scheme.weights for scheme in SCHEMES.values() if scheme.numbers)


def columns_of(weight: Tensor) -> int:
    """Return K of a weight [E, N, K], or [E, N, K / 2] with two values in a byte."""
    return weight.shape[2] * (1 + is_packed(weight))


def scheme_of_call(a) -> Scheme:
    """Return how w1 is scaled in a call."""
    return scheme_of(a.w1, a.w1_scale, a.weight_only)


def activation_dtype(a) -> torch.dtype | None:
    """Return the dtype that tokens are quantized to before a GEMM, or None if they stay unquantized."""
    return None if a.weight_only else scheme_of(a.w1, a.w1_scale).tokens(a.w1.dtype)


def are_e4m3_or_halves(a) -> bool:
    """True if weights and the tokens that they multiply are e4m3, bf16 or fp16."""
    return not a.weight_only and a.w1.dtype not in (torch.int8, *E5M2)


def intermediate(a) -> int:
    """Return the columns between the two GEMMs."""
    return a.w1.shape[1] // 2


def slots(a) -> int:
    """Return the experts per token, including shared ones."""
    return a.topk_ids.shape[1] + a.shared_experts


def routing_arguments(a) -> dict[str, object]:
    """Return the arguments by which kernels find the experts of tokens."""
    return {
        "ids": a.topk_ids,
        "expert_map": a.expert_map,
        "topk": a.topk_ids.shape[1],
        "shared": a.shared_experts,
        "routed": len(a.w1) - a.shared_experts,
        "mapped": 0 if a.expert_map is None else len(a.expert_map),
        "id_words": a.topk_ids.element_size() // 4,
    }


def is_plain(a) -> bool:
    """True if gate_up is silu(gate) * up of products without a bias."""
    has_rest = a.w1_bias is not None or a.swiglu_limit is not None or a.interleaved
    return not has_rest and (a.swiglu_alpha, a.swiglu_beta) == (1.0, 0.0)


def swiglu_arguments(a) -> dict[str, object]:
    """Return the argument `swiglu` of kernels for other activations."""
    limit = math.inf if a.swiglu_limit is None else float(a.swiglu_limit)
    activation = {"limit": limit, "exponent": -float(a.swiglu_alpha) / math.log(2), "beta": float(a.swiglu_beta)}
    return fields("swiglu", {"bias": a.w1_bias, "activation": activation, "interleaved": int(a.interleaved)})


def scale_strides(weight: Tensor, scale: Tensor | None) -> tuple[int, int]:
    """Return the strides of a contiguous scale in elements: between experts, and between rows or blocks of rows."""
    experts, k, kind = len(weight), columns_of(weight), scheme_of(weight, scale)
    return 0 if scale is None else scale.numel() // experts, kind.groups(k) if kind.rows else 0


def weight_strides(a, weight: Tensor) -> tuple[int, int, int]:
    """Return the strides of an expert's weight in bytes: between tiles of 16 rows, between rows, between 16 bytes of a row."""
    if a.shuffled:
        return FRAGMENT_ROWS * weight.shape[2] * weight.element_size(), FRAGMENT_BYTES, FRAGMENT_ROWS * FRAGMENT_BYTES
    row = weight.stride(1) * weight.element_size()
    return FRAGMENT_ROWS * row, row, FRAGMENT_BYTES


def _odds(a) -> tuple[int, float]:
    """Return this rank's routed experts, and the chance that a token goes to one of them under uniform routing."""
    routed = len(a.w1) - a.shared_experts
    of_all = max(routed if a.expert_map is None else len(a.expert_map), routed, 1)
    return routed, min(a.topk_ids.shape[1] / of_all, 1.0)


def expected_pairs(a) -> float:
    """Return the expected pairs of tokens and this rank's experts."""
    routed, odds = _odds(a)
    return a.hidden.shape[0] * (routed * odds + a.shared_experts)


def expected_tiles(a, tokens: int) -> float:
    """Return the expected tiles of `tokens` tokens: an expert has a k-th further one if more than k * tokens go there."""
    (routed, odds), m = _odds(a), a.hidden.shape[0]
    mean, deviation = m * odds, math.sqrt(2 * m * odds * (1.0 - odds)) or 1e-9
    more = (math.erfc((k * tokens + 0.5 - mean) / deviation) / 2 for k in range(1, -(-m // tokens)))
    return routed * (1.0 - (1.0 - odds) ** m + sum(more)) + a.shared_experts * -(-m // tokens)


def expected_hit(a) -> float:
    """Return the expected experts that are hit by a token."""
    return expected_tiles(a, max(a.hidden.shape[0], 1))


def contract(a) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the op's contract: (argument, wanted, got, holds)."""
    dims = a.hidden.dim() == 2 and a.w1.dim() == a.w2.dim() == 3
    yield "hidden, w1, w2", "[M, H], [E, 2 I, H], [E, H, I]", describe(a.hidden), dims
    m, h = a.hidden.shape
    experts, n, _ = a.w1.shape
    of_8_bits, packed = a.w1.dtype in TOKENS, is_packed(a.w1)
    holds = columns_of(a.w1) == h and n % 2 == 0 and (a.w1.dtype in HALVES or of_8_bits or packed)
    yield "w1", f"bf16, fp16, e4m3, e5m2 or int8 [E, 2 I, H={h}], or uint8 [E, 2 I, H / 2]", describe(a.w1), holds
    holds = a.w2.dtype == a.w1.dtype and a.w2.shape[:2] == (experts, h) and columns_of(a.w2) == n // 2
    half = " / 2" if packed else ""
    yield "w2", f"{a.w1.dtype} [E={experts}, H={h}, I={n // 2}{half}]", describe(a.w2), holds
    yield "weight_only", "False, unless weights have 8 bits", str(a.weight_only), of_8_bits or not a.weight_only
    converted = packed or scheme_of_call(a).converted
    halves = (torch.bfloat16,) if converted else tuple(HALVES)
    wanted = halves if of_8_bits or packed else (a.w1.dtype,)
    dtype = activation_dtype(a)
    quantized = dtype is not None and a.hidden.dtype == dtype
    yield "hidden", f"{' or '.join(map(str, wanted))} [M, H]", describe(a.hidden), quantized or a.hidden.dtype in wanted
    yield "out_dtype", " or ".join(map(str, halves)), str(a.out_dtype), a.out_dtype in halves
    holds = a.topk_ids.dim() == 2 and len(a.topk_ids) == m and a.topk_ids.dtype in (torch.int32, torch.int64)
    yield "topk_ids", f"int32 or int64 [M={m}, topk]", describe(a.topk_ids), holds
    # As in vLLM: two weights for one expert and token would be two inputs.
    holds = not a.apply_router_weight_on_input or a.topk_ids.shape[1] == 1
    yield "topk_ids", "[M, 1] with apply_router_weight_on_input", describe(a.topk_ids), holds
    holds = a.topk_weights.shape == a.topk_ids.shape and a.topk_weights.dtype == torch.float32
    yield "topk_weights", f"float32 {list(a.topk_ids.shape)}", describe(a.topk_weights), holds
    for name, weight, scale in (("w1_scale", a.w1, a.w1_scale), ("w2_scale", a.w2, a.w2_scale)):
        wanted = "float32 [E] or [E, N] or, unless int8, [E, ceil(N / 128), ceil(K / 128)] or, for e4m3fn, e8m0 or uint8 [E, N, K / 32]"
        if packed:
            wanted = "bf16 [E, N, K / 32] or [E, N, K / 128] (INT4), or e8m0 or uint8 [E, N, K / 32] (MXFP4)"
        holds = weight.dtype in scheme_of(weight, scale).weights
        yield name, wanted if of_8_bits or packed else "None", "None" if scale is None else describe(scale), holds
    kind, of_w2 = scheme_of(a.w1, a.w1_scale), scheme_of(a.w2, a.w2_scale)
    got, same = f"per {kind.name} and per {of_w2.name}", kind is of_w2 if packed else kind.group == of_w2.group
    yield "w1_scale and w2_scale", "both or neither per 128x128, or per 1x32", got, same
    if a.hidden_scale is not None or quantized:
        scale = a.hidden_scale
        shapes = ((m, kind.groups(h)),) * quantized
        shapes += () if kind.native or quantized and kind.group else ((1,), ())
        holds = scale is not None and dtype is not None and tuple(scale.shape) in shapes and scale.dtype in kind.scales
        dtypes = " or ".join(map(str, kind.scales))
        wanted = f"{dtypes}, one of {', '.join(str(list(s)) for s in shapes)}" if shapes else "None"
        yield "hidden_scale", wanted, "None" if scale is None else describe(scale), holds
    if a.act_scale is not None:
        is_static = a.act_scale.numel() == 1 and a.act_scale.dtype == torch.float32
        wanted = "float32, one element, with quantized tokens and weights not scaled per 1x32"
        yield "act_scale", wanted, describe(a.act_scale), is_static and dtype is not None and not kind.native
    if a.expert_map is not None:
        holds = a.expert_map.dim() == 1 and a.expert_map.numel() > 0 and a.expert_map.dtype == torch.int32
        yield "expert_map", "int32 [global experts], one or more", describe(a.expert_map), holds
    if a.shuffled:
        whole = all(fits(weight.shape[1:], weight.dtype) and weight.is_contiguous() for weight in (a.w1, a.w2))
        whole = whole and not converted
        wanted = "False with 4-bit weights and MX-FP8 weights alone, or unless rows of w1 and w2 are multiples of 16, columns of 64 bytes, and both contiguous"
        yield "shuffled", wanted, f"True with {describe(a.w1)} and {describe(a.w2)}", whole
    for name, columns in (("w1_bias", n), ("w2_bias", h)):
        if (bias := getattr(a, name)) is not None:
            holds = bias.dtype in (*HALVES, torch.float32) and bias.shape == (experts, columns)
            yield name, f"bf16, fp16 or float32 [E={experts}, {columns}]", describe(bias), holds
    holds = a.swiglu_limit is None or a.swiglu_limit > 0
    yield "swiglu_limit", "None or a number above 0", str(a.swiglu_limit), holds
    for name in ("swiglu_alpha", "swiglu_beta"):
        yield name, "a finite number", str(getattr(a, name)), math.isfinite(getattr(a, name))
    yield "shared_experts", f"0 to E={experts}", str(a.shared_experts), 0 <= a.shared_experts <= experts
