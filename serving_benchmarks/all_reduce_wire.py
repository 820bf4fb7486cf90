"""Print the errors of an all-reduce with fewer bits on the wire, relative to float64, a model's perplexity, and predicted times.

    python serving_benchmarks/all_reduce_wire.py [--ranks 2 4 8] [--hidden 16384 7168] [--rows 32 64 128] [--tokens 32768]

Errors are of the sum, relative to its norm, by PyTorch on the CPU; the kernels' sums have the same bits (tests/emulator/test_flagged.py).
INT4 is QuickReduce's in vLLM 0.33, which quantizes blocks of 32 values in each of two stages and sums in fp16. Inputs are

    normal      independent normal values on each rank
    outliers    the same, 0.1 % of the columns a thousand times as large
    opposed     pairs of ranks with nearly opposite values: the sum is a tenth of what each rank sends

Perplexities are of the small Llama of quality/trained.py on held-out text, in PyTorch: fp32, but each of its four all-reduces per token
gets the bf16 products of the ranks' shares of o_proj and down_proj. Every call has the format, as none has in vLLM, where small calls stay
bf16. If the model is not cached, it is trained, in a minute.

Times are by the costs of collectives/flagged.py, without a launch's fixed part. `bf16` and `fp8` are the plugin's launches in stages.
`sharded` is not built: each rank norms its own rows, keeps their residual, and sends static FP8.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "quality")]

import torch
import trained
from small_models import Model
from torch import Tensor
from torch.nn import functional

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import flagged, launches, wire
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.arch import Arch

INPUTS = ("normal", "outliers", "opposed")
PRODUCTS = {"MI300X": "gfx942", "H200": "sm_90"}
INT4_BLOCK = 32
COLUMNS = 16384
ROWS = 16


def inputs(kind: str, ranks: int) -> list[Tensor]:
    """Return an input for each rank."""
    generator = torch.Generator().manual_seed(ranks)
    values = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(ranks)]
    if kind == "outliers":
        for each in values:
            each[:, torch.randperm(COLUMNS, generator=generator)[: COLUMNS // 1000]] *= 1000
    if kind == "opposed":
        values[1::2] = [odd / 10 - even for odd, even in zip(values[1::2], values[::2])]
    return [each.bfloat16() for each in values]


def int4(x: Tensor) -> Tensor:
    """Return fp16 values as a rank receives them with QuickReduce's INT4: of 32 values, the one of largest magnitude becomes -8."""
    blocks = x.unflatten(-1, (-1, INT4_BLOCK, 2)).transpose(-1, -2)  # a lane's pairs are of two blocks
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest * -0.125).half()
    levels = (blocks / (scale + 6e-8)).clamp(-8, 7).round()
    return (levels * scale).half().transpose(-1, -2).flatten(-3)


def int4_sum(inputs: list[Tensor]) -> Tensor:
    """Return QuickReduce's sum with INT4 in both stages."""
    return int4(sum(int4(each.half().float()).half() for each in inputs).float())


SUMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "bf16": lambda inputs: sum(each.float() for each in inputs).bfloat16(),
    **{
        f"fp8, {name}": functools.partial(wire.fp8_sum, fp8=arch.fp8_dtype)
        for name, arch in archs.ARCHS.items()
        if arch.vendor == "amd"
    },
    "INT4": int4_sum,
}
"""The sum of the ranks' inputs, by wire format."""


def errors(ranks: list[int]) -> list[tuple[str, ...]]:
    """Return the table of errors relative to float64."""
    rows: list[tuple[str, ...]] = []
    for number in ranks:
        for kind in INPUTS:
            by_rank = inputs(kind, number)
            exact = sum(each.double() for each in by_rank)
            found = {name: (total(by_rank).double() - exact).norm() / exact.norm() for name, total in SUMS.items()}
            rows = rows or [("ranks", "inputs", *found)]
            rows.append((str(number), kind, *(f"{float(error):.2e}" for error in found.values())))
    return rows


