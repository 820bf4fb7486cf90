"""The result of each op in float64, from its documentation, without importing the package.

`FORMULAS[op](before, after, outputs)` yields for each result (name, value found, value wanted, allowed difference). The
arguments before and after the call are named tuples. Elements whose exact value is not finite are left out: op_tests.py
covers them.
"""

import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

Found = Iterator[tuple[str, Tensor, Tensor, Tensor]]
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23, torch.float64: 0.0}
"""An upper bound of half a step of a type, relative to the value."""
MIN = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-24, torch.float32: 2.0**-149, torch.float64: 0.0}
LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
E4M3, E4M3_MIN = 2.0**-4, 2.0**-10  # half steps
FP32 = 1e-5  # error of some fp32 sums
SIGMOID = 2.0**-126  # a smaller one may be 0 in fp32
EXPONENT = 1.25 * 2.0**-24
"""The error of x in the exponent of exp2(x * log2(e)) in fp32, relative to x.

The product is rounded, and so is log2(e).
"""
SCORE = 2.0**-19  # other error of a score, a sum of few or their quotient: 32 roundings
OF_TERMS = 4e-6  # error of a long fp32 sum, relative to the sum of absolute terms


def rounded(x: Tensor, dtype: torch.dtype, times: int = 1) -> Tensor:
    """Return how far rounding may move x."""
    return 1.01 * times * (HALF[dtype] * x.abs() + MIN[dtype])


