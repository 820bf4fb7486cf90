"""Multiply a shared expert by its gate in the launch of its activation: Qwen2-MoE, Qwen3-Next, Qwen3.5.

    vLLM:    sigmoid(expert_gate(x)) * down_proj(act_fn(gate_up_proj(x)))
    plugin:  down_proj(act_fn(gate_up_proj(x)) * sigmoid(expert_gate(x)))

vLLM runs a shared expert eagerly inside an op, where the gate costs three launches: a GEMM of one column, a sigmoid and a product. The
activation's launch (`silu_and_mul_with_expert_gate`) has them all, at any number of tokens. The router's GEMM could have the column, but
vLLM runs shared experts on a stream of their own, which would wait for the router.

A layer gets a subclass, which runs vLLM's own `forward` without the gate. What it computes is not read from names: stand-ins for its parts
show it (`model_queries.feeds`, `is_gated`). Other layers keep the gate vLLM's, as do those where the launch was timed to lose.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_rocm_ops.ops.shared.rowwise import VECTOR
from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.graph import model_queries
from vllm_rocm_ops.vllm.graph.compiled_ops import QuantComparison, dequantized
from vllm_rocm_ops.vllm.moe import expert_support
from vllm_rocm_ops.vllm.selection.key import EAGER, Baseline

if TYPE_CHECKING:
    from vllm_rocm_ops.core.op import Op


def shape_suffix(columns: int) -> str:
    """Return what follows the shape of the activation alone, for tokens of this many columns."""
    return f" gate of {columns}"


class GatedActivation:
    """Mix into the class of a shared expert with a gate."""

    def forward(self, x: Tensor) -> Tensor:
        """Run vLLM's `forward` without the gate, which the activation multiplies by. In a graph that is compiled the gate stays."""
        from vllm_rocm_ops.vllm.graph import fused_quant

        if torch.compiler.is_compiling() or x.dtype != self.expert_gate.weight.dtype or not fused_quant.in_rows(x):
            return super().forward(x)
        act_fn = functools.partial(activate, self, x)
        parts = {"gate_up_proj": self.gate_up_proj, "act_fn": act_fn, "down_proj": self.down_proj, "expert_gate": None}
        return seam.plain_of(self, GatedActivation).forward(types.SimpleNamespace(**parts), x)


