"""Autotune kernel configurations for a model on this GPU, and save them."""

from __future__ import annotations

import argparse
import sys

import torch

from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.tools import options
from vllm_rocm_ops.tools.bench import tune
from vllm_rocm_ops.tools.bench.baselines import baselines


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    decode = f"vLLM's graph capture sizes 1, 2, 4, 8, 16, 24, ... {tune.DECODE[-1]}"
    options.add_model(parser, decode, required=True)
    parser.add_argument(
        "--op", choices=options.op_names(), metavar="OP", help="op to tune (default: all of the model's)"
    )
    parser.add_argument("--prefill", action="store_true", help=f"also tune {', '.join(map(str, tune.PREFILL))} tokens")
    parser.add_argument("--force", action="store_true", help="measure shapes that already have a row, too")
    parser.add_argument("--no-baselines", action="store_true", help="skip the kernels of PyTorch, vLLM and AITER")


def run(
    model: str,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    op: str | None,
    prefill: bool,
    force: bool,
    no_baselines: bool,
) -> int:
    """Write each row as soon as it is measured, and print a summary. Raises RuntimeError without a GPU."""
    clock = clocks.GpuClock()
    calls = [call for call in options.calls_of(model, tp, ep, clock.arch) if op in (None, call.op.name)]
    in_decode, refused = tune.problems([call for call in calls if call.count], batch or tune.DECODE, clock.arch)
    in_prefill, more = tune.problems(calls, tune.PREFILL if prefill else (), clock.arch)
    done = tune.tune(
        [*in_decode, *in_prefill],
        clock,
        envs.tables(),
        baselines=(lambda op: {}) if no_baselines else baselines,
        force=force,
        on=archs.product_of(torch.cuda.current_device()),
        log=sys.stderr,
    )
    print(tune.summary(done, refused | more, clock))
    return 0