class DividedModel(Model):
    """The small model with the layers before its all-reduces divided among ranks, whose bf16 products are summed in a wire format."""

    def __init__(self, config: dict, weights: dict[str, Tensor], ranks: int, wire_format: str):
        super().__init__(config, weights)
        self.ranks, self.wire_format = ranks, wire_format

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer, and the all-reduce behind it."""
        if not name.endswith(("o_proj", "down_proj")):
            return super().linear(name, x)
        parts = zip(x.chunk(self.ranks, -1), self.weights[f"{name}.weight"].chunk(self.ranks, -1))
        return SUMS[self.wire_format]([functional.linear(*part).bfloat16() for part in parts]).float()


def perplexities(ranks: list[int], weights: dict[str, Tensor], text: Tensor) -> list[tuple[str, ...]]:
    """Return the table of perplexities on sequences of tokens [sequences, tokens]."""
    rows: list[tuple[str, ...]] = [("ranks", *SUMS)]
    weights = {name: weight.float() for name, weight in weights.items()}
    with torch.no_grad():
        for number in ranks:
            models = [DividedModel(trained.CONFIGS["llama"], weights, number, name) for name in SUMS]
            rows.append((str(number), *(f"{math.exp(model.loss(text)):.4f}" for model in models)))
    return rows


def sharded(rows: int, hidden: int, ranks: int, arch: Arch) -> float:
    """Return the predicted us of a launch whose ranks norm their own rows: bf16 is scattered, static FP8 gathered.

    All blocks store and load; the blocks of a rank's own rows also sum and norm.
    """
    costs, own_rows = arch.costs.collective, -(-rows // ranks)
    own_blocks = min(launches.PARTS[-1], arch.compute_units // own_rows) * own_rows
    block_bytes = hidden * (2 + 1) * rows / min(rows * launches.PARTS[-1], arch.compute_units)
    own_block_bytes = hidden * (2 * ranks + ranks - 1) * own_rows / own_blocks
    link_us = own_rows * hidden * (2 + 1) / costs.peer_bytes_per_us(ranks)
    return link_us + (block_bytes + own_block_bytes) / costs.unit_bytes_per_us + costs.exchange_us + 2 * costs.hop_us


def times(ranks: list[int], hiddens: list[int], rows: list[int], arch: Arch) -> list[tuple[str, ...]]:
    """Return the table of predicted times."""
    lines: list[tuple[str, ...]] = [("ranks", "hidden", "rows", "bf16", "fp8", "sharded")]
    for number in ranks:
        for hidden in hiddens:
            for count in rows:
                a = ops.rms_norm.Arguments(
                    torch.empty(count, hidden, dtype=torch.bfloat16, device="meta"), None, 0.0, False
                )
                us = []
                for wire_format in (wire.BF16, wire.FP8):
                    sizes = {"capacity": 0, "payload": flagged.PAYLOAD}  # as calls of any size are in stages
                    group = launches.Group(0, (0,) * number, 0, 0, arch.compute_units, 1, **sizes, wires=(wire_format,))
                    config = flagged.default(a, arch, group)
                    us.append(flagged.cost(config, a, arch, group))
                us.append(sharded(count, hidden, number, arch))
                lines.append((str(number), str(hidden), str(count), *(f"{each:.1f}" for each in us)))
    return lines


def show(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print a table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(title, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows), "", sep="\n")


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in (("ranks", [2, 4, 8]), ("hidden", [16384, 7168]), ("rows", [32, 64, 128])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=values, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32768, help="of the held-out text (default: %(default)s)")
    given = parser.parse_args(argv)
    show("relative error of the sum beside float64", errors(given.ranks))
    weights, held_out = trained.trained_weights("llama", trained.cache()), trained.held_out(trained.cache())
    text = trained.windows(given.tokens, held_out)
    show("perplexity of the small Llama", perplexities(given.ranks, weights, text))
    for product, name in PRODUCTS.items():
        show(f"predicted us on {product}", times(given.ranks, given.hidden, given.rows, archs.named(name)))


if __name__ == "__main__":
    main()
