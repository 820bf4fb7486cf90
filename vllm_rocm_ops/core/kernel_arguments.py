"""Pack a launch's values into a kernel's argument buffer, as the stamp of its code object describes it.

csrc/build.py stores names, offsets and types from the compiler in the stamp. HIP, CUDA and the emulator get the same buffer.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops.core.launch import I64, Address, Counters, Launch, Workspace

FORMATS = {"i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
FORMATS |= {"f32": "f", "f64": "d", "pointer": "Q"}  # of the module struct, by type
POINTERS = (torch.Tensor, Workspace, Counters, Address, type(None))


class Parameters(NamedTuple):
    """A kernel's parameters: bytes of the argument buffer, and (offset, type) by argument name."""

    bytes: int
    arguments: dict[str | int, tuple[int, str]]


def parameters(path: Path, symbol: str) -> Parameters:
    """Return a kernel's parameters from the stamp of its code object. Raises RuntimeError if the stamp lacks the kernel."""
    stamp = path.with_suffix(".json")
    try:
        return Parameters(**_kernels(stamp, stamp.stat().st_mtime_ns)[symbol])
    except (OSError, ValueError, KeyError):
        raise RuntimeError(f"the stamp of {path} does not have the arguments of {symbol}") from None


@functools.cache
def _kernels(stamp: Path, version: int) -> dict[str, dict]:
    """Return the kernels in one version of a stamp."""
    return json.loads(stamp.read_text())["kernels"]


def in_order(l: Launch) -> Parameters:
    """Return the parameters of a kernel without a stamp, inferred from its arguments in order."""
    end, arguments = 0, {}
    for place, arg in enumerate(l.args):
        types = ("i64",) if isinstance(arg, I64) else ("pointer", "i32", "f32")
        kind = next((type for type in types if _fits(arg, type)), None)
        if kind is None:
            raise TypeError(
                f"{l.symbol}: argument {place} must be a tensor, None, int, I64 or float, got {_shown(arg)}"
            )
        size = struct.calcsize(FORMATS[kind])
        arguments[place] = start, _ = -(-end // size) * size, kind
        end = start + size
    return Parameters(end, arguments)


def _fits(arg, type: str) -> bool:
    """True if an argument fits a type."""
    if type == "pointer" or isinstance(arg, POINTERS):
        return type == "pointer" and isinstance(arg, POINTERS)
    if type.startswith("f"):
        return isinstance(arg, float)
    bits = int(type[1:])
    least = -(1 << bits - 1) if type.startswith("i") else 0
    return isinstance(arg, int) and least <= arg < least + (1 << bits)


def _wanted(type: str) -> str:
    kinds = {"p": "a tensor, Workspace, Counters, Address or None", "f": "a float"}
    return f"{kinds.get(type[0], 'an int within its range')} ({type})"


def _shown(arg) -> str:
    return "a tensor" if isinstance(arg, torch.Tensor) else f"{type(arg).__name__} {arg!r}"


def packer(l: Launch, takes: Parameters) -> tuple[struct.Struct, dict[str | int, object]]:
    """Return the layout of a launch's argument buffer, and its values by name, with tensors as 0.

    `layout.pack(*values.values())` is the buffer. Raises TypeError if names or types differ from the kernel's parameters.
    """
    given = l.named
    if given.keys() != takes.arguments.keys():
        missing, unknown = takes.arguments.keys() - given.keys(), given.keys() - takes.arguments.keys()
        got = " and ".join([f"no {name}" for name in sorted(missing)] + [f"also {name}" for name in sorted(unknown)])
        raise TypeError(f"{l.symbol}: arguments must be {', '.join(map(str, takes.arguments))}, got {got}")
    codes, end, values = "=", 0, {}
    for name, (offset, type) in takes.arguments.items():
        arg = given[name]
        if not _fits(arg, type):
            raise TypeError(f"{l.symbol}: argument {name} must be {_wanted(type)}, got {_shown(arg)}")
        codes += f"{offset - end}x{FORMATS[type]}"
        end = offset + struct.calcsize(FORMATS[type])
        values[name] = 0 if type == "pointer" and not isinstance(arg, Address) else arg
    return struct.Struct(f"{codes}{takes.bytes - end}x"), values


def pack(l: Launch, takes: Parameters, address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr) -> bytes:
    """Return the argument buffer with an address for each tensor.

    It is AMD's kernarg segment without hidden arguments, and CUDA's parameter buffer.
    """
    layout, values = packer(l, takes)
    values |= {name: address(arg) for name, arg in l.named.items() if isinstance(arg, torch.Tensor)}
    return layout.pack(*values.values())
