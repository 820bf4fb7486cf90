"""Judge the problems of AMD and GPU MODE's contests, on a GPU in full, or in the emulator at reduced size.

python serving_benchmarks/contests gemm                        # on a GPU: checks, times, score
python serving_benchmarks/contests mla --emulate gfx942        # without one: reduced sizes, checked, not timed
python serving_benchmarks/contests moe --submission mine.py    # judges custom_kernel(data) of a file in the same way
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # Python runs the folder, and searches modules in it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from contests import gemm, mla, moe, submission
from contests.judge import Judge, Machine, Verdict, gpu, score
from vllm_rocm_ops.core import launch

CONTESTS = {module.CONTEST.name: module.CONTEST for module in (gemm, moe, mla)}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options; exit with an error if they do not fit."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="contests", description=__doc__, formatter_class=formatter)
    add, stage = parser.add_argument, "with -c: print only the best us of the plugin's stage N; 0 is the total"
    add("contest", choices=CONTESTS, help="contest whose problems are checked and timed by its rules")
    add("--submission", type=Path, metavar="FILE", help="file with a custom_kernel(data) (default: the plugin)")
    add("--emulate", metavar="ARCH", help="check in the emulator of this architecture, at reduced size, untimed")
    add("--ranked", action="store_true", help="use new inputs for each call and check each, as in a ranked run")
    add("-c", dest="number", type=int, metavar="N", help="number of a single benchmark, from 0 (default: all)")
    add("-t", dest="stage", type=int, metavar="N", help=stage)
    add("-b", "--once", action="store_true", help="check and time one call each")
    add("-p", "--profile", action="store_true", help="only call, under an external profiler")
    arguments = parser.parse_args(argv)
    if arguments.emulate and (arguments.number is not None or arguments.stage is not None or arguments.ranked):
        parser.error("--emulate is untimed: it excludes -c, -t and --ranked")
    if arguments.profile and (arguments.once or arguments.emulate):
        parser.error("-p is unchecked: it excludes -b and --emulate")
    if arguments.stage is not None and (arguments.number is None or arguments.submission):
        parser.error("-t needs -c and no --submission: a submission has no stages")
    count = len(CONTESTS[arguments.contest].benchmarks)
    if arguments.number is not None and not 0 <= arguments.number < count:
        parser.error(f"-c must be 0 to {count - 1} for {arguments.contest}, got {arguments.number}")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts and the score. Returns 1 if a result is wrong."""
    contest = CONTESTS[arguments.contest]
    kernel = contest.ours
    if arguments.submission:
        custom_kernel = submission.load(arguments.submission)
        kernel = lambda data, stage: custom_kernel(data)
    if arguments.emulate:
        from vllm_rocm_ops.emulator import cases as emulated  # an extra

        emulator = emulated.emulator_of(arguments.emulate)
        print(f"{contest.name} in the emulator of {emulator.arch}, at reduced size, untimed")
        with launch.executor(emulator):
            judge = Judge(contest, kernel, Machine("cpu", emulator.arch.fp8_dtype))
            return _say("case", (judge.checked(number, sizes) for number, sizes in enumerate(contest.reduced)))
    try:
        judge = Judge(contest, kernel, gpu())
    except RuntimeError as error:
        raise RuntimeError(f"a contest needs a GPU or --emulate: {error}") from None
    if arguments.stage is not None:
        return _print_stage(judge, arguments.number, arguments.stage)
    if judge.machine.rounding and contest.terms is gemm.CONTEST.terms:
        print("tolerance: plus 2^-11 of a sum's absolute terms, as NVIDIA's FP8 instructions keep 14 bits")
    numbers = range(len(contest.benchmarks)) if arguments.number is None else [arguments.number]
    if arguments.profile:
        return _say("case", (judge.profiled(number) for number in numbers))
    tests = contest.tests if arguments.number is None else ()
    if _say("test", (judge.checked(number, sizes) for number, sizes in enumerate(tests))):
        print("wrong results: no timing")
        return 1
    timed: list[Verdict] = []

    def verdicts() -> Iterator[Verdict]:
        for number in numbers:
            timed.append(judge.timed(number, arguments.once, arguments.ranked))
            yield timed[-1]

    failed = _say("case", verdicts())
    print("wrong results: no score" if failed else score(timed))
    return failed


def _say(kind: str, verdicts: Iterator[Verdict]) -> int:
    """Print verdicts as they arrive. Returns 1 if one is wrong."""
    failed = 0
    for verdict in verdicts:
        print("\n".join(verdict.lines(kind)), flush=True)
        failed |= bool(verdict.wrong)
    return failed


def _print_stage(judge: Judge, number: int, stage: int) -> int:
    """Print the best microseconds of a stage, for scripts."""
    verdict = judge.timed(number, once=False, ranked=False)
    if verdict.wrong:
        return _say("case", iter([verdict]))
    best = [min(verdict.times), *verdict.stages.values()]
    if not 0 <= stage < len(best):
        raise ValueError(f"-t must be 0 to {len(best) - 1}, got {stage}")
    print(f"{best[stage] * 1e6:.6f}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    try:
        return run(arguments)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)  # torch's errors continue with a stack
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