def exact(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


# Rows


def quantized(name: str, y: Tensor, off: Tensor, q: Tensor, scale: Tensor) -> Found:
    """Yield quantized values q with `scale`, which represent y.

    y is known up to `off`; `scale` has y's number of dimensions.
    """
    limit = LIMIT[q.dtype]
    wanted = (y / scale).clamp(-limit, limit)
    yield name, q.double(), wanted, 1.01 * (E4M3 * wanted.abs() + E4M3_MIN + off / scale)


def dynamic(a, y: Tensor, off: Tensor, outputs: tuple, group: int | None, bounds_scale: bool = False) -> Found:
    """Yield quantized values and their scales, per row or per group of a row."""
    q, scale = outputs
    limit = LIMIT[q.dtype]
    columns = y.shape[-1]
    y, off, q = (x.reshape(-1, columns // (group or columns), group or columns) for x in (y, off, q))
    largest = y.abs().amax(-1)
    if getattr(a, "scale_ub", None) is not None:
        bound = a.scale_ub.double().reshape(()) * (limit if bounds_scale else 1.0)
        largest = torch.minimum(largest, bound.nan_to_num(nan=torch.inf, posinf=torch.inf))
    wanted = (largest / limit).clamp(min=1 / (limit * 512))
    yield "scale", scale.double(), wanted, 1e-5 * wanted + off.amax(-1) / limit
    yield from quantized("values", y, off, q, scale.double().unsqueeze(-1))


def mx(y: Tensor, off: Tensor, outputs: tuple, max_of_type: float) -> Found:
    """Yield OCP's e4m3 values with a scale exponent per 32 of them, the smallest that keeps them within 448.

    Groups are left out that overflow when y is rounded.
    """
    q, scale = outputs
    y, off, q = (x.reshape(-1, x.shape[-1] // 32, 32) for x in (y, off, q))
    largest, apart = y.abs().amax(-1), off.amax(-1)
    least, wanted, most = (
        (torch.ceil(torch.log2(of.clamp(min=2.0**-126) / 448.0)) + 127).clamp(0, 254)
        for of in (largest - apart, largest, largest + apart)
    )
    fits = largest + apart < max_of_type
    y = y.where(fits.unsqueeze(-1), torch.nan)
    yield "scale", scale.double(), wanted.where(fits, torch.nan), (most - least).nan_to_num(nan=0.0)
    yield from quantized("values", y, off, q, torch.exp2(scale.double() - 127).unsqueeze(-1))


def output(a, y: Tensor, off: Tensor, outputs: tuple, group: int | None = None, bounds_scale: bool = False) -> Found:
    """Yield the results of an op on rows: y itself, values with a static scale or dynamic ones, or both."""
    if len(outputs) == 3:
        plain, *outputs = outputs
        yield "output", plain.double(), y, off
        yield from dynamic(a, plain.double(), torch.zeros_like(off), tuple(outputs), 128)  # of the rounded y
    elif len(outputs) == 2 and outputs[1].dtype == torch.uint8:
        yield from mx(y, off, outputs, torch.finfo(a.input.dtype).max)
    elif len(outputs) == 2:
        yield from dynamic(a, y, off, outputs, group, bounds_scale)
    elif "scale" in a._fields:
        yield from quantized("values", y, off, outputs[0], a.scale.double().reshape(()))
    else:
        yield "output", outputs[0].double(), y, off


def norm(before, after, outputs: tuple) -> Found:
    a, dtype = before, before.input.dtype
    x, rounds_norm = exact(a.input), "quant_dtype" not in a._fields or "scale" in a._fields or len(outputs) == 3
    if getattr(a, "addend", None) is not None:
        x = exact((x.float() + a.addend_factor * a.addend.float()).to(dtype))
    if getattr(a, "residual", None) is not None:
        x = x + exact(a.residual)
        yield "residual", after.residual.double(), x, rounded(x, dtype)
        x = exact(after.residual) if rounds_norm else x
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.epsilon)
    weight = n.new_ones(()) if a.weight is None else exact(a.weight) + a.one_plus_weight
    y = n * weight
    yield from output(a, y, FP32 * y.abs() + rounded(y, dtype, 2), outputs, getattr(a, "group_size", None))


def layer_norm(before, after, outputs: tuple) -> Found:
    a, x = before, exact(before.input)
    d = x - x.mean(-1, keepdim=True)
    inverse = torch.rsqrt(d.square().mean(-1, keepdim=True) + a.epsilon)
    weight = torch.ones(()) if a.weight is None else exact(a.weight)
    bias = torch.zeros(()) if a.bias is None else exact(a.bias)
    y = d * inverse * weight + bias
    cancelled = FP32 * ((x.abs().amax(-1, keepdim=True) * inverse + (d * inverse).abs()) * weight.abs() + bias.abs())
    off = cancelled + rounded(y, a.input.dtype)
    yield from output(a, y, off, outputs, getattr(a, "group_size", None))


def softmax(before, after, outputs: tuple) -> Found:
    x = exact(before.input)
    y = torch.exp(x - x.amax(-1, keepdim=True))
    y = y / y.sum(-1, keepdim=True)
    yield "output", outputs[0].double(), y, FP32 * y + 2.0**-126 + rounded(y, before.input.dtype)


def silu_and_mul(before, after, outputs: tuple) -> Found:
    a = before
    gate, up = exact(a.input).chunk(2, -1)
    y = silu(gate) * up
    off = FP32 * y.abs() + rounded(y, a.input.dtype, 2) + MIN[a.input.dtype] * up.abs() + SIGMOID * (gate * up).abs()
    yield from output(a, y, off, outputs, getattr(a, "group_size", None), bounds_scale=hasattr(a, "group_size"))


def silu_and_mul_with_clamp(before, after, outputs: tuple) -> Found:
    a = before
    gate, up = exact(a.input).chunk(2, -1)
    gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit) + a.beta
    y = gate * torch.sigmoid(a.alpha * gate) * up
    off = FP32 * y.abs() + rounded(y, a.input.dtype) + MIN[a.input.dtype] * up.abs() + SIGMOID * (gate * up).abs()
    yield from output(a, y, off, outputs, getattr(a, "group_size", None), bounds_scale=hasattr(a, "group_size"))


def silu_and_mul_with_expert_gate(before, after, outputs: tuple) -> Found:
    a = before
    gate, up = exact(a.input).chunk(2, -1)
    terms = exact(a.tokens) * exact(a.expert_gate[0])
    factor = torch.sigmoid(terms.sum(-1, keepdim=True))
    of_logit = (OF_TERMS + EXPONENT) * terms.abs().sum(-1, keepdim=True) * (1 - factor)  # of the sigmoid, relative
    y = silu(gate) * up * factor
    of_sigmoids = SIGMOID * ((gate * up).abs() * factor + (silu(gate) * up).abs()) + MIN[a.input.dtype] * up.abs()
    off = (FP32 + of_logit) * y.abs() + rounded(y, a.input.dtype) + of_sigmoids
    yield from output(a, y, off, outputs, getattr(a, "group_size", None), bounds_scale=hasattr(a, "group_size"))


def sigmoid_and_mul(before, after, outputs: tuple) -> Found:
    a = before
    x, gate = exact(a.input), exact(a.gate).reshape(a.input.shape)
    y = x * torch.sigmoid(gate)
    off = FP32 * y.abs() + rounded(y, a.input.dtype) + SIGMOID * x.abs()
    yield from output(a, y, off, outputs, getattr(a, "group_size", None), bounds_scale=hasattr(a, "group_size"))


def stream_memory(before, after, outputs: tuple) -> Found:
    a, found = before, outputs[0].double()
    wanted = {"copy": a.words, "write": torch.full_like(a.words, int("01" * 4, 16))}.get(a.direction)
    if wanted is None:
        runs = [run.double().sum() for run in a.words.split(1024)]
        sums = torch.tensor([sum(runs[block :: a.num_blocks]) for block in range(a.num_blocks)], dtype=torch.float64)
        wanted = (sums + 2**31) % 2**32 - 2**31
    yield "output", found, wanted.double(), torch.zeros(found.shape, dtype=torch.float64)


# GEMMs


def of_blocks(values: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return values [n, k] times their scales, one per block of rows x columns."""
    n, k = values.shape
    return values.double() * scale.double().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def powers(values: Tensor, scale: Tensor) -> Tensor:
    """Return MX-FP8 values [n, k] times their scales, one per 32 columns of a row or of 32 rows."""
    bits = scale.view(torch.uint8).double()
    scale = torch.exp2(bits - 127).masked_fill(bits == 255, torch.nan)
    return of_blocks(values, scale, 1 if len(scale) == len(values) else 32, 32)


def plain(weight: Tensor) -> Tensor:
    """Return a weight [N, K], which may be shuffled, [N / 16, K / (64 bytes), 4, 16, 16 bytes]."""
    if weight.dim() == 2:
        return weight
    tiles, steps, vectors, rows, elements = weight.shape
    return weight.permute(0, 3, 1, 2, 4).reshape(tiles * rows, steps * vectors * elements)


def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> Found:
    """Yield a @ b^T + bias."""
    wanted, terms = a @ b.t(), a.abs() @ b.abs().t()
    if bias is not None:
        wanted, terms = wanted + bias.double(), terms + bias.double().abs()
    representable = torch.finfo(torch.float32).max > terms
    wanted = wanted.where(representable & (terms < torch.finfo(out.dtype).max), torch.nan)
    yield "output", out.double(), wanted, rounded(wanted, out.dtype) + OF_TERMS * terms + 2.0**-126


def scaled_mm(before, after, outputs: tuple) -> Found:
    a = before
    left = a.a.double() * a.scale_a.double().reshape(-1, 1)
    right = (a.b.t() if a.b.dim() == 2 else plain(a.b)).double() * a.scale_b.double().reshape(-1, 1)
    yield from product(left, right, a.bias, outputs[0])


def scaled_mm_silu_and_mul_quant(before, after, outputs: tuple) -> Found:
    a = before
    left = a.a.double() * a.scale_a.double().reshape(-1, 1)
    right = (a.b.t() if a.b.dim() == 2 else plain(a.b)).double() * a.scale_b.double().reshape(-1, 1)
    sums, terms = left @ right.t(), left.abs() @ right.abs().t()
    sums = sums.where(terms < torch.finfo(a.dtype).max, torch.nan)
    (gate, up), (gate_off, up_off) = (x.chunk(2, 1) for x in (sums, rounded(sums, a.dtype) + OF_TERMS * terms))
    y = silu(gate) * up
    off = 1.1 * (up.abs() + up_off) * gate_off + silu(gate).abs() * up_off  # silu rises by at most 1.1
    off += FP32 * y.abs() + rounded(y, a.dtype, 2) + MIN[a.dtype] * up.abs() + SIGMOID * (gate * up).abs()
    yield from quantized("values", y, off, outputs[0], a.scale.double().reshape(()))


def block_scaled_mm(before, after, outputs: tuple) -> Found:
    a = before
    left, right = of_blocks(a.a, a.scale_a, 1, 128), of_blocks(plain(a.b), a.scale_b, 128, 128)
    yield from product(left, right, None, outputs[0])


def mxfp8_scaled_mm(before, after, outputs: tuple) -> Found:
    a = before
    yield from product(powers(a.a, a.scale_a), powers(a.b, a.scale_b), a.bias, outputs[0])


def w4a16_gemm(before, after, outputs: tuple) -> Found:
    a = before
    nibbles = torch.stack([a.weight >> 4 * i & 15 for i in range(8)], -1).flatten(1).double() - 8
    numbers = nibbles * exact(a.scale).repeat_interleave(len(a.weight) // len(a.scale), 0)
    left, out = exact(a.x).reshape(-1, a.x.shape[-1]), outputs[0]
    yield from product(left, numbers.t(), a.bias, out.reshape(len(left), out.shape[-1]))


def of_mx(a) -> Tensor:
    """Return the numbers of an MXFP8 or MXFP4 weight."""
    return powers(a.weight, a.scale) if a.weight.is_floating_point() else of_four_bits(a.weight, a.scale)


def mx_dequantize(before, after, outputs: tuple) -> Found:
    wanted = of_mx(before)
    yield "numbers", outputs[0].double(), wanted, rounded(wanted, torch.bfloat16)


def mx_gemm(before, after, outputs: tuple) -> Found:
    a, weight = before, of_mx(before)
    left, out = exact(a.x).reshape(-1, a.x.shape[-1]), outputs[0]
    yield from product(left, weight, a.bias, out.reshape(len(left), out.shape[-1]))


def dequantize_int4(before, after, outputs: tuple) -> Found:
    a = before
    raw = a.quantized.contiguous().view(torch.uint8)
    pairs = raw[..., : 4 * a.groups].contiguous().view(torch.float16).double().unflatten(-1, (a.groups, 2))
    packed = raw[..., 4 * a.groups :]
    values = torch.stack((packed % 16, packed // 16), -1).flatten(-2).double().unflatten(-1, (a.groups, -1))
    wanted = (values * pairs[..., :1] + pairs[..., 1:]).flatten(-2)
    largest = (15 * pairs[..., :1].abs() + pairs[..., 1:].abs()).expand_as(values).flatten(-2)
    yield "values", outputs[0].double(), wanted, rounded(wanted, a.dtype) + 2.0**-22 * largest


def batched_gemm(before, after, outputs: tuple) -> Found:
    found = outputs[0] if before.out is None else after.out
    x, weight = before.x.double(), before.weights.double()
    wanted, terms = (torch.einsum("mhk,hkn->mhn", *of) for of in ((x, weight), (x.abs(), weight.abs())))
    off = rounded(wanted, before.x.dtype) + OF_TERMS * terms
    if getattr(before, "out_scales", None) is None:
        yield "output", found.double(), wanted, off
        return
    rows, unbounded = (after.out.flatten(1), after.out_scales), types.SimpleNamespace(scale_ub=None)
    yield from dynamic(unbounded, wanted.flatten(1), off.flatten(1), rows, 128)


def batched_gemm_rope(before, after, outputs: tuple) -> Found:
    yield from batched_gemm(before, after, outputs)
    wanted, sizes = turned(before.q_pe, before.positions, before.cos_sin_cache, before.is_neox)
    yield "q_pe", after.q_pe.double(), wanted, rounded(wanted, before.q_pe.dtype) + FP32 * sizes


def gemm(before, after, outputs: tuple) -> Found:
    a, out = before, outputs[0]
    left, right = gemm_sides(a)
    bias = torch.zeros(()) if a.bias is None else a.bias
    slope = {"none": 1.0, "leaky_relu": 0.01}[a.activation]
    if out.is_floating_point():
        for name, found, wanted, off in product(left, right, None, out):
            wanted = wanted + bias.double()
            wanted = wanted.where(wanted >= 0, wanted * slope)
            yield name, found, wanted, off + rounded(wanted, out.dtype) + OF_TERMS * bias.double().abs()
        return
    wanted, limits = left @ right.t(), torch.iinfo(out.dtype)
    terms = left.abs() @ right.abs().t()
    scaled = a.scale_a is not None or a.scale_b is not None or slope != 1.0
    wanted = wanted.where(wanted >= 0, wanted * slope).clamp(limits.min, limits.max)
    yield "output", out.double(), wanted, (0.5 + OF_TERMS * terms) * scaled


def gemm_sides(a) -> tuple[Tensor, Tensor]:
    """Return both operands as rows along K, times their scales."""
    sides = (a.a, a.scale_a), (a.b.t(), a.scale_b)
    if a.block_scales:
        (rows, scale_a), (columns, scale_b) = sides
        return of_blocks(rows, scale_a, 1, 128), of_blocks(columns, scale_b.t(), 128, 128)
    return tuple(x.double() * (1.0 if s is None else s.double().reshape(-1, 1)) for x, s in sides)


def unquantized_gemm(before, after, outputs: tuple) -> Found:
    a = before
    left, out = exact(a.x).reshape(-1, a.x.shape[-1]), outputs[0]
    yield from product(left, exact(plain(a.weight)), a.bias, out.reshape(len(left), -1))


def as_quantized(x: Tensor, kind: str, dtype: torch.dtype, scale: Tensor | None, of: Tensor) -> Tensor:
    """Return rows quantized to the type of the weights, with the scales of the rows `of`."""
    if dtype == torch.int8:
        largest = of.abs().amax(-1, keepdim=True).clamp(min=1e-10)
        unit = largest / 127 if scale is None else scale.double().reshape(())
        return (x / unit).clamp(-127, 127).round() * unit
    dtype = {torch.float8_e5m2: torch.float8_e4m3fn, torch.float8_e5m2fnuz: torch.float8_e4m3fnuz}.get(dtype, dtype)
    limit = LIMIT[dtype]
    if scale is not None:
        unit = scale.double().reshape(())
        return (x / unit).clamp(-limit, limit).float().to(dtype).double() * unit
    width = {"block": 128, "mx": 32}.get(kind, x.shape[1])
    groups, of = (torch.nn.functional.pad(t, (0, -t.shape[1] % width)).unflatten(1, (-1, width)) for t in (x, of))
    largest = of.abs().amax(-1, keepdim=True)
    if kind == "mx":
        unit = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=2.0**-118) / limit)))
    else:
        unit = (largest / limit).clamp(min=1 / (limit * 512))
    return ((groups / unit).clamp(-limit, limit).float().to(dtype).double() * unit).flatten(1)[:, : x.shape[1]]


def of_four_bits(packed: Tensor, scale: Tensor) -> Tensor:
    """Return weights [N, K / 2] of INT4 with bf16 scales, or of E2M1 with E8M0 scales, whose groups follow from the shapes."""
    n, bytes_ = packed.shape
    bits = torch.empty(n, 2 * bytes_, dtype=torch.int64, device=packed.device)
    bits[:, 0::2], bits[:, 1::2] = packed.long() % 16, packed.long() // 16
    if scale.dtype == torch.bfloat16:
        values, factors = bits.double() - 8, scale.double()
    else:
        exponent, mantissa = bits // 2 % 4, bits % 2
        values = torch.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
        values = torch.where(bits >= 8, -values, values).double()
        raw = scale.view(torch.uint8).double()
        factors = torch.where(raw == 255, torch.nan, torch.exp2(raw - 127))
    return (values.unflatten(1, (scale.shape[1], -1)) * factors[:, :, None]).flatten(1)


def fused_experts(before, after, outputs: tuple) -> Found:
    a = before
    scales = a.w1_scale
    packed = a.w1.dtype == torch.uint8
    kind = (
        "none"
        if scales is None or packed
        else "mx"
        if scales.element_size() == 1
        else "block"
        if scales.dim() == 3
        else "row"
    )
    if kind == "block" and tuple(scales.shape[1:]) == (a.w1.shape[1], 1):
        kind = "row"

    def weight(values: Tensor, scale: Tensor | None) -> Tensor:
        if a.shuffled:
            (n, k), elements = values.shape, 16 // values.element_size()
            values = plain(values.view(n // 16, k // (4 * elements), 4, 16, elements))
        if packed:
            return of_four_bits(values, scale)
        if kind == "none":
            return values.double()
        if kind == "mx":
            return powers(values, scale)
        return (
            of_blocks(values, scale, 128, 128) if kind == "block" else values.double() * scale.double().reshape(-1, 1)
        )

    def quantized(x: Tensor, error: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return quantized x, and its error where the error of x, or of its scale, makes it round the other way."""
        below, found, above = (as_quantized(x + by * error, kind, a.w1.dtype, scale, x) for by in (-1, 0, 1))
        return found, torch.maximum((below - found).abs(), (above - found).abs())

    x, x_off = a.hidden.double(), torch.zeros((), dtype=torch.float64, device=a.hidden.device)
    if a.hidden.element_size() == 1:
        x = (
            powers(a.hidden, a.hidden_scale)
            if kind == "mx"
            else x * a.hidden_scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
            if kind == "block"
            else x * a.hidden_scale.double()
        )
    elif kind != "none" and not a.weight_only:
        x, x_off = quantized(x, 2.0**-22 * x.abs(), a.hidden_scale)
    routed, ids = len(a.w1) - a.shared_experts, a.topk_ids.long()
    if a.expert_map is not None:
        known = (ids >= 0) & (ids < len(a.expert_map))
        ids = a.expert_map.long()[ids.where(known, 0)].where(known, -1)
    total, terms, off = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for expert in range(len(a.w1)):
        share = torch.ones(len(x), dtype=torch.float64, device=x.device)
        if expert < routed:
            share = (a.topk_weights.double() * (ids == expert)).sum(1)
        w1, w2 = (weight(w[expert], None if s is None else s[expert]) for w, s in ((a.w1, scales), (a.w2, a.w2_scale)))
        on_input = share[:, None] if a.apply_router_weight_on_input else torch.ones_like(share[:, None])
        gate_up, gate_up_off = x @ w1.t() * on_input, (OF_TERMS * x.abs() + x_off) @ w1.abs().t() * on_input.abs()
        if a.w1_bias is not None:
            gate_up += a.w1_bias[expert].double()
            gate_up_off += OF_TERMS * a.w1_bias[expert].double().abs()
        (gate, up), (gate_off, up_off) = (
            (t[:, 0::2], t[:, 1::2]) if a.interleaved else t.chunk(2, 1) for t in (gate_up, gate_up_off)
        )
        if a.swiglu_limit is not None:
            gate, up = gate.minimum(torch.full_like(gate, a.swiglu_limit)), up.clamp(-a.swiglu_limit, a.swiglu_limit)
        glu, up = gate * torch.sigmoid(a.swiglu_alpha * gate), up + a.swiglu_beta
        inner = (glu * up).to(a.out_dtype).double()
        inner_off = 1.1 * up.abs() * gate_off + glu.abs() * up_off  # the product with the sigmoid rises by at most 1.1
        if kind != "none" and not a.weight_only:
            roundings = (
                2 if a.act_scale is None else 1
            )  # rounding of the value, and of the maximum if it gives the scale
            error = roundings * HALF[a.out_dtype] * inner.abs() + inner_off
            inner, inner_off = quantized(inner, error, a.act_scale)
        share = torch.ones_like(share).where(share != 0, 0.0) if a.apply_router_weight_on_input else share
        bias = torch.zeros_like(total[0]) if a.w2_bias is None else a.w2_bias[expert].double()
        total += share[:, None] * (inner @ w2.t() + bias)
        terms += share[:, None].abs() * (inner.abs() @ w2.abs().t() + bias.abs())
        off += share[:, None].abs() * (inner_off @ w2.abs().t())
    of_terms = HALF[a.out_dtype] if kind == "none" or a.weight_only else 0.02  # some roundings of x go the other way
    yield "output", outputs[0].double(), total, rounded(total, a.out_dtype) + of_terms * terms + off


# Routing


def scored(x: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """Return the scores of logits and their relative error bounds.

    The bound includes exp2(x * log2(e)), which Triton's exp computes as well.
    """
    if score == "sigmoid":
        scores = torch.sigmoid(x)
        return scores, EXPONENT * x.abs() * (1 - scores) + SCORE
    scores, below = torch.softmax(x, -1), x.amax(-1, keepdim=True) - x
    off = 2 * EXPONENT * below  # the difference is rounded, too
    return scores, off + (scores * off).sum(-1, keepdim=True) + SCORE


def top(
    scores: Tensor, off: Tensor, values: Tensor, before, outputs: tuple, factor: float, kept: Tensor, epsilon: float
) -> Found:
    """Yield the ids of the largest `values` among the kept experts, and their scores as weights."""
    weights, ids = outputs
    a = before
    padding = getattr(a, "is_padding", None)
    if padding is not None:
        here = ids[padding].double()
        yield "ids of padding", here, torch.full_like(here, -1.0), torch.zeros_like(here)
        kept_rows = {"gating_output": a.gating_output[~padding], "is_padding": None}
        rows = (x[~padding] for x in (scores, off, values))
        outputs = weights[~padding], ids[~padding]
        yield from top(*rows, a._replace(**kept_rows), outputs, factor, kept[~padding], epsilon)
        return
    clear = torch.isfinite(before.gating_output.double()).all(-1)
    bias = a.e_score_correction_bias
    if bias is not None and not torch.isfinite(bias.double()).all():
        clear[:] = False
    values = values.masked_fill(~kept, -torch.inf)
    wanted = values.topk(a.topk, -1)
    mine = values.gather(-1, ids.long())
    near = torch.full_like(mine, 2e-6).where(clear[:, None], torch.inf)
    yield "chosen values", mine, wanted.values.where(clear[:, None], torch.nan), near + 1e-5 * wanted.values.abs()
    ordered, _ = ids.long().sort(-1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).double().sum(-1)
    yield "repeated ids", repeated, torch.zeros_like(repeated), torch.zeros_like(repeated)
    share, off = (of_experts.gather(-1, ids.long()) for of_experts in (scores, off))
    least = SIGMOID * (share < 2 * SIGMOID)
    if a.renormalize:
        total = share.sum(-1, keepdim=True) + epsilon
        off = off + (share * off).sum(-1, keepdim=True) / total + SCORE
        share, least = share / total, least / total
    share = (factor * share).where(clear[:, None], torch.nan)
    yield "weights", weights.double(), share, off * share.abs() + factor * least + MIN[torch.float32]


def flat_top(score: str) -> Callable:
    def formula(before, after, outputs: tuple) -> Found:
        x = exact(before.gating_output)
        scores, off = scored(x, score)
        values = x if before.e_score_correction_bias is None else scores + exact(before.e_score_correction_bias)
        kept, factor = torch.ones_like(x, dtype=torch.bool), getattr(before, "routed_scaling_factor", 1.0)
        yield from top(scores, off, values, before, outputs, factor, kept, 0.0)

    return formula


def grouped_topk(before, after, outputs: tuple) -> Found:
    a, x = before, exact(before.gating_output)
    scores, off = scored(x, a.scoring_func)
    values = x if a.e_score_correction_bias is None else scores + exact(a.e_score_correction_bias)
    grouped = values.nan_to_num(nan=-torch.inf).unflatten(-1, (a.num_expert_group, -1))
    best = grouped.topk(min(1 if a.e_score_correction_bias is None else 2, grouped.shape[-1]), -1).values.sum(-1)
    # A group that ties with the last kept one, up to rounding, may replace it: rows with such groups are left out.
    order = best.sort(-1, descending=True).values
    chosen = a.topk_group
    if chosen < a.num_expert_group:
        unclear = ~(order[:, chosen - 1] - order[:, chosen] > 1e-5)
        x, outputs = x[~unclear], tuple(output[~unclear] for output in outputs)
        scores, off, values, best = scores[~unclear], off[~unclear], values[~unclear], best[~unclear]
        before = before._replace(gating_output=before.gating_output[~unclear])
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(chosen, -1).indices, True)
    kept = kept.repeat_interleave(scores.shape[-1] // a.num_expert_group, -1)
    yield from top(scores, off, values, before, outputs, a.routed_scaling_factor, kept, 1e-20)


def router_gemm_topk(before, after, outputs: tuple) -> Found:
    """Yield the logits, and the experts that these logits, which are rounded, choose."""
    a, (logits, weights, ids) = before, outputs
    yield from product(exact(a.x), exact(plain(a.weight)), None, logits)
    if a.is_padding is not None:
        here = ids[a.is_padding].double()
        yield "ids of padding", here, torch.full_like(here, -1.0), torch.zeros_like(here)
        logits, weights, ids = (output[~a.is_padding] for output in outputs)
    given = types.SimpleNamespace(**a._replace(is_padding=None)._asdict(), gating_output=logits)
    given._replace = lambda gating_output: types.SimpleNamespace(**vars(given) | {"gating_output": gating_output})
    yield from grouped_topk(given, None, (weights, ids))


def router_z_loss(before, after, outputs: tuple) -> Found:
    x = exact(before.logits)
    wanted = before.coefficient * torch.logsumexp(x, -1).square().sum() / max(len(x), 1)
    yield "loss", outputs[0].double(), wanted, 1e-4 * wanted.abs() + 1e-12


def load_balancing_loss(before, after, outputs: tuple) -> Found:
    a, x = before, exact(before.logits)
    experts = x.shape[1]
    counts = torch.stack([(a.topk_ids == expert).sum() for expert in range(experts)]).double()
    pairs = max(a.topk_ids.numel(), 1)
    wanted = a.coefficient * experts * (counts / pairs * torch.softmax(x, -1).sum(0) / max(len(x), 1)).sum()
    yield "loss", outputs[0].double(), wanted, 1e-4 * wanted.abs() + 1e-12


# Attention


def by_slot(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return caches of any layout as [pages, page, heads, size]."""
    if key.dim() == 4:
        return key, value
    values = value.permute(0, 3, 1, 2) if value.dim() == 4 else value.permute(0, 2, 4, 1, 3).flatten(1, 2)
    return key.permute(0, 3, 1, 2, 4).flatten(3), values


def turned(x: Tensor, positions: Tensor, table: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Return heads [tokens, heads, size] with their first elements rotated, and the magnitudes of the terms."""
    x, rotary = x.double(), table.shape[1]
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    part, rest = x[..., :rotary], x[..., rotary:]
    first, second = part.chunk(2, -1) if is_neox else (part[..., 0::2], part[..., 1::2])
    both = first * cos - second * sin, second * cos + first * sin
    sizes = first.abs() * cos.abs() + second.abs() * sin.abs(), second.abs() * cos.abs() + first.abs() * sin.abs()
    joined = (
        torch.cat([torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2), tail], -1)
        for pair, tail in ((both, rest), (sizes, rest.abs()))
    )
    return tuple(joined)


def written(
    name: str, old: Tensor, new: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None, off: Tensor
) -> Found:
    """Yield a cache [pages, page, ...] after rows were written to their slots; other slots are unchanged."""
    wanted, allowed = old.double().flatten(0, 1).clone(), torch.zeros(old.flatten(0, 1).shape, dtype=torch.float64)
    allowed = allowed.to(old.device)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if old.element_size() == 1:
            unit, limit = 1.0 if scale is None else scale.double().reshape(()), LIMIT[old.dtype]
            wanted[slot] = (rows[row].double() / unit).clamp(-limit, limit)
            allowed[slot] = 1.01 * (E4M3 * wanted[slot].abs() + E4M3_MIN + off[row] / unit)
        else:
            wanted[slot], allowed[slot] = rows[row].double(), off[row]
    yield name, new.double().flatten(0, 1), wanted, allowed


def both_written(a, old: tuple, new: tuple, keys: torch.Tensor, off: torch.Tensor) -> Found:
    """Yield what is found and wanted in the caches of keys, up to `off`, and of values."""
    values = a.value.reshape(a.positions.shape[-1], -1, old[1].shape[-1])
    yield from written("key_cache", old[0], new[0], keys, a.slot_mapping, a.k_scale, off)
    exact = torch.zeros_like(values).double()
    yield from written("value_cache", old[1], new[1], values, a.slot_mapping, a.v_scale, exact)


def rope_and_cache(before, after, outputs: tuple) -> Found:
    a = before
    old, new = (by_slot(caches.key_cache, caches.value_cache) for caches in (before, after))
    size = old[0].shape[-1]
    for name in ("query", "key"):
        rows, found = (getattr(of, name).reshape(len(a.positions), -1, size) for of in (before, after))
        wanted, sizes = turned(rows, a.positions, a.cos_sin_cache, a.is_neox)
        off = rounded(wanted, rows.dtype) + FP32 * sizes
        yield name, found.double(), wanted, off
    yield from both_written(a, old, new, wanted, off)


def qk_norm_rope_and_cache(before, after, outputs: tuple) -> Found:
    a = before
    old, new = (by_slot(caches.key_cache, caches.value_cache) for caches in (before, after))
    size, dtype = old[0].shape[-1], a.query.dtype
    tokens, pairs = a.positions.shape[-1], a.cos_sin_cache.shape[1] // 2
    positions = a.positions.reshape(-1, tokens)
    by = torch.tensor(["THW"[p % 3] == "H" and p // 3 < a.height_pairs for p in range(pairs)]).long()
    by += 2 * torch.tensor(["THW"[p % 3] == "W" and p // 3 < a.width_pairs for p in range(pairs)]).long()
    rows = positions[by.to(positions.device)].t()  # [tokens, pairs]
    columns = torch.arange(2 * pairs, device=rows.device)
    table = a.cos_sin_cache[torch.cat((rows, rows), 1), columns]  # a row per token
    for name, weight in (("query", a.q_weight), ("key", a.k_weight)):
        x = getattr(before, name).double().reshape(tokens, -1, size)
        row = x.reshape(tokens, -1, len(weight))  # a norm's elements
        n = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + a.epsilon) * (weight.double() + a.one_plus_weight)
        wanted, sizes = turned(n.reshape(x.shape), torch.arange(tokens), table, a.is_neox)
        # Each term has the rounding of the norm.
        off = rounded(wanted, dtype) + rounded(sizes, dtype) + 2 * FP32 * sizes
        yield f"{name}_out", getattr(after, f"{name}_out").double().reshape(x.shape), wanted, off
    yield from both_written(a, old, new, wanted, off)


def rope_and_cache_mla(before, after, outputs: tuple) -> Found:
    a = before
    for name in ("q_pe", "k_pe"):
        rows, found = (getattr(of, name).reshape(len(a.positions), -1, a.k_pe.shape[-1]) for of in (before, after))
        wanted, sizes = turned(rows, a.positions, a.cos_sin_cache, a.is_neox)
        off = rounded(wanted, rows.dtype) + FP32 * sizes
        yield name, found.double(), wanted, off
    rows = torch.cat([a.kv_c.double(), wanted[:, 0]], -1)
    off = torch.cat([torch.zeros_like(a.kv_c).double(), off[:, 0]], -1)
    yield from written("kv_cache", a.kv_cache, after.kv_cache, rows, a.slot_mapping, a.scale, off)


def mla_norm_rope_and_cache(before, after, outputs: tuple) -> Found:
    """Yield both latents' norms, the queries' possibly quantized, and the results of the rotation and the cache write."""
    a, dtype = before, before.qkv.dtype
    behind = len(a.kv_weight), a.kv_cache.shape[2] - len(a.kv_weight)
    q, kv, k_pe = a.qkv.split([a.qkv.shape[1] - sum(behind), *behind], 1)
    of_rows = {"input": q, "weight": a.q_weight, "epsilon": a.epsilon, "one_plus_weight": False}
    made = (after.q_out,)
    if a.q_scale is not None:
        of_rows |= {"scale": a.q_scale}
    elif a.scales_out is not None:
        of_rows |= {
            "scale_ub": a.scale_ub,
            "group_size": q.shape[1] // a.scales_out.shape[1],
            "quant_dtype": a.q_out.dtype,
        }
        made = after.q_out, after.scales_out
    if a.q_weight is not None:
        queries = type("Queries", (), of_rows | {"_fields": tuple(of_rows)})
        yield from norm(queries, queries, made)
    kv = kv.double()
    kv = kv * torch.rsqrt(kv.square().mean(-1, keepdim=True) + a.epsilon) * a.kv_weight.double()
    off = FP32 * kv.abs() + rounded(kv, dtype, 2)
    yield "kv_out", after.kv_out.double(), kv, off
    wanted, sizes = (of[:, 0] for of in turned(k_pe[:, None], a.positions, a.cos_sin_cache, a.is_neox))
    of_k_pe = rounded(wanted, dtype) + FP32 * sizes
    yield "k_pe_out", after.k_pe_out.double(), wanted, of_k_pe
    rows, offs = torch.cat([kv, wanted], -1), torch.cat([off, of_k_pe], -1)
    yield from written("kv_cache", a.kv_cache, after.kv_cache, rows, a.slot_mapping, a.cache_scale, offs)


def attended(
    a,
    after,
    outputs: tuple,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Found:
    """Yield the attention of query rows [rows, heads, size] over caches [pages, page, heads, size]."""
    out, lse = outputs
    out = out if a.out is None else after.out
    group, dtype, query = query.shape[1] // keys.shape[2], query.dtype, query.double()
    wanted, off = (query.new_zeros(*query.shape[:2], values.shape[3]) for _ in range(2))
    sums = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64, device=query.device)
    lse_off = torch.zeros_like(sums)
    for request, length in enumerate(a.seq_lens.tolist()):
        places = torch.arange(length, device=query.device)
        pages = a.block_table[request].long()[places // keys.shape[1]]
        k, v = (
            cache[pages, places % keys.shape[1]].double() * (1.0 if scale is None else scale.double())
            for cache, scale in zip((keys, values), scales)
        )
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        for row in range(a.query_len):
            last = length - a.query_len + row
            first = max(last - window + 1, 0) if window else 0
            at = request * a.query_len + row
            if last >= 0:
                scores = torch.einsum("hd,chd->hc", query[at], k[first : last + 1]) * a.scale
            else:
                scores = query.new_zeros(query.shape[1], 0)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            if not scores.shape[1]:
                continue
            weights = torch.softmax(scores, 1)[:, : max(last + 1 - first, 0)]
            seen = v[first : last + 1] if last >= 0 else v[:0]
            wanted[at] = torch.einsum("hc,chd->hd", weights, seen)
            off[at] = 2.0**-7 * torch.einsum("hc,chd->hd", weights, seen.abs())
            sums[at] = torch.logsumexp(scores, 1)
            lse_off[at] = 1e-3 + FP32 * scores.abs().amax(1)
    out, off = out.reshape(wanted.shape), off + rounded(wanted, dtype)
    if getattr(a, "out_scale", None) is not None:
        yield from quantized("output", wanted, off, out, a.out_scale.double())
    elif getattr(a, "out_scales", None) is not None:
        rows, unbounded = (
            (wanted.flatten(1), off.flatten(1), (out.flatten(1), after.out_scales)),
            types.SimpleNamespace(scale_ub=None),
        )
        yield from dynamic(unbounded, *rows, 128)
    else:
        yield "output", out.double(), wanted, off
    if a.return_lse:
        empty = torch.isinf(sums)
        yield "lse", lse.double().where(~empty, 0.0), sums.where(~empty, 0.0), lse_off


def paged_attention_decode(before, after, outputs: tuple) -> Found:
    a = before
    keys, values = by_slot(a.key_cache, a.value_cache)
    query = a.query.reshape(len(a.query), -1, keys.shape[3])
    return attended(a, after, outputs, query, keys, values, (a.k_scale, a.v_scale), a.window, a.sinks)


def mla_decode(before, after, outputs: tuple) -> Found:
    a, keys = before, before.kv_cache.unsqueeze(2)
    query = torch.cat([a.q_nope, a.q_pe], -1)
    return attended(a, after, outputs, query, keys, keys[..., : a.q_nope.shape[2]], (a.kv_scale, a.kv_scale))


def gated_delta_net_decode(before, after, outputs: tuple) -> Found:
    """Yield the states, of which slots that no row has are unchanged, and the results; `sizes` are sums of absolute terms."""
    a, (_, heads, of_v, of_k) = before, before.state.shape
    groups = (a.qkvz.shape[1] // of_k - 2 * heads * of_v // of_k) // 2
    each, x, gate_off = heads // groups, a.qkvz.double(), torch.zeros(len(a.qkvz), 2 * heads, dtype=torch.float64)
    if a.ba is None:
        ba = a.tokens.double() @ a.ba_weight.double().t()
        gate_off = OF_TERMS * (a.tokens.double().abs() @ a.ba_weight.double().abs().t())
    else:
        ba = a.ba.double()
    if a.is_interleaved:
        parts = gate_off.unflatten(1, (groups, -1)).split([each, each], 2)
        gate_off = torch.cat([part.flatten(1) for part in parts], 1)
    if a.is_interleaved:
        x, ba = x.unflatten(1, (groups, -1)), ba.unflatten(1, (groups, -1))
        q, k, v, z = (part.flatten(1) for part in x.split([of_k, of_k, each * of_v, each * of_v], 2))
        b, alpha = (part.flatten(1) for part in ba.split([each, each], 2))
    else:
        q, k, v, z = x.split([groups * of_k, groups * of_k, heads * of_v, heads * of_v], 1)
        b, alpha = ba.split([heads, heads], 1)
    x, width = torch.cat([q, k, v], 1), a.conv_weight.shape[1]
    b_off, a_off = gate_off.split([heads, heads], 1)
    gate_off = b_off + a_off * torch.exp(a.a_log.double())  # of beta and decay, relative
    rate = torch.exp(a.a_log.double()) * torch.log1p(torch.exp(alpha + a.dt_bias.double()))
    conv, state, y = a.conv_state.double().clone(), a.state.double().clone(), x.new_zeros(len(x), heads, of_v)
    state_off, off = torch.zeros_like(state), torch.zeros_like(y)
    for request, slots in enumerate(a.indices.tolist()):
        first, end = (request, request + 1) if a.row_starts is None else a.row_starts[request : request + 2].tolist()
        end = min(end, first + len(slots))
        taken = 1 if a.accepted is None else int(a.accepted[request])
        if first == end or not 1 <= taken <= len(slots) or slots[0] < 1 or slots[taken - 1] < 1:
            continue
        rows = torch.cat([a.conv_state[slots[0], :, taken - 1 : taken + width - 2].double().t(), x[first:end]])
        conv[slots[0], :, : len(rows) - 1] = rows[1:].t()
        s = a.state[slots[taken - 1]].double()
        sizes = s.abs()
        for t in range(first, end):
            row = silu((rows[t - first : t - first + width] * a.conv_weight.double().t()).sum(0))
            q, k, v = row[: groups * of_k], row[groups * of_k : 2 * groups * of_k], row[2 * groups * of_k :]
            q, k = (of.view(groups, 1, of_k).repeat_interleave(each, 0) for of in (q, k))
            q, k = (of / torch.sqrt(of.square().sum(2, keepdim=True) + 1e-6) for of in (q, k))
            q, v = q / of_k**0.5, v.view(heads, of_v, 1)
            decay, beta = torch.exp(-rate[t])[:, None, None], torch.sigmoid(b[t])[:, None, None]
            s, sizes = decay * s, decay * sizes
            step = beta * (v.abs() + (sizes * k.abs()).sum(2, keepdim=True))
            s, sizes = s + beta * (v - (s * k).sum(2, keepdim=True)) * k, sizes + step * k.abs()
            relative = FP32 + gate_off[t, :, None]
            o, o_off = (s * q).sum(2), relative * (sizes * q.abs()).sum(2)
            inverse = torch.rsqrt(o.square().mean(1, keepdim=True) + a.epsilon)
            factor = inverse * a.norm_weight.double() * silu(z[t].view(heads, of_v))
            y[t] = o * factor
            o_off = o_off + o.abs() * inverse * o_off.square().mean(1, keepdim=True).sqrt()
            off[t] = o_off * factor.abs() + FP32 * y[t].abs()
            if slots[t - first] > 0:
                state[slots[t - first]], state_off[slots[t - first]] = (
                    s,
                    relative[..., None] * sizes + rounded(s, a.state.dtype),
                )
    yield "conv_state", after.conv_state.double(), conv, torch.zeros_like(conv)
    yield "state", after.state.double(), state, state_off
    y, off = y.flatten(1), off.flatten(1)
    if a.out_scales is not None:
        unbounded = types.SimpleNamespace(scale_ub=None)
        yield from dynamic(unbounded, y, off, (after.out, after.out_scales), 128)
    elif a.out_scale is not None:
        yield from quantized("out", y, off, after.out, a.out_scale.double().reshape(()))
    else:
        yield "out", after.out.double(), y, off + rounded(y, a.out.dtype)


def random_words(counter: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return random words by Philox4x32-10, as its authors publish it."""
    x, y, z, w = counter
    key, other = seed % 2**32, seed // 2**32 % 2**32
    for step in range(10):
        k, o = (key + step * 0x9E3779B9) % 2**32, (other + step * 0xBB67AE85) % 2**32
        a, b = x * 0xD2511F53, z * 0xCD9E8D57
        x, y, z, w = b // 2**32 ^ y ^ k, b % 2**32, a // 2**32 ^ w ^ o, a % 2**32
    return x, y, z, w


def dropped(a, sequence: int, rows: int, heads: int, keys: int) -> Tensor:
    """Return a mask of the weights [heads, rows, keys] that are dropped."""
    words = [
        [[random_words((of, row, head, sequence), a.seed) for of in range(-(-keys // 4))] for row in range(rows)]
        for head in range(heads)
    ]
    of_key = torch.tensor(words, dtype=torch.float64).reshape(heads, rows, -1)
    return (of_key < round(a.dropout * 2**32))[..., :keys]


def flash_attention(before, after, outputs: tuple) -> Found:
    a, (out, lse, mask) = before, outputs
    turned = {"bshd": lambda x: x, "bhsd": lambda x: x.transpose(1, 2), "thd": lambda x: x.unsqueeze(0)}[a.layout]
    queries, found = turned(a.q), turned(out)
    heads = queries.shape[2]

    def of_heads(scale: Tensor | None, count: int) -> Tensor:
        ones = torch.ones(count, dtype=torch.float64)
        return (ones if scale is None else ones * scale.double().reshape(-1)).repeat_interleave(heads // count)

    if a.block_table is not None:
        caches = by_slot(a.k, a.v)
    sequences = len(queries) if a.cu_seqlens_q is None else len(a.cu_seqlens_q) - 1
    for s in range(sequences):
        rows = slice(None) if a.cu_seqlens_q is None else slice(*a.cu_seqlens_q[s : s + 2].tolist())
        batch = s if a.cu_seqlens_q is None else 0
        q = queries[batch, rows].double()
        if a.block_table is not None:
            places = torch.arange(int(a.seq_lens[s]))
            page = caches[0].shape[1]
            k, v = (c[a.block_table[s].long()[places // page], places % page].double() for c in caches)
        else:
            keys = slice(None) if a.cu_seqlens_k is None else slice(*a.cu_seqlens_k[s : s + 2].tolist())
            k, v = (turned(x)[batch, keys].double() for x in (a.k, a.v))
        kv_heads = k.shape[1]
        k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
        factor = a.scale * of_heads(a.q_scale, heads) * of_heads(a.k_scale, kv_heads)
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * factor[:, None, None]
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        behind = k.shape[1] - len(q) + torch.arange(len(q))[:, None] - torch.arange(k.shape[1])
        if a.alibi_slopes is not None:
            scores = scores - a.alibi_slopes[s].double()[:, None, None] * behind.abs()
        if a.bias is not None:
            scores = scores + a.bias[s % len(a.bias)].double()
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        if a.causal:
            hidden |= behind < 0
        if a.window:
            hidden |= behind >= a.window
        scores = scores.masked_fill(hidden, -torch.inf)
        has_keys = (~hidden).any(1)
        weights = torch.softmax(scores, -1).nan_to_num() if k.shape[1] else scores
        of_value = of_heads(a.v_scale, kv_heads)[:, None, None]
        if a.dropout:
            gone = dropped(a, s, len(q), heads, k.shape[1])
            if a.return_mask:
                yield "mask", mask[batch].double(), (~gone).double(), torch.zeros(gone.shape, dtype=torch.float64)
            weights = weights.masked_fill(gone, 0.0) / (1 - a.dropout)
        wanted, sizes = weights @ v * of_value, weights @ v.abs() * of_value
        off = 2.0**-7 * sizes + rounded(wanted, out.dtype)
        if a.p_scale is not None:
            most = weights.amax(-1, keepdim=True) / of_heads(a.p_scale, heads)[:, None, None]
            off = off + 0.51 * most / (1 - a.dropout) * (v.abs() * of_value).sum(1, keepdim=True)
        yield "output", found[batch, rows].transpose(0, 1).double(), wanted, off
        if a.return_lse:
            sums = torch.logsumexp(scores, -1)
            ours = (lse[:, rows] if a.layout == "thd" else lse[batch]).double()
            largest = scores.abs().where(~hidden, 0.0).amax(-1) if k.shape[1] else sums.abs()
            wanted_sums = sums.where(has_keys, 0.0)
            yield "lse", ours.where(has_keys, 0.0), wanted_sums, 1e-3 + FP32 * largest.nan_to_num()
            yield (
                "lse without keys",
                ours.where(~has_keys, torch.inf).isinf().double(),
                torch.ones_like(ours),
                ours * 0.0,
            )


FORMULAS: dict[str, Callable[..., Found]] = {
    **dict.fromkeys(
        (
            *("rms_norm", "fused_add_rms_norm", "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"),
            *("rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant", "rms_norm_mxfp8_quant"),
            "rms_norm_and_per_block_quant",
        ),
        norm,
    ),
    **dict.fromkeys(
        (
            *("layer_norm", "layer_norm_static_fp8_quant", "layer_norm_dynamic_per_token_quant"),
            *("layer_norm_per_block_quant", "layer_norm_mxfp8_quant"),
        ),
        layer_norm,
    ),
    **dict.fromkeys(
        (
            *("silu_and_mul", "silu_and_mul_quant", "silu_and_mul_per_token_quant"),
            *("silu_and_mul_per_block_quant", "silu_and_mul_mxfp8_quant"),
        ),
        silu_and_mul,
    ),
    **dict.fromkeys(
        (
            f"silu_and_mul_with_clamp{kind}"
            for kind in ("", "_quant", "_per_token_quant", "_per_block_quant", "_mxfp8_quant")
        ),
        silu_and_mul_with_clamp,
    ),
    **dict.fromkeys(
        (
            f"silu_and_mul_with_expert_gate{kind}"
            for kind in ("", "_quant", "_per_token_quant", "_per_block_quant", "_mxfp8_quant")
        ),
        silu_and_mul_with_expert_gate,
    ),
    **dict.fromkeys(
        (f"sigmoid_and_mul{kind}" for kind in ("_quant", "_per_token_quant", "_per_block_quant", "_mxfp8_quant")),
        sigmoid_and_mul,
    ),
    "softmax": softmax,
    "stream_memory": stream_memory,
    "scaled_mm": scaled_mm,
    "scaled_mm_silu_and_mul_quant": scaled_mm_silu_and_mul_quant,
    "block_scaled_mm": block_scaled_mm,
    "mxfp8_scaled_mm": mxfp8_scaled_mm,
    "mx_dequantize": mx_dequantize,
    "mx_gemm": mx_gemm,
    "unquantized_gemm": unquantized_gemm,
    "w4a16_gemm": w4a16_gemm,
    "batched_gemm": batched_gemm,
    "batched_gemm_rope": batched_gemm_rope,
    "gemm": gemm,
    "flash_attention": flash_attention,
    "dequantize_int4": dequantize_int4,
    "fused_experts": fused_experts,
    "topk_softmax": flat_top("softmax"),
    "topk_sigmoid": flat_top("sigmoid"),
    "grouped_topk": grouped_topk,
    "router_gemm_topk": router_gemm_topk,
    "router_z_loss": router_z_loss,
    "load_balancing_loss": load_balancing_loss,
    "rope_and_cache": rope_and_cache,
    "rope_and_cache_mla": rope_and_cache_mla,
    "qk_norm_rope_and_cache": qk_norm_rope_and_cache,
    "mla_norm_rope_and_cache": mla_norm_rope_and_cache,
    "paged_attention_decode": paged_attention_decode,
    "mla_decode": mla_decode,
    "gated_delta_net_decode": gated_delta_net_decode,
}
