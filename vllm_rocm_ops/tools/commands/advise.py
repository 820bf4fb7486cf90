"""Time a model's layers under the other setting of AITER on this GPU, and say which flag is faster. No flag is changed."""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import time

from vllm_rocm_ops.core import envs
from vllm_rocm_ops.tools import advise, options
from vllm_rocm_ops.tools.check_worker import Worker

SIZES = 1, 8, 64
MINUTES = 5.0


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_model(parser, ",".join(map(str, SIZES)), required=True)
    meaning = f"time limit, in minutes; remaining pairs are left out (default: {MINUTES:.0f})"
    parser.add_argument("--minutes", type=float, default=MINUTES, help=meaning)


def run(model: str, tp: int | None, ep: int | None, batch: tuple[int, ...] | None, minutes: float) -> int:
    """Print each pair, then what serves and the faster flags. Raises RuntimeError without a GPU."""
    if not 0 < minutes < math.inf:
        raise ValueError(f"advise: --minutes must be positive, got {minutes}")
    envs.hand_down({"VLLM_ROCM_USE_AITER": "1"})  # vLLM's call of AITER is to find the settings that it has then
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_rocm_ops.tools.advise"])
    with contextlib.closing(Worker(context)) as worker:
        record = advise.survey(worker, model, tp, ep, batch or SIZES, time.monotonic() + 60 * minutes)
    for line in advise.lines(record):
        print(line)
    return 0
