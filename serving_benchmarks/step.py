"""Predict a model's decode step on an AMD GPU, launch by launch, without a GPU (needs the extra [emulator]).

    python -m serving_benchmarks.step --model deepseek-v3 --tp 8 --batch 1,8

timing_study/step.py says how a step is modeled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.tools import options

if __package__:  # with -m, sys.path lacks this folder
    sys.path.insert(0, str(Path(__file__).parent))


def lines(given: argparse.Namespace) -> Iterator[str]:
    """Yield the report's lines. Raises ValueError, and ImportError without the extra."""
    machine = machines.named(given.arch)
    from timing_study import refit, step, step_report

    machine = refit.of_user(machine)
    options.calls_of(given.model, given.tp, given.ep)  # its errors name the model
    asked = model_config.read(given.model), given.tp or 1, given.ep, given.batch or (1,), machine, given.context
    yield from refit.said(machine)
    yield from step_report.lines(*asked, step.live_time(machine, given.context))


def main(argv: list[str] | None = None) -> int:
    """Print the steps and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serving_benchmarks.step", description=__doc__.partition("\n")[0])
    options.add_model(parser, required=True)
    options.add_machine(parser)
    try:
        for line in lines(parser.parse_args(argv)):
            print(line, flush=True)
    except (ImportError, ValueError, RuntimeError) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)  # torch's errors go on with a stack
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