def activate(layer: torch.nn.Module, x: Tensor, gate_up: Tensor):
    """Return a layer's gated activation as its `down_proj` takes it: quantized, or a tensor."""
    from vllm_rocm_ops.vllm.graph import fused_quant

    linear = layer.down_proj
    key = key_of(linear, gate_up.shape[-1] // 2)
    return fused_quant.silu_and_mul(linear, key, gate_up, x, layer.expert_gate.weight.data)


def key_of(linear: torch.nn.Module, columns: int):
    """Return the key of the quantized input that a `down_proj` gets, None for a tensor, which LoRA's layers take."""
    from vllm_rocm_ops.vllm.graph import fused_quant

    quantizes = hasattr(linear, "vllm_rocm_ops_quantize")
    return fused_quant.made_for(linear, columns, fused_quant.runnable_gates()) if quantizes else None


def unsupported_reason(layer: torch.nn.Module, dtype: torch.dtype) -> str:
    """Return why the op does not compute a shared expert's gate, empty if it does."""
    from vllm import envs
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from vllm_rocm_ops.vllm.graph import fused_quant

    gate, down = layer.expert_gate, layer.down_proj
    if envs.VLLM_BATCH_INVARIANT:
        return "batch invariance: the order of its sum depends on the number of tokens"
    if dtype not in fused_quant.DTYPES:
        return f"{dtype} tokens"
    if type(gate) not in compat.gate_classes():
        return f"gates of class {type(gate).__name__}"
    method, weight = getattr(gate, "quant_method", None), gate.weight
    if not (method is None or isinstance(method, UnquantizedLinearMethod)) or weight.dtype != dtype:
        return f"gates of {weight.dtype} with {dtype} tokens"
    if getattr(gate, "bias", None) is not None or getattr(down, "bias", None) is not None:
        return "a bias of the gate or of down_proj"
    if weight.dim() != 2 or weight.shape[0] != 1 or weight.shape[1] % VECTOR:
        return f"gates with a weight of {list(weight.shape)}"
    return ""


class SharedGateComparison(QuantComparison):
    """A shared expert's activation and gate, with the projection that reads the product."""

    def __init__(self, op: Op, layer: torch.nn.Module, columns: int, dtype: torch.dtype, baseline: Baseline):
        super().__init__(op, layer.act_fn, layer.down_proj, columns, dtype, False, baseline)
        self.layer = layer
        shape = self.pattern.shape + shape_suffix(self.weight.shape[1])
        self.pattern, self.key = self.pattern._replace(shape=shape), self.key._replace(shape=shape)

    @property
    def weight(self) -> Tensor:
        return self.layer.expert_gate.weight.data

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        moved, operations = super().work(layer, tokens)
        return moved + (tokens + 1.0) * self.weight.nbytes, operations + 2.0 * tokens * self.weight.numel()

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the activation's input and tokens, whose products with the gate are mostly within 3."""
        gate_up, _ = super().inputs(tokens, seed)
        generator = torch.Generator(gate_up.device).manual_seed(seed + 1)
        x = torch.randn(tokens, self.weight.shape[1], generator=generator, device=gate_up.device)
        return gate_up, (x / self.weight.float().norm().clamp_min(1e-6)).to(self.dtype)

    def plugin(self, gate_up: Tensor, x: Tensor) -> tuple | None:
        return self.run({"input": gate_up, "tokens": x, "expert_gate": self.weight})

    def baseline(self, gate_up: Tensor, x: Tensor) -> tuple:
        """Return vLLM's activation, and the sigmoid. It multiplies the tokens, which are as wide as the result of `down_proj`."""
        made = self.producer.vllm_forward(gate_up)
        quantize = getattr(self.linear, "vllm_rocm_ops_quantize", None)
        gate = torch.sigmoid(self.layer.expert_gate(x)[0])
        return *((made, None) if quantize is None else quantize(made)), gate, gate * x

    def exact(self, gate_up: Tensor, x: Tensor) -> tuple[Tensor]:
        gate, up = gate_up.float().chunk(2, 1)
        factor = torch.sigmoid(x.float() @ self.weight.float().t())
        return (self.clamped(torch.nn.functional.silu(gate) * up * factor),)

    def results(self, output: tuple, tokens: int) -> list[Tensor]:
        values, scale, gate, *_ = output
        made = values[:tokens].float() if scale is None else dequantized(values[:tokens], scale)
        return [made if gate is None else made * gate[:tokens].float()]

    def apply_decision(self, plugin_serves: bool) -> None:
        plain = seam.plain_of(self.layer, GatedActivation)
        self.layer.__class__ = seam.mixed(GatedActivation, plain) if plugin_serves else plain


def gates(model: torch.nn.Module, compiles: bool) -> Iterator[QuantComparison]:
    """Yield the gates of a model's shared experts that the op may serve."""
    from vllm.config import get_current_vllm_config

    from vllm_rocm_ops.vllm.graph import fused_quant

    if None not in fused_quant.runnable_gates():
        return
    opaque = model_queries.opaque(model)
    for layer in model_queries.gated(model):
        is_eager = layer in opaque or not compiles
        if getattr(layer, "expert_gate", None) is None or not is_eager or not model_queries.is_gated(layer):
            continue
        dtype = get_current_vllm_config().model_config.dtype
        if why := unsupported_reason(layer, dtype):
            expert_support.log_unsupported(why, "gates of shared experts")
            continue
        columns = model_queries.width(layer.down_proj)
        op = fused_quant.op_of(fused_quant.EXPERT_GATES, key_of(layer.down_proj, columns), False)
        yield SharedGateComparison(op, layer, columns, dtype, EAGER)
