"""Run a call in the emulator and report registers, LDS, instructions, bytes and waits (needs the extra [emulator])."""

from __future__ import annotations

import argparse

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.tools import explain, options


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("op", choices=options.op_names(), metavar="op", help="op name, as in explain")
    parser.add_argument("--arch", help="AMD architecture or product (default: as in explain)")
    options.add_call(parser)


def run(op: str, arch: str | None, first: tuple[tuple[int, ...], torch.dtype | None], given: list[str]) -> int:
    """Print the report of the call's kernels. Raises ImportError without the extra, and ValueError."""
    the_op = getattr(ops, op)
    arguments = options.parse_arguments_of(the_op, given)
    for line in explain.emulate(the_op, arch or explain.usual_arch(), *first, **arguments):
        print(line, flush=True)
    return 0
