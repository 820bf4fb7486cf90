"""Share code between the ops of csrc/ops/moe_routing.hip, which read router logits [M, E]."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops.shared.rowwise import exact

MODULE = "moe_routing"
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MAX_EXPERTS = 512
WAVES = 4  # per block
MEANINGS = {
    "gating_output": "[M, E], bf16, fp16 or fp32: router logits; rows at any stride.",
    "topk": "Experts per token.",
    "renormalize": "Divide the weights by their sum.",
    "num_expert_group": "Groups, a divisor of E.",
    "topk_group": "Groups to choose from.",
    "scoring_func": '"softmax" or "sigmoid".',
    "routed_scaling_factor": "Factor of the weights.",
    "e_score_correction_bias": "[E], bf16, fp16 or fp32, or None: added to the scores for the choice, not to the weights.",
    "is_padding": "[M], bool, or None: tokens that go to no expert.",
}
"""Arguments of ops that choose experts."""


def logits(x: Tensor) -> Tensor:
    """Return the logits with NaN as -inf."""
    return exact(x).masked_fill(x.isnan(), -math.inf)


def exponentials(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x - maximum), 1 at the maximum even if it is infinite, and the maximum."""
    maximum = x.amax(-1, keepdim=True)
    return torch.where(x == maximum, 1.0, torch.exp(x - maximum)), maximum


def softmax(x: Tensor) -> Tensor:
    """Return the softmax by `exponentials`."""
    of_each, _ = exponentials(x)
    return of_each / of_each.sum(-1, keepdim=True)


def contract(name: str, x: Tensor) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of logits."""
    holds = x.dim() == 2 and is_wide_float(x) and x.shape[-1] > 0
    yield name, "[M, E], floating point of 16 bits or more", describe(x), holds


def can_implement(name: str, x: Tensor) -> Iterator[tuple[str, bool]]:
    """Yield the kernels' rules for logits."""
    yield f"{name} is bfloat16, float16 or float32", x.dtype in ELEMENTS
    yield f"{name}'s rows are contiguous", x.stride(-1) == 1 or x.shape[-1] == 1
    yield f"there are at most {MAX_EXPERTS} experts", x.shape[-1] <= MAX_EXPERTS


def fitting(needed: int, kernels: tuple[int, ...]) -> list[int]:
    """Return the limit of the smallest kernel that fits `needed`, in a list that is empty if none does."""
    return [most for most in kernels if most >= needed][:1]


def launch(symbol: str, blocks: int, args: dict, arch: Arch) -> Launch:
    """Return the launch of a routing kernel."""
    return Launch(MODULE, symbol, (blocks, 1, 1), (WAVES * arch.wave_lanes, 1, 1), args)


# Values of cases


def random(m: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return normal values."""
    return torch.randn(m, experts, generator=generator) * 2


def equal(m: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return rows of one value, two alternating values, alternating zeros, and spikes at the first and last expert."""
    x = torch.zeros(4, experts)
    x[0] = 1.25
    x[1, 1::2] = 0.5
    x[2, 0::2] = -0.0
    x[3, [0, -1]] = 3.0
    return x.repeat(-(-m // 4), 1)[:m]


def not_finite(m: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return rows of only NaN, NaN except one value, infinities, only -inf, and scattered NaN."""
    x = random(m, experts, generator)
    x[0] = math.nan
    x[1, torch.arange(experts) != experts // 2] = math.nan
    x[2, [1, experts - 1]] = math.inf
    x[2, 0] = -math.inf
    x[3] = -math.inf
    x[4, ::3] = math.nan
    return x


def some_nan(m: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return normal values with NaN in every third column."""
    x = random(m, experts, generator)
    x[:, 1::3] = math.nan
    return x


def matrix(values: Tensor, dtype: torch.dtype, padding: int, device: str) -> Tensor:
    """Return rows as a view with `padding` more elements after each."""
    experts = values.shape[1]
    return torch.nn.functional.pad(values, (0, padding)).to(dtype).to(device)[:, :experts]
