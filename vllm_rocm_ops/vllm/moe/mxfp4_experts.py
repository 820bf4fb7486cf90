"""Run MXFP4 experts (e2m1 with one e8m0 scale per 32 of K) with bf16 tokens by `fused_experts`, see base.py.

vLLM chooses a backend first, and its experts for that backend are the baseline. On ROCm OpenAI's triton_kernels and
AITER's Triton experts hold transposed views of the checkpoint's bytes (`StridedLayout`), which the op reads in place,
including vLLM's zero padding. On gfx950 their scales are swizzled for block-scaled matrix instructions: the op reads an
unswizzled copy, a sixteenth of the weights' bytes. Layers in other layouts stay vLLM's. Some of these experts route
tokens (vLLM calls them monolithic): then the plugin routes, too, in the calls that it serves.

On GPUs without MXFP4 instructions vLLM emulates W4A4 and rounds tokens to MXFP4. The plugin multiplies bf16 tokens, so
generated text may differ from the emulation's, which a warning says.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe import routing_experts
from vllm_rocm_ops.vllm.moe.expert_support import log_unsupported

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes. The last is for vLLM's emulation, which leaves weights as loaded."""

SCHEME = "kMxfp4Static", None
"""vLLM's names of the weight key and the activation key."""

BACKENDS = "TRITON", "TRITON_UNFUSED", "AITER_TRITON_MXFP4_BF16", "EMULATION"
"""vLLM's backends whose experts can be the baseline. Up to 0.29 it has no AITER_TRITON_MXFP4_BF16."""

SELECTS = {
    "select_mxfp4_moe_backend": ("config", "activation_key"),
    "select_deepseek_v4_mxfp4_moe_backend": ("config",),
}
"""vLLM's functions that select experts, gpt-oss's and the general one, with their parameters."""

SCALE_TILES = "CDNA4MXScaleLayout", "GFX950MXScaleLayout"
"""triton_kernels' layout of scales for block-scaled matrix instructions, and its name before Triton 3.6."""

ROUTING = "RenormalizeNaive"
"""vLLM's routing method of the layers in which the plugin routes, gpt-oss's."""

logger = logging.getLogger("vllm.vllm_rocm_ops")


def row_major(parameter, what: str) -> Tensor:
    """Return weights [E, N, K / 2] or scales [E, N, K / 32] of vLLM's experts with K last: a view, or swizzled scales' copy.

    Args:
        parameter: A tensor as loaded, or triton_kernels' tensor with its layout.
        what: The name of the parameter, for the error.

    Raises:
        ValueError: It has a layout that the op does not read.
    """
    if isinstance(parameter, Tensor):
        return parameter
    storage = parameter.storage
    name = (storage.layout if isinstance(storage.layout, type) else type(storage.layout)).__name__
    rows = storage.data.transpose(1, 2)
    if name == "StridedLayout":
        return rows
    if name not in SCALE_TILES:
        raise ValueError(f"{what} in {name}")
    return unswizzle_scales(rows)


