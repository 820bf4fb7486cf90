"""Plant mistakes, each in its own process, and report what catches them: python tests/mutations [names].

Rows of the table: for a bug that cases, a call or a check of code objects catch, only the kernels they need are
compiled. A bug that named tests catch is built in its own folder, a mistake in Python is imported. Then these tests run
with --full until one fails.

Mutants of operators.py, and bugs without named tests: the cases that launch a kernel of a module that includes the file
run, of one architecture after the other, the smallest first; then what else is in these ops' files and then in tests/ops
for them, each the default selection and then --full, until a test fails or --seconds are over. Kernels are compiled when they are
launched. A mutant is equivalent if all machine code stays, or if EQUIVALENT has a proof.

Names are parts of bugs' names or of their files', or with a colon parts of mutants' names. --operators runs all mutants
of these files of csrc. Without arguments all bugs run, and SAMPLE mutants of each file. A table lists what failed. The
exit status is 1 if a mistake survives.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import pytest
from marks import AMD
from sources import file_of_tests

from . import import_hook, operators
from .bug import Bug, Tests
from .code_text import DoesNotFit
from .kernel_copy import CODE, CSRC, ROOT, KernelCopy, modules_of, plant_in_emulators
from .operators import Mutant
from .table import BUGS
from .table.equivalent import EQUIVALENT

TESTS = ROOT / "tests"
SAMPLE = 1
"""Mutants of a file that run without arguments."""
SECONDS = 100.0
"""The time limit of a mutant's tests. The comparison of machine code comes after them."""


class Reached(NamedTuple):
    """The modules of which a case launches a kernel, and how many waves and bytes it has at least."""

    modules: frozenset[str]
    waves: int
    bytes: int


