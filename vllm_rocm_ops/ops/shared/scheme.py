"""Describe how the weights of experts are scaled: a row of SCHEMES per way, which kernels, cases, models and seams ask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.quantization import E5M2, LIMIT, MX_BLOCK, MX_SCALES
from vllm_rocm_ops.ops.shared.gemm import BLOCK, HALVES
from vllm_rocm_ops.ops.shared.weight_layout import unshuffled

TOKENS = {torch.int8: torch.int8, **{e4m3: e4m3 for e4m3 in LIMIT}, **E5M2}
"""The dtype that tokens are quantized to, by the dtype of scaled weights."""


@dataclass(frozen=True)
class Scheme:
    """One way to scale weights [E, N, K] of experts, and the tokens that they multiply."""

    name: str  # in kernels' symbols if scales have groups; in messages and in keys of timings
    weights: tuple[torch.dtype, ...]
    rows: int = 0  # of a weight that share a scale, 0 for all of an expert
    group: int = 0  # columns of weights and of tokens that share a scale, 0 for all
    scales: tuple[torch.dtype, ...] = (torch.float32,)
    scaled: bool = True
    native: bool = False  # matrix instructions scale groups: whole ones, no static scale, no tiled kernels
    quantizer: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # of tokens, if not to `LIMIT` by float32 scales

    def groups(self, columns: int) -> int:
        """Return the scales of a row."""
        return -(-columns // self.group) if self.group else 1

    def shape(self, experts: int, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of the scales of weights [E, N, K]."""
        return experts, *(-(-size // of) for size, of in ((n, self.rows), (k, self.group)) if of)

    def weight_dtype(self, half: torch.dtype, fp8_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of weights in a model of this 16-bit dtype, on a GPU of this e4m3 dtype."""
        return next(dtype for dtype in (half, fp8_dtype, *LIMIT) if dtype in self.weights)

    def infix(self, row: str, dtype: torch.dtype | None = None) -> str:
        """Return the part of symbols that names scales, `row` if they have no groups, or the dtype of unscaled weights."""
        return HALVES.get(dtype) or (self.name if self.group else row)

    def fits(self, weight: torch.Size, dtype: torch.dtype, scale: torch.Size, scale_dtype: torch.dtype) -> bool:
        """True if weights and scales of these shapes and dtypes are scaled this way. A scale per row may have two shapes."""
        shape, whole = self.shape(*weight), not self.native or weight[2] % self.group == 0
        shapes = (shape, (*shape, 1)) if self.rows == 1 and not self.group else (shape,)
        return self.scaled and whole and dtype in self.weights and scale_dtype in self.scales and scale in shapes

    def dequantized(self, values: Tensor, scale: Tensor | None, exact: torch.dtype, rows: int | None = None) -> Tensor:
        """Return values [N, K] of one expert times their scales; tokens [M, K] with 1 for `rows`."""
        values = values.to(exact)
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


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("none", tuple(HALVES), scaled=False),
        Scheme("block", (*LIMIT, *E5M2), BLOCK, BLOCK),
        Scheme("channel", tuple(TOKENS), 1),
        Scheme("tensor", tuple(TOKENS)),
        Scheme("mx", (torch.float8_e4m3fn,), 1, MX_BLOCK, MX_SCALES, native=True, quantizer=quantization.mx),
    )
}


def scheme_of(weight: Tensor, scale: Tensor | None) -> Scheme:
    """Return how a weight [E, N, K] is scaled, by a scheme for no weights if no row of SCHEMES fits."""
    return SCHEMES["none"] if scale is None else _of(weight.shape, weight.dtype, scale.shape, scale.dtype)


def weight_of(weights: Tensor, scales: Tensor | None, expert: int, shuffled: bool, exact: torch.dtype) -> Tensor:
    """Return the numbers [N, K] of one expert's weight."""
    values = unshuffled(weights[expert]) if shuffled else weights[expert]
    return scheme_of(weights, scales).dequantized(values, None if scales is None else scales[expert], exact)


@functools.lru_cache
def _of(*of: torch.Size | torch.dtype) -> Scheme:
    return next((scheme for scheme in SCHEMES.values() if scheme.fits(*of)), Scheme("unknown", ()))
