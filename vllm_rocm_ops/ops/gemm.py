"""Multiply matrices of any dtypes, strides and sizes, with scales, bias and activation.

Kernels: csrc/ops/gemm.hip, csrc/ops/standalone/gemm_blocks.hip.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, Workspace, fields
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared import gemm as products
from vllm_rocm_ops.ops.shared import gemm_blocks, gemm_cases
from vllm_rocm_ops.ops.shared import skinny_gemm as skinny
from vllm_rocm_ops.ops.shared import tiled_gemm as tiled
from vllm_rocm_ops.ops.shared.gemm import E5M2, HALVES, Operand, Product
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig
from vllm_rocm_ops.ops.shared.tiled_gemm import TiledConfig

__all__ = ["gemm"]

INTS = {torch.int32: 3, torch.int8: 4}
OUT_TYPES = products.OUT_TYPES | INTS
SLOPES = {"none": 1.0, "leaky_relu": 0.01}  # factor of negative results
FEW = (1, 8)  # row limit of the kernels without tiles
THREADS = 256  # per block of these kernels
ROWS, SPLIT_K = 128, (1, 2, 4, 8, 16)  # of this op's tiles
LARGE = ("int8", "e4m3", "bf16", "fp16")  # dtypes that also have tiles of 128 rows of a

# The cost model of the kernels without tiles. Never measured on an AMD GPU.
BY_ELEMENT = 4.0  # slowdown of operands loaded element by element
LANE_OPERATIONS = 134e3  # per compute unit and microsecond
OPERATIONS = (18.0, 1.5)  # per element of b, and per element and row of a; 20 for 1 to 2 rows, measured on H200
LATENCY_US = 2.0


@dataclass(frozen=True)
class FewConfig:
    """A wave multiplies a column of b by all rows of a, at most `tokens`."""

    tokens: int


def _types(arch: Arch) -> dict[torch.dtype, str]:
    """Return the names of the dtypes that the kernels support on arch, in the order of ElementType in csrc/gemm/element.h."""
    return {torch.int8: "int8", arch.fp8_dtype: "e4m3", E5M2[arch.fp8_dtype]: "e5m2", **HALVES}


def _multiplied(a, arch: Arch) -> tuple[str, int]:
    """Return the dtype that a pair of operands is multiplied in, and its bytes."""
    pair = dict.fromkeys((a.a.dtype, a.b.dtype))
    for dtype, name in HALVES.items():
        if dtype in pair:
            return name, 2
    if torch.int8 in pair:
        return ("int8", 1) if len(pair) == 1 else ("fp16", 2)
    return "_".join(_types(arch)[dtype] for dtype in pair), 1


def _operands(a, size: int) -> tuple[Operand, Operand]:
    """Return a and b as rows along K, with `size` bytes per multiplied element."""
    sides = ((a.a, a.a.stride(0)), (a.b.t(), a.b.stride(1)))
    return tuple(Operand(t, t.shape[0], t.shape[1] * size, stride * t.element_size()) for t, stride in sides)


def _lies_in_vectors(operand: Operand) -> bool:
    """True if rows are contiguous and 16-byte aligned."""
    rows = operand.tensor
    together = rows.stride(1) == 1 and (rows.shape[0] == 1 or operand.stride % 16 == 0)
    return together and rows.data_ptr() % 16 == 0


def _has_vectors(operand: Operand) -> bool:
    """True if rows are also whole vectors of the multiplied dtype."""
    in_memory = operand.tensor.shape[1] * operand.tensor.element_size()
    return _lies_in_vectors(operand) and in_memory == operand.k and operand.k % 16 == 0


def _is_fast(a, operands: tuple[Operand, Operand]) -> bool:
    """True if the vectorized kernels support a call. They have no block scales for two 16-bit operands."""
    has_scales = a.block_scales and a.a.element_size() == a.b.element_size() == 2
    return not has_scales and all(_has_vectors(operand) and operand.stride < 2**25 for operand in operands)


def _is_skinny(a, kind: str) -> bool:
    """True if the skinny kernels support a call: int8 with scales, few rows of a, at most a column bias."""
    plain = a.out_dtype in products.OUT_TYPES and a.activation == "none" and (a.bias is None or a.bias.dim() == 1)
    return (
        kind == "int8"
        and plain
        and a.a.shape[0] <= skinny.MAX_TOKENS
        and a.scale_a is not None
        and a.scale_b is not None
        and (not a.block_scales or a.scale_b.stride(0) == 1 or a.scale_b.shape[0] == 1)
        and all(holds for _, holds in products.can_implement(*_skinny_operands(a)))
    )


def _skinny_operands(a) -> tuple[Operand, Operand]:
    return products.activations(a.a), products.weight(a.b, transposed=True)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    types = (torch.int8, *E5M2, *E5M2.values(), *HALVES, torch.float32)
    wanted = "int8, float8_e4m3, float8_e5m2, bfloat16, float16 or float32"
    yield "a", f"{wanted} [M, K]", describe(a.a), a.a.dim() == 2 and a.a.dtype in types
    k = a.a.shape[1]
    holds = a.b.dim() == 2 and a.b.dtype in types and a.b.shape[0] == k
    yield "b", f"{wanted} [K={k}, N]", describe(a.b), holds
    m, n = a.a.shape[0], a.b.shape[1]
    if a.block_scales:
        yield from gemm_blocks.contract(a)
    else:
        for name, scale, rows in (("scale_a", a.scale_a, m), ("scale_b", a.scale_b, n)):
            if scale is not None:
                holds = scale.dtype == torch.float32 and scale.numel() in (1, rows)
                yield name, f"float32 with 1 or {rows} elements", describe(scale), holds
    of_ints = a.a.dtype == a.b.dtype == torch.int8
    wanted = "bfloat16, float16, float32 or, of int8 with int8, int32 or int8"
    yield "out_dtype", wanted, str(a.out_dtype), a.out_dtype in (OUT_TYPES if of_ints else products.OUT_TYPES)
    if a.bias is not None:
        wanted = f"{a.out_dtype}, not of ints, [N={n}] or [M={m}, 1]"
        holds = a.out_dtype not in INTS and a.bias.dtype == a.out_dtype and tuple(a.bias.shape) in ((n,), (m, 1))
        yield "bias", wanted, describe(a.bias), holds
    yield "activation", " or ".join(SLOPES), str(a.activation), a.activation in SLOPES


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    for name, dtype in (("a", a.a.dtype), ("b", a.b.dtype)):
        yield f"{name} is not float32, which torch multiplies", dtype != torch.float32
        yield f"{arch.name} supports {name}'s dtype ({', '.join(_types(arch).values())})", dtype in _types(arch)
    yield "a and b are not bfloat16 with float16", {a.a.dtype, a.b.dtype} != set(HALVES)
    rest = [t for t in (a.scale_a, a.scale_b, a.bias) if t is not None]
    if a.block_scales:
        yield from gemm_blocks.can_implement(a)
        rest = rest[2:]
    yield "row scales and bias are contiguous", all(t.is_contiguous() for t in rest)
    m, n, k = _sizes(a)
    yield "N and K are at least 1", min(n, k) > 0
    yield "K is below 2^17, so that int8 sums fit 32 bits", k < 2**17 or torch.int8 not in (a.a.dtype, a.b.dtype)
    yield "M, N and K are below 2^30, M * N is below 2^40", max(m, n, k) < 2**30 and m * n < 2**40
    for name, rows in (("a", a.a), ("b", a.b.t())):
        reach = (256 * rows.stride(0) + 128 * rows.stride(1)) * rows.element_size()
        yield f"256 rows by 128 along K of {name} span less than 2 GB", reach < 2**31


def _sizes(a) -> tuple[int, int, int]:
    return a.a.shape[0], a.b.shape[1], a.a.shape[1]


def _configs(a, arch: Arch) -> list:
    if not all(holds for _, holds in _can_implement(a, arch)):
        return []
    kind, size = _multiplied(a, arch)
    operands = _operands(a, size)
    fitting: list = [c for c in tiled.configs(*operands, arch) if c.rows == ROWS and c.split_k in SPLIT_K]
    if kind not in LARGE or not _is_fast(a, operands):
        fitting = [c for c in fitting if c.tokens == tiled.TILES[0][0]]
    if _is_skinny(a, kind):
        narrow = arch.vendor == "nvidia"  # HAS_INT8_STREAMS in csrc/device
        fitting += [c for c in skinny.configs(*_skinny_operands(a), arch, _unit(a)) if c.rows == 16 or not narrow]
    return [FewConfig(t) for t in FEW if t >= a.a.shape[0]][:1] + fitting


def _unit(a) -> int:
    """Return the steps along K per unit of the skinny kernels."""
    return gemm_blocks.UNIT if a.block_scales else 1


def _cost(config, a, arch: Arch) -> dict[str, float]:
    if isinstance(config, SkinnyConfig):
        return skinny.cost(config, *_skinny_operands(a), arch, _unit(a))
    operands = _operands(a, _multiplied(a, arch)[1])
    if isinstance(config, TiledConfig):
        terms = tiled.cost(config, *operands, arch)
        return terms | {"multiplying": terms["multiplying"] * (1.0 if _is_fast(a, operands) else BY_ELEMENT)}
    m, n, k = _sizes(a)
    elements = n * k * (OPERATIONS[0] + OPERATIONS[1] * m)
    apart = BY_ELEMENT if not all(_lies_in_vectors(operand) for operand in operands) else 1.0
    moved = n * k * a.b.element_size() / (arch.bandwidth_gb_s * 1e3)
    issued = apart * elements / (arch.compute_units * LANE_OPERATIONS)
    return {"multiplying": max(moved, issued), "latency": LATENCY_US}


def _plan(config, out: Tensor, a, arch: Arch) -> list[Launch]:
    m, n, k = _sizes(a)
    if m == 0:
        return []
    kind, size = _multiplied(a, arch)
    (scale_a_row, scale_a_k), (scale_b_row, scale_b_k) = _scale_strides(a)
    module = gemm_blocks.MODULE if a.block_scales else "gemm"
    if isinstance(config, SkinnyConfig):
        scales = (a.scale_a, scale_a_row, scale_a_k), (a.scale_b, scale_b_row)
        product = Product(out, *_skinny_operands(a), *scales, a.bias)
        return skinny.launch(module, config, product, arch, _unit(a), kind)
    operands = _operands(a, size)
    has_vectors = _has_vectors if isinstance(config, TiledConfig) else _lies_in_vectors
    types = list(_types(arch))
    problem = {
        name: {
            "data": tensor,
            "row": operand.stride,
            "step": operand.tensor.stride(1) * tensor.element_size(),
            "type": types.index(tensor.dtype),
            "vectors": int(has_vectors(operand)),
        }
        for name, tensor, operand in zip("ab", (a.a, a.b), operands)
    }
    is_row_bias = a.bias is not None and a.bias.dim() == 2
    problem |= {
        "out": out,
        "partials": None,
        "counters": None,
        "scale_a": a.scale_a,
        "scale_b": a.scale_b,
        "bias": a.bias,
        "m": m,
        "n": n,
        "k": k,
        "scale_a_row": scale_a_row,
        "scale_b_row": scale_b_row,
        "scale_a_k": scale_a_k,
        "scale_b_k": scale_b_k,
        "bias_row": int(is_row_bias),
        "bias_column": int(a.bias is not None and not is_row_bias),
        "out_type": OUT_TYPES[out.dtype],
        "unscaled": int(_is_unscaled(a)),
        "slope": SLOPES[a.activation],
    }
    if isinstance(config, FewConfig):
        whole = TiledConfig(tiled.TILES[0][0], ROWS, 1)
        problem |= tiled.division(whole, *operands)
        sums = "" if a.block_scales else "int_" if kind == "int8" else "float_"
        grid = -(-n // (THREADS // arch.wave_lanes))
        symbol = f"{module}_few_{sums}{config.tokens}"
        return [Launch(module, symbol, (grid, 1, 1), (THREADS, 1, 1), fields("problem", problem))]
    if bytes_shared := tiled.partial_bytes(config, *operands):
        problem["partials"] = Workspace(bytes_shared)
        problem["counters"] = Counters(tiled.tiles(config, *operands))
    problem |= tiled.division(config, *operands)
    kind = kind if _is_fast(a, operands) else f"any_{kind}"
    return [tiled.launch(module, kind, config, *operands, arch, problem)]


def _scale_strides(a) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the strides of both scales in elements: along a's rows and K, and along b's columns (or their blocks) and K."""
    if a.block_scales:
        return a.scale_a.stride(), a.scale_b.t().stride()
    return tuple((int(scale is not None and scale.numel() > 1), 0) for scale in (a.scale_a, a.scale_b))