@functools.cache
def reached() -> dict[tuple[str, str, str], Reached]:
    """Return what a case reaches, by its arch, op and name, if kernels accept it."""
    import torch

    from vllm_rocm_ops.core import archs, op

    found = {}
    for of, (the_op, case) in itertools.product(
        map(archs.named, AMD), ((o, c) for o in op.registered() for c in o.cases())
    ):
        a = the_op.Arguments(*case.make("meta", torch.Generator(), of.fp8_dtype))
        plans = [the_op.plan(config, the_op.allocate(a), a, of) for config in the_op.configs(a, of)]
        if plans:
            modules = frozenset(launched.module for plan in plans for launched in plan)
            waves = min(sum(math.prod((*one.grid, *one.block)) for one in plan) // 64 for plan in plans)
            size = sum(value.nbytes for value in a if isinstance(value, torch.Tensor))
            found[of.name, the_op.name, case.name] = Reached(modules, waves, size)
    return found


@dataclass(frozen=True)
class Result:
    verdict: str  # the test that failed, or why none did
    caught: bool
    said: str
    seconds: float


class FirstFailure:
    """A pytest plugin that keeps the name and the message of the first failing test.

    With `ops` it deselects tests that concern none of them, cases that reach none of the modules, and tests that plant
    bugs. It runs cases first, the smallest of the first arch before others.
    """

    test = said = ""

    def __init__(self, ops: Collection[str] | None = None, modules: Collection[str] = ()):
        self.ops, self.modules = ops, modules

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.ops is not None:
            items[:] = sorted(filter(self.concerns, items), key=place)

    def concerns(self, item: pytest.Item) -> bool:
        """True if a test is a case that reaches a module, or has one of the ops as a parameter, or else its file names one."""
        if (key := case_of(item)) is not None:
            return key in reached() and not reached()[key].modules.isdisjoint(self.modules)
        given = getattr(item, "callspec", None)
        of = given and (given.params.get("the_op") or given.params.get("name"))
        named = getattr(of, "name", of) in self.ops
        in_file = any(re.search(rf"\b{op}\b", source_of(item.path)) for op in self.ops)
        return "planted" not in item.name and (named if given and "the_op" in given.params else in_file)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        yield
        if call.excinfo is not None and not self.test and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.test = item.nodeid.rpartition("/")[2]
            self.said = " ".join(f"{call.excinfo.typename}: {call.excinfo.value}".split())


def case_of(item: pytest.Item) -> tuple[str, str, str] | None:
    """Return the key of the case that a test runs, in `reached`."""
    given = getattr(item, "callspec", None)
    if item.originalname != "test_case" or given is None or "the_op" not in given.params:
        return None
    return given.params["executor"].partition(":")[0], given.params["the_op"].name, given.params["case"].name


def place(item: pytest.Item) -> tuple:
    """Return where a test comes: cases by arch and size, then others in their order."""
    key = case_of(item)
    return (key is None, *((key[0], *reached()[key][1:]) if key else ()))


@functools.cache
def source_of(path: Path) -> str:
    return path.read_text()


@contextlib.contextmanager
def silent():
    """Discard pytest's report and the compilers' warnings."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def find(test: str) -> str:
    """Return the name of a test with its file's path, given the name without the folder."""
    file, separator, rest = test.partition("::")
    (path,) = TESTS.rglob(file)
    return f"{path}{separator}{rest}"


def judge(bug: Bug | Mutant, seconds: float = SECONDS) -> Result:
    """Report what catches a mistake, in this process, which must not be reused."""
    start = time.monotonic()

    def result(verdict: str, caught: bool, said: str = "") -> Result:
        return Result(verdict, caught, said, time.monotonic() - start)

    if bug.name in EQUIVALENT:
        return result(f"equivalent: {EQUIVALENT[bug.name]}", True)
    try:
        if bug.file.endswith(".py"):
            if import_hook.module_of(bug.file) in sys.modules:
                return judge_afresh(bug, result)
            import_hook.plant(bug.file, bug.mutated)
            return judge_by_tests(bug, result, "-m", "not slow")
        with tempfile.TemporaryDirectory() as folder, silent():
            copy = KernelCopy(Path(folder))
            if has_no_tests(bug):
                return judge_by_ops(bug, copy, seconds, result)
            if not isinstance(bug.by, Tests):
                by, _, said = bug.by.require(bug, copy).partition(": ")
                return result(by, True, said)
            copy.plant(bug, [bug.by.module] if bug.by.module else modules_of(bug.file), archs_of(bug))
            from vllm_rocm_ops.core import launch

            launch.CODE = copy.code
            return judge_by_tests(bug, result)
    except DoesNotFit as error:
        return result(f"does not fit: {error}", False)
    except (AssertionError, pytest.fail.Exception) as error:
        return result(f"SURVIVED: {error}", False)
    except RuntimeError as error:
        return result(" ".join(f"does not build: {error}".split()), False)


def has_no_tests(bug: Bug | Mutant) -> bool:
    """True if all tests of the ops with the file may catch a mistake."""
    return isinstance(bug, Mutant) or (isinstance(bug.by, Tests) and not bug.by.names)


def archs_of(bug: Bug) -> list[str]:
    """Return the archs that the tests name, or all AMD archs."""
    return [arch for arch in AMD if any(arch in name for name in bug.by.names)] or list(AMD)


def judge_by_tests(bug: Bug, result: Callable[..., Result], *options: str) -> Result:
    """Run the tests that a bug names."""
    first, selection = FirstFailure(), [find(test) for test in bug.by.names]
    if bug.runs_all:
        take_tests("1")  # a named test also runs if it is not in the default selection
    with silent():
        status = pytest.main(["-q", "-x", *options, "-p", "no:cacheprovider", *selection], plugins=[first])
    if status == pytest.ExitCode.OK:
        return result("SURVIVED", False)
    if status != pytest.ExitCode.TESTS_FAILED:
        return result(f"no such tests: {' '.join(bug.by.names)}", False)
    unseen = first.said.startswith("UnsupportedInstruction")  # a limit of the emulator, not a failing test
    return result(first.test, not unseen, first.said)


AFRESH = """
import json, sys
from mutations import import_hook
import_hook.plant(*json.loads(sys.argv[1]))
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
"""A program that runs tests with a mistake in a module that this process has imported, as the table of bugs does."""


def judge_afresh(bug: Bug, result: Callable[..., Result]) -> Result:
    """Run the tests that a bug names in another interpreter."""
    options = ["-q", "-x", "-rf", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", *map(find, bug.by.names)]
    command = [sys.executable, "-c", AFRESH, json.dumps([bug.file, bug.mutated]), *options]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FULL_TESTS": "1" if bug.runs_all else "",
        "COLUMNS": "300",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode == pytest.ExitCode.OK:
        return result("SURVIVED", False)
    failed = re.search(r"^FAILED \S*?(test_\w+\.py\S*)(?: - )?(.*)", done.stdout, re.MULTILINE)
    if failed is None:
        return result(f"no such tests, or no run of them: {(done.stdout + done.stderr)[-300:]}", False)
    return result(failed[1], True, failed[2])


def judge_by_ops(bug: Bug | Mutant, copy: KernelCopy, seconds: float, result: Callable[..., Result]) -> Result:
    """Run the tests of the ops that a mistake may reach: first those in files of their own."""
    from vllm_rocm_ops.core import op

    modules = modules_of(bug.file)
    ops = {the_op for _, the_op, _ in (key for key, of in reached().items() if not of.modules.isdisjoint(modules))}
    plant_in_emulators(copy, bug, modules)
    own = [str(file_of_tests(the_op)) for the_op in op.registered() if the_op.name in ops]
    others, end = [str(TESTS / "ops"), *(f"--ignore={file}" for file in own)], time.monotonic() + seconds
    for where, full in itertools.product((own, others), ("", "1")):
        left = max(end - time.monotonic(), 0.0)
        status, test, said = apart(run_tests_of, where, ops, modules, full, seconds=left) or OVER
        if said.startswith("BuildError"):
            return result("the compiler", isinstance(bug, Mutant), said)
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            failed = status == pytest.ExitCode.TESTS_FAILED and not said.startswith("UnsupportedInstruction")
            return result(f"{test} {'with --full' if full else 'by default'}", failed, said)
    if keeps_code(bug, copy, modules):
        return result("equivalent: the machine code stays", True)
    return result(f"SURVIVED {'all tests' if time.monotonic() < end else f'{seconds:.0f} s of tests'}", False)


OVER = (pytest.ExitCode.OK, "", "")
"""The result of tests that were ended, of which none has failed."""


def keeps_code(bug: Bug | Mutant, copy: KernelCopy, modules: list[str]) -> bool:
    """True if no kernel's machine code changes. The smallest modules are compiled first."""
    command = [sys.executable, "-S", CSRC / "compare_code.py", CODE, copy.code, "--archs"]
    for path in sorted((CODE / arch / f"{module}.co" for arch in AMD for module in modules), key=size_of):
        copy.plant(bug, [path.stem], [path.parent.name])
        if subprocess.run([*command, path.parent.name], capture_output=True, check=False).returncode:
            return False
    return True


def size_of(path: Path) -> int:
    return path.stat().st_size


def take_tests(full: str) -> None:
    """Make this process run the default selection of tests, or all."""
    os.environ["FULL_TESTS"] = full
    for read in ("marks", "op_tests") if full else ("marks",):
        sys.modules.pop(read, None)


def prepare() -> None:
    """Choose ops and cases once, before forking."""
    reached()
    take_tests("")
    importlib.import_module("op_tests").chosen()


def run_tests_of(where: list[str], ops: set[str], modules: list[str], full: str) -> tuple[int, str, str]:
    take_tests(full)
    first = FirstFailure(ops, modules)
    with silent():
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *where], plugins=[first])
    return int(status), first.test, first.said


