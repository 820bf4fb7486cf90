"""Show what is installed and used here, and what is not and why."""

from __future__ import annotations

import argparse
import json as json_module

from vllm_rocm_ops.tools import doctor


def add(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument("--json", action="store_true", help="for machines")


def run(json: bool) -> int:
    """Print what is found."""
    found = doctor.find()
    print(json_module.dumps(found, indent=1) if json else doctor.text(found))
    return 0
