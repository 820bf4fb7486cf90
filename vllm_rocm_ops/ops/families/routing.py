"""What the ops of csrc/ops/moe_routing.hip share, all of which read a router's logits [M, E]."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.tensors import describe, is_wide_float

MODULE = "moe_routing"
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MOST_EXPERTS = 512
WAVES = 4  # of a block


def exact(x: Tensor) -> Tensor:
    """In fp32, or in fp64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def logits(x: Tensor) -> Tensor:
    """The logits that count: NaN as -inf."""
    return exact(x).masked_fill(x.isnan(), -math.inf)


def exponentials(x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - maximum), the maximum's own being 1 even if infinite, and the maximum."""
    maximum = x.amax(-1, keepdim=True)
    return torch.where(x == maximum, 1.0, torch.exp(x - maximum)), maximum


def softmax(x: Tensor) -> Tensor:
    of_each, _ = exponentials(x)
    return of_each / of_each.sum(-1, keepdim=True)


def contract(name: str, x: Tensor) -> Iterator[tuple[str, str, str, bool]]:
    holds = x.dim() == 2 and is_wide_float(x) and x.shape[-1] > 0
    yield name, "[M, E], floating point of 16 bits or more", describe(x), holds


def envelope(name: str, x: Tensor) -> Iterator[tuple[str, bool]]:
    yield f"{name} is bfloat16, float16 or float32", x.dtype in ELEMENTS
    yield f"the elements of {name}'s rows lie side by side", x.stride(-1) == 1 or x.shape[-1] == 1
    yield f"there are at most {MOST_EXPERTS} experts", x.shape[-1] <= MOST_EXPERTS
    yield "there are fewer than 2^31 rows", x.shape[0] < 2**31


def fitting(needed: int, kernels: tuple[int, ...]) -> list[int]:
    """What the smallest kernel takes that takes so many; nothing if none does."""
    return [most for most in kernels if most >= needed][:1]


def launch(symbol: str, blocks: int, args: dict, arch: Arch) -> Launch:
    return Launch(MODULE, symbol, (blocks, 1, 1), (WAVES * arch.wave_lanes, 1, 1), args)


# Values of cases


def random(m: int, experts: int, generator: torch.Generator) -> Tensor:
    return torch.randn(m, experts, generator=generator) * 2


def equal(m: int, experts: int, generator: torch.Generator) -> Tensor:
    """Rows of one value, of two values in turn, of both zeros in turn, and a spike at the first and last expert."""
    x = torch.zeros(4, experts)
    x[0] = 1.25
    x[1, 1::2] = 0.5
    x[2, 0::2] = -0.0
    x[3, [0, -1]] = 3.0
    return x.repeat(-(-m // 4), 1)[:m]


def not_finite(m: int, experts: int, generator: torch.Generator) -> Tensor:
    """Rows of NaN alone, of NaN but for one, with infinities, of -inf alone, and with NaN here and there."""
    x = random(m, experts, generator)
    x[0] = math.nan
    x[1, torch.arange(experts) != experts // 2] = math.nan
    x[2, [1, experts - 1]] = math.inf
    x[2, 0] = -math.inf
    x[3] = -math.inf
    x[4, ::3] = math.nan
    return x


def some_nan(m: int, experts: int, generator: torch.Generator) -> Tensor:
    x = random(m, experts, generator)
    x[:, 1::3] = math.nan
    return x


def matrix(values: Tensor, dtype: torch.dtype, padding: int, device: str) -> Tensor:
    """A view of rows with so many elements more behind them."""
    experts = values.shape[1]
    return torch.nn.functional.pad(values, (0, padding)).to(dtype).to(device)[:, :experts]
