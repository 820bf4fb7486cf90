"""Run NVIDIA's compute-sanitizer over the op tests, on a GPU with sm_90 code, and print a line per tool.

    python tests/sanitize.py [--tool memcheck racecheck initcheck synccheck] [-k EXPRESSION] [--of-each 3] [--workers 4]

It runs test_case of tests/ops/op_tests.py in all configurations: the smallest case for each kernel, and at least --of-each
cases per op. With pytest's -k it runs the matching tests of tests/ops instead, one process per tool. Otherwise a tool's
cases are divided among --workers processes, which run at once on all visible GPUs in turn.

It fails if a tool found anything in one of the package's kernels or could not say where, if a test failed or was
skipped, if none ran, and if a tool takes longer than --timeout; then it lists the cases that did not end. Each tensor
is its own allocation, so that an out-of-bounds access shows. racecheck covers shared memory only.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from sources import file_of_tests

from vllm_rocm_ops import ops  # noqa: F401  the ops register at import
from vllm_rocm_ops.core import archs, op
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Case, Op

OP_TESTS = pathlib.Path(__file__).resolve().parent / "ops"
TOOLS = "memcheck", "racecheck", "initcheck", "synccheck"
FOUND = 86  # exit status of a tool that has findings
PRINTED = 100_000  # reports at most
HEAD = re.compile(r"^========= (\S.*)$")
SUMMARY = re.compile(r"^(?:\w+ SUMMARY: (\d+) (?:error|hazard)s?(?: displayed.*)?)$")
SILENT = re.compile(
    r"^(COMPUTE-SANITIZER|\w+ SUMMARY:|Target application returned an error|Saved host backtrace|Host Frame)"
)
MIDDLE = re.compile(r"(?<=[^=\n])(?=={9} \S)")  # a report that begins after pytest's words on a line
OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|error)s?\b(?=.* in [\d.]+s)")


@dataclasses.dataclass(frozen=True)
class Result:
    """The findings of a tool.

    The number of each finding by kernel, the plugin's and others; passed and failed tests; and why the result cannot be
    trusted, if so.
    """

    ours: dict[str, int]
    others: dict[str, int]
    passed: int
    failed: int
    why: str = ""

    @property
    def is_clean(self) -> bool:
        return not (self.ours or self.failed or self.why)

    def told(self) -> str:
        parts = [f"{sum(self.ours.values())} errors in our kernels, {self.passed} tests passed, {self.failed} failed"]
        parts += [f"{sum(self.others.values())} errors in others'"] * bool(self.others) + [self.why] * bool(self.why)
        return ", ".join(parts)

    def __add__(self, other: Result) -> Result:
        both = ((self.ours, other.ours), (self.others, other.others))
        ours, others = (dict(collections.Counter(one) + collections.Counter(two)) for one, two in both)
        return Result(ours, others, self.passed + other.passed, self.failed + other.failed, self.why or other.why)


def kernels_of(the_op: Op, case: Case, arch: Arch) -> set[str]:
    """Return the kernels that a case runs in its configurations."""
    a = the_op.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
    plans = (the_op.plan(config, the_op.allocate(a), a, arch) for config in the_op.configs(a, arch))
    return {planned.symbol for plan in plans for planned in plan}


def size_of(the_op: Op, case: Case, arch: Arch) -> int:
    """Return the number of elements in a case's tensors."""
    return sum(x.numel() for x in case.make("meta", torch.Generator(), arch.fp8_dtype) if isinstance(x, torch.Tensor))


def chosen(arch: Arch, of_each: int) -> list[tuple[Op, Case]]:
    """Return the smallest case that runs each kernel, and at least `of_each` cases for each op with kernels."""
    found = []
    for the_op in op.registered():
        known: set[str] = set()
        cases = sorted(the_op.cases(), key=lambda case, the_op=the_op: size_of(the_op, case, arch))
        running = [(case, kernels) for case in cases if (kernels := kernels_of(the_op, case, arch))]
        for place, (case, kernels) in enumerate(running):
            if place < of_each or not kernels <= known:
                found.append((the_op, case))
                known |= kernels
    return found