FORK = multiprocessing.get_context("fork")


def apart(call: Callable, *arguments, seconds: float | None = None):
    """Return the result of a call in a process that may start others, None if it takes longer than `seconds`."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: send.send(call(*arguments)))
    process.start()
    send.close()
    try:
        if receive.poll(seconds):
            return receive.recv()
        process.kill()
        return None
    finally:
        process.join()


def chosen(names: list[str], files: list[str]) -> list[Bug | Mutant]:
    """Return the mistakes that the command line selects."""
    if not names and not files:
        return [
            *BUGS.values(),
            *(m for f in operators.sources() for m in operators.sample(operators.mutants(f), SAMPLE)),
        ]
    found = [bug for name, bug in BUGS.items() if any(part in f"{name} {bug.file}" for part in names)]
    of = dict.fromkeys(file.removeprefix("csrc/") for file in files)
    found += [mutant for file in of for mutant in operators.mutants(file)]
    of = {part.partition(":")[0] for part in names if ":" in part}
    mutants = (mutant for file in operators.sources() if file in of for mutant in operators.mutants(file))
    return found + [mutant for mutant in mutants if any(part in mutant.name for part in names)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help="parts of names of bugs, of their files or of mutants")
    parser.add_argument("--operators", nargs="+", metavar="FILE", default=[], help="run all mutants of files of csrc")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many run at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long tests of a mutant run (%(default)s)")
    arguments = parser.parse_args()
    found = chosen(arguments.names, arguments.operators)
    if not found:
        parser.error(f"names must be parts of {', '.join(BUGS)}")
    # Mistakes are in emulated kernels, also on a machine with a GPU.
    os.environ |= {"VLLM_ROCM_OPS_TABLES": os.devnull, "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    import torch

    if any(bug.file.endswith(".py") for bug in found):
        with silent():
            from vllm import LLM  # noqa: F401  once, before forking; it imports nothing of the package
    torch.set_num_threads(1)
    if any(map(has_no_tests, found)):
        prepare()
    os.environ["FULL_TESTS"] = "1"  # tests that bugs name run however long they take
    print("| Mistake | File | Change | Caught by | Seconds |\n|---|---|---|---|---|")
    lived = 0
    with ThreadPool(arguments.jobs) as pool:
        for of, judged in zip(found, pool.imap(lambda of: apart(judge, of, arguments.seconds), found, chunksize=1)):
            lived += not judged.caught
            print(f"| {of.name} | {of.file} | `{of.change}` | {judged.verdict} | {judged.seconds:.0f} |", flush=True)
            if judged.said:
                print(f"    {judged.said[:200]}", file=sys.stderr, flush=True)
    print(f"{len(found) - lived} of {len(found)} mistakes are caught or equivalent")
    return int(lived > 0)
