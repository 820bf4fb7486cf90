"""Make random inputs of a model's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Makes random tensors by a generator, on its device; tensors on the meta device have no values."""

    device: str
    generator: torch.Generator
    fp8_dtype: torch.dtype
    dtype: torch.dtype

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal values in the model's dtype or another."""
        return self._tensor(torch.randn, shape, dtype or self.dtype)

    def scales(self, *shape: int) -> Tensor:
        """Return float32 values in [0.5, 1.5)."""
        scales = self._tensor(torch.rand, shape, torch.float32)
        return scales if scales.is_meta else scales + 0.5

    def exponents(self, *shape: int) -> Tensor:
        """Return e8m0 scales as uint8, from 2^-2 to 2^3."""
        return (self.scales(*shape) * 6 + 122).to(torch.uint8)

    def bits(self, *shape: int) -> Tensor:
        """Return uniform bytes, of two values of four bits each."""
        bits = self._tensor(torch.rand, shape, torch.float32)
        return bits.to(torch.uint8) if bits.is_meta else (bits * 256).to(torch.uint8)

    def _tensor(self, random: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = random(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(dtype).to(self.device)
