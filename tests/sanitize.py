"""NVIDIA's compute-sanitizer over the op tests, on a GPU that our code is compiled for (sm_90): a line for each of its tools.

    python tests/sanitize.py [--tool memcheck racecheck initcheck synccheck] [-k EXPRESSION] [--of-each 3] [--part 1/2]

Runs cases of tests/ops/test_ops.py, in all configurations: for each kernel the smallest that runs it, and --of-each of an op at
least. With -k, pytest's own, it runs those tests of tests/ops that fit instead. With --part 1/2 it runs every second of its cases, with
--part 2/2 the others, for where time is short.

Fails if a tool found anything in a kernel of ours or could not say where, if a test failed or none ran, and if a tool takes longer
than --timeout. Each tensor is an allocation of its own, so that an access beyond one shows. racecheck looks at shared memory only.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
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

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import op, ops  # noqa: F401  the ops register when they are imported
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.op import Case, Op

OP_TESTS = pathlib.Path(__file__).resolve().parent / "ops"
TOOLS = "memcheck", "racecheck", "initcheck", "synccheck"
FOUND = 86  # the exit status of a tool that has found something
PRINTED = 100_000  # reports at most
HEAD = re.compile(r"^========= (\S.*)$")
SUMMARY = re.compile(r"^(?:\w+ SUMMARY: (\d+) (?:error|hazard)s?(?: displayed.*)?)$")
SILENT = re.compile(
    r"^(COMPUTE-SANITIZER|\w+ SUMMARY:|Target application returned an error|Saved host backtrace|Host Frame)"
)
OUTCOME = re.compile(r"(\d+) (passed|failed|error)s?\b(?=.* in [\d.]+s)")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a tool said: how often it found what in which kernel of ours, and in others; tests that passed and failed; why it cannot
    be trusted, if so."""

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


def kernels_of(the_op: Op, case: Case, arch: Arch) -> set[str]:
    """Those that a case runs in its configurations."""
    a = the_op.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
    plans = (the_op.plan(config, the_op.allocate(a), a, arch) for config in the_op.configs(a, arch))
    return {planned.symbol for plan in plans for planned in plan}


def size_of(the_op: Op, case: Case, arch: Arch) -> int:
    """Elements of a case's tensors."""
    return sum(x.numel() for x in case.make("meta", torch.Generator(), arch.fp8_dtype) if isinstance(x, torch.Tensor))


def chosen(arch: Arch, of_each: int) -> list[tuple[Op, Case]]:
    """For each kernel the smallest case that runs it, and so many of each op that has kernels."""
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
    """Each report of a tool: its first line, and all of its lines."""
    lines: list[str] = []
    for line in [*output.splitlines(), "========= end"]:
        if HEAD.match(line) and not re.match(r"=+ and ", line):
            if lines:
                yield HEAD.match(lines[0])[1], "\n".join(lines)
            lines = [line]
        elif lines and line.startswith("========="):
            lines.append(line)


def parse(output: str, status: int, kernels: set[str]) -> Result:
    """What the output of a tool over pytest says. Reports that name no kernel count as ours."""
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
    elif unprinted > 0:
        why = why or f"{unprinted} errors were not printed"
    elif status not in (0, FOUND) and not failed:
        why = why or f"exit status {status}"
    return Result(dict(ours), dict(others), counts.get("passed", 0), failed, why)


def find_sanitizer() -> str:
    """The path of compute-sanitizer. SystemExit where there is none."""
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
    """What this machine's first GPU is. SystemExit where it has none that compute-sanitizer checks."""
    arch = archs.of_device(0) if torch.cuda.is_available() and not torch.version.hip else None
    if arch is None:
        raise SystemExit("compute-sanitizer needs an NVIDIA GPU that the kernels are compiled for, and finds none")
    return arch


def run(sanitizer: str, tool: str, tests: list[str], seconds: float) -> tuple[str, int | None]:
    """The output of a tool over these tests and its exit status, which is None if it took too long."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", str(PRINTED)]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        return output.read(), status


def share(text: str) -> tuple[int, int]:
    """Which part of how many, of "1/2". Raises ValueError."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tool", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    add("-k", metavar="EXPRESSION", help="tests of tests/ops, as pytest takes it")
    add("--of-each", type=int, default=3, help="cases of each op at least; default: %(default)s")
    add("--part", type=share, default=(1, 1), metavar="I/N", help="of the cases; default: all of them")
    add("--timeout", type=float, default=1800, help="seconds for one tool; default: %(default)s")
    add("--logs", type=pathlib.Path, help="folder that keeps each tool's output")
    arguments = parser.parse_args(argv)
    arch, sanitizer = gpu(), find_sanitizer()
    kernels = {name for the_op in op.registered() for case in the_op.cases() for name in kernels_of(the_op, case, arch)}
    tests = [str(OP_TESTS), "-k", arguments.k] if arguments.k else []
    part, parts = arguments.part
    for the_op, case in [] if arguments.k else chosen(arch, arguments.of_each)[part - 1 :: parts]:
        tests.append(f"{OP_TESTS / 'test_ops.py'}::test_case[{arch.name}-{the_op.name}-{case.name}]")
    well = True
    for tool in arguments.tool:
        start = time.monotonic()
        output, status = run(sanitizer, tool, tests, arguments.timeout)
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            (arguments.logs / f"{tool}.log").write_text(output)
        result = parse(output, status or 0, kernels)
        if status is None:
            result = dataclasses.replace(result, why=f"it took longer than --timeout {arguments.timeout:g}")
        well &= result.is_clean
        print(
            f"{tool}: {'clean' if result.is_clean else 'WRONG'}: {result.told()}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        for what, count in sorted({**result.ours, **result.others}.items()):
            print(f"  {count} x {what}", flush=True)
        if result.why or result.failed:
            print("\n".join(f"  | {line}" for line in output.splitlines()[-20:]), flush=True)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
