"""Implement the plugin's experts in vLLM's MoE layers. Each holds vLLM's experts for the layer, the baseline.

vLLM has no registry for experts, so the seams wrap its functions that select experts, in every module that imported
them. The plugin's experts come first if they support the layer. Weights stay as loaded, which vLLM calls the TRITON
backend, and the baseline is vLLM's class for it. With AITER enabled by its switch, weights are in AITER's shuffled
order, which the op reads too: the baseline is AITER's, vLLM routes, and the plugin serves where it was timed to be
faster. So it is for a backend that the user named; other backends than TRITON and AITER stay vLLM's.

Each call chooses between the op and the baseline. On ROCm vLLM runs the whole layer in one opaque op, so the choice is
made in Python outside of compiled graphs, and a captured graph holds the choice for its batch size. On CPU Dynamo
traces the layer, there is no baseline, and the op's reference runs.

- Tensor parallelism: a rank has a slice of each expert, and vLLM sums the ranks' results.
- Expert parallelism: `expert_map` says which experts a rank has.
- Data parallelism: vLLM moves tokens by all-gather and reduce-scatter or by MoRI, quantized if the baseline
  wants it. MoRI's buffers have spare rows, which go to no expert. Timing uses 16-bit tokens on both sides.
- The batched activation format (DeepEP low latency, NIXL) stays vLLM's.
- Shared experts are linear layers, served by their seams. If AITER fuses them into the routed experts
  (VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS), vLLM routes all tokens to them as the last experts, so the op's
  `shared_experts` is unused here. With expert parallelism the layer stays AITER's.
"""

import collections
import types
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.quantization import cast
from vllm_rocm_ops.ops.shared.experts import columns_of, scheme_of, weight_of
from vllm_rocm_ops.ops.shared.gated import activated
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import moe_side_channel
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.moe.expert_support import (
    Predicates,
    copy_of,
    epilogue_traits,
    log_unsupported,
    mask_spare_rows,
    swiglu_of,
    unsupported_parallelism,
)
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison
from vllm_rocm_ops.vllm.selection.key import Baseline

MAX_TOKENS = 64  # default token limit, before timing (kernel_selection.py)

APPLY = (
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts"),
    *("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"),
    "apply_router_weight_on_input",
)
"""The parameters of `FusedMoEExpertsModular.apply`."""
ApplyArguments = collections.namedtuple("ApplyArguments", APPLY)


def op_arguments(
    experts, hidden, w1, w2, topk_weights, topk_ids, expert_map, on_input: bool, hidden_scale, out_dtype, activation
) -> tuple:
    """Return the arguments of `fused_experts`, with the scales of `experts`; `hidden_scale` is None for 16-bit tokens."""
    hidden_scale = experts.a1_scale if hidden_scale is None else hidden_scale
    scales = experts.w1_scale, experts.w2_scale, hidden_scale, experts.a2_scale
    routing = topk_weights, topk_ids, out_dtype
    biases = experts.w1_bias, experts.w2_bias
    options = expert_map, 0, on_input, experts.shuffled, experts.weight_only
    return hidden, w1, w2, *routing, *scales, *options, *biases, *swiglu_of(experts, activation)


