"""vLLM's attention backends that subclasses of ours replace in place, through its registry: decoder.py and mla.py have
what our layers do.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import timing as attention_timing

Batch = tuple[int, int]
"""Requests and their query length."""

NO_BATCH = 0, 0


@dataclass(frozen=True)
class Backend:
    """One of vLLM's backends. `kind` goes in front of its implementation. `needs` are classes and their attributes that it relies
    on. `caches(impl, layer, kv_cache)` are its key and value cache as our ops take them, None where they are in another order;
    `batch(metadata)` the requests and their query length if all are decode rows, else `NO_BATCH`."""

    path: str
    kind: type
    impl: str
    needs: tuple[tuple[str, tuple[str, ...]], ...]
    caches: Callable[[object, torch.nn.Module, Tensor], tuple[Tensor, Tensor] | None] | None = None
    batch: Callable[[object], Batch] | None = None
    on_gpu: bool = True

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Of the class."""
        return self.path.rpartition(".")[2]


@functools.cache
def made(backend: Backend) -> type:
    """Our class for a backend."""
    stock = getattr(importlib.import_module(backend.module), backend.name)
    module = backend.kind.__module__

    def derived(front: tuple[type, ...], theirs: type, **members) -> type:
        return type(f"RocmOps{theirs.__name__}", (*front, theirs), {"__module__": module, **members})

    impl = derived((backend.kind,), stock.get_impl_cls(), rocm_ops_backend=backend)
    builder = derived((attention_timing.NotingBuilder,), stock.get_builder_cls())
    getters = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return derived((), stock, **getters)


def find(backends: dict[str, Backend], module: str, name: str) -> type:
    """The class of that name, which vLLM's registry asks a module for."""
    for backend in backends.values():
        if name == f"RocmOps{backend.name}":
            return made(backend)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def check(member: str, backend: Backend) -> None:
    """A backend is vLLM's own, and the files have what our subclass relies on. They are read and not imported, which takes long."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    seam.require_parameters(register_backend, "backend", "class_path")
    found = getattr(AttentionBackendEnum, member, None)
    seam.require(found is not None and found.value == backend.path, f"{backend.path} as {member}")
    if found.is_overridden():
        raise seam.Unavailable(f"another plugin replaces {member} by {found.get_path()}")
    require_method(f"{backend.module}.{backend.impl}", *backend.kind.METHOD)
    for path, names in backend.needs:
        known = _attributes(_class(path))
        for name in names:
            seam.require(name in known, f"{path.rpartition('.')[2]}.{name}")


def require_method(path: str, name: str, *wanted: str, may: tuple[str, ...] = ()) -> None:
    """Raise `Unavailable` unless a class has a method with these parameters, and no more than those that it `may` have."""
    seam.require_in(methods(path), name, f"{path.rpartition('.')[2]}.{name}", 1, wanted, may)


def methods(path: str) -> dict[str, ast.FunctionDef]:
    """Return the methods that a class itself has."""
    return {node.name: node for node in _class(path).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in seam.body_of(module) if isinstance(node, ast.ClassDef)}


def _class(path: str) -> ast.ClassDef:
    module, _, name = path.rpartition(".")
    seam.require(name in _classes(module), f"{name} in {module}")
    return _classes(module)[name]


def _attributes(node: ast.ClassDef) -> set[str]:
    """What a class declares, and what its methods assign."""
    declared = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    found = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return declared | {part.attr for part in found if isinstance(part.value, ast.Name) and part.value.id == "self"}


def seam_of(
    name: str, replaces: str, backends: dict[str, Backend], platforms: dict[str, tuple[str, ...]], op: str
) -> seam.Seam:
    """Return the seam that replaces these backends by an op, on each platform those that it has."""

    def served() -> dict[str, Backend]:
        return {member: backends[member] for member in platforms[seam.served_platform()]}

    calls = {"probe": lambda: probe(served()), "install": lambda: install(served())}
    return seam.Seam(name=name, replaces=replaces, ops=(op,), **calls)


def probe(backends: dict[str, Backend]) -> None:
    """Each backend is vLLM's own and as expected."""
    for member, backend in backends.items():
        check(member, backend)
    _classes.cache_clear()


def install(backends: dict[str, Backend]) -> None:
    """Have vLLM's registry find our subclasses in the backends' places."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member, backend in backends.items():
        register_backend(AttentionBackendEnum[member], f"{backend.kind.__module__}.RocmOps{backend.name}")


# Caches and batches


def packed(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """[pages, heads, N, key and value], in any order in memory."""
    return kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)


def packed_unless_shuffled(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same, unless the user has AITER shuffle the cache."""
    from vllm._aiter_ops import rocm_aiter_ops

    return None if rocm_aiter_ops.is_shuffle_kv_cache_enabled() else packed(impl, layer, kv_cache)


def packed_unless_interleaved(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same, unless groups of slots have their elements side by side, as AITER's kernels for gfx1250 may want it."""
    return None if getattr(impl, "_shuffle_kv_layout", False) else packed(impl, layer, kv_cache)


def native(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """[pages, 2, N, heads * size]. A fusion for AITER has vLLM interleave values."""
    from vllm.v1.attention.ops.paged_attn import PagedAttention

    if getattr(impl, "_use_interleaved_v_cache", False):
        return None
    return PagedAttention.split_kv_cache(kv_cache.transpose(0, 1), impl.num_kv_heads, impl.head_size)


def of_cpu(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """[pages, heads, N, key and value] as bytes: all keys of a page, transposed, before its values. AMX has another order."""
    if layer.isa not in ("vec", "vec16"):
        return None
    pages, heads, slots, both = kv_cache.shape
    block, head, _, _ = kv_cache.stride()
    shape, begin, size = (pages, slots, heads, both // 2), kv_cache.storage_offset(), both // 2
    keys = kv_cache.as_strided(shape, (block, 1, head, slots), begin)
    return keys, kv_cache.as_strided(shape, (block, size, head, 1), begin + slots * size)


def in_rows(x: Tensor) -> Tensor:
    """Rows of heads [tokens, heads, size] in the same memory, as ops know columns of one tensor; x where heads are apart."""
    return x.flatten(1) if x.dim() == 3 and x.stride()[1:] == (x.shape[2], 1) else x


def batch_of_all(metadata) -> Batch:
    """Where requests may have any lengths: their sum is the number of tokens, so they are equal if it is that of the longest."""
    requests, longest = metadata.block_table.shape[0], metadata.max_query_len
    return (requests, longest) if metadata.num_actual_tokens == requests * longest else NO_BATCH


def batch_of_decodes(metadata) -> Batch:
    """Where decode rows come first. They are all if they are as many as tokens."""
    if not metadata.num_decodes:
        return NO_BATCH
    requests, longest = metadata.num_decodes, metadata.decode_metadata.max_query_len
    same = metadata.num_decode_tokens == metadata.num_actual_tokens == requests * longest
    return (requests, longest) if same and metadata.block_table.shape[0] == requests else NO_BATCH
