"""Fuse the FP8 quantization of MoE inputs into the norm before it, in vLLM's compiled graph.

    before: norm -> moe_forward
    after:  rms_norm_and_per_block_quant -> the plugin's op, which runs moe_forward with the quantized output at hand

The router inside moe_forward, and vLLM's experts, read the 16-bit output. The plugin's experts read the quantized one
(graph/moe_side_channel.py), with the same bits as their own quantization. So does the first GEMM of the shared experts if its kernel takes
row-major scales, as on ROCm.

The rewrite applies if all MoE layers of a model qualify and the fused launch was faster than the two launches it replaces
(compiled_ops.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared.experts import scheme_of
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.vllm.graph import compiled_ops, model_queries, moe_side_channel
from vllm_rocm_ops.vllm.graph.compiled_ops import QuantComparison
from vllm_rocm_ops.vllm.graph.norm_outputs import TwoOutputs
from vllm_rocm_ops.vllm.moe import expert_support
from vllm_rocm_ops.vllm.selection.key import EAGER, SEPARATE

if TYPE_CHECKING:
    from vllm_rocm_ops.vllm.graph.rewrite import Norm

BESIDE = SEPARATE._replace(scope=EAGER.scope)
"""The baseline of two launches, not compiled, in the key of a measurement."""
OP = ops.rms_norm_and_per_block_quant
NAMES = ("moe_forward", "moe_forward_shared")
WRITES = {"moe_forward": ["hidden_states"], "moe_forward_shared": []}
"""vLLM's ops -> the arguments that their schemas declare as mutated."""

_library = torch.library.Library("vllm_rocm_ops", "FRAGMENT")


# Models


def layers_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the MoE layers of a model."""
    for layer in model.modules():
        if hasattr(layer, "routed_experts") and hasattr(layer, "_forward_impl"):
            yield layer


def moves_tokens(config) -> bool:
    """True if the tokens of MoE layers of this configuration move between ranks."""
    return config.dp_size > 1 or config.pcp_size > 1 or config.is_sequence_parallel


def supports(layer: torch.nn.Module) -> bool:
    """True if the plugin's experts serve an MoE layer and quantize its input, unchanged, per 128 columns."""
    from vllm_rocm_ops.vllm.graph import fused_quant

    experts, config = expert_support.serving_experts(layer.routed_experts), layer.moe_config
    if experts is None or layer.routed_input_transform is not None:
        return False
    if moves_tokens(config):
        return False
    weight = expert_support.first_weight(layer.routed_experts)
    return (
        weight.dtype == fused_quant.QUANT_DTYPE
        and scheme_of(weight, experts.w1_scale).group == BLOCK
        and experts.a1_scale is None
        and weight.shape[2] % BLOCK == 0
        and not getattr(layer.routed_experts, "apply_router_weight_on_input", False)
    )


def hidden_of(model: torch.nn.Module) -> int:
    """Return the hidden size if all MoE layers of a model accept quantized input, else 0."""
    from vllm_rocm_ops.vllm.graph import fused_quant

    layers = list(layers_of(model))
    sizes = {layer.routed_experts.w13_weight.shape[2] if supports(layer) else 0 for layer in layers}
    return sizes.pop() if len(sizes) == 1 and fused_quant.has_kernels(OP.name) else 0