def run(
    experts,
    baseline: Callable[[], Tensor] | None,
    routed: tuple[Tensor, ...],
    options: tuple,
    hidden_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run `fused_experts` with the scales in `experts`, or `baseline()` where vLLM serves.

    `routed` are tokens [tokens, hidden], with `hidden_scale` if vLLM quantized them, weights [experts, 2 * inner, hidden] and
    [experts, hidden, inner], and the weights and ids of the tokens' experts. `options` are the map of all experts to this rank's,
    -1 for others, or None if the rank has all, whether weights multiply the input, the activation, and the number of experts.
    """
    hidden, w1, w2, topk_weights, topk_ids = routed
    expert_map, on_input, activation, global_num_experts = options
    out_dtype = out_dtype or hidden.dtype
    quantized = None if on_input or hidden_scale is not None else moe_side_channel.quantized(hidden)
    if quantized is not None and quantized[0].dtype == w1.dtype and scheme_of(w1, experts.w1_scale).group == BLOCK:
        hidden, hidden_scale = quantized
    routed = hidden, w1, w2, topk_weights, topk_ids
    arguments = op_arguments(experts, *routed, expert_map, on_input, hidden_scale, out_dtype, activation)
    if baseline is None:
        return torch.ops.vllm_rocm_ops.fused_experts(*arguments)
    call = topk_ids.shape[1], topk_ids.dtype, expert_map, on_input, activation, global_num_experts
    choice = choice_of(experts, len(hidden), experts.comparison or COMPARISON, w1, w2, out_dtype, *call)
    output = ops.fused_experts.run_kernels(*arguments) if choice.plugin_serves(len(hidden)) else None
    return baseline() if output is None else output


def choice_of(experts, tokens: int, comparison: LayerComparison, w1: Tensor, w2: Tensor, dtype: torch.dtype, *call):
    """Return the choice for a layer, given the rest of `Experts`' layer. A baseline that always serves gets all calls."""
    choice = getattr(experts, "choice", None)
    if choice is None or choice.layers is not None:
        topk, _, expert_map, _, activation, _ = call
        scheme, rest = scheme_of(w1, experts.w1_scale).name, epilogue_traits(experts, activation)
        key = type(experts), experts.named, w1.shape, w2.shape, w1.dtype, scheme, dtype, topk, expert_map is None, rest
        layer = w1, w2, dtype, experts, *call
        beside = Baseline(experts.baseline_class().__name__, named=experts.named)
        choice = experts.choice = kernel_selection.choice_for(key, comparison, beside, lambda: layer, w1, tokens)
    if choice.baseline_always_serves:
        experts.restore_baseline()
    return choice


class Experts(LayerComparison):
    """Calls of experts. Routing is uniform over all experts, of all ranks.

    A layer: both weights, the tokens' dtype, the holder of the scales, and the rest of `run`'s arguments.
    """

    op, limit, sampled_rows = ops.fused_experts, MAX_TOKENS, 3  # a row needs the whole weights of its experts

    def max_tokens(self):
        return 0 if linear_base.asks_for_aiter("fused_moe") else self.limit

    def columns(self, layer):
        return columns_of(layer[0]), layer[1].shape[1]

    def describe(self, layer):
        w1, w2, dtype, experts, topk, _, expert_map, _, activation, total = layer
        schemes = scheme_of(w1, experts.w1_scale), scheme_of(w2, experts.w2_scale)
        kinds = " ".join(dict.fromkeys(scheme.name for scheme in schemes))
        here = f"{len(w1)}" if expert_map is None else f"{len(w1)} of {total}"
        types = kernel_selection.types(w1.dtype, dtype)
        how = " shuffled" * experts.shuffled + " alone" * experts.weight_only
        return f"{here} experts {columns_of(w1)}x{columns_of(w2)} top {topk} {types} scales {kinds}{how}{epilogue_traits(experts, activation)}"

    def work(self, layer, tokens):
        w1, w2, _, _, topk, _, expert_map, *_, total = layer
        pairs = tokens * topk * len(w1) / (len(w1) if expert_map is None else total)
        weights = w1.nbytes + w2.nbytes
        values = sum(w.shape[1] * columns_of(w) for w in (w1, w2))
        return weights * min(1.0, pairs / len(w1)), 2.0 * pairs * values

    def arguments(self, layer, x, seed):
        *_, topk, ids_dtype, expert_map, _, _, total = layer
        num_experts = len(layer[0]) if expert_map is None else total
        routed = min(total, num_experts)
        generator = torch.Generator(x.device).manual_seed(seed)
        scores = torch.rand(len(x), num_experts, generator=generator, device=x.device)
        scores[:, routed:] += 1.0  # shared experts, which all tokens go to
        weights, ids = scores.topk(topk, 1)
        return layer, x, weights / weights.sum(1, keepdim=True), ids.to(ids_dtype)

    def plugin(self, layer, x, weights, ids):
        w1, w2, dtype, experts, _, _, expert_map, on_input, activation, _ = layer
        arguments = op_arguments(experts, x, w1, w2, weights, ids, expert_map, on_input, None, dtype, activation)
        return self.op.run_kernels(*arguments)

    def baseline(self, layer, x, weights, ids):
        w1, w2, _, experts, _, _, expert_map, on_input, activation, total = layer
        options = activation, total, experts.baseline_expert_map(expert_map), on_input
        return experts.kernel.apply(x, *experts.baseline_weights(w1, w2), weights, ids, *options)

    def exact(self, arguments, x, rows, columns):
        layer, _, weights, ids = arguments
        w1, w2, _, experts, _, _, expert_map, on_input, activation, _ = layer
        *swiglu, interleaved = swiglu_of(experts, activation)
        here = ids if expert_map is None else expert_map[ids.long()]
        results = torch.zeros(len(rows), len(columns), device=x.device)
        for place, row in enumerate(rows.tolist()):
            for expert, weight in zip(here[row].tolist(), weights[row].tolist()):
                if expert < 0:
                    continue
                token = x[row].float() * (weight if on_input else 1.0)
                token = _quant_dequant(token, experts.a1_scale, expert, w1.dtype)
                gate_up = weight_of(w1, experts.w1_scale, expert, experts.shuffled, torch.float32) @ token
                gate_up = gate_up if experts.w1_bias is None else gate_up + experts.w1_bias[expert]
                gate, up = (gate_up[::2], gate_up[1::2]) if interleaved else gate_up.chunk(2)
                inner = _quant_dequant(activated(gate, up, *swiglu), experts.a2_scale, expert, w2.dtype)
                result = weight_of(w2, experts.w2_scale, expert, experts.shuffled, torch.float32)[columns] @ inner
                result = result if experts.w2_bias is None else result + experts.w2_bias[expert][columns]
                results[place] += result * (1.0 if on_input else weight)
        return results

    def layers_of(self, a):
        total = len(a.w1 if a.expert_map is None else a.expert_map)
        swiglu = a.swiglu_limit, a.swiglu_alpha, a.swiglu_beta, a.interleaved
        options = a.topk_ids.shape[1], a.topk_ids.dtype, a.expert_map, a.apply_router_weight_on_input, swiglu, total
        scales = {"w1_scale": a.w1_scale, "w2_scale": a.w2_scale, "a1_scale": None, "a2_scale": None}
        scales |= {"w1_bias": a.w1_bias, "w2_bias": a.w2_bias}
        scales |= {"weight_only": a.weight_only}
        orders = (types.SimpleNamespace(**scales, shuffled=shuffled) for shuffled in (False, True))
        return [(a.w1, a.w2, a.out_dtype, order, *options) for order in orders]

    def exact_of(self, a, rows, columns):
        layer = self.layers_of(a)[a.shuffled]
        return self.exact((layer, None, a.topk_weights, a.topk_ids), a.hidden, rows, columns)


COMPARISON = Experts()


def _quant_dequant(x: Tensor, scales: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    """Fake-quantize by a static scale, as a model's scale may clip random tokens. Dynamic scales do not need it."""
    if scales is None:
        return x
    scale = scales.flatten()[expert if scales.numel() > 1 else 0]
    return cast(x / scale, dtype).float() * scale


def modular_kernel_of(baseline) -> object:
    """Return vLLM's `FusedMoEKernel` of experts, without data or expert parallelism."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

    return modular_kernel.FusedMoEKernel(no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular(), baseline)


def probe(oracle, select: str, *parameters: str) -> None:
    """Raise `Unavailable` unless vLLM's base class of experts and its selecting module are as expected."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

    base = modular_kernel.FusedMoEExpertsModular
    seam.require_parameters(getattr(oracle, select), *parameters)
    seam.require_parameters(oracle.backend_to_kernel_cls, "backend")
    seam.require_parameters(base.__init__, "moe_config", "quant_config")
    seam.require_parameters(base.apply, *APPLY)
    seam.require_parameters(base.workspace_shapes, "M", "N", "K")
    config = "moe_config", "weight_key", "activation_key", "activation_format"
    seam.require_parameters(base.is_supported_config, "cls", *config)
    seam.require_parameters(no_dp_ep._quantize_input, "a1", "quant_config", "defer_input_quant")
    seam.require_parameters(no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular)
    calls = "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map"
    seam.require_parameters(modular_kernel.FusedMoEKernel.apply, *calls, "apply_router_weight_on_input")
    seam.require_parameters(modular_kernel.FusedMoEKernel.__init__, "prepare_finalize", "fused_experts")
    seam.require("SILU" in MoEActivation.__members__, "MoEActivation.SILU")


def first_supported(candidates: list[type], config, weight_key=None, activation_key=None) -> type | None:
    """Return the plugin's first class that supports a layer, or None."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

    if why := unsupported_parallelism(config.moe_parallel_config):
        log_unsupported(why)
        return None
    asked = config, weight_key, activation_key, FusedMoEActivationFormat.Standard
    return next((candidate for candidate in candidates if candidate.is_supported_config(candidate, *asked)[0]), None)


def select(candidates: list[type], vllm_selects: Callable[[], tuple], config, *scheme) -> tuple:
    """Return a backend and its experts: the plugin's first class that supports a layer, else what vLLM selects.

    Where the user named a backend, the baseline must be what vLLM selects.
    """
    named = None if config.moe_backend == "auto" else vllm_selects()
    if named is not None:
        keeps = envs.VLLM_ROCM_OPS_NAMED_BACKEND == "keep"
        pairs = ((each, (each.backend, each.baseline_class() or named[1])) for each in candidates)
        candidates = [each for each, pair in pairs if pair == named and not keeps]
    chosen = first_supported(candidates, config, *scheme) if candidates else None
    return (chosen.backend, chosen) if chosen else named or vllm_selects()


def baseline_class(oracle, backend, scheme: tuple) -> type | None:
    """Return vLLM's experts for a backend of `oracle`, its module that selects experts, None on CPU.

    The scheme, a weight key and an activation key, decides among several classes.
    """
    # vLLM's MX-FP8 module has another function for the backends that it adds.
    classes = getattr(oracle, "_mxfp8_backend_to_kernel_cls", oracle.backend_to_kernel_cls)
    if seam.served_platform() == "cpu":
        return None
    first, *others = classes(backend)
    return (
        next((candidate for candidate in (first, *others) if candidate._supports_quant_scheme(*scheme)), first)
        if others
        else first
    )


def modular(name: str, schemes: tuple, oracle, backend) -> type:
    """Return the plugin's class of modular experts, with vLLM's for `backend` as baseline.

    `apply` must write into a buffer of vLLM's, so the op's result is copied.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import _quantize_input
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class RocmOpsExperts(Predicates, modular_kernel.FusedMoEExpertsModular):
        def __init__(self, moe_config, quant_config):
            super().__init__(moe_config, quant_config)
            baseline = self.baseline_class()
            self.baseline = baseline and baseline(moe_config, copy_of(quant_config))
            self.kernel = baseline and modular_kernel_of(self.baseline)  # for timing
            moves_tokens = moe_config.moe_parallel_config.use_all2all_kernels or moe_config.dp_size > 1
            self.gets_baseline_inputs = moves_tokens

        @property
        def expects_unquantized_inputs(self):
            return not self.gets_baseline_inputs or self.baseline is None or self.baseline.expects_unquantized_inputs

        def restore_baseline(self):
            if not getattr(self.baseline, "consumes_expert_mask", False):
                self.apply, self.gets_baseline_inputs = self.baseline.apply, True

        def workspace_shapes(self, M, N, K, *others, **more):
            if self.baseline is None:
                return (0,), (0,), (M, K)
            return self.baseline.workspace_shapes(M, N, K, *others, **more)

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceNoOP()

        def apply(self, *arguments, **named):
            a = ApplyArguments(*arguments, **named)

            def baseline() -> Tensor:
                quantized, scale = a.hidden_states, a.a1q_scale
                if self.expects_unquantized_inputs:
                    defers = self.baseline.expects_unquantized_inputs
                    quantized, scale = _quantize_input(a.hidden_states, self.quant_config, defers)
                w1, w2 = self.baseline_weights(*self.op_weights(a.w1, a.w2))
                given = a._replace(hidden_states=quantized, w1=w1, w2=w2, a1q_scale=scale)
                self.baseline.apply(*given._replace(expert_map=self.baseline_expert_map(a.expert_map)))
                return a.output

            # With apply_router_weight_on_input vLLM has already multiplied the input by the weights.
            weights = torch.ones_like(a.topk_weights) if a.apply_router_weight_on_input else a.topk_weights
            fallback = None if self.baseline is None else baseline
            ids = a.topk_ids if a.expert_tokens_meta is None else mask_spare_rows(a.topk_ids, a.expert_tokens_meta)
            routed = a.hidden_states, *self.op_weights(a.w1, a.w2), weights, ids
            options = a.expert_map, False, a.activation, a.global_num_experts
            result = run(self, fallback, routed, options, a.a1q_scale, a.output.dtype)
            if result is not a.output:
                a.output.copy_(result)

    return with_attributes(RocmOpsExperts, name, schemes, oracle, backend)


def with_attributes(experts_class: type, name: str, schemes: tuple, oracle, backend) -> type:
    """Return a class with its name and the attributes that `Predicates` reads."""
    experts_class.__name__ = experts_class.__qualname__ = name
    experts_class.schemes, experts_class.baseline_class = (
        schemes,
        staticmethod(lambda: baseline_class(oracle, backend, schemes[0])),
    )
    experts_class.oracle, experts_class.backend = oracle, backend
    experts_class.beside_aiter = backend.name == "TRITON" and hasattr(type(backend), "AITER")
    experts_class.shuffled = backend.name == "AITER"
    return experts_class
