"""Define the decode steps of Gated DeltaNet to benchmark against vLLM's kernels: layers of public models, and batch sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops import gated_delta_net_decode
from vllm_rocm_ops.tools.bench.baselines import GATED_DELTA_NET, Baseline
from vllm_rocm_ops.tools.bench.shapes import Check, Shape, relative_error

BATCHES = 1, 8, 32, 128
NEXT = {"heads": (16, 32), "is_interleaved": True, "dtype": torch.bfloat16}
QWEN35 = {"heads": (2, 8), "is_interleaved": False, "dtype": torch.float32}
LAYERS = {
    "qwen3-next tp1": NEXT,
    "qwen3-next tp1 from tokens": {**NEXT, "columns": 2048},
    "qwen3-next tp1 4 rows": {**NEXT, "rows": 4},
    "qwen3.5-397b tp8": QWEN35,
    "qwen3.5-397b tp8 4 rows": {**QWEN35, "rows": 4},
}
"""Layers: K and V heads, the order of rows, the state's dtype, columns of tokens in place of b and a, and a request's rows with drafts."""
SIZE, WIDTH = 128, 4  # of K and V, and rows of the convolution


@dataclass(frozen=True)
class Step(Shape):
    """Define one decode step."""

    draws_on_device, listed = True, GATED_DELTA_NET

    def bytes_moved(self, sets: list[tuple]) -> float:
        """Return the bytes of the states that requests have, read and written, and of rows."""
        a = self.op.Arguments(*sets[0])
        states = (len(a.indices) + a.indices.numel()) * a.state[0].nbytes + 2 * len(a.indices) * a.conv_state[0].nbytes
        return states + a.qkvz.nbytes + a.out.nbytes

    def check(self, sets: list[tuple], device: str, baselines: Mapping[str, Baseline]) -> Check:
        """Return a check for the relative error (norm) of the results against float64."""
        a = self.op.Arguments(*sets[0])
        exact = a._make(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in a)
        self.op.reference(*exact)

        def fields() -> dict[str, object]:
            given = a._replace(state=a.state.clone(), conv_state=a.conv_state.clone(), out=a.out.clone())
            self.op(*given)
            return {"relative_error": relative_error(given.out, exact.out)}

        return fields


def make(
    requests: int,
    device,
    generator,
    fp8_dtype=None,
    *,
    heads: tuple[int, int],
    is_interleaved: bool,
    dtype: torch.dtype,
    columns: int = 0,
    rows: int = 1,
) -> tuple:
    """Create the op's arguments. With several rows, half of the last step's were accepted."""
    key_heads, value_heads = heads
    channels, tokens = (2 * key_heads + value_heads) * SIZE, requests * rows

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    ba, of_ba, drafts = None if columns else values(tokens, 2 * value_heads), (), (None, None)
    if columns:
        of_ba = values(tokens, columns), values(2 * value_heads, columns) * columns**-0.5
    indices = torch.randperm(tokens, generator=generator, device=device).to(torch.int32) + 1
    if rows > 1:
        accepted = torch.full((requests,), 1 + rows // 2, dtype=torch.int32, device=device)
        drafts = accepted, torch.arange(requests + 1, dtype=torch.int32, device=device) * rows
    return (
        *(values(tokens, channels + value_heads * SIZE), ba, is_interleaved),
        *(values(tokens + 1, WIDTH + rows - 2, channels).transpose(1, 2), values(channels, WIDTH)),
        values(tokens + 1, value_heads, SIZE, SIZE, dtype=dtype),
        *(values(value_heads, dtype=torch.float32), values(value_heads), values(SIZE), 1e-6),
        *(indices.view(requests, rows), values(tokens, value_heads * SIZE), *drafts, None, None, *of_ba),
    )


def gated_delta_net(tokens: Iterable[int] = BATCHES) -> Iterator[Step]:
    """Yield the layers for each batch size."""
    for name, layer in LAYERS.items():
        for batch in tokens:
            case = Case(f"{name} {batch}", functools.partial(make, batch, **layer))
            yield Step(gated_delta_net_decode, case, {"requests": batch, "heads": layer["heads"][1]})
