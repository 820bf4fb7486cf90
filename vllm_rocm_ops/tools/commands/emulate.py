"""Run a call in the emulator: registers, LDS, instructions, bytes and waits of its kernels; needs the extra [emulator]."""

from __future__ import annotations

import argparse

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.tools import explain, options


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("op", choices=options.op_names(), metavar="op", help="an op, as explain takes it")
    parser.add_argument("--arch", help="an AMD architecture; default: as explain takes it")
    options.add_call(parser)


def run(op: str, arch: str | None, first: tuple[tuple[int, ...], torch.dtype | None], given: list[str]) -> int:
    """Print what the call's kernels have and do. Raises ImportError without the extra, and ValueError."""
    the_op = getattr(ops, op)
    arguments = explain.parse_arguments_of(the_op, given)
    for line in explain.emulate(the_op, arch or explain.usual_arch(), *first, **arguments):
        print(line, flush=True)
    return 0