def reports(output: str) -> Iterator[tuple[str, str]]:
    """Yield each report of a tool: its first line, and all of its lines."""
    lines: list[str] = []
    for line in [*MIDDLE.sub("\n", output).splitlines(), "========= end"]:
        if HEAD.match(line) and not re.match(r"=+ and ", line):
            if lines:
                yield HEAD.match(lines[0])[1], "\n".join(lines)
            lines = [line]
        elif lines and line.startswith("========="):
            lines.append(line)


def parse(output: str, status: int, kernels: set[str]) -> Result:
    """Return the result of a tool over pytest, from its output.

    Reports without a kernel count as the plugin's.
    """
    ours, others = collections.Counter(), collections.Counter()
    totals, why = [], ""
    for head, text in reports(output):
        if summary := SUMMARY.match(head):
            totals.append(int(summary[1]))
        if "Internal Sanitizer Error" in head or "Unable to" in head:
            why = head
        if SILENT.match(head):
            continue
        place = re.search(r"\bat (?:0x[0-9a-f]+ in )?(.+?)(?:\+0x[0-9a-f]+)?(?: in .*)?$", text, re.MULTILINE)
        where = sorted(kernels & {*re.findall(r"\w+", text)})
        what = re.sub(r" at .*| from .*|0x[0-9a-f]+", "", head).strip()
        if where or not place:
            ours[f"{what} in {where[0]}" if where else what] += 1
        else:
            others[f"{what} in {place[1]}"] += 1
    counts = {word: int(n) for n, word in OUTCOME.findall(output)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    unprinted = sum(totals) - ours.total() - others.total()
    if not totals:
        why = why or "there is no summary"
    elif not counts:
        why = why or "no test ran"
    elif "skipped" in counts:
        why = why or f"{counts['skipped']} tests were skipped"
    elif unprinted > 0:
        why = why or f"{unprinted} errors were not printed"
    elif status not in (0, FOUND) and not failed:
        why = why or f"exit status {status}"
    return Result(dict(ours), dict(others), counts.get("passed", 0), failed, why)


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer, or raise SystemExit."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    homes += sorted(map(str, pathlib.Path("/usr/local").glob("cuda*")), reverse=True)
    folders = [folder for home in homes for folder in (f"{home}/bin", f"{home}/compute-sanitizer")]
    packaged = [
        path.parent for root in map(pathlib.Path, sys.path) for path in root.glob("nvidia/**/compute-sanitizer")
    ]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *folders, *map(str, packaged)]))
    if found is None:
        raise SystemExit(
            "compute-sanitizer is not on PATH and in no CUDA toolkit; it is a part of NVIDIA's CUDA toolkit"
        )
    return found


def gpu() -> Arch:
    """Return the name of this machine's first GPU, or raise SystemExit if compute-sanitizer does not support it."""
    arch = archs.of_device(0) if torch.cuda.is_available() and not torch.version.hip else None
    if arch is None:
        raise SystemExit("compute-sanitizer needs an NVIDIA GPU that the kernels are compiled for, and finds none")
    return arch


