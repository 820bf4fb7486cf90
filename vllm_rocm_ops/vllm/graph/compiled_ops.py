"""Select the norms and activations that run by the plugin's ops: those that vLLM's compiler serves less well.

An op covers the norm, or the activation, and the quantization of the next linear's input. In vLLM these are part of the
compiled graph, so the choice cannot be made at a call. It is made per pattern between loading and compilation, once for
all token counts.

    measured    The same small graph is compiled with the model's settings and vLLM's passes, and timed against the op
                (kernel_timing.py). The op must win by the geometric mean, and be slower at no token count.
    unmeasured  vLLM's where one of its passes fuses the quantization, else the plugin's.
    off         vLLM's, because the op was wrong on this GPU.

Patterns that stay vLLM's are part of the fingerprint of vLLM's compile cache.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.vllm.graph import model_queries
from vllm_rocm_ops.vllm.selection.comparison import RowComparison
from vllm_rocm_ops.vllm.selection.kernel_selection import Choice, Decided
from vllm_rocm_ops.vllm.selection.key import EAGER, Baseline, Key, Pattern

logger = logging.getLogger("vllm.vllm_rocm_ops")

TOKENS = (2, 8, 64, 256)  # token counts to time, besides the largest step. Not 1, for which Dynamo compiles again
SHARE = 0.4  # of a start's timing limit; the rest is for linear layers, experts and attention
SETS = 16  # of inputs, one per call of a graph


@dataclasses.dataclass
class CompileChoices:
    """The choices made before vLLM compiles.

    Attributes:
        decisions: Whether the plugin serves a pattern (`fused_quant.pattern`).
        off: Ops that are off on this GPU.
        all_reduced: Quantizations after an all-reduce and a norm that stay vLLM's.
        on: Which of the seams norm and activation are on.
        others: What `deciders` decided, for people.
    """

    decisions: dict[Pattern, bool] = dataclasses.field(default_factory=dict)
    off: frozenset[str] = frozenset()
    all_reduced: frozenset = frozenset()
    on: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()


choices = CompileChoices()
left_to_vllm: set[str] = set()


def patterns_left_to_vllm() -> list[str]:
    """Return the keys of the patterns that stay vLLM's in this process."""
    return sorted(left_to_vllm)


def quantizer(layer: torch.nn.Module, kernel) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return vLLM's quantization of a layer's input, as a function of x."""
    quantize = getattr(kernel, "baseline", None) or kernel
    quant_fp8 = getattr(quantize.quant_fp8, "vllm_forward", quantize.quant_fp8)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        params = kernel._get_layer_params(layer)
        if hasattr(kernel, "use_triton"):  # scales per block
            scales = params.input_scale, params.input_scale_ub
            return quant_fp8(x, *scales, use_triton=quantize.use_triton)
        return quant_fp8(x, *params[2:])

    return run


class GraphComparison(RowComparison):
    """An op and what vLLM's compiled graph has in its place.

    Subclasses define `graph_outputs(*given)`, which vLLM compiles.
    """

    def by_vllm(self, graph: Callable, *given):
        """Return the baseline's outputs, given `graph_outputs`, compiled or not."""
        return graph(*given)

    def baseline(self, *given):
        return self.by_vllm(self.graph_outputs, *given)

    def compiled(self, compiles: Callable) -> Callable:
        graph = functools.cache(lambda: compiles()(self.graph_outputs))
        return lambda *given: self.by_vllm(graph(), *given)


class LayerPart(GraphComparison):
    """The part of an attention layer that an op serves, and its comparison with vLLM's layers.

    Subclasses define `graph_outputs(x, positions)`, and `baseline_outputs(of_graph, x, *others)`, which has what runs after it.
    """

    def name(self, shape: str, baseline: Baseline) -> None:
        self.pattern, self.key = Pattern(self.op.name, shape), Key(self.op.name, shape, baseline)

    def runs_unmeasured(self) -> bool:
        return self.decoder.is_forced

    def by_vllm(self, graph: Callable, x: Tensor, positions: Tensor, *others):
        return self.baseline_outputs(graph(x, positions), x, *others)


