"""Report the environment, and which seams and kernels are enabled, or why not."""

from __future__ import annotations

import argparse
import json as json_module

from vllm_rocm_ops.tools import doctor


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verbose", action="store_true", help="list every module, seam, measured time and op, too")


def run(json: bool, verbose: bool) -> int:
    """Print the report."""
    report = doctor.find()
    print(json_module.dumps(report, indent=1) if json else doctor.text(report, verbose))
    return 0