class BesideExperts(TwoOutputs):
    """A norm with two outputs before an MoE layer, against the plugin's norm and a separate quantization."""

    def __init__(self, norm: torch.nn.Module):
        super().__init__(OP, norm, norm, len(norm.weight), norm.weight.dtype, True, BESIDE)

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        """Return the bytes and operations, with one more write and read of the 16-bit output."""
        moved, operations = super().work(layer, tokens)
        return moved + 2.0 * tokens * self.columns * self.dtype.itemsize, operations

    def baseline(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        from vllm_rocm_ops.vllm.graph import vllm_row_kernels

        norm = self.producer
        plain = ops.fused_add_rms_norm.call(x, residual, norm.weight.data, norm.variance_epsilon, self.one_plus)
        return plain, *vllm_row_kernels.quantized(plain), residual


def norms_before_experts(model: torch.nn.Module, compiles: bool) -> Iterator[QuantComparison]:
    """Yield a norm that precedes the MoE layers of a compiled model."""
    size = hidden_of(model) if compiles else 0
    norms = [norm for norm in model_queries.norms(model) if len(norm.weight) == size] if size else []
    if norms:
        ops_beside()  # code that vLLM compiled in an earlier start calls them without a graph
    yield from (BesideExperts(norm) for norm in norms[:1])


# The op


def run_beside(name: str, *arguments):
    """Run a vLLM op with the quantized hidden states, its last two arguments, at hand."""
    *given, values, scales = arguments
    with moe_side_channel.beside(given[0], values, scales):
        return _functions()[name](*given)


def _functions() -> dict[str, Callable]:
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    return {name: getattr(moe_runner, f"_{name}") for name in NAMES}


@functools.cache
def ops_beside() -> dict:
    """Return {vLLM op: plugin op}. Plugin ops take two more arguments, FP8 values and scales; the first call defines them."""
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.utils.torch_utils import direct_register_custom_op

    made = {}
    for name, function in _functions().items():
        vllm_op, made_fake = getattr(torch.ops.vllm, name).default, getattr(moe_runner, f"_{name}_fake")
        signature = inspect.signature(function)
        more = [
            inspect.Parameter(more, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
            for more in ("values", "scales")
        ]

        def run(*arguments, name=name):
            return run_beside(name, *arguments)

        def fake(*arguments, made_fake=made_fake):
            return made_fake(*arguments[:-2])

        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])
        direct_register_custom_op(
            f"{name}_quantized",
            run,
            mutates_args=WRITES[name],
            fake_impl=fake,
            target_lib=_library,
            tags=tuple(vllm_op.tags),
        )
        made[vllm_op] = getattr(torch.ops.vllm_rocm_ops, f"{name}_quantized").default
    return made


# Graphs


def layer_of(result: fx.Node, readers: list[fx.Node]) -> fx.Node | None:
    """Return the only MoE layer among a norm's readers if its hidden states are the norm's output, else None."""
    layers = [reader for reader in readers if reader.op == "call_function" and called(reader) in ops_beside()]
    is_input = len(layers) == 1 and hidden_states(layers[0]) is result and result.meta["val"].dim() == 2
    return layers[0] if is_input else None


def pattern(norm: Norm) -> str:
    """Return the key of a norm with two outputs in `choices`."""
    from vllm_rocm_ops.vllm.graph import fused_quant

    rows, has_residual = norm.result.meta["val"], norm.residual is not None
    return fused_quant.pattern(OP, rows.shape[-1], rows.dtype, has_residual, False, False, norm.one_plus)


def called(node: fx.Node) -> object:
    """Return the op that a node calls, directly or through auto_functionalized."""
    return node.args[0] if node.target is auto_functionalized else node.target


def hidden_states(layer: fx.Node) -> fx.Node:
    """Return the hidden states of an MoE layer's call."""
    return layer.kwargs["hidden_states"] if "hidden_states" in layer.kwargs else layer.args[0]


def also_quantize(norm: Norm, readers: list[fx.Node], summed: Callable) -> bool:
    """Have a norm also quantize its result for the experts that read it. Return whether that serves.

    `summed` returns the all-reduce that is to be one launch with the norm.
    """
    from vllm_rocm_ops.vllm.graph import fused_quant, rewrite

    wins = rewrite.choices.decisions.get(pattern(norm))
    if not wins or OP.name in rewrite.choices.off or (layer := layer_of(norm.result, readers)) is None:
        return False
    given = {"quant_dtype": fused_quant.QUANT_DTYPE} | norm.arguments()
    _, *quantized = rewrite.insert(norm, OP, given, [], summed(norm, OP, given), rewrite.outputs_of(OP, given))[:3]
    give_quantized(layer, *quantized)
    return True


compiled_ops.norm_rules.append(also_quantize)


def give_quantized(layer: fx.Node, values: fx.Node, scales: fx.Node) -> None:
    """Make an MoE layer's call take quantized hidden states, too."""
    plugin_op, given = ops_beside()[called(layer)], {"values": values, "scales": scales}
    is_functional = layer.target is auto_functionalized
    if "eager_input_vals" in layer.meta:  # the strides that Inductor keeps for ops with needs_exact_strides
        args, kwargs = layer.meta["eager_input_vals"]
        args = (plugin_op, *args[1:]) if is_functional else args
        layer.meta["eager_input_vals"] = args, kwargs | {name: node.meta["val"] for name, node in given.items()}
    layer.kwargs = layer.kwargs | given
    if is_functional:
        layer.args = (plugin_op, *layer.args[1:])
    else:
        layer.target = plugin_op
