"""Quantize a norm's result for some of its readers, and keep it for the others, in one launch.

In Qwen3-Next and Qwen3.5 the norm before a Gated DeltaNet layer is read by two projections: of q, k, v and z in FP8, whose input is
quantized per 128 columns, and of b and a in 16 bits. The op is the one of norms before experts (moe/quantized_input.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.vllm.graph import compiled_ops, model_queries
from vllm_rocm_ops.vllm.graph.compiled_ops import QuantComparison, dequantized
from vllm_rocm_ops.vllm.selection.key import Baseline, Pattern

if TYPE_CHECKING:
    from vllm_rocm_ops.vllm.graph.rewrite import Norm

OP = ops.rms_norm_and_per_block_quant
LINEARS = "in_proj_qkvz", "in_proj_ba"
"""The projections of a layer that read one norm, in FP8 and in 16 bits."""
BESIDE = " beside a linear layer"


def pattern(columns: int, dtype: torch.dtype, one_plus: bool) -> Pattern:
    """Return the pattern of such a norm with a residual in `choices`."""
    from vllm_rocm_ops.vllm.graph import fused_quant

    found = fused_quant.pattern(OP, columns, dtype, True, False, False, one_plus)
    return found._replace(shape=found.shape + BESIDE)


class TwoOutputs(QuantComparison):
    """A norm with a residual and the quantization of its result in one launch. Both outputs are checked."""

    def exact(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        result, added = super().exact(x, residual)
        return result, result, added

    def results(self, output: tuple[Tensor, ...], tokens: int) -> list[Tensor]:
        plain, values, scale, residual = output
        return [dequantized(values[:tokens], scale), plain, residual]


class BesideLinear(TwoOutputs):
    """A norm with two outputs before a linear layer and others, against vLLM's two launches."""

    def __init__(self, norm: torch.nn.Module, linear: torch.nn.Module, dtype: torch.dtype, baseline: Baseline):
        super().__init__(OP, norm, linear, len(norm.weight), dtype, True, baseline)
        self.pattern = pattern(self.columns, dtype, self.one_plus)
        self.key = self.key._replace(shape=self.pattern.shape)

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        moved, operations = super().work(layer, tokens)
        return moved + float(tokens * self.columns * self.dtype.itemsize), operations

    def graph_outputs(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        plain, residual = self.producer.vllm_forward(x, residual)
        return plain, *self.linear.vllm_rocm_ops_quantize(plain), residual


def norms_before_two(model: torch.nn.Module, compiles: bool) -> Iterator[QuantComparison]:
    """Yield the norm of a compiled model whose layers have such projections."""
    from vllm.config import get_current_vllm_config

    from vllm_rocm_ops.vllm.graph import compilation, fused_quant

    for layer in model.modules() if compiles and fused_quant.has_kernels(OP.name) else ():
        quantized, plain = (getattr(layer, name, None) for name in LINEARS)
        if (
            plain is None
            or hasattr(plain, "vllm_rocm_ops_quantize")
            or not hasattr(quantized, "vllm_rocm_ops_quantize")
        ):
            continue
        width = model_queries.width(quantized)
        key = fused_quant.made_for(quantized, width, (fused_quant.kFp8Dynamic128Sym,))
        norms = [norm for norm in model_queries.norms(model) if len(norm.weight) == width]
        if key is not None and norms and quantized.vllm_rocm_ops_takes_rows and width % BLOCK == 0:
            baseline = compilation.baseline_of(get_current_vllm_config(), model)(True, has_pass=False)
            yield BesideLinear(norms[0], quantized, norms[0].weight.dtype, baseline)
            return


def takes_either_order(marker: fx.Node) -> bool:
    """True if only the plugin's linear op, which takes scales in either order, reads the scales of a quantization."""
    scales = [part for part in marker.users if part.args[1] == 1]
    op = torch.ops.vllm_rocm_ops.block_scaled_linear.default
    return all(reader.target is op for part in scales for reader in part.users)


def also_quantize(norm: Norm, readers: list[fx.Node], quantizes: list[fx.Node], summed: Callable) -> bool:
    """Have a norm quantize for some of its readers, and keep its result for the others. Return whether it does.

    `summed` returns the all-reduce that is to be one launch with the norm.
    """
    from vllm_rocm_ops.vllm.graph import fused_quant, queries, rewrite

    others = [reader for reader in readers if reader not in quantizes]
    key, given = rewrite.quantization(quantizes[0])
    is_known = (
        len({str(reader.args) for reader in quantizes}) == 1
        and key == fused_quant.kFp8Dynamic128Sym
        and all(map(queries.is_materialized, others))
        and norm.residual is not None
        and OP.name not in rewrite.choices.off
        and fused_quant.has_kernels(OP.name)
    )
    if not is_known:
        return False
    result = norm.result.meta["val"]
    serves = rewrite.choices.decisions.get(pattern(result.shape[-1], result.dtype, norm.one_plus))
    given = {"quant_dtype": given["quant_dtype"]} | norm.arguments()
    makes = rewrite.outputs_of(OP, given)
    wanted = quantizes[0].meta["val"][: 1 if all(map(takes_either_order, quantizes)) else 2]
    if not serves or not queries.are_alike(makes[1 : 1 + len(wanted)], wanted):
        return False
    outputs = rewrite.insert(norm, OP, given, [], summed(norm, OP, given), makes)
    for marker in quantizes:
        for part in list(marker.users):
            part.replace_all_uses_with(outputs[1 + part.args[1]])
    return True


compiled_ops.pattern_finders.append(norms_before_two)
compiled_ops.two_output_rules.append(also_quantize)
