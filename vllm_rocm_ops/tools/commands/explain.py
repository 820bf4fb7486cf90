"""Explain which kernel serves a call, or each call of a model, and why; no GPU needed."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers, vllm_launches
from vllm_rocm_ops.tools import explain, options


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    pages = Path(vllm_rocm_ops.__file__).parent / "docs"
    parser.epilog = f"Reference pages of the ops (arguments, numerics, performance): {pages}"
    names = options.op_names()
    parser.add_argument("op", nargs="?", choices=names, metavar="op", help="one of: " + ", ".join(names))
    options.add_model(parser)
    first = next(iter(archs.ARCHS))
    arch = f"architecture, optionally with :compute units, or product, e.g. {first}:80 or MI300X (default: this GPU, else {first})"
    parser.add_argument("--arch", help=arch)
    options.add_call(parser)
    meaning = "with --model: add each call's op, blocks and configuration"
    parser.add_argument("--verbose", action="store_true", help=meaning)


def run(
    op: str | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    arch: str | None,
    first: tuple[tuple[int, ...], torch.dtype | None],
    given: list[str],
    verbose: bool,
) -> int:
    """Print the explanation. Raises ValueError, TypeError and RuntimeError."""
    if (op is None) == (model is None):
        raise ValueError("explain needs either an op or --model")
    arch = arch or explain.usual_arch()
    if op:
        the_op = getattr(vllm_rocm_ops.ops, op)
        print(explain.explain(the_op, arch, *first, **options.parse_arguments_of(the_op, given)), flush=True)
        return 0
    known = archs.named(arch)
    calls = options.calls_of(model, tp, ep, known)
    config = model_config.read(model)
    around = explain.around(config, tp or 1, ep, known)
    others = layers.unserved(config, tp or 1, ep, layers.built_for(known))
    batches = batch or (1,)
    rows = explain.table([*calls, *around], known, batches, verbose, others)
    lines = explain.lines_of(rows if verbose else explain.shortened(rows), verbose)
    if not verbose:
        step = layers.launches(config, tp or 1, ep, layers.built_for(known))
        lines += ["", *explain.summary(rows, step, batches, tp or 1)]
    for line in lines:
        print(line, flush=True)
    print(f"layers as vLLM {vllm_launches.version(config, tp or 1, tp if ep == 0 else ep)} builds them", flush=True)
    return 0
