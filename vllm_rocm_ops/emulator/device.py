"""Load code objects and run launches of their kernels on the CPU."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_rocm_ops.core import archs, kernel_arguments
from vllm_rocm_ops.core import launch as launches

from . import errors
from .counters import Counters, Traffic
from .memory import MAX_BYTES, Space, span_of
from .objects import CodeObject, KernelObject
from .program import Program
from .scheduler import Scheduler
from .waves import LANES

MAX_PROGRAMS = 32  # megabytes each


@dataclasses.dataclass(frozen=True)
class Options:
    """Configure an emulator.

    races: report races. seed: run waves in random order instead of lockstep. patience: instructions without progress before a
    deadlock is reported. traffic: count what each block moves per tensor. preloads_arguments: whether firmware preloads a kernel's
    first arguments into SGPRs, as since ROCm 6. compute_units and lds_bytes: the chip, for the number of resident blocks.
    """

    races: bool = True
    seed: int | None = None
    patience: int = 200_000
    traffic: bool = False
    preloads_arguments: bool = True
    compute_units: int = 304
    lds_bytes: int = 65536

    def resident_blocks(self, kernel: KernelObject, waves_per_block: int, lds: int) -> int:
        """Return the number of resident blocks on the chip, limited by registers and LDS."""
        blocks = max(1, 4 * kernel.waves_per_simd // waves_per_block)
        if lds:
            blocks = max(1, min(blocks, self.lds_bytes // lds))
        return blocks * self.compute_units


class Emulator:
    """Emulate one architecture as an executor of `vllm_rocm_ops.core.launch.Launch`.

    The architecture is a name that archs.named accepts ("gfx950:3" has 3 compute units), `options` go to `Options`. `last`
    is the last launch's `Counters`, `history` has all launches' with their symbols. `program_type` and `scheduler_type`
    are the classes of programs and schedulers.
    """

    program_type, scheduler_type = Program, Scheduler

    def __init__(self, arch_name: str, **options):
        self.arch = archs.named(arch_name)
        if self.arch.vendor != "amd":
            known = " and ".join(name for name, each in archs.ARCHS.items() if each.vendor == "amd")
            raise ValueError(f"the emulator runs {known}, got {arch_name}")
        self.options = Options(compute_units=self.arch.compute_units, lds_bytes=self.arch.lds_bytes, **options)
        self.last: Counters | None = None
        self.history: list[tuple[str, Counters]] = []
        # Arguments that launches so far stored to. A bound kernel takes megabytes, and is freed with the process's cache.
        self._stored: weakref.WeakKeyDictionary[Program, set[str]] = weakref.WeakKeyDictionary()

    def launch(self, launch, uninitialized: tuple = ()) -> None:
        """Run a launch of an op's module."""
        self.run(launches.code_object(launch.module, self.arch.name), launch, uninitialized)

    def run(
        self,
        path: Path | str,
        launch,
        uninitialized: tuple = (),
        blocks: Sequence[int] | None = None,
    ) -> Counters:
        """Run a launch of the code object at `path`, or only `blocks` of it, as if the others were late."""
        program = self.checked(path, launch)
        traffic = Traffic(waves_of(launch)) if self.options.traffic else None
        space = Space(program.space_granule, self.options.races, traffic)
        assert space.add_bytes("the code object", bytes(program.code_object.relocated(program.base))) == program.base
        space.add_tensors([(f"argument {name}", tensor) for name, tensor in tensors_of(launch)], uninitialized)
        kernarg = self.kernarg(space, Path(path), launch, program.object)
        space.watch(self._stored.get(program))
        self.last = self.scheduler_type(program, launch, space, kernarg, self.options, blocks).run()
        self._stored[program] = self._stored.get(program, set()) | space.stored_names()
        self.history.append((launch.symbol, self.last))
        return self.last

    def checked(self, path: Path | str, launch) -> Program:
        """Return the program of a launch. Raises LaunchError for a launch that does not fit."""
        program = self.program(path, launch.symbol)
        kernel = program.object
        threads = math.prod(launch.block)
        if threads > kernel.max_block or not threads:
            raise errors.LaunchError(
                f"{launch.symbol}: block must be at most {kernel.max_block} threads, got {launch.block}"
            )
        if kernel.lds + launch.lds > self.arch.lds_bytes:
            raise errors.LaunchError(
                f"{launch.symbol}: lds must be at most {self.arch.lds_bytes}, got {kernel.lds + launch.lds}"
            )
        if rule := launches.too_large([launch]):
            raise errors.LaunchError(f"the device requires that {rule}")
        if not math.prod(launch.grid):
            raise errors.LaunchError(f"{launch.symbol}: grid must be positive, got {launch.grid}")
        for name, tensor in tensors_of(launch):
            start, end = span_of(tensor)
            if end - start > MAX_BYTES:
                raise errors.LaunchError(
                    f"{launch.symbol}: argument {name} must be at most {MAX_BYTES} bytes, got {end - start}"
                )
        return program

    def kernarg(self, space: Space, path: Path, launch, kernel: KernelObject) -> int:
        """Store a launch's arguments in `space`, which has its tensors, and return their address."""
        content = self.packed(path, launch, space)
        explicit = [arg for arg in kernel.metadata.get(".args", ()) if not arg[".value_kind"].startswith("hidden_")]
        expected = max((arg[".offset"] + arg[".size"] for arg in explicit), default=0)
        if len(content) != expected:
            raise errors.LaunchError(f"{launch.symbol}: args must be {expected} bytes, got {len(content)}")
        # the segment is allocated in 64-byte lines, and compilers load them whole
        size = -(-max(kernel.kernarg_size, 1) // 64) * 64
        content = bytearray(content.ljust(size, b"\0"))
        for arg in kernel.metadata.get(".args", ()):
            kind, axis = arg[".value_kind"][:-2], "xyz".find(arg[".value_kind"][-1])
            hidden = {"hidden_block_count": launch.grid, "hidden_group_size": launch.block}
            if kind in hidden:
                value = hidden[kind][axis].to_bytes(arg[".size"], "little")
                content[arg[".offset"] : arg[".offset"] + arg[".size"]] = value
        return space.add_bytes("the kernel arguments", bytes(content))

    def packed(self, path: Path, launch, space: Space) -> bytes:
        """Return the bytes of a launch's arguments, with its tensors' addresses in `space`."""
        is_in_order = isinstance(launch.args, tuple)
        takes = kernel_arguments.in_order(launch) if is_in_order else kernel_arguments.parameters(path, launch.symbol)
        return kernel_arguments.pack(launch, takes, space.address)

    def program(self, path: Path | str, symbol: str) -> Program:
        """Return the kernel, shared by all emulators of the process until the file changes."""
        path = Path(path)
        stamp = path, path.stat().st_mtime_ns, path.stat().st_size
        code = _code_object(*stamp)
        if code.arch != self.arch.name:
            raise errors.LaunchError(f"{path} must be compiled for {self.arch.name}, got {code.arch}")
        if symbol not in code.kernels:
            raise errors.LaunchError(f"{path} must hold {symbol}, got {sorted(code.kernels)}")
        return _program(self.program_type, *stamp, symbol)


def tensors_of(launch) -> list[tuple]:
    """Return the tensors among a launch's arguments, with their names."""
    return [(name, arg) for name, arg in launch.named.items() if isinstance(arg, torch.Tensor)]


def waves_of(launch) -> int:
    """Return the number of waves of a launch."""
    return math.prod(launch.grid) * -(-math.prod(launch.block) // LANES)


@functools.lru_cache(maxsize=64)
def _code_object(path: Path, mtime_ns: int, size: int) -> CodeObject:
    return CodeObject(path)


_programs: collections.OrderedDict[tuple, Program] = collections.OrderedDict()


def _program(kind: type[Program], path: Path, mtime_ns: int, size: int, symbol: str) -> Program:
    key = kind, path, mtime_ns, size, symbol
    if key not in _programs:
        code = _code_object(path, mtime_ns, size)
        _programs[key] = kind(code, symbol, code.arch)
        forget_programs(MAX_PROGRAMS)
    _programs.move_to_end(key)
    return _programs[key]


def forget_programs(kept: int = 0) -> None:
    """Let all but the `kept` programs go that ran last."""
    while len(_programs) > kept:
        _programs.popitem(last=False)[1].unbind()
