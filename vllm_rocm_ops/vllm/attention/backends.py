"""Replace vLLM's attention backends in place through its registry, by subclasses of decoder.py and mla.py."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.ops.shared.attention import of_16_bytes
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import timing as attention_timing

Batch = tuple[int, int]
"""Requests, and their common query length."""

NO_BATCH = 0, 0
PAGE = 16  # slots per page of a cache that is made for timing


@dataclass(frozen=True)
class Backend:
    """One of vLLM's backends.

    Attributes:
        path: The backend's class.
        kind: The class mixed into its implementation.
        impl: The name of the implementation.
        needs: Classes and their attributes that the plugin relies on.
        caches: Returns the key and the value cache [pages, slots, heads, size], None for an unsupported memory order.
        batch: Returns the batch if all its rows are decode rows of one query length, else `NO_BATCH`.
        casts_sinks: True if its kernels load sinks of any dtype and compute with them in float32.
    """

    path: str
    kind: type
    impl: str
    needs: tuple[tuple[str, tuple[str, ...]], ...]
    caches: Callable[[object, torch.nn.Module, Tensor], tuple[Tensor, Tensor] | None] | None = None
    batch: Callable[[object], Batch] | None = None
    on_gpu: bool = True
    casts_sinks: bool = False

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@functools.cache
def made(backend: Backend) -> type:
    """Return the subclass for a backend."""
    baseline = getattr(importlib.import_module(backend.module), backend.name)
    module = backend.kind.__module__

    def derived(front: tuple[type, ...], parent: type, **members) -> type:
        return type(f"RocmOps{parent.__name__}", (*front, parent), {"__module__": module, **members})

    impl = derived((backend.kind,), baseline.get_impl_cls(), rocm_ops_backend=backend)
    builder = derived((attention_timing.NotingBuilder,), baseline.get_builder_cls())
    getters = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return derived((), baseline, **getters)


def find(backends: dict[str, Backend], module: str, name: str) -> type:
    """Return the subclass of that name, for which vLLM's registry asks a module."""
    for backend in backends.values():
        if name == f"RocmOps{backend.name}":
            return made(backend)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def check(member: str, backend: Backend) -> None:
    """Raise `Unavailable` unless a backend is vLLM's own and has what the subclass relies on.

    Reads the source files: an import takes long.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    seam.require_parameters(register_backend, "backend", "class_path")
    registered = getattr(AttentionBackendEnum, member, None)
    seam.require(registered is not None and registered.value == backend.path, f"{backend.path} as {member}")
    if registered.is_overridden():
        raise seam.Unavailable(f"another plugin replaces {member} by {registered.get_path()}")
    require_method(f"{backend.module}.{backend.impl}", *backend.kind.METHOD)
    for path, names in backend.needs:
        require_attributes(path, *names)


def require_attributes(path: str, *names: str) -> None:
    """Raise `Unavailable` unless a class declares these attributes, or its methods assign them."""
    known = _attributes(_class(path))
    for name in names:
        seam.require(name in known, f"{path.rpartition('.')[2]}.{name}")


def require_method(path: str, name: str, *wanted: str, may: tuple[str, ...] = ()) -> None:
    """Raise `Unavailable` unless a class has a method with these parameters, and no others than it `may` have."""
    seam.require_in(methods(path), name, f"{path.rpartition('.')[2]}.{name}", 1, wanted, may)


def methods(path: str) -> dict[str, ast.FunctionDef]:
    """Return the methods that a class itself defines."""
    return {node.name: node for node in _class(path).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in seam.body_of(module) if isinstance(node, ast.ClassDef)}


def _class(path: str) -> ast.ClassDef:
    module, _, name = path.rpartition(".")
    seam.require(name in _classes(module), f"{name} in {module}")
    return _classes(module)[name]


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares, and those that its methods assign."""
    declared = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    assigned = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return declared | {part.attr for part in assigned if isinstance(part.value, ast.Name) and part.value.id == "self"}


def seam_of(
    name: str, replaces: str, backends: dict[str, Backend], platforms: dict[str, tuple[str, ...]], op: str
) -> seam.Seam:
    """Return the seam that replaces the backends of a platform by an op. `platforms` has their names in `backends`."""

    def served() -> dict[str, Backend]:
        return {member: backends[member] for member in platforms[seam.served_platform()]}

    calls = {"probe": lambda: probe(served()), "install": lambda: install(served())}
    return seam.Seam(name=name, replaces=replaces, ops=(op,), **calls)


def probe(backends: dict[str, Backend]) -> None:
    """Raise `Unavailable` unless each backend is vLLM's own and as expected."""
    for member, backend in backends.items():
        check(member, backend)
    _classes.cache_clear()


