"""Compare the op for attention's output gate and quantization with vLLM's, for layers as Qwen3-Next's: x * sigmoid(gate).

The gate of a head is beside the head's query in one projection, and stays there (attention/rope_and_cache.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.vllm.graph import model_queries
from vllm_rocm_ops.vllm.graph.compiled_ops import QuantComparison


class GateComparison(QuantComparison):
    """The gate of a layer's heads with the output projection that reads the product quantized."""

    def __init__(self, op, layer: torch.nn.Module, columns: int, dtype: torch.dtype, baseline):
        super().__init__(op, layer, layer.o_proj, columns, dtype, False, baseline)
        self.head_size = layer.attn.head_size

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return attention's output, and the projection's columns of queries and gates."""
        both, _ = super().inputs(tokens, seed)
        x = both.new_empty(tokens, self.columns)
        return x.copy_(both[:, : self.columns].flip(1)), both

    def gate(self, both: Tensor) -> Tensor:
        return both.unflatten(1, (-1, 2 * self.head_size))[..., self.head_size :]

    def plugin(self, x: Tensor, both: Tensor) -> tuple[Tensor, Tensor, None] | None:
        return self.run({"input": x, "gate": self.gate(both)})

    def graph_outputs(self, x: Tensor, both: Tensor) -> tuple[Tensor, Tensor, None]:
        return *self.linear.vllm_rocm_ops_quantize(x * torch.sigmoid(self.gate(both).reshape(x.shape))), None

    def exact(self, x: Tensor, both: Tensor) -> tuple[Tensor, None]:
        return self.clamped(x.float() * torch.sigmoid(self.gate(both.float()).reshape(x.shape))), None


def gates(model: torch.nn.Module, compiles: bool) -> Iterator[QuantComparison]:
    """Yield the gates of a compiled model's attention layers that the op may serve, one of each kind."""
    from vllm.config import get_current_vllm_config

    from vllm_rocm_ops.vllm.graph import compilation, fused_quant

    keys = fused_quant.runnable(fused_quant.GATES) if compiles else ()
    for layer in model.modules() if keys else ():
        linear = getattr(layer, "o_proj", None)
        if not getattr(layer, "attn_output_gate", False) or not hasattr(linear, "vllm_rocm_ops_quantize"):
            continue
        columns = model_queries.width(linear)
        key = fused_quant.made_for(linear, columns, keys)
        if key is not None and columns % layer.attn.head_size == 0:
            config = get_current_vllm_config()
            baseline = compilation.baseline_of(config, model)(False, has_pass=False)
            op = fused_quant.op_of(fused_quant.GATES, key, False)
            yield GateComparison(op, layer, columns, config.model_config.dtype, baseline)
