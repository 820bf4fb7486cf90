"""Name the benchmark lists of public models' shapes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.tools.bench import shapes
from vllm_rocm_ops.tools.bench.attention import attention
from vllm_rocm_ops.tools.bench.decode_attention import decode_attention
from vllm_rocm_ops.tools.bench.experts import experts, four_bit_experts
from vllm_rocm_ops.tools.bench.gated_delta_net import gated_delta_net
from vllm_rocm_ops.tools.bench.gemm_dtypes import gemm_dtypes

LISTS: dict[str, Callable[..., Iterable[shapes.Shape]]] = {
    "rows": shapes.rows,
    "rows-fp16": functools.partial(shapes.rows, dtype=torch.float16),
    "expert-gates": shapes.expert_gates,
    "linear": shapes.gemm,
    "linear-shuffled": functools.partial(shapes.gemm, shuffled=True),
    "linear-four-bit": shapes.four_bit,
    "linear-mx": shapes.mx,
    "gemm-dtypes": gemm_dtypes,
    "routing": shapes.routing,
    "gates": shapes.gates,
    "moe": experts,
    "moe-bf16": functools.partial(experts, dtype=torch.bfloat16),
    "moe-four-bit": four_bit_experts,
    "attention": attention,
    "attention-fp16": functools.partial(attention, dtype=torch.float16),
    "decode-attention": decode_attention,
    "gated-delta-net": gated_delta_net,
    "decode-attention-fp16": functools.partial(decode_attention, dtype=torch.float16),
}
VARIANTS = ("-fp16", "-bf16", "-shuffled")
KINDS = {
    "rows": "ops",
    "linear": "gemm",
    "linear-four-bit": "four-bit",
    "linear-mx": "mx",
    "gemm-dtypes": "products",
}  # kinds of results that differ from the list's name


def kind_of(name: str | None, model: str | None) -> str:
    """Return the kind of results in the file name: a list's, "model" or "cases"."""
    if name is None:
        return "model" if model else "cases"
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return KINDS.get(name, name)


def of_list(
    name: str, tp: int | None, tokens: tuple[int, ...] | None, arch: Arch | None = None
) -> Iterable[shapes.Shape]:
    """Return the shapes of a list on `arch`, for `tp` and `tokens` if given. Raises ValueError if the list does not support them."""
    options = {"tp": ("--tp", tp), "tokens": ("--batch", tokens)}
    given = {key: value for key, (_, value) in options.items() if value is not None}
    parameters = inspect.signature(LISTS[name]).parameters
    refused = given.keys() - parameters
    if refused:
        raise ValueError(f"the list {name} does not support {' '.join(sorted(options[key][0] for key in refused))}")
    return LISTS[name](**given, **({"arch": arch} if "arch" in parameters else {}))
