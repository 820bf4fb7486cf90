"""A planted bug, and the ways of catching it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.correctness import generator_of, run_and_check
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.stats import stats
from vllm_rocm_ops.emulator.errors import EmulatorError, UnsupportedInstruction

from .code_text import replaced
from .import_hook import STUDY, path_of
from .kernel_copy import CSRC, KernelCopy, PlantedEmulator, modules_of

WRONG = "error|NaNs differ"
"""The report of a case with wrong values; elements that no kernel wrote are NaN."""


@dataclass(frozen=True)
class Bug:
    """A plausible mistake.

    In `file`, of csrc, the package or timing_study, `old` occurs once and becomes `new`. `by` names what catches it. Comments and
    white space do not matter.
    """

    name: str
    file: str
    old: str
    new: str
    by: Cases | Call | Code | Tests

    @property
    def is_seam(self) -> bool:
        return self.file.endswith(".py")

    @property
    def runs_all(self) -> bool:
        """True if the tests that it names run as with --full: a mistake in a seam must show by default."""
        return not self.is_seam or self.path.is_relative_to(STUDY)

    @property
    def path(self) -> Path:
        return path_of(self.file) if self.is_seam else CSRC / self.file

    @property
    def mutated(self) -> str:
        """The file's source with the mistake."""
        return replaced(self.path.read_text(), self.file, self.old, self.new)

    @property
    def change(self) -> str:
        return " ".join(f"{self.old} -> {self.new or '(nothing)'}".split()).replace("|", "\\|")


class Cases:
    """Cases of an op in the emulator, in all configurations that launch a module with the file: one fails and says `said`.

    Only kernels that they launch are compiled.
    """

    def __init__(self, op: Op, *names: str, on: str = "gfx942", said: str = ""):
        self.op, self.names, self.on, self.said = op, names, on, said

    @property
    def way(self) -> str:
        return "cases"

    def require(self, bug: Bug, kernels: KernelCopy) -> str:
        """Return the case and the message of the failure, or fail."""
        emulator = PlantedEmulator(kernels, self.on, bug)
        for case in (case for case in self.op.cases() if case.name in self.names):
            arguments = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
            try:
                with launch.executor(emulator):
                    for config in self._configs(self.op.Arguments(*arguments), bug, emulator.arch):
                        with self.op.running(config):
                            for _ in range(2):  # leftovers of the first call show in the second
                                run_and_check(self.op, arguments, "cpu")
            except (AssertionError, EmulatorError) as error:
                return f"{self.op.name}-{case.name} on {self.on}: {as_said(error, self.said)}"
            assert stats()[self.op.name]
        pytest.fail(f"no case of {self.op.name} catches: {bug.name}")

    def _configs(self, a: tuple, bug: Bug, arch: Arch) -> Iterator:
        """Yield the configurations that launch a module with the bug's file. Not each of them launches the bug."""
        for config in self.op.configs(a, arch):
            planned = self.op.plan(config, self.op.allocate(a), a, arch)
            if not {one.module for one in planned}.isdisjoint(modules_of(bug.file)):
                yield config


class Call:
    """A test of tests/ops, by module and function, called with `arguments` in the emulator.

    With `as_executor` it gets the value of the fixture `executor`, too, else only the arch.
    """

    def __init__(self, test: str, *arguments, on: str = "gfx942", as_executor: bool = True):
        self.test, self.arguments, self.on, self.as_executor = test, arguments, on, as_executor

    @property
    def way(self) -> str:
        return self.test

    def require(self, bug: Bug, kernels: KernelCopy) -> str:
        """Return the message of the failure, or fail."""
        emulator = PlantedEmulator(kernels, self.on, bug)
        executor = ("cpu", emulator.arch) if self.as_executor else emulator.arch
        try:
            with launch.executor(emulator):
                found(self.test)(*self.arguments, executor)
        except (AssertionError, EmulatorError) as error:
            assert "fallback" not in str(error)
            return f"{self.test} on {self.on}: {as_said(error, '')}"
        pytest.fail(f"{self.test} does not catch: {bug.name}")


class Code:
    """A function of tests, by module and name, that takes a code object and returns the names of faulty kernels.

    The code object has one kernel.
    """

    def __init__(self, module: str, symbol: str, check: str, on: str = "gfx942"):
        self.module, self.symbol, self.check, self.on = module, symbol, check, on

    @property
    def way(self) -> str:
        return self.check

    def require(self, bug: Bug, kernels: KernelCopy) -> str:
        """Return the kernels that are found, or fail."""
        wrong = sorted(found(self.check)(kernels.compile(bug, self.module, self.symbol, self.on)))
        assert wrong, f"{self.check} finds nothing: {bug.name}"
        return f"{self.check}: {', '.join(wrong)}"


class Tests:
    """Tests by their names, or files of tests.

    Kernels are built from `module`, by default from each module that includes the file. Without names, the tests of
    tests/ops run for each op that launches one of them, which compiles kernels when they are launched.
    """

    __test__ = False  # not a test class for pytest

    def __init__(self, *names: str, module: str = ""):
        self.names, self.module = names, module


def as_said(error: Exception, said: str) -> str:
    message = " ".join(f"{type(error).__name__}: {error}".split())
    assert not isinstance(error, UnsupportedInstruction), f"the emulator fails, not the test: {message}"
    assert re.search(said, str(error)), f"{message} is not {said!r}"
    return message


def found(name: str):
    """Return a function of a module of tests."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(module), function)