def _is_unscaled(a) -> bool:
    """True if results are the int32 sums themselves."""
    return a.out_dtype == torch.int32 and a.scale_a is None and a.scale_b is None and a.activation == "none"


def _torch(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    block_scales: bool = False,
) -> Tensor:
    """Run PyTorch's GEMM for these dtypes, then scales, bias and activation. Raise ValueError if PyTorch has none."""
    if block_scales:
        raise ValueError("PyTorch has no GEMM with block scales for all of these dtypes")
    if a.dtype == b.dtype == torch.int8:
        product = torch._int_mm(a, b)
    elif a.element_size() == b.element_size() == 1:
        unscaled = torch.ones((), device=a.device)
        scales = [unscaled if scale is None else scale for scale in (scale_a, scale_b)]
        if max(scale.numel() for scale in scales) > 1:
            shapes = (len(a), 1), (1, b.shape[1])
            scales = [s.reshape(shape if s.numel() > 1 else ()).expand(shape) for s, shape in zip(scales, shapes)]
        product = torch._scaled_mm(a, b, *(scale.contiguous() for scale in scales), out_dtype=torch.bfloat16)
        scale_a = scale_b = None
    else:
        product = a @ b if a.dtype == b.dtype else a.float() @ b.float()
    if out_dtype not in INTS and scale_a is scale_b is bias is None and activation == "none":
        return product.to(out_dtype)
    return _finished(product, torch.float32, out_dtype, scale_a, scale_b, bias, activation)