def unswizzle_scales(tiles: Tensor) -> Tensor:
    """Return scales [E, N, K / 32] of CDNA4's tiles [E, N / 32, K]. A word has rows r and r + 16, columns c and c + 4."""
    experts, blocks, tile_bytes = tiles.shape
    split = tiles.reshape(experts, blocks, tile_bytes // 256, 4, 16, 2, 2)
    return split.permute(0, 1, 6, 4, 2, 5, 3).reshape(experts, 32 * blocks, tile_bytes // 32)


class LayoutAdapter:
    """Mixin of the plugin's experts that reads weights, scales and biases in the layouts of vLLM's experts."""

    w1_scale = w2_scale = w1_bias = w2_bias = a1_scale = a2_scale = None
    read: tuple = None, None, None, None
    """vLLM's w1 and w2, and both as the op reads them."""
    copies: tuple = ()
    """Pairs of a function that reads scales or biases of vLLM's, and the copy of them that the op reads."""

    def op_weights(self, w1, w2):
        if self.read[0] is not w1 or self.read[1] is not w2:
            config = self.quant_config
            values = [row_major(weight, "MXFP4 weights") for weight in (w1, w2)]
            self.copies = ()
            scales = [self.scales(quant.scale, weight) for quant, weight in zip((config._w1, config._w2), values)]
            if any(weight.stride(2) != 1 for weight in values):
                raise ValueError("MXFP4 weights whose columns are apart")
            self.w1_scale, self.w2_scale = scales
            # vLLM's Triton experts convert biases from the checkpoint's bf16 to float32.
            self.w1_bias, self.w2_bias = (self.bias(quant.bias) for quant in (config._w1, config._w2))
            self.read = w1, w2, *values
        return self.read[2:]

    def baseline_weights(self, w1, w2):
        return self.read[:2]

    def scales(self, scale, values: Tensor) -> Tensor:
        """Return scales [E, N, K / 32] of values [E, N, K / 2]: a copy if they are swizzled, padded or not contiguous."""
        scale = scale if isinstance(scale, Tensor) else compat.mx_scale(scale)
        data = scale if isinstance(scale, Tensor) else scale.storage.data
        rows, columns = values.shape[1], values.shape[2] // 16
        return self.tracked(data, lambda: row_major(scale, "MXFP4 scales")[:, :rows, :columns].contiguous())

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return bias if bias is None else self.tracked(bias, lambda: bias.to(torch.bfloat16))

    def tracked(self, source: Tensor, read: Callable[[], Tensor]) -> Tensor:
        """Return `read()`. If it copied `source`, add it to `copies`, which `refresh` writes again."""
        copy = read()
        if copy.data_ptr() != source.data_ptr():
            self.copies = *self.copies, (read, copy)
        return copy

    def refresh(self):
        for read, copy in self.copies:
            copy.copy_(read())

    def can_read(self, w1, w2) -> bool:
        """True if the op reads the layouts of a layer. Otherwise vLLM's experts serve it from now on."""
        try:
            self.op_weights(w1, w2)
        except ValueError as why:
            self.refused = str(why)
            log_unsupported(self.refused)
            self.restore_baseline()
            return False
        return True


def baseline_class(oracle, backend, routes: bool) -> type | None:
    """Return vLLM's class of experts for a backend, monolithic if it `routes`. None if there is none, and on CPU."""
    if seam.served_platform() == "cpu":
        return None
    classes = oracle.backend_to_kernel_cls(backend)
    return next((candidate for candidate in classes if candidate.is_monolithic() == routes), None)


def modular(oracle, backend, scheme: tuple) -> type:
    """Return the plugin's class of modular experts, for tokens that vLLM has routed."""

    class RocmOpsMxfp4Experts(LayoutAdapter, experts.modular("", (scheme,), oracle, backend)):
        @staticmethod
        def _supports_parallel_config(config):  # load balancing moves parameters, but not the copies of these experts
            moves = config.enable_eplb and backend.name != "EMULATION"
            return experts.Predicates._supports_parallel_config(config) and not moves

        def moe_problem_size(self, a1, w1, w2, topk_ids):
            return (super() if self.baseline is None else self.baseline).moe_problem_size(a1, w1, w2, topk_ids)

        def apply(self, output, hidden_states, w1, w2, *others, **more):
            apply = super().apply if self.can_read(w1, w2) else self.baseline.apply
            return apply(output, hidden_states, w1, w2, *others, **more)

    return with_attributes(
        RocmOpsMxfp4Experts, f"RocmOpsMxfp4{backend.name.title()}Experts", oracle, backend, scheme, False
    )


def routing(oracle, backend, scheme: tuple) -> type:
    """Return the plugin's class of monolithic experts, which route tokens as vLLM's for this backend do."""
    from vllm.model_executor.layers.fused_moe import modular_kernel

    class RocmOpsRoutingMxfp4Experts(LayoutAdapter, experts.Predicates, modular_kernel.FusedMoEExpertsMonolithic):
        def __init__(self, moe_config, quant_config):
            super().__init__(moe_config, quant_config)
            self.method, self.topk = routing_experts.METHODS[ROUTING], moe_config.experts_per_token
            self.baseline = self.baseline_class()(moe_config, quant_config)

        @staticmethod
        def is_supported_config(experts_class, moe_config, *asked):
            return routing_experts.is_supported_config(experts_class, ROUTING, moe_config, *asked)

        @staticmethod
        def _supports_routing_method(routing_method, weight_key, activation_key):
            return routing_method.name == ROUTING

        @staticmethod
        def _supports_router_logits_dtype(router_logits_dtype, routing_method):
            return True  # is_supported_config asks the kernels

        @staticmethod
        def _supports_activation(activation):
            # In AITER's experts rows of gate and up alternate with any activation, which its name does not say.
            return activation.name == "SWIGLUOAI"

        def restore_baseline(self):
            self.apply = self.baseline.apply

        def apply(self, *arguments, **named):
            a = routing_experts.ApplyArguments(*arguments, **named)
            x, options = a.hidden_states, (a.expert_map, a.apply_router_weight_on_input)
            if self.can_read(a.w1, a.w2):
                values = self.op_weights(a.w1, a.w2)
                call = self.topk, torch.int32, *options, a.activation, a.global_num_experts
                choice = experts.choice_of(self, len(x), COMPARISON, *values, x.dtype, *call)
                if choice.plugin_serves(len(x)):
                    routed = *values, *self.route(a.router_logits)
                    given = experts.op_arguments(self, x, *routed, *options, None, x.dtype, a.activation)
                    if (output := ops.fused_experts.run_kernels(*given)) is not None:
                        return output
            return self.baseline.apply(*arguments, **named)

        def route(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
            """Return the weights and ids [tokens, topk] of the tokens' experts."""
            return routing_experts.route(self.method, self.topk, router_logits, *(None,) * 3, 1.0, has_baseline=True)

    name = f"RocmOpsRoutingMxfp4{backend.name.title()}Experts"
    return with_attributes(RocmOpsRoutingMxfp4Experts, name, oracle, backend, scheme, True)


def with_attributes(experts_class: type, name: str, oracle, backend, scheme: tuple, routes: bool) -> type:
    """Return a class with its name and attributes, not `beside_aiter`: `select_experts` also has AITER's baselines."""
    experts.with_attributes(experts_class, name.replace("_", ""), (scheme,), oracle, backend)
    experts_class.baseline_class = staticmethod(lambda: baseline_class(oracle, backend, routes))
    experts_class.beside_aiter = False
    return experts_class


class RoutedExperts(experts.Experts):
    """Calls of monolithic experts, which get router logits [tokens, experts] in place of weights and ids."""

    def arguments(self, layer, x, seed):
        *_, total = layer
        generator = torch.Generator(x.device).manual_seed(seed)
        ranks = torch.rand(len(x), total, generator=generator, device=x.device).argsort(1)
        return layer, x, ((ranks - total // 2) / 16).to(x.dtype)  # distinct in bf16 for up to 512 experts

    def plugin(self, layer, x, logits):
        return super().plugin(layer, x, *layer[3].route(logits))

    def baseline(self, layer, x, logits):
        w1, w2, _, plugin_experts, _, _, expert_map, on_input, activation, total = layer
        options = activation, total, expert_map, None, on_input
        return plugin_experts.baseline.apply(x, *plugin_experts.baseline_weights(w1, w2), logits, *options)

    def exact(self, arguments, x, rows, columns):
        layer, _, logits = arguments
        largest, ids = logits.float().topk(layer[4], 1)
        return super().exact((layer, x, largest.softmax(1), ids), x, rows, columns)


COMPARISON = RoutedExperts()


def probe() -> None:
    """Raise `Unavailable` unless vLLM's selection of MXFP4 experts and their base classes are as expected."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.utils import quant_utils

    for select, parameters in SELECTS.items():
        experts.probe(mxfp4, select, *parameters)
    routing_experts.probe_vllm()
    seam.require_parameters(modular_kernel.FusedMoEExpertsModular.moe_problem_size, "a1", "w1", "w2", "topk_ids")
    seam.require({"TRITON", "EMULATION"} <= mxfp4.Mxfp4MoeBackend.__members__.keys(), "Mxfp4MoeBackend")
    seam.require(hasattr(quant_utils, SCHEME[0]), SCHEME[0])


def install() -> None:
    """Have vLLM select the plugin's experts where it would select experts that they can have as baseline."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.utils import quant_utils

    scheme = getattr(quant_utils, SCHEME[0]), None
    for name in filter(mxfp4.Mxfp4MoeBackend.__members__.get, BACKENDS):
        backend = mxfp4.Mxfp4MoeBackend[name]
        PLUGIN_EXPERTS.extend(make(mxfp4, backend, scheme) for make in (routing, modular))

    def wrapped(select):
        def plugin_select(config, activation_key=None):
            arguments = (config,) if activation_key is None else (config, activation_key)
            return select_experts(lambda: select(*arguments), config, scheme)

        plugin_select.__name__ = select.__name__
        return plugin_select

    for name in SELECTS:
        select = getattr(mxfp4, name)
        seam.replace_function(select.__name__, select, wrapped(select))


def select_experts(vllm_selects, config, scheme: tuple) -> tuple:
    """Return a backend and a class of experts: the plugin's whose baseline vLLM selects, else vLLM's."""
    for_emulation = PLUGIN_EXPERTS[-1]
    if config.in_dtype != torch.bfloat16:
        log_unsupported(f"MXFP4 weights with {config.in_dtype}")
        return vllm_selects()
    if seam.served_platform() == "cpu":
        return experts.select([for_emulation], vllm_selects, config, *scheme)
    selected = vllm_selects()
    candidates = [each for each in PLUGIN_EXPERTS if (each.backend, each.baseline_class()) == selected]
    if not candidates:
        log_unsupported(f"MXFP4 weights as vLLM's backend {selected[0].name} holds them")
        return selected
    chosen = experts.select(candidates, lambda: selected, config, *scheme)
    if chosen[1] is for_emulation:
        warn_bf16_tokens()
    return chosen


@functools.cache
def warn_bf16_tokens() -> None:
    """Warn once that the plugin multiplies bf16 tokens where vLLM's emulation rounds them to MXFP4."""
    logger.warning(
        "vllm-rocm-ops: MXFP4 experts multiply bf16 tokens in the calls that the plugin serves. vLLM's emulation rounds tokens to "
        "4 bits where the checkpoint asks for it, so generated text may differ; the seam mxfp4_experts can be switched off"
    )


SEAM = seam.Seam(
    name="mxfp4_experts",
    replaces="select_mxfp4_moe_backend and select_deepseek_v4_mxfp4_moe_backend of fused_moe/oracle/mxfp4.py",
    probe=probe,
    install=install,
    ops=("fused_experts", "topk_softmax"),
)
