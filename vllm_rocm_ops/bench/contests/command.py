"""`vllm-rocm-ops bench --contest KIND`: a contest's problems, judged on a GPU in full or in the emulator at reduced size."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from vllm_rocm_ops import launch
from vllm_rocm_ops.bench.clock import GpuClock
from vllm_rocm_ops.bench.contests import gemm, mla, moe, submission
from vllm_rocm_ops.bench.contests.judge import Emulated, Gpu, Judge, Verdict, score

CONTESTS = {module.CONTEST.name: module.CONTEST for module in (gemm, moe, mla)}
OPTIONS = ("submission", "number", "stage", "ranked")  # that mean something with --contest alone
WITH = ("command", "contest", "once", "profile", "emulate", "jobs", "vllm_version", "shapes", "model", *OPTIONS)


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of contests to those of bench."""
    add = command.add_argument_group("contests of AMD and GPU MODE's Inference Sprint").add_argument
    meaning = "the problems of a contest, checked and timed by its rules; with --emulate checked at reduced size; "
    add("--contest", choices=CONTESTS, help=meaning + "-b checks and times one call each, -p only calls")
    add("--submission", type=Path, metavar="FILE", help="judge the custom_kernel(data) of this file in place of ours")
    add("--ranked", action="store_true", help="new inputs for each call, each checked, as in a ranked run")
    add("-c", dest="number", type=int, metavar="N", help="the benchmark of this number only, from 0")
    add("-t", dest="stage", type=int, metavar="N", help="with -c: print the best us of ours' stage N only; 0 is all")


def refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with an error where options do not fit."""
    given = {
        name for name, value in vars(arguments).items() if value is not None and value is not False and value != ""
    }
    if arguments.contest is None:
        names = {"number": "-c", "stage": "-t", "submission": "--submission", "ranked": "--ranked"}
        without = [names[name] for name in OPTIONS if name in given]
        if without:
            parser.error(f"{' '.join(without)} needs --contest")
        return
    others = given - set(WITH) | given & {"shapes", "model"}
    if others:
        parser.error(
            f"--contest goes with none of {' '.join(f'--{name}'.replace('_', '-') for name in sorted(others))}"
        )
    if arguments.emulate and given & {"number", "stage", "ranked"}:
        parser.error("--emulate times nothing: it goes with none of -c -t --ranked")
    if arguments.stage is not None and (arguments.number is None or arguments.submission):
        parser.error("-t needs -c, and ours: a submission has no stages")
    count = len(CONTESTS[arguments.contest].benchmarks)
    if arguments.number is not None and not 0 <= arguments.number < count:
        parser.error(f"-c must be 0 to {count - 1} with --contest {arguments.contest}, got {arguments.number}")


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdicts and the score; 1 if a result is wrong."""
    contest = CONTESTS[arguments.contest]
    kernel = contest.ours
    if arguments.submission:
        custom_kernel = submission.load(arguments.submission)

        def kernel(data, stage):
            return custom_kernel(data)

    if arguments.emulate:
        from vllm_rocm_ops import emulated  # an extra

        emulator = emulated.emulator_of(arguments.emulate)
        print(f"{contest.name} in the emulator of {emulator.arch}, at reduced size; nothing is timed")
        with launch.executor(emulator):
            judge = Judge(contest, kernel, Emulated(emulator.arch.fp8_dtype))
            return _say("case", (judge.checked(number, sizes) for number, sizes in enumerate(contest.reduced)))
    try:
        judge = Judge(contest, kernel, Gpu(GpuClock().arch.fp8_dtype))
    except RuntimeError as error:
        raise RuntimeError(f"--contest needs a GPU or --emulate: {error}") from None
    if arguments.stage is not None:
        return _print_stage(judge, arguments.number, arguments.stage)
    if judge.machine.rounding and contest.terms is gemm.CONTEST.terms:
        print("results may be off by 2^-11 of the terms of a sum too: NVIDIA's FP8 instructions keep 14 bits")
    numbers = range(len(contest.benchmarks)) if arguments.number is None else [arguments.number]
    if arguments.profile:
        return _say("case", (judge.profiled(number) for number in numbers))
    if arguments.number is None:
        tests = (judge.checked(number, sizes) for number, sizes in enumerate(contest.tests))
        if _say("test", tests):
            print("results are wrong: nothing is timed")
            return 1
    timed: list[Verdict] = []

    def verdicts() -> Iterator[Verdict]:
        for number in numbers:
            timed.append(judge.timed(number, arguments.once, arguments.ranked))
            yield timed[-1]

    failed = _say("case", verdicts())
    print("results are wrong: there is no score" if failed else score(timed))
    return failed


def _say(kind: str, verdicts: Iterator[Verdict]) -> int:
    """Prints verdicts as they come; 1 if one is wrong."""
    failed = 0
    for verdict in verdicts:
        print("\n".join(verdict.lines(kind)), flush=True)
        failed |= bool(verdict.wrong)
    return failed


def _print_stage(judge: Judge, number: int, stage: int) -> int:
    """Prints the best microseconds of a stage, for scripts."""
    verdict = judge.timed(number, once=False, ranked=False)
    if verdict.wrong:
        return _say("case", iter([verdict]))
    best = [min(verdict.times), *verdict.stages.values()]
    if not 0 <= stage < len(best):
        raise ValueError(f"bench --contest: -t must be 0 to {len(best) - 1}, got {stage}")
    print(f"{best[stage] * 1e6:.6f}")
    return 0