class QuantComparison(GraphComparison):
    """A norm or an activation with the linear that reads its quantized result."""

    def __init__(
        self,
        op: Op,
        producer: torch.nn.Module,
        linear: torch.nn.Module,
        columns: int,
        dtype: torch.dtype,
        has_residual: bool,
        baseline: Baseline = EAGER,
    ):
        from vllm_rocm_ops.vllm.graph import fused_quant

        self.op, self.producer, self.linear, self.columns, self.dtype = op, producer, linear, columns, dtype
        self.quant_dtype = fused_quant.QUANT_DTYPE
        self.is_norm, self.has_residual = "weight" in op.Arguments._fields, has_residual
        self.column_major = getattr(linear, "vllm_rocm_ops_column_major_scales", False)
        self.one_plus = self.is_norm and getattr(producer, "one_plus_weight", False)
        traits = has_residual, self.bound() is not None, self.column_major, self.one_plus
        self.pattern = fused_quant.pattern(op, columns, dtype, *traits)
        self.key = Key(op.name, self.pattern.shape, baseline)

    def bound(self) -> Tensor | None:
        takes = "scale_ub" in self.op.Arguments._fields and "block" not in self.op.name
        return getattr(self.linear, "input_scale_ub", None) if takes else None

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        tensors = 2 + 2 * self.has_residual
        return float(tokens * self.columns * (tensors * self.dtype.itemsize + 1)), 0.0

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor | None]:
        device = next(self.linear.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)

        def random(columns: int) -> Tensor:
            return torch.randn(tokens, columns, generator=generator, device=device).to(self.dtype)

        x = random(self.columns * (1 if self.is_norm else 2))
        return x, random(self.columns) if self.has_residual else None

    def plugin(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
        given = {"input": x, "residual": residual}
        if self.is_norm:
            given |= {"weight": self.producer.weight.data, "epsilon": self.producer.variance_epsilon}
            given |= {"one_plus_weight": self.one_plus}
        return self.run(given, residual)

    def run(self, given: dict[str, object], residual: Tensor | None = None) -> tuple | None:
        """Return the op's results, a static scale included, and the residual, or None where no kernel supports the call."""
        given = self.op.Arguments._field_defaults | {"group_size": BLOCK, "quant_dtype": self.quant_dtype} | given
        given |= {"is_scale_transposed": self.column_major, "scale_ub": self.bound()}
        given |= {"scale": getattr(self.linear, "input_scale", None)}
        output = self.op.run_kernels(*(given[name] for name in self.op.Arguments._fields))
        if output is None:
            return None
        return *(output if isinstance(output, tuple) else (output, given["scale"])), residual

    def graph_outputs(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if residual is None:
            return *self.linear.vllm_rocm_ops_quantize(self.producer.vllm_forward(x)), None
        output, residual = self.producer.vllm_forward(x, residual)
        return *self.linear.vllm_rocm_ops_quantize(output), residual

    def exact(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the result and the residual in float32.

        The result is not quantized, but clamped to the range of its quantized values.
        """
        x = x.float()
        if not self.is_norm:
            gate, up = x.chunk(2, 1)
            result = torch.nn.functional.silu(gate) * up
        else:
            x = x if residual is None else x + residual.float()
            norm = self.producer
            result = ops.rms_norm.reference(x, norm.weight.data, norm.variance_epsilon, self.one_plus)
        return self.clamped(result), x if self.has_residual else None

    def clamped(self, result: Tensor) -> Tensor:
        """Return a result within the range of its quantized values."""
        limit = self.bound()
        if "scale" in self.op.Arguments._fields:
            limit = self.linear.input_scale.float().abs() * LIMIT[self.quant_dtype]
        return result if limit is None else result.clamp(-limit, limit)

    def results(self, output: tuple[Tensor, Tensor, Tensor | None], tokens: int) -> list[Tensor | None]:
        values, scale, residual = output
        return [dequantized(values[:tokens], scale), residual]

    def runs_unmeasured(self) -> bool:
        """True if the op runs before timing: unless a vLLM pass fuses the quantization."""
        return not self.key.baseline.is_fused

    def apply_decision(self, plugin_serves: bool) -> None:
        """Do nothing: a graph's pass reads the decision from `choices`."""


pattern_finders: list[Callable[[torch.nn.Module, bool], Iterator[QuantComparison]]] = []
"""Further patterns, by seam: functions of a model and whether vLLM compiles it."""
deciders: list[Callable[[object, Decided], str]] = []
"""Further decisions, by seam: functions of vLLM's configuration that return what they decided, for vLLM's compile cache."""
two_output_rules: list[Callable[..., bool]] = []
"""Further rewrites of norms whose result some readers quantize: functions as in `norm_rules`, given these readers, too."""
norm_rules: list[Callable[..., bool]] = []
"""Further rewrites, by folder: functions of a norm in a graph, its readers and how it is summed, that return whether they served."""


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    """Return a quantized result in float32.

    Some of vLLM's kernels pad the rows of the scales. MX-FP8 scales are exponents.
    """
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
    groups = values.float().unflatten(1, (scale.shape[-1] if scale.dim() == 2 else 1, -1))
    scale = scale[: len(values)].unsqueeze(-1) if scale.dim() == 2 and scale.numel() > 1 else scale.reshape(-1)[0]
    return (groups * scale).flatten(1)


def fused_in(
    model: torch.nn.Module, hidden: int, dtype: torch.dtype, baseline: Callable[..., Baseline], compiles: bool
) -> Iterator[QuantComparison]:
    """Yield the pairs of a norm or an activation and a linear whose input it may quantize.

    Norms quantize in models that vLLM compiles. Norms as wide as the model, with `hidden` columns, belong to its decoder
    layers and have a residual.
    """
    from vllm_rocm_ops.vllm.graph import fused_quant

    tables = {True: fused_quant.NORMS, False: fused_quant.ACTIVATIONS}
    keys = {is_norm: fused_quant.runnable(table) for is_norm, table in tables.items()}
    norms = {(type(norm), norm.weight.shape[0]): norm for norm in model_queries.norms(model) if compiles}
    kinds, opaque = {}, model_queries.opaque(model)  # one linear of each kind
    for linear in model.modules():
        if hasattr(linear, "vllm_rocm_ops_quantize"):
            traits = getattr(linear, "input_scale_ub", None) is None, linear.vllm_rocm_ops_column_major_scales
            kinds.setdefault(
                (model_queries.width(linear), fused_quant.made_for(linear, 0, keys[True]), *traits), linear
            )
    pairs = [
        (norm, linear)
        for norm in norms.values()
        for linear in kinds.values()
        if model_queries.width(linear) == len(norm.weight)
    ]
    pairs += [(layer.act_fn, layer.down_proj) for layer in model_queries.gated(model)]
    for producer, linear in pairs:
        if not hasattr(linear, "vllm_rocm_ops_quantize"):
            continue
        is_norm, columns = hasattr(producer, "variance_epsilon"), model_queries.width(linear)
        key, is_opaque = fused_quant.made_for(linear, columns, keys[is_norm]), producer in opaque or not compiles
        is_mx = key == fused_quant.MX  # no vLLM pass fuses it, and no linear accepts it
        if key is not None and not (is_mx and is_opaque):
            has_residual, beside = is_norm and columns == hidden, baseline(is_norm, producer in opaque, not is_mx)
            op = fused_quant.op_of(tables[is_norm], key, has_residual)
            yield QuantComparison(op, producer, linear, columns, dtype, has_residual, beside)


def choice_of(kernels: RowComparison) -> Choice:
    """Return a choice to time."""
    return Choice(kernels, kernels.key, dict.fromkeys(range(SETS), ()))


def decide(comparisons: list[QuantComparison], decided: Decided) -> dict[Pattern, bool]:
    """Return, by pattern, whether the op runs. Raises ValueError for a key that has a choice per token count."""
    decisions = {}
    for comparison in comparisons:
        if not comparison.key.has_one_choice:
            raise ValueError(
                f"{comparison.op.name}: key must have one choice for all token counts, got {comparison.key}"
            )
        measured = decided.shapes.get(comparison.key)
        runs = comparison.runs_unmeasured() if measured is None else bool(measured[0])
        decisions[comparison.pattern] = (
            decisions.get(comparison.pattern, True) and runs and comparison.op.name not in decided.off
        )
    return decisions