def install(backends: dict[str, Backend]) -> None:
    """Register the subclasses in vLLM's registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member, backend in backends.items():
        register_backend(AttentionBackendEnum[member], f"{backend.kind.__module__}.RocmOps{backend.name}")


# Caches and batches


def packed(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Split [pages, heads, slots, key and value], in any memory order."""
    return kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)


def is_shuffled() -> bool:
    """True if AITER's shuffled layout of a cache is enabled, VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1."""
    from vllm._aiter_ops import rocm_aiter_ops

    return rocm_aiter_ops.is_shuffle_kv_cache_enabled()


def packed_or_shuffled(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """Split a packed cache, or one in AITER's shuffled layout, which the ops have as interleaved.

    vLLM's implementation splits the latter into pages of keys and of values, whose bytes AITER's kernels read as [heads, size / x, slots, x]
    and [heads, slots / x, size, x]. None where keys and values of a page are not apart, as up to 0.28, where they overwrite each other.
    """
    if not is_shuffled():
        return packed(impl, layer, kv_cache)
    parts = impl._split_kv_cache(kv_cache) if hasattr(impl, "_split_kv_cache") else ()
    if len(parts) != 2 or not all(part[0].is_contiguous() for part in parts):
        return None
    (pages, slots, heads, size), x = parts[0].shape, of_16_bytes(kv_cache)
    keys, values = (heads, size // x, slots, x), (heads, slots // x, size, x)
    return parts[0].view(pages, *keys), parts[1].view(pages, *values)


def packed_unless_interleaved(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """Split a packed cache, unless slots are interleaved, as AITER's kernels for gfx1250 may want it."""
    return None if getattr(impl, "_shuffle_kv_layout", False) else packed(impl, layer, kv_cache)


def split_rocm_cache(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """Split [pages, 2, slots, heads * size]. None where vLLM interleaves the values for an AITER fusion."""
    from vllm.v1.attention.ops.paged_attn import PagedAttention

    if getattr(impl, "_use_interleaved_v_cache", False):
        return None
    return PagedAttention.split_kv_cache(kv_cache.transpose(0, 1), impl.num_kv_heads, impl.head_size)


def of_cpu(impl, layer: torch.nn.Module, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
    """Split the CPU backend's [pages, heads, slots, key and value].

    In memory a page has all its keys, transposed, before its values. None for AMX, whose order differs; vLLM sets `isa`
    when it makes the cache.
    """
    if getattr(layer, "isa", "vec") not in ("vec", "vec16"):
        return None
    pages, heads, slots, both = kv_cache.shape
    block, head, _, _ = kv_cache.stride()
    shape, begin, size = (pages, slots, heads, both // 2), kv_cache.storage_offset(), both // 2
    keys = kv_cache.as_strided(shape, (block, 1, head, slots), begin)
    return keys, kv_cache.as_strided(shape, (block, size, head, 1), begin + slots * size)


def cache_of(backend: Backend, impl, tokens: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return an empty cache for a number of tokens in a backend's order."""
    (heads, size), pages = (impl.num_kv_heads, impl.head_size), -(-tokens // PAGE)
    if backend.caches is split_rocm_cache or (backend.caches is packed_or_shuffled and is_shuffled()):
        return torch.empty(pages, 2, PAGE, heads * size, dtype=dtype, device=device)
    if not backend.on_gpu:
        return torch.empty(pages, heads, PAGE, 2 * size, dtype=dtype, device=device)
    return torch.empty(pages, PAGE, heads, 2 * size, dtype=dtype, device=device).transpose(1, 2)


def in_rows(x: Tensor) -> Tensor:
    """View [tokens, heads, size] as [tokens, heads * size], or return x where its heads are not contiguous."""
    return x.flatten(1) if x.dim() == 3 and x.stride()[1:] == (x.shape[2], 1) else x


def batch_of_all(metadata) -> Batch:
    """Return the batch where requests may have any lengths: all are equal if num_tokens = requests * longest."""
    requests, longest = metadata.block_table.shape[0], metadata.max_query_len
    return (requests, longest) if metadata.num_actual_tokens == requests * longest else NO_BATCH


def batch_of_decodes(metadata) -> Batch:
    """Return the batch where vLLM puts decode rows first: all rows are decode rows if none are left."""
    if not metadata.num_decodes:
        return NO_BATCH
    requests, longest = metadata.num_decodes, metadata.decode_metadata.max_query_len
    same = metadata.num_decode_tokens == metadata.num_actual_tokens == requests * longest
    return (requests, longest) if same and metadata.block_table.shape[0] == requests else NO_BATCH
