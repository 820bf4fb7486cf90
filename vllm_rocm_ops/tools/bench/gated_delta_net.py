"""Define the decode steps of Gated DeltaNet to benchmark against vLLM's kernels: layers of public models, and batch sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops import gated_delta_net_decode
from vllm_rocm_ops.tools.bench.baselines import GATED_DELTA_NET, Baseline, baselines
from vllm_rocm_ops.tools.bench.shapes import Check, Shape

BATCHES = 1, 8, 32, 128
LAYERS = {  # K heads, V heads, whether rows are interleaved, the state's dtype, and the columns of tokens if they come in place of b and a
    "qwen3-next tp1": (16, 32, True, torch.bfloat16),
    "qwen3-next tp1 from tokens": (16, 32, True, torch.bfloat16, 2048),
    "qwen3.5-397b tp8": (2, 8, False, torch.float32),
}
SIZE, WIDTH = 128, 4  # of K and V, and rows of the convolution


@dataclass(frozen=True)
class Step(Shape):
    """Define one decode step, with a row per request."""

    draws_on_device = True

    def bytes_moved(self, sets: list[tuple]) -> float:
        """Return the bytes of the states that requests have, read and written, and of rows."""
        a = self.op.Arguments(*sets[0])
        return len(a.indices) * 2 * (a.state[0].nbytes + a.conv_state[0].nbytes) + a.qkvz.nbytes + a.out.nbytes

    def baselines(self, sets: list[tuple]) -> Mapping[str, Baseline]:
        return baselines(self.op, GATED_DELTA_NET)

    def check(self, sets: list[tuple], device: str, baselines: Mapping[str, Baseline]) -> Check:
        """Return a check for the relative error (norm) of the results against float64."""
        a = self.op.Arguments(*sets[0])
        exact = a._make(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in a)
        self.op.reference(*exact)

        def fields() -> dict[str, object]:
            given = a._replace(state=a.state.clone(), conv_state=a.conv_state.clone(), out=a.out.clone())
            self.op(*given)
            return {"relative_error": ((given.out.double() - exact.out).norm() / exact.out.norm()).item()}

        return fields


def _make(layer: tuple, batch: int, device, generator, fp8_dtype) -> tuple:
    """Create the op's arguments."""
    key_heads, heads, is_interleaved, dtype, *columns = layer
    channels = (2 * key_heads + heads) * SIZE

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    ba, of_ba = None if columns else values(batch, 2 * heads), ()
    if columns:
        of_ba = values(batch, *columns), values(2 * heads, *columns) * columns[0] ** -0.5
    indices = torch.randperm(batch, generator=generator, device=device).to(torch.int32) + 1
    return (
        *(values(batch, channels + heads * SIZE), ba, is_interleaved),
        *(values(batch + 1, WIDTH - 1, channels).transpose(1, 2), values(channels, WIDTH)),
        values(batch + 1, heads, SIZE, SIZE, dtype=dtype),
        *(values(heads, dtype=torch.float32), values(heads), values(SIZE), 1e-6),
        *(indices[:, None], values(batch, heads * SIZE), None, None, None, None, *of_ba),
    )


def gated_delta_net(tokens: Iterable[int] = BATCHES) -> Iterator[Step]:
    """Yield the layers for each batch size."""
    for name, layer in LAYERS.items():
        for batch in tokens:
            case = Case(f"{name} {batch}", functools.partial(_make, layer, batch))
            yield Step(gated_delta_net_decode, case, {"requests": batch, "heads": layer[1]})
