"""Predict the times of all configurations of skinny GEMMs and experts, to compare with the one that `cost` chooses.

    python -m timing.choices --device MI300X --tokens 1 16 64 > choices.csv
    python -m timing.choices --op fused_experts --tokens 1 8 32 > experts.csv
    python -m timing.choices --read choices.csv

The first predicts the cheapest configurations of the linear layers of Llama-3.1-405B and DeepSeek-V3 on one GPU of
eight, and of experts, with tokens routed by one random draw. The second predicts experts only. The last reports the
regret of today's choice, relative to the best configuration in such a file.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.models.arguments import Inputs
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.ops import fused_experts
from vllm_rocm_ops.timing import machines, predict
from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.tools.bench import experts
from vllm_rocm_ops.tools.bench.shapes import linear_layers

MODELS = ("llama-3.1-405b-fp8", "deepseek-v3")
RANKS = 8
SHARES = ("deepseek-v3-tp8", "deepseek-v3-ep8", "qwen3-30b-a3b", "mixtral-8x7b-tp2")  # of experts
HEADER = ("device", "op", "M", "layer", "config", "cost_us", "predicted_us")
Row = dict[str, str]


def _experts(tokens: int, inputs: Inputs, share: experts.Share) -> tuple:
    """Return arguments of experts, with random ids, all experts equally likely."""
    a = fused_experts.Arguments(*experts.arguments_of(tokens, inputs, share, experts.BLOCKS))
    drawn = torch.rand(tokens, share.known, generator=torch.Generator().manual_seed(0)).topk(share.topk)
    return tuple(a._replace(topk_ids=drawn.indices.int()))


def layers() -> dict[tuple[str, str], LayerCall]:
    """Return the linear layers, each shape once, by op and NxK, and the experts, by op and share."""
    found = {}
    for model in MODELS:
        for call, n, k in linear_layers(model, RANKS):
            found.setdefault((call.op.name, f"{n}x{k}"), call)
    for name in SHARES:
        of_share = LayerCall(name, fused_experts, _experts, (experts.SHARES[name],), torch.bfloat16)
        found[fused_experts.name, name] = of_share
    return found


def costs(call: LayerCall, tokens: int, arch: Arch) -> tuple[tuple, dict[object, float]]:
    """Return the arguments of a call, on the meta device, and the cost of each configuration, the cheapest first."""
    a = call.op.Arguments(*call.case(tokens).make("meta", torch.Generator(), arch.fp8_dtype))
    found = {config: sum(call.op.cost(config, a, arch).values()) for config in call.op.configs(a, arch)}
    return a, dict(sorted(found.items(), key=lambda of: of[1]))


def predicted(call: LayerCall, a, config, machine: Machine) -> float:
    """Return the predicted time of a configuration, in us."""
    return sum(kernel.prediction.us for kernel in predict.predict_call(call.op, a._asdict(), machine, config=config))


def rows(machine: Machine, tokens: Iterable[int], most: int, only: str = "") -> Iterator[Row]:
    """Yield a row for each of the `most` cheapest configurations of each shape, optionally of one op `only`."""
    for (op, layer), call in layers().items():
        if only not in ("", op):
            continue
        for m in tokens:
            a, known = costs(call, m, machine.arch)
            for config, cost in list(known.items())[:most]:
                values = (
                    machine.name,
                    op,
                    m,
                    layer,
                    config,
                    f"{cost:.2f}",
                    f"{predicted(call, a, config, machine):.2f}",
                )
                yield dict(zip(HEADER, map(str, values), strict=True))


def losses(found: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield, for each shape of a file, the row of today's choice and the row with the shortest predicted time."""
    shapes: dict[tuple, list[Row]] = defaultdict(list)
    for row in found:
        shapes[tuple(row[name] for name in HEADER[:4])].append(row)
    calls = layers()
    for (device, op, m, layer), of in shapes.items():
        _, known = costs(calls[op, layer], int(m), archs.named(device))
        names = {row["config"] for row in of}
        chosen = next(str(config) for config in known if str(config) in names)
        best = min(of, key=lambda row: float(row["predicted_us"]))
        yield next(row for row in of if row["config"] == chosen), best


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m timing.choices", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=machines.COMPARED)
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 16, 64))
    parser.add_argument("--op", default="", help="of these alone")
    parser.add_argument("--most", type=int, default=8, help="configurations of a shape")
    parser.add_argument("--read", type=Path, metavar="CSV")
    arguments = parser.parse_args(argv)
    if arguments.read is None:
        writer = csv.DictWriter(sys.stdout, HEADER, lineterminator="\n")
        writer.writeheader()
        for row in rows(machines.named(arguments.device), arguments.tokens, arguments.most, arguments.op):
            writer.writerow(row)
            sys.stdout.flush()
        return 0
    logs = []
    with arguments.read.open(newline="") as file:
        for chosen, best in losses(csv.DictReader(file)):
            of = float(chosen["predicted_us"]) / float(best["predicted_us"])
            logs.append(math.log(of))
            print(f"{of:.2f} {chosen['op']} {chosen['M']}x{chosen['layer']}: {chosen['config']}, best {best['config']}")
    print(
        f"{len(logs)} shapes: {math.exp(sum(logs) / len(logs)):.3f} as a geometric mean, at most {math.exp(max(logs)):.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
