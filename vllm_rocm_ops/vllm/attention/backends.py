"""vLLM's attention backends that subclasses of ours replace in place, through its registry: decoder.py and mla.py have
what our layers do.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    functions = methods(path)
    had = [argument.arg for argument in functions[name].args.args[1:]] if name in functions else []
    text = f"{path.rpartition('.')[2]}.{name}({', '.join(wanted)}), it has ({', '.join(had)})"
    seam.require(name in functions and [one for one in had if one not in may] == [*wanted], text)


def methods(path: str) -> dict[str, ast.FunctionDef]:
    """Return the methods that a class itself has."""
    return {node.name: node for node in _class(path).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    import vllm

    source = Path(vllm.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text()
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


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
