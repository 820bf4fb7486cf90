"""Check and benchmark every op on this GPU, and write one report file, within three minutes."""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import time
from pathlib import Path

from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.tools import check
from vllm_rocm_ops.tools.check_worker import Worker


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="report file (default: ./vllm-rocm-ops-check-<GPU>-<time>.json)"
    )
    parser.add_argument("--op", default="*", metavar="PATTERN", help="op name pattern; skips bandwidth and models")
    meaning = f"time limit, in minutes; remaining parts are skipped (default: {check.MINUTES:.0f})"
    parser.add_argument("--minutes", type=float, default=check.MINUTES, help=meaning)
    meaning = "run in the emulator of this architecture instead of a GPU (needs the extra [emulator])"
    parser.add_argument("--emulate", metavar="ARCH", help=meaning)


def run(output: Path | None, op: str, minutes: float, emulate: str | None) -> int:
    """Run all parts and write the report after each. Returns 1 if a part failed or did not finish."""
    if emulate:
        archs.named(emulate)
    if not 0 < minutes < math.inf:
        raise ValueError(f"check: --minutes must be positive, got {minutes}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_rocm_ops.tools.check"])
    end = time.monotonic() + 60 * minutes
    with contextlib.closing(Worker(context)) as worker:
        parts, path, failed = check.run_parts(worker, output, op, emulate, end)
    for line in frozen.beside([piece for part in parts for piece in part["found"]]):
        print(line)
    bad = sum(bool(check.wrong_of(part)) for part in parts)
    left_out = sum(part["ended"] == "left out" for part in parts)
    text = f"{len(parts)} parts, {f'{bad} failed' if bad else 'no failures'}"
    why = f"{failed} failed" if failed else "time limit"
    print(text + (f", {left_out} skipped ({why})" if left_out else ""))
    if not (emulate or any(part["part"].startswith("emulator") for part in parts)):
        print("emulator counters skipped: they need the extra vllm-rocm-ops[emulator]")
    code = [piece["code"] for part in parts for piece in part["found"] if "code" in piece]
    for origin in [launch.origin(archs.named(emulate).name)] if emulate else code:
        print(f"code objects: {origin}")
    print(f"report: {path.resolve()} (please attach it to an issue)")
    return int(bad > 0)
