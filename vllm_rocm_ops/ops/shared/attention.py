"""Describe the paged KV caches of vLLM's ROCm attention backends, as views of the tensors that vLLM's ops take.

Strides come from the tensors; x is the elements in 16 bytes, and a page has N slots of one token each:

    packed       key_cache [pages, N, heads, size], value_cache [pages, N, heads, size of a value]
    native       key_cache [pages, heads, size / x, N, x], value_cache [pages, heads, size of a value, N]
    interleaved  as native, value_cache [pages, heads, N / x, size of a value, x]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.core.tensors import describe

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LAUNCH_US = 2.0  # without its bytes: the smallest kernels took 1.7 to 2.7 on MI308X (ROCm/FlyDSL PR 848, aiter PR 3747)
VECTOR = 8  # elements per vector access of a lane


def of_16_bytes(cache: Tensor) -> int:
    """Return the elements in 16 bytes."""
    return 16 // cache.element_size()


def is_quantized(cache: Tensor) -> bool:
    """True if a cache is e4m3."""
    return cache.dtype in LIMIT


@dataclass(frozen=True)
class CacheStrides:
    """Strides of a cache in elements, as CacheView of csrc/attention/cache.h."""

    block_stride: int
    head_stride: int
    group_stride: int
    slot_stride: int
    chunk_stride: int
    element_stride: int


class CacheLayout:
    """The layout of a key and a value cache, by their shapes."""

    def __init__(self, key_cache: Tensor, value_cache: Tensor):
        self.key, self.value = key_cache, value_cache
        self.is_native = key_cache.dim() == 5
        self.x = key_cache.shape[4] if self.is_native else of_16_bytes(key_cache)
        self.is_interleaved = value_cache.dim() == 5
        if self.is_native:
            self.pages, self.heads, chunks, self.page_size, _ = key_cache.shape
            self.key_size = chunks * self.x
            self.value_size = value_cache.shape[3 if self.is_interleaved else 2]
        else:
            self.pages, self.page_size, self.heads, self.key_size = key_cache.shape
            self.value_size = value_cache.shape[3]

    def key_strides(self) -> CacheStrides:
        """Return the strides of the key cache."""
        if self.is_native:
            block, head, chunk, slot, element = self.key.stride()
            return CacheStrides(block, head, slot * self.x, slot, chunk, element)
        block, slot, head, element = self.key.stride()
        return CacheStrides(block, head, slot * self.x, slot, element * self.x, element)

    def value_strides(self) -> CacheStrides:
        """Return the strides of the value cache."""
        if self.is_interleaved:
            block, head, group, element, slot = self.value.stride()
        elif self.is_native:
            block, head, element, slot = self.value.stride()
            group = slot * self.x
        else:
            block, slot, head, element = self.value.stride()
            group = slot * self.x
        return CacheStrides(block, head, group, slot, element * self.x, element)

    # For references

    def keys(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Return the keys [..., heads, size] in these slots of pages."""
        if self.is_native:
            return _indexed(self.key.movedim(3, 1), pages, slots).flatten(-2)
        return _indexed(self.key, pages, slots)

    def values(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Return the values [..., heads, size] in these slots of pages."""
        if self.is_interleaved:
            return _indexed(self.value.permute(0, 2, 4, 1, 3), pages, slots // self.x, slots % self.x)
        return _indexed(self.value.movedim(3, 1) if self.is_native else self.value, pages, slots)

    def write(self, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [tokens, heads, size] of the caches' dtypes to these slots of pages."""
        if self.is_native:
            _bits(self.key).movedim(3, 1)[pages, slots] = _bits(keys).unflatten(-1, (-1, self.x))
        else:
            _bits(self.key)[pages, slots] = _bits(keys)
        if self.is_interleaved:
            _bits(self.value).permute(0, 2, 4, 1, 3)[pages, slots // self.x, slots % self.x] = _bits(values)
        else:
            value = _bits(self.value)
            (value.movedim(3, 1) if self.is_native else value)[pages, slots] = _bits(values)


def _bits(tensor: Tensor) -> Tensor:
    """Return an e4m3 tensor as bytes, since PyTorch does not index all FP8 dtypes; others unchanged."""
    return tensor.view(torch.uint8) if is_quantized(tensor) else tensor


def _indexed(cache: Tensor, *indices: Tensor) -> Tensor:
    return _bits(cache)[indices].view(cache.dtype)


def cache_contract(key_cache: Tensor, value_cache: Tensor) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of every op on a key and a value cache."""
    wanted = "[pages, N, heads, size] or [pages, heads, size / x, N, x], x 16 bytes of elements"
    holds = key_cache.dim() == 4 or key_cache.dim() == 5 and key_cache.shape[4] * key_cache.element_size() == 16
    yield "key_cache", wanted, describe(key_cache), holds and 0 not in key_cache.shape
    if key_cache.dim() == 4:
        pages, size, heads, _ = key_cache.shape
        dims, wanted = (4,), f"[pages={pages}, N={size}, heads={heads}, size]"
    else:
        pages, heads, _, size, _ = key_cache.shape
        dims, wanted = (4, 5), f"[pages={pages}, heads={heads}, size, N={size}] or [pages, heads, N / x, size, x]"
    holds = value_cache.dtype == key_cache.dtype and value_cache.dim() in dims and 0 not in value_cache.shape
    if holds and key_cache.dim() == 4:
        holds = value_cache.shape[:3] == key_cache.shape[:3]
    elif holds:
        x = of_16_bytes(key_cache)
        slots = value_cache.shape[2] * x if value_cache.dim() == 5 else value_cache.shape[3]
        holds = (*value_cache.shape[:2], slots) == (pages, heads, size)
        holds = holds and (value_cache.dim() == 4 or value_cache.shape[4] == x)
    yield "value_cache", f"{key_cache.dtype} {wanted}", describe(value_cache), holds


def scale_contract(name: str, scale: Tensor | None) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of an optional scale of one element."""
    if scale is not None:
        yield name, "float32 with one element", describe(scale), scale.numel() == 1 and scale.dtype == torch.float32


def cache_dtype_contract(name: str, cache: Tensor, dtype: torch.dtype) -> tuple[str, str, str, bool]:
    """Return the contract of a cache's dtype."""
    return name, f"of dtype {dtype} or e4m3", describe(cache), cache.dtype == dtype or is_quantized(cache)


def can_implement_cache(layout: CacheLayout, dtype: torch.dtype, arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield the kernels' rules for the caches, for queries of this dtype."""
    rule = f"the cache is of the query's dtype or {arch.fp8_dtype}, the FP8 dtype of {arch.name}"
    yield rule, layout.key.dtype in (dtype, arch.fp8_dtype)
    yield f"head sizes are multiples of {VECTOR}", layout.key_size % VECTOR == layout.value_size % VECTOR == 0
    yield "there are fewer than 2^31 slots", layout.pages * layout.page_size < 2**31
    key, value = layout.key_strides(), layout.value_strides()
    of_key = (key.block_stride, key.head_stride, key.slot_stride, key.chunk_stride)
    yield "elements of a key are contiguous", key.element_stride == 1
    x = layout.x
    yield f"keys are aligned to {x} elements", on_vectors(layout.key, *of_key, elements=x)
    if layout.is_native:
        along = (value.block_stride, value.head_stride, value.group_stride, value.element_stride)
        yield "slots of a value's element are contiguous", value.slot_stride == 1
    else:
        along = (value.block_stride, value.head_stride, value.slot_stride)
        yield "elements of a value are contiguous", value.element_stride == 1
    yield f"values are aligned to {VECTOR} elements", on_vectors(layout.value, *along)


def on_vectors(x: Tensor, *strides: int, elements: int = VECTOR) -> bool:
    """True if the address of x and these strides are multiples of a number of elements."""
    return x.data_ptr() % (elements * x.element_size()) == 0 and not any(stride % elements for stride in strides)


def heads(x: Tensor, size: int) -> Tensor:
    """Return [tokens, heads, size] as it is, and [tokens, heads * size] with its heads split."""
    return x if x.dim() == 3 else x.unflatten(1, (-1, size))


def is_heads(x: Tensor, tokens: int | None, count: int | None, size: int) -> bool:
    """True if x is [tokens, count, size] or [tokens, count * size]; None matches any number."""
    if x.dim() not in (2, 3) or (x.dim() == 2 and x.shape[1] % size):
        return False
    split = heads(x, size)
    counts = tokens in (None, x.shape[0]) and count in (None, split.shape[1])
    return counts and split.shape[1] > 0 and split.shape[2] == size


def can_implement_heads(name: str, x: Tensor, elements: int = VECTOR) -> tuple[str, bool]:
    """Return the kernels' rule for heads [tokens, heads, size] that are aligned to a number of elements."""
    holds = x.stride(-1) == 1 and on_vectors(x, *x.stride()[:-1], elements=elements)
    return f"{name}'s heads are contiguous and {elements * x.element_size()}-byte aligned", holds
