"""Calls of decode whose configurations are measured on a GPU, all of them: what a prediction of each is compared with.

    python -m vllm_rocm_ops.timing.configurations > FILE

A line is a call: the median time of each configuration in us, from graphs, with every tensor cold; the configuration that a call gets;
and how far the middle half of the samples spreads. Calls go in the order of a hash of what they are, so that those which were measured
before time ran out are any.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.bench import clock, experts, shapes, tune
from vllm_rocm_ops.model_arguments import Inputs
from vllm_rocm_ops.op import Case, Op

ROWS, TOKENS, TILED_TOKENS = (1, 16, 256), (1, 16, 64), (128,)
SHARES = ("deepseek-v3-tp8", "deepseek-v3-ep8", "qwen3-30b-a3b", "mixtral-8x7b-tp2")
NORMS = (
    ops.fused_add_rms_norm,
    ops.fused_add_rms_norm_static_fp8_quant,
    ops.rms_norm_per_block_quant,
)
ACTIVATIONS = (ops.silu_and_mul, ops.silu_and_mul_quant, ops.silu_and_mul_per_block_quant)
MOST_WEIGHT = 2**26  # elements
EXPERT_CALLS = 16  # of a graph, with the same weights


class Point(NamedTuple):
    """A call whose configurations are measured."""

    kind: str
    op: Op
    case: Case

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.case.name}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()


def _case(name: str, arguments: Callable, *sizes) -> Case:
    return shapes.made_case(name, torch.bfloat16, arguments, *sizes)


def _gemms() -> Iterator[Point]:
    found = set()
    for model, of in (("llama", ops.scaled_mm), ("deepseek", ops.block_scaled_mm), ("deepseek", ops.unquantized_gemm)):
        for call, n, k in shapes.linear_layers(shapes.MODELS[model], shapes.TP):
            plain = call.op is ops.unquantized_gemm
            if (
                not call.count
                or plain != (of is ops.unquantized_gemm)
                or n * k > MOST_WEIGHT
                or (of.name, n, k) in found
            ):
                continue
            found.add((of.name, n, k))
            arguments, *how = shapes.GEMMS[of]
            small = n * k < 2**25 and not plain
            for m in (*TOKENS, *(TILED_TOKENS if small else ())):
                kind = "tiled GEMM" if m in TILED_TOKENS else "skinny GEMM"
                yield Point(kind, of, _case(f"{m}x{n}x{k}", arguments, m, n, k, *how))


def in_turn(arguments: tuple, number: int = 0) -> tuple:
    """Experts' arguments with tokens that go to all experts of this rank in turn, from another one on in each call."""
    a = ops.fused_experts.Arguments(*arguments)
    ids, here = a.topk_ids.numel(), len(a.w1)
    turn = (torch.arange(ids, device=a.topk_ids.device) + number * ids) % here
    return tuple(a._replace(topk_ids=turn.view(a.topk_ids.shape).to(a.topk_ids.dtype)))


def _experts(m: int, inputs: Inputs, share: experts.Share, quantization: str) -> tuple:
    made = experts.arguments_of(m, inputs, share, quantization)
    return made if inputs.device == "meta" else in_turn(made)


def points() -> list[Point]:
    """All, in the order of their hashes."""
    found = list(_gemms())
    for hidden, m in itertools.product(shapes.HIDDEN, ROWS):
        for op in (*NORMS, *ACTIVATIONS):
            arguments, *how = shapes.ROW_OPS[op]
            kind = "norm" if op in NORMS else "SwiGLU"
            found.append(Point(kind, op, _case(f"{m}x{hidden}", arguments, m, hidden, *how)))
    for name, m in itertools.product(SHARES, TOKENS):
        share = experts.SHARES[name]
        found.append(Point("experts", ops.fused_experts, _case(f"{name} {m}", _experts, m, share, experts.BLOCKS)))
    return sorted(found, key=lambda point: point.digest)


def held_out(found: list[Point]) -> set[str]:
    """The names of those whose times are not fitted: of each kind, the half with the larger hashes."""
    names = set()
    for kind in {point.kind for point in found}:
        of_kind = sorted((point for point in found if point.kind == kind), key=lambda point: point.digest)
        names |= {point.name for point in of_kind[(len(of_kind) + 1) // 2 :]}
    return names


def configurations(op: Op, a, arch: Arch) -> list:
    """Those of a call but general kernels, where others take it too."""
    found = op.configs(a, arch)
    return [config for config in found if getattr(config, "vectors_per_thread", 1)] or list(found)


def _sets(point: Point, timer: clock.Clock) -> list[tuple]:
    if point.op is not ops.fused_experts:
        return tune.inputs(point.case, timer)
    generator = torch.Generator(timer.device).manual_seed(0)
    first = ops.fused_experts.Arguments(*point.case.make(timer.device, generator, timer.arch.fp8_dtype))
    calls = range(EXPERT_CALLS)
    return [in_turn(first._replace(hidden=torch.randn_like(first.hidden)), number) for number in calls]


def measure(point: Point, timer: clock.Clock) -> dict[str, object]:
    """The times of all configurations of a call."""
    sets, op = _sets(point, timer), point.op
    a = op.Arguments(*sets[0])
    chosen = op.explain(*sets[0], arch=timer.arch, require_code=True).config
    prepared = {}
    for config in configurations(op, a, timer.arch):
        with op.running(config):
            prepared[config] = timer.prepare(op, sets)
    us, spread = {}, []
    for config, samples in timer.samples(prepared).items():
        low, us[str(config)], high = statistics.quantiles(samples, n=4)
        spread.append((high - low) / us[str(config)])
    return {
        "op": op.name,
        "case": point.case.name,
        "us": {config: round(value, 3) for config, value in us.items()},
        "chosen": str(chosen),
        "spread": round(statistics.median(spread), 4),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_rocm_ops.timing.configurations", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no call after so many")
    arguments = parser.parse_args(argv)
    timer, start = clock.GpuClock(), time.monotonic()
    about = {"gpu": torch.cuda.get_device_name()}
    for point in points():
        if time.monotonic() - start > arguments.seconds:
            break
        print(json.dumps(measure(point, timer) | about), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