def _problem(a) -> dict[str, object]:
    """Return the key of a tuned row: sizes, dtypes, and whether a and b have K innermost."""
    m, n, k = _sizes(a)
    types = [str(dtype).removeprefix("torch.") for dtype in (a.a.dtype, a.b.dtype)]
    inner = [int(stride == 1) for stride in (a.a.stride(1), a.b.stride(0))]
    kinds = {"a": types[0], "b": types[1], "a_inner": inner[0], "b_inner": inner[1], "blocks": int(a.block_scales)}
    return {"m": m, "n": n, "k": k} | kinds


def _linear(tokens: int, inputs: Inputs, n: int, k: int, per_token: bool, *has_bias: bool) -> tuple:
    """Return an int8 layer's arguments, with scales per output channel and per token or tensor."""
    a, b = ((40 * inputs.values(rows, k)).clamp(-127, 127).to(torch.int8) for rows in (tokens, n))
    scales = inputs.scales(tokens if per_token else 1, 1), inputs.scales(n, 1)
    return a, b.t(), inputs.dtype, *scales, *(inputs.values(n) for _ in has_bias)


@functools.partial(
    Op,
    allocate=lambda a: a.a.new_empty((a.a.shape[0], a.b.shape[1]), dtype=a.out_dtype),
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=_problem,
    cases=gemm_cases.cases,
    sums=True,
    product=True,
    linear=_linear,
    baseline=_torch,
)
def gemm(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    block_scales: bool = False,
) -> Tensor:
    """Compute activation((a @ b) * scale_a * scale_b^T + bias), summed in float32.

    int8 with int8 is summed exactly if results are integers. torch multiplies fp32, and bf16 with fp16. MX-FP8, e8m0
    scales and shuffled weights have ops of their own: `mxfp8_scaled_mm` and `block_scaled_mm`.

    Args:
        a: [M, K], int8, e4m3, e5m2, bf16, fp16 or fp32; any strides.
        b: [K, N], any of these dtypes; any strides.
        out_dtype: bf16, fp16, fp32 or, for int8 with int8, int32 or int8.
        scale_a: float32, 1 or M elements, or None. With block_scales [M, ceil(K / 128)], any strides, 0 to repeat a
            scale.
        scale_b: float32, 1 or N elements, or None. With block_scales [ceil(K / 128), ceil(N / 128)], any strides.
        bias: [N] or [M, 1], out_dtype, or None; not for integer results.
        activation: "none", or "leaky_relu" with slope 0.01.
        block_scales: Scale every block of 128 along K by itself.

    Returns:
        [M, N], out_dtype. Integers are rounded to nearest even and saturated, NaN becomes 0.

    Source:
        03-matrix-multiplication-all-types.py and multreduce_matmul_kernel.py of AMD perf-kernels.
    """
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    summed = torch.float64 if a.dtype == b.dtype == torch.int8 else wide
    a, b = a.to(summed), b.to(summed)
    if block_scales:
        a, b = gemm_blocks.scaled(a, b, scale_a, scale_b)
    return _finished(a @ b, wide, out_dtype, scale_a, scale_b, bias, activation, block_scales)


def _finished(
    product: Tensor, wide: torch.dtype, out_dtype, scale_a, scale_b, bias, activation: str, block_scales: bool = False
) -> Tensor:
    """Apply scales, bias and activation to the sums in `wide`, and convert. Block-scaled sums have their scales already."""
    if out_dtype == torch.int32 and scale_a is None and scale_b is None and activation == "none":
        return product.to(out_dtype)
    product = product.to(wide)
    if scale_a is not None and not block_scales:
        product = product * scale_a.to(wide).reshape(-1, 1)
    if scale_b is not None and not block_scales:
        product = product * scale_b.to(wide).reshape(1, -1)
    if bias is not None:
        product = product + bias.to(wide)
    if activation != "none":
        product = torch.where(product < 0, product * SLOPES[activation], product)
    if out_dtype in INTS:
        limits = torch.iinfo(out_dtype)
        high = limits.max if out_dtype == torch.int8 else 2147483520  # the largest float32 below
        product = product.nan_to_num(nan=0.0).clamp(limits.min, high).round()
    return product.to(out_dtype)
