"""Make the cases of the op `gemm`: inputs of any dtypes, orders and scales."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops.shared.gemm import BLOCK, E5M2, HALVES
from vllm_rocm_ops.ops.shared.skinny_gemm import MAX_TOKENS


def cases() -> Iterator[Case]:
    """Yield each dtype alone and with others, every order of rows and columns, odd sizes, all results and scales."""

    def case(name: str, m: int, n: int, k: int, a: str, b: str, order: str = "rc", **given) -> Case:
        return Case(name, functools.partial(inputs, m, n, k, a, b, order, given))

    leaky = {"activation": "leaky_relu"}
    yield case("fp16-few", 1, 23, 31, "fp16", "fp16", bias="row")
    yield case("bf16-few", 7, 5, 120, "bf16", "bf16", scales="rows", **leaky)
    yield case("e4m3-e5m2-few", 4, 6, 256, "e4m3", "e5m2", scales="tensors", out_dtype=torch.float32)
    yield case("int8-few", 1, 3, 16, "int8", "int8", scales="rows", bias="column")
    yield case("int8-few-int32", 3, 5, 520, "int8", "int8", out_dtype=torch.int32)
    yield case("int8", 12, 70, 144, "int8", "int8", scales="rows", bias="column")
    for m in (20, 40, 66, 100):
        yield case(f"int8-m{m}", m, 20, 64, "int8", "int8", scales="tensors")
    yield case("int8-int8", 70, 20, 272, "int8", "int8", scales="powers", out_dtype=torch.int8)
    for m in (3, 20):
        yield case(f"int8-ties-m{m}", m, 24, 32, "int8", "int8", scales="halves", out_dtype=torch.int8)
    yield case("int8-int32", 10, 20, 144, "int8", "int8", out_dtype=torch.int32)
    for kind in ("e4m3", "e5m2", "bf16", "fp16"):
        yield case(kind, 65, 40, 80, kind, kind, scales="rows", **leaky)
    yield case("e5m2-e4m3", 17, 40, 80, "e5m2", "e4m3", scales="rows", out_dtype=torch.float16)
    for a, b, order in (
        ("int8", "int8", "cr"),
        ("e4m3", "e4m3", "rr"),
        ("e5m2", "e5m2", "cc"),
        ("e4m3", "e5m2", "rr"),
        ("e5m2", "e4m3", "rr"),
        ("bf16", "e5m2", "rr"),
        ("e4m3", "fp16", "cc"),
        ("int8", "e4m3", "cr"),
    ):
        yield case(f"{a}-{b}-{order}", 11, 35, 77, a, b, order, scales="rows", bias="column")
    blocks = {"scales": "blocks", "block_scales": True}
    yield case("blocks-int8-few", 1, 131, 272, "int8", "int8", **blocks, bias="column")
    yield case("blocks-e5m2-e4m3-few", 7, 5, 300, "e5m2", "e4m3", "cr", **blocks, **leaky)
    for m in (10, 20, 40, 66, 100):
        yield case(f"blocks-int8-m{m}", m, 144, 400, "int8", "int8", **blocks)
    yield case("blocks-int8-int8", 66, 150, 400, "int8", "int8", **blocks | {"scales": "powers"}, out_dtype=torch.int8)
    for kind in ("e4m3", "e5m2"):
        yield case(f"blocks-{kind}", 65, 140, 272, kind, kind, **blocks, bias="row")
    for a, b in (
        ("bf16", "e4m3"),
        ("int8", "int8"),
        ("e4m3", "e4m3"),
        ("e5m2", "e5m2"),
        ("e4m3", "e5m2"),
        ("int8", "fp16"),
    ):
        yield case(f"blocks-{a}-{b}-rr", 11, 135, 333, a, b, "rr", **blocks, out_dtype=torch.float16)
    for a, b in (("e5m2", "e4m3"), ("e4m3", "e5m2")):
        yield case(f"blocks-{a}-{b}", 17, 140, 272, a, b, **blocks)
    yield case("blocks-fp16", 9, 20, 144, "fp16", "fp16", **blocks)
    yield case("no-rows", 0, 32, 64, "int8", "int8")
    yield case("fp32", 3, 5, 7, "fp32", "fp32")


def inputs(m, n, k, a_kind, b_kind, order, given, device, generator, fp8_dtype) -> tuple:
    """Return inputs; `order` has "r" or "c" for row-major or column-major a and b, both padded."""

    def matrix(rows: int, columns: int, kind: str, order: str, gap: int = 16) -> Tensor:
        of_kind = {"int8": torch.int8, "e4m3": fp8_dtype, "e5m2": E5M2[fp8_dtype], "fp32": torch.float32}
        dtype = of_kind.get(kind) or {name: dtype for dtype, name in HALVES.items()}[kind]
        outer, inner = (rows, columns) if order == "r" else (columns, rows)
        values = torch.randn(outer, inner + gap, generator=generator)
        largest = 1 if given.get("scales") == "halves" else 127
        values = (values * 40).round().clamp(-largest, largest) if kind == "int8" else values
        values = values.to(dtype).to(device)[:, :inner]
        return values if order == "r" else values.t()

    block_scales = given.get("block_scales", False)

    def scale(rows: int, block: int = 1) -> Tensor | None:
        rows = rows if given.get("scales") in ("rows", "blocks", "powers") else 1
        shape = (-(-k // BLOCK), -(-rows // block)) if block_scales else (rows, 1)
        if given.get("scales") == "powers":
            return (2.0 ** torch.randint(-5, -2, shape, generator=generator)).to(device)
        if given.get("scales") == "halves":
            return torch.full(shape, 0.5).to(device)
        return None if not given.get("scales") else (torch.rand(shape, generator=generator) + 0.5).to(device)

    out_dtype = given.get("out_dtype", torch.bfloat16)
    bias = None
    if given.get("bias"):
        bias = torch.randn((m, 1) if given["bias"] == "row" else (n,), generator=generator).to(out_dtype).to(device)
    operands = matrix(m, k, a_kind, order[0]), matrix(k, n, b_kind, order[1])
    scale_a, scale_b = scale(m), scale(n, BLOCK)
    if block_scales:  # with few rows b's scales are column-major; a's vary with M
        scale_a = scale_a.t() if m % 2 else scale_a.t().contiguous()
        scale_b = scale_b.t().contiguous().t() if m <= MAX_TOKENS else scale_b
    return *operands, out_dtype, scale_a, scale_b, bias, given.get("activation", "none"), block_scales
