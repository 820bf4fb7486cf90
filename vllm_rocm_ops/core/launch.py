"""Launches: what a plan asks for, which code that is, and who executes it.

HIP, CUDA and the emulator are executors of the same `Launch`; nothing else differs between them.
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

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core.arch import Arch

CODE = Path(__file__).parents[1] / "code"


class I64(int):
    """An integer of 64 bits among arguments in order; a plain int has 32 there."""


class Workspace(int):
    """An argument: so many bytes of HBM, unwritten, of this call's launches that name the same object."""


class Counters(int):
    """An argument: so many 32-bit counters, zero before the launch and left zero by it, which no launch uses that may run at
    the same time. A launch has one such argument at most."""


class Address(int):
    """An argument: an address of memory that is no tensor's, the same in all calls."""


class Launch(NamedTuple):
    """One kernel launch.

    `module` is the stem of csrc/ops/<module>.hip, `symbol` the kernel. `grid` counts blocks, `block` threads, `lds` bytes
    of dynamic LDS. `args` are the kernel's arguments by their names, those of a structure as `fields` has them: a pointer is a
    tensor, `Workspace`, `Counters`, `Address` or None. Executors see tensors in place of workspaces and counters. Arguments of a kernel
    without a stamp are a tuple, in order and naturally aligned: a pointer, `I64`, an int of 32 bits or a float for fp32.
    """

    module: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: dict[str, object] | tuple
    lds: int = 0

    @property
    def named(self) -> dict[str | int, object]:
        """The arguments by their names; those in order by their places."""
        return self.args if isinstance(self.args, dict) else dict(enumerate(self.args))

    def with_each(self, of: Callable[[object], object]) -> Launch:
        """With of(argument) in place of each argument."""
        args = {name: of(arg) for name, arg in self.named.items()}
        return self._replace(args=args if isinstance(self.args, dict) else tuple(args.values()))


class NotLaunched(RuntimeError):
    """A call's first launch failed, so that nothing of the call ran."""


class Executor(Protocol):
    """Runs launches of code for `arch`. `uninitialised` are the tensors that nothing has been written to yet. A launch that
    fails and wrote nothing may raise `NotLaunched`."""

    arch: Arch

    def launch(self, launch: Launch, uninitialised: tuple[torch.Tensor, ...]) -> None: ...


def fields(structure: str, values: Mapping[str, object]) -> dict[str, object]:
    """The arguments that fill a structure: "structure.field" for each field, some of which may be structures themselves."""
    found = {}
    for field, value in values.items():
        name = f"{structure}.{field}"
        found |= fields(name, value) if isinstance(value, Mapping) else {name: value}
    return found


def code_object(module: str, arch_name: str) -> Path:
    """The file that holds `module`'s kernels for `arch_name`."""
    return CODE / arch_name / (module + archs.ARCHS[arch_name].code_suffix)


def built(module: str, arch_name: str) -> Path:
    """The file that holds `module`'s kernels for `arch_name`, as its stamp says. RuntimeError if it is not there, or another."""
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
    """Whether a code object has the hash that its stamp holds; without one it is taken for whole."""
    return stamp(path).get("sha256") in (None, hashlib.sha256(path.read_bytes()).hexdigest())


def stamp(path: Path) -> dict:
    """What the build says of a code object; nothing where that cannot be read."""
    try:
        return json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}


_executor: Executor | None = None  # runs the ops on CPU tensors


@contextlib.contextmanager
def executor(cpu_device: Executor) -> Iterator[None]:
    """Within it, every op on CPU tensors is planned for `cpu_device.arch` and run by it, not by the PyTorch reference."""
    global _executor
    previous, _executor = _executor, cpu_device
    try:
        yield
    finally:
        _executor = previous


def cpu_executor() -> Executor | None:
    """The executor of ops on CPU tensors, if one is set."""
    return _executor


@functools.cache
def runtime():
    """The `_C` extension, or the reason why there is none."""
    try:
        from vllm_rocm_ops import _C
    except ImportError as error:
        return None, f"the extension vllm_rocm_ops._C does not load: {error}"
    if _C.backend() is None:
        return None, _C.status()
    return _C, ""


def not_loaded(planned: Iterable[Launch], arch_name: str) -> str:
    """Why the GPU of this process does not load the code of launches. Empty if it does, or the process has initialised none."""
    if not torch.cuda.is_initialized():
        return ""
    loader, why = runtime()
    try:
        for l in () if why else planned:
            loader.load(str(built(l.module, arch_name)), l.symbol, torch.cuda.current_device())
    except RuntimeError as error:
        return str(error)
    return why