@dataclasses.dataclass(frozen=True)
class Share:
    """Tests that one process runs under a tool."""

    tool: str
    tests: list[str]
    log: pathlib.Path
    environment: dict[str, str]

    def run(self, sanitizer: str, began: dict[str, float], seconds: float) -> int | None:
        """Return the exit status, or None if the tool exceeds `seconds` since it began its first share."""
        left = began.setdefault(self.tool, time.monotonic()) + seconds - time.monotonic()
        command = [sanitizer, "--tool", self.tool, "--error-exitcode", str(FOUND), "--print-limit", str(PRINTED)]
        command += ["--report-api-errors", "no"] if self.tool == "memcheck" else []
        command += [sys.executable, "-m", "pytest", "-q", "-o", "verbosity_test_cases=1", "-p", "no:cacheprovider"]
        command += ["--tb=short", *self.tests]
        with self.log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **self.environment}, start_new_session=True
            )
            try:
                return process.wait(max(left, 0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None

    def not_ended(self) -> list[str]:
        """Return the tests without an outcome in the log, in order; the first may have begun."""
        ended = re.findall(r"\b(?:PASSED|FAILED|ERROR|SKIPPED)\b", self.log.read_text(errors="replace"))
        return [test.rpartition("::")[2] for test in self.tests if "::" in test][len(ended) :]

    def result(self, status: int | None, kernels: set[str]) -> Result:
        found = parse(self.log.read_text(errors="replace"), status or 0, kernels)
        if status is None:
            found = dataclasses.replace(found, why=f"it took longer than --timeout: {self.log}")
        return found


def shares(tools: list[str], tests: list[str], whole: bool, workers: int, logs: pathlib.Path) -> list[Share]:
    """Return the shares of all processes, ordered by tool.

    Each has a GPU and its part of the CPU cores.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = itertools.cycle(named.split(",") if named else map(str, range(torch.cuda.device_count() or 1)))
    of_all = {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONUNBUFFERED": "1",
        "FULL_TESTS": "1",
        "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // workers, 1)),
    }
    dealt = [tests] if whole else [part for place in range(workers) if (part := tests[place::workers])]
    return [
        Share(tool, part, logs / f"{tool}-{place}.log", of_all | {"CUDA_VISIBLE_DEVICES": next(gpus)})
        for tool in tools
        for place, part in enumerate(dealt)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tool", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    add("-k", metavar="EXPRESSION", help="tests of tests/ops, as pytest takes it")
    add("--of-each", type=int, default=3, help="cases of each op at least; default: %(default)s")
    add("--workers", type=int, default=1, help="processes at once; default: %(default)s")
    add("--timeout", type=float, default=1800, help="seconds for one tool; default: %(default)s")
    add("--logs", type=pathlib.Path, help="folder that keeps each process' output; default: a new one")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, got {arguments.workers}")
    arch, sanitizer = gpu(), find_sanitizer()
    kernels = {name for the_op in op.registered() for case in the_op.cases() for name in kernels_of(the_op, case, arch)}
    tests = [str(OP_TESTS), "-k", arguments.k] if arguments.k else []
    for the_op, case in [] if arguments.k else chosen(arch, arguments.of_each):
        tests.append(f"{file_of_tests(the_op)}::test_case[{arch.name}-{the_op.name}-{case.name}]")
    logs = arguments.logs or pathlib.Path(tempfile.mkdtemp(prefix="sanitize-"))
    logs.mkdir(parents=True, exist_ok=True)
    parts = shares(arguments.tool, tests, bool(arguments.k), arguments.workers, logs)
    well, began = True, {}
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        running = [(part, pool.submit(part.run, sanitizer, began, arguments.timeout)) for part in parts]
        for tool, of_tool in itertools.groupby(running, lambda one: one[0].tool):
            ended = [(part, future.result()) for part, future in of_tool]
            results = [part.result(status, kernels) for part, status in ended]
            result = functools.reduce(Result.__add__, results)
            well &= result.is_clean
            state, seconds = "clean" if result.is_clean else "WRONG", time.monotonic() - began[tool]
            print(f"{tool}: {state}: {result.told()}, {seconds:.0f} s", flush=True)
            for what, count in sorted({**result.ours, **result.others}.items()):
                print(f"  {count} x {what}", flush=True)
            for (part, status), of_part in zip(ended, results, strict=True):
                for test in part.not_ended() if status is None else ():
                    print(f"  did not end: {test}", flush=True)
                if status is not None and (of_part.why or of_part.failed):
                    last = part.log.read_text(errors="replace").splitlines()[-20:]
                    print(f"  {part.log}:", *(f"  | {line}" for line in last), sep="\n", flush=True)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
