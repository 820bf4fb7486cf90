"""Define the shapes of linear layers with INT4 or MX weights: Llama-3.3-70B's on 1 and 8 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.tools.bench.shapes import TOKENS, Shape, beside_float64, made_case

LAYERS = {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}  # N and K
SPLIT = {"qkv": (8, 1), "o": (1, 8), "gate_up": (8, 1), "down": (1, 8)}  # of N and K on 8 ranks
GROUPS = (128, 32)


def four_bit(tokens: Iterable[int] = TOKENS) -> Iterator[Shape]:
    """Yield the layers of a decode step on one rank with INT4 weights, with groups of 32 and 128."""
    return layers(ops.w4a16_gemm, "group", GROUPS, tokens)


def mx(tokens: Iterable[int] = TOKENS) -> Iterator[Shape]:
    """Yield the same with MXFP8 and MXFP4 weights."""
    return layers(ops.mx_gemm, "form", ("fp8", "fp4"), tokens)


def layers(op: Op, trait: str, traits: tuple, tokens: Iterable[int]) -> Iterator[Shape]:
    """Yield the layers of an op's calls, for each value of a trait."""
    for value, tp, (layer, (n, k)), m in itertools.product(traits, (1, 8), LAYERS.items(), tokens):
        of_n, of_k = SPLIT[layer] if tp == 8 else (1, 1)
        sizes = m, n // of_n, k // of_k
        name = f"llama-70b tp{tp} {layer} {'x'.join(map(str, sizes))} {trait} {value}"
        case = made_case(name, torch.bfloat16, op.linear, *sizes, value)
        yield Shape(op, case, {**dict(zip("mnk", sizes)), trait: value}, beside_float64)
