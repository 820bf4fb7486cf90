"""Describe kernel launches, find their code objects, and select their executor.

HIP, CUDA and the emulator execute the same `Launch`; nothing else differs between them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.arch import Arch

CODE = Path(__file__).parents[1] / "code"
RELEASE = "release.json"  # in CODE, in wheels: the version and the objects' hashes, by arch and module


class I64(int):
    """A 64-bit integer among arguments in order, where a plain int has 32 bits."""


class Workspace(int):
    """An argument: bytes of unwritten HBM, shared by this call's launches that name the same object."""


class Counters(int):
    """An argument: a number of 32-bit counters, zero before the launch and after it.

    No launch that may run concurrently uses them. A launch has at most one such argument.
    """


class Address(int):
    """A fixed device address that no tensor owns."""


class Launch(NamedTuple):
    """One kernel launch.

    `module` is the stem of a file in csrc/ops, `symbol` the kernel. `grid` counts blocks, `block` threads, `lds` bytes of dynamic
    LDS. `args` are the kernel's arguments by name, with `fields` for structures: a pointer is a tensor, `Workspace`, `Counters`,
    `Address` or None. Executors see tensors in place of workspaces and counters. A kernel without a stamp has a tuple of arguments,
    in order and naturally aligned: a pointer, `I64`, an int (32 bits) or a float (fp32).
    """

    module: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: dict[str, object] | tuple
    lds: int = 0

    @property
    def named(self) -> dict[str | int, object]:
        """Return the arguments by name; a tuple's by place."""
        return self.args if isinstance(self.args, dict) else dict(enumerate(self.args))

    def with_each(self, convert: Callable[[object], object]) -> Launch:
        """Return the launch with of(argument) in place of each argument."""
        args = {name: convert(arg) for name, arg in self.named.items()}
        return self._replace(args=args if isinstance(self.args, dict) else tuple(args.values()))


LIMIT = "fewer than 2^32 threads along each axis and at most 65535 blocks along y and z"
"""Sizes that every driver takes: HIP computes blocks x threads in 32 bits; it takes 65536 blocks along y and z, CUDA one less."""


def too_large(planned: Iterable[Launch]) -> str:
    """Return the rule that a launch breaks which no driver takes for its size, or an empty text."""
    for l in planned:
        threads = [blocks * per_block for blocks, per_block in zip(l.grid, l.block)]
        if max(threads) >= 2**32 or max(l.grid[1:]) >= 2**16:
            return f"{l.symbol} has {LIMIT}, not grid {l.grid} block {l.block}"
    return ""


class NotLaunched(RuntimeError):
    """A call's first launch failed, so nothing of the call ran."""


class Executor(Protocol):
    """Runs launches of code for `arch`.

    `uninitialized` are the tensors that are still unwritten. A launch that fails without a write may raise `NotLaunched`.
    """

    arch: Arch

    def launch(self, launch: Launch, uninitialized: tuple[torch.Tensor, ...]) -> None: ...


def fields(structure: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that fill a structure, named "structure.field"; fields may be structures themselves."""
    arguments = {}
    for field, value in values.items():
        name = f"{structure}.{field}"
        arguments |= fields(name, value) if isinstance(value, Mapping) else {name: value}
    return arguments


def code_object(module: str, arch_name: str) -> Path:
    """Return the path of `module`'s code object for `arch_name`."""
    return CODE / arch_name / (module + archs.ARCHS[arch_name].code_suffix)


def built(module: str, arch_name: str) -> Path:
    """Return the path of a code object that matches its stamp. Raises RuntimeError if it is missing or damaged."""
    path = code_object(module, arch_name)
    try:
        status = path.stat()
        is_whole = _is_whole(path, status.st_mtime_ns, status.st_size)
    except OSError:
        raise RuntimeError(f"no code object of {module} for {arch_name}") from None
    if not is_whole:
        raise RuntimeError(f"the code object of {module} for {arch_name} is damaged: {path} is not what its stamp says")
    return path


@functools.cache
def _is_whole(path: Path, *version: int) -> bool:
    """True if a code object has its stamp's hash; without a hash it counts as whole."""
    return stamp(path).get("sha256") in (None, hashlib.sha256(path.read_bytes()).hexdigest())


def stamp(path: Path) -> dict:
    """Return the stamp of a code object, empty if it cannot be read."""
    return _json(path.with_suffix(".json"))


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def stamps(arch_name: str) -> dict[str, dict]:
    """Return the stamps of the code objects for an arch, by module."""
    suffix = archs.ARCHS[arch_name].code_suffix
    return {path.stem: stamp(path) for path in sorted((CODE / arch_name).glob("*" + suffix))}


def origin(arch_name: str, by_module: Mapping[str, Mapping] | None = None) -> str:
    """Return where an arch's code objects are from: a release, if all have its hashes, else the compilers on this machine.

    A release's wheel comes with the hashes (csrc/wheels.py). `found` has the stamps, by default the installed objects'.
    """
    by_module = stamps(arch_name) if by_module is None else by_module
    if not by_module:
        return "none"
    release = _json(CODE / RELEASE)
    hashes = release.get("objects", {}).get(arch_name, {})
    if all(module in hashes and entry.get("sha256") == hashes[module] for module, entry in by_module.items()):
        return f"release {release['version']}"
    debug = ", debug" if any(entry.get("debug") for entry in by_module.values()) else ""
    return (
        f"built here by {'; '.join(sorted({entry.get('compiler', 'unknown') for entry in by_module.values()}))}{debug}"
    )


_executor: Executor | None = None  # of ops on CPU tensors


@contextlib.contextmanager
def executor(cpu_device: Executor) -> Iterator[None]:
    """Run every op on CPU tensors through `cpu_device`, planned for its arch, instead of the PyTorch reference."""
    global _executor
    previous, _executor = _executor, cpu_device
    try:
        yield
    finally:
        _executor = previous


def cpu_executor() -> Executor | None:
    """Return the executor of ops on CPU tensors, if one is set."""
    return _executor


@functools.cache
def runtime():
    """Return the `_C` extension and an empty text, or None and the reason why it is missing."""
    try:
        from vllm_rocm_ops import _C
    except ImportError as error:
        return None, f"the extension vllm_rocm_ops._C does not load: {error}"
    if _C.backend() is None:
        return None, _C.status()
    return _C, ""


def not_loaded(planned: Iterable[Launch], arch_name: str) -> str:
    """Return why this process's GPU cannot load the code of launches; empty if it can, or no GPU is initialized."""
    if not torch.cuda.is_initialized():
        return ""
    loader, why = runtime()
    try:
        for l in () if why else planned:
            loader.load(str(built(l.module, arch_name)), l.symbol, torch.cuda.current_device())
    except RuntimeError as error:
        return str(error)
    return why
