"""Launches: what a plan asks for, how its arguments are packed, and who executes it.

HIP, CUDA and the emulator are executors of the same `Launch`; nothing else differs between them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops.arch import Arch

CODE = Path(__file__).parent / "code"


class I64(int):
    """An integer argument of 64 bits; a plain int has 32."""


class Workspace(int):
    """An argument: so many bytes of HBM, unwritten, of this call's launches that name the same object."""


class Counters(int):
    """An argument: so many 32-bit counters, zero before the launch and left zero by it, which no launch uses that may run at
    the same time. A launch has one such argument at most."""


class Launch(NamedTuple):
    """One kernel launch.

    `module` is the stem of csrc/ops/<module>.hip, `symbol` the kernel. `grid` counts blocks, `block` threads, `lds` bytes
    of dynamic LDS. `args` become, in order and naturally aligned: tensor, `Workspace`, `Counters` or None, a pointer;
    `I64`, 64 bits; int, 32 bits; float, fp32. Executors see tensors in place of workspaces and counters.
    """

    module: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple
    lds: int = 0


class Executor(Protocol):
    """Runs launches of code for `arch`. `uninitialised` are the tensors that nothing has been written to yet."""

    arch: Arch

    def launch(self, launch: Launch, uninitialised: tuple[torch.Tensor, ...]) -> None: ...


def packer(args: tuple) -> tuple[struct.Struct, list]:
    """The layout of a kernel's arguments, and their values with tensors as 0: `layout.pack(*values)` is the buffer."""
    codes, values = "", []
    for arg in args:
        if arg is None or isinstance(arg, (torch.Tensor, Workspace, Counters)):
            code, value = "Q", 0
        elif isinstance(arg, I64):
            code, value = "q", int(arg)
        elif isinstance(arg, int):
            code, value = "i", arg
        elif isinstance(arg, float):
            code, value = "f", arg
        else:
            raise TypeError(f"a kernel argument must be a tensor, None, int, I64 or float, got {arg!r}")
        size = struct.calcsize(code)
        padding = -struct.calcsize("=" + codes) % size
        codes += "x" * padding + code
        values.append(value)
    return struct.Struct("=" + codes), values


def pack(args: tuple) -> bytes:
    """The kernel argument buffer (AMD's kernarg segment without hidden arguments; CUDA's parameter buffer)."""
    layout, values = packer(args)
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            values[i] = arg.data_ptr()
    return layout.pack(*values)


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
