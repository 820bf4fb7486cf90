"""A copy of the kernels' sources in which to plant mistakes."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from load_build import load_build

from vllm_rocm_ops.emulator import Emulator

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CODE = ROOT / "vllm_rocm_ops" / "code"
TYPES = {"bf16": "Bf16", "fp16": "F16"}


def _mla(symbol: str) -> str:
    kind, fp8, query, lds, tiles = re.search(r"_(bf16|fp16)(_fp8)?(_query)?(_lds)?_(\d+)$", symbol).groups()
    element = TYPES[kind]
    if symbol.startswith("mla_decode_combine"):
        return f"COMBINE({symbol}, MlaCombine, {element}, {tiles})\n"
    cache = "E4m3" if fp8 else element
    if lds:
        return f"DECODE_64({symbol}, {element}, {cache}, {cache if query else element})\n"
    return f"DECODE({symbol}, {element}, {cache}, {tiles})\n"


def _paged(symbol: str) -> str:
    kind, fp8, size, layout = re.search(r"_(bf16|fp16)(_fp8)?_(\d+)_(\w+)$", symbol).groups()
    cache, (layout, _, grouped) = "E4m3" if fp8 else TYPES[kind], layout.partition("_")
    problem = "GroupedProblem" if grouped else "DecodeProblem"
    return f"INSTANCE({symbol}, {TYPES[kind]}, {cache}, {size}, {str(layout == 'native').lower()}, {problem})\n"


def _batched(symbol: str) -> str:
    rope, kind, form, tokens = re.search(r"(_rope)?_(bf16|fp16)_(\w+)_(\d+)$", symbol).groups()
    form = {"wave_splitk": "WAVES", "transposed": "TRANSPOSED_ROPE" if rope else "TRANSPOSED"}[form]
    return f"{form}({kind}, {TYPES[kind]}, {tokens})\n"


def _batched_quant(symbol: str) -> str:
    kind, tokens = re.search(r"_(bf16|fp16)_(\d+)$", symbol).groups()
    return f"QUANTIZED({kind}, {TYPES[kind]}, {tokens})\n"


INSTANCES: dict[str, tuple[str, Callable[[str], str]]] = {
    "mla_decode": ("#define PACKED_ROW_TILES", _mla),
    "paged_attention_decode": ("#define SIZES", _paged),
    "batched_gemm": ("#define TOKENS", _batched),
    "batched_gemm_quant": ("#define TOKENS", _batched_quant),
}
"""By module: the macro before which no kernel is instantiated, and the line that instantiates one.

A single kernel compiles in a tenth of the time.
"""


@functools.cache
def included(path: Path) -> frozenset[str]:
    """Return a kernel source and all headers that it includes, by their paths in csrc."""
    found, left = set(), [path]
    while left:
        of = left.pop()
        if of not in found and of.exists():
            found.add(of)
            names = re.findall(r'^#include "(.*)"', of.read_text(), re.MULTILINE)
            left += [(of.parent / name).resolve() if (of.parent / name).exists() else CSRC / name for name in names]
    return frozenset(of.relative_to(CSRC).as_posix() for of in found)


@functools.cache
def modules_of(file: str) -> list[str]:
    """Return the kernel modules that include a file of csrc."""
    return [path.stem for path in sorted(CSRC.glob("ops/**/*.hip")) if file in included(path)]


class Mutation(Protocol):
    """A source with a mistake."""

    file: str
    mutated: str


class KernelCopy:
    """A copy of the kernels' sources and of the shipped code objects.

    Modules, or a single kernel, can be built with a mistake in them.
    """

    def __init__(self, root: Path):
        shutil.copytree(CSRC, root / "csrc")
        self._build = load_build(root / "csrc")
        for path in CODE.glob("*/*.*"):
            link = self.code / path.relative_to(CODE)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)

    @property
    def code(self) -> Path:
        return self._build.CODE

    @property
    def csrc(self) -> Path:
        return self._build.CSRC

    def plant(self, bug: Mutation, modules: Iterable[str], archs: Iterable[str]) -> None:
        """Build the modules with a mistake, and restore the sources."""
        with self._mutated(bug):
            self._build.build(sorted(modules), list(archs))

    def compile(self, bug: Mutation, module: str, symbol: str, arch: str) -> Path:
        """Compile one kernel with a mistake, and return its code object.

        Only the names are left of the module's other kernels.
        """
        stamp = json.loads((CODE / arch / f"{module}.json").read_text())
        others = [other for other in stamp["kernels"] if other != symbol]
        # A template without callers is parsed only.
        left_out = "{0}(...)={0}(__VA_ARGS__); template <int> __attribute__((device)) void {0}_left_out(__VA_ARGS__)"
        code = self.code.with_name("kernels") / arch / f"{symbol}.co"
        source = self._build.sources()[module]
        with self._mutated(bug), self._alone(source, symbol):
            self._build.compile_source(source, arch, code, [left_out.format(other) for other in others])
        code.with_suffix(".json").write_text(json.dumps({"kernels": {symbol: stamp["kernels"][symbol]}}))
        return code

    @contextlib.contextmanager
    def _mutated(self, bug: Mutation) -> Iterator[None]:
        path, mutated = self.csrc / bug.file, bug.mutated
        original = path.read_text()
        try:
            path.write_text(mutated)
            yield
        finally:
            path.write_text(original)

    @contextlib.contextmanager
    def _alone(self, path: Path, symbol: str) -> Iterator[None]:
        """Leave one kernel in the source, where INSTANCES says how."""
        if path.stem not in INSTANCES:
            yield
            return
        first, instance = INSTANCES[path.stem]
        original = path.read_text()
        head, macro, _ = original.partition(first)
        assert macro, f"{path.name} does not hold {first}"
        try:
            path.write_text(head + instance(symbol))
            yield
        finally:
            path.write_text(original)


class PlantedEmulator(Emulator):
    """Run kernels with a bug in their sources, compiling each at its launch."""

    def __init__(self, kernels: KernelCopy, chip: str, bug: Mutation):
        super().__init__(chip)
        arch = self.arch.name
        self.compile = functools.cache(lambda module, symbol: kernels.compile(bug, module, symbol, arch))

    def launch(self, launch, uninitialized: tuple = ()) -> None:
        self.run(self.compile(launch.module, launch.symbol), launch, uninitialized)


def plant_in_emulators(kernels: KernelCopy, bug: Mutation, modules: Collection[str]) -> None:
    """Make emulators of this process compile kernels of these modules with a bug when they are launched."""
    compiled = functools.cache(functools.partial(kernels.compile, bug))
    shipped = Emulator.launch

    def launch(self, launch, uninitialized: tuple = ()) -> None:
        if launch.module in modules:
            self.run(compiled(launch.module, launch.symbol, self.arch.name), launch, uninitialized)
        else:
            shipped(self, launch, uninitialized)

    Emulator.launch = launch
