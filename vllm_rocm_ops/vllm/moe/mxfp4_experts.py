"""Run MXFP4 experts (E2M1 with one E8M0 scale per 32 of K) with bf16 tokens by `fused_experts` where it is faster, see base.py.

vLLM chooses a backend first, and its experts for it are kept. OpenAI's triton_kernels and AITER's Triton experts hold
transposed views of the checkpoint's bytes on ROCm (`StridedLayout`), which the op reads in place, with the zeros that vLLM pads
to. On gfx950 scales are in an order of matrix instructions: the op has a copy of them, a sixteenth of the weights' bytes. Weights in
another order stay vLLM's. Some of these experts route: then the plugin routes, too, in the calls that it serves.

vLLM emulates W4A4 and rounds tokens to MXFP4 on GPUs without it. Beside it the plugin multiplies bf16 tokens, so the model's tokens
differ from the emulation's. That is said in the log.
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
from vllm_rocm_ops.vllm.moe.expert_support import say_refused

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes, the last for vLLM's emulation, which leaves weights as loaded."""

SCHEME = "kMxfp4Static", None
"""vLLM's names of the weight key and the activation key."""

BACKENDS = "TRITON", "TRITON_UNFUSED", "AITER_TRITON_MXFP4_BF16", "EMULATION"
"""vLLM's backends whose experts are kept. Up to 0.29 it has no AITER_TRITON_MXFP4_BF16."""

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


def rows_of(held, what: str) -> Tensor:
    """Return weights or scales [E, N, K / ...] that vLLM's experts hold, K last, as a view of those that are not in tiles.

    Raises:
        ValueError: They are in an order that the op does not read.
    """
    if isinstance(held, Tensor):  # as loaded
        return held
    storage = held.storage
    name = (storage.layout if isinstance(storage.layout, type) else type(storage.layout)).__name__
    rows = storage.data.transpose(1, 2)
    if name == "StridedLayout":
        return rows
    if name not in SCALE_TILES:
        raise ValueError(f"{what} in {name}")
    return of_tiles(rows)


def of_tiles(tiles: Tensor) -> Tensor:
    """Return scales [E, N, K / 32] of tiles [E, N / 32, K], in which a word has rows r and r + 16, columns c and c + 4."""
    experts, blocks, of_block = tiles.shape
    split = tiles.reshape(experts, blocks, of_block // 256, 4, 16, 2, 2)
    return split.permute(0, 1, 6, 4, 2, 5, 3).reshape(experts, 32 * blocks, of_block // 32)


class Reads:
    """Mix into the plugin's experts: reads what vLLM's experts hold in a form of their own."""

    w1_scale = w2_scale = w1_bias = w2_bias = a1_scale = a2_scale = None
    read: tuple = None, None, None, None
    """The weights of vLLM's layer, and as the op reads them."""
    copies: tuple = ()
    """Pairs of functions that read vLLM's scales and biases, and of copies that the op reads in their place."""

    def readable(self, w1, w2):
        if self.read[0] is not w1 or self.read[1] is not w2:
            config = self.quant_config
            values = [rows_of(weight, "MXFP4 weights") for weight in (w1, w2)]
            self.copies = ()
            scales = [self.scales(of.scale, weight) for of, weight in zip((config._w1, config._w2), values)]
            if any(weight.stride(2) != 1 for weight in values):
                raise ValueError("MXFP4 weights whose columns are apart")
            self.w1_scale, self.w2_scale = scales
            # vLLM's Triton experts have them in float32, from a checkpoint's bf16.
            self.w1_bias, self.w2_bias = (self.bias(of.bias) for of in (config._w1, config._w2))
            self.read = w1, w2, *values
        return self.read[2:]

    def held(self, w1, w2):
        return self.read[:2]

    def scales(self, scale, values: Tensor) -> Tensor:
        """Return the scales [E, N, K / 32] of values [E, N, K / 2], copied if they are in tiles, or their rows apart or padded."""
        scale = scale if isinstance(scale, Tensor) else compat.mx_scale(scale)
        data = scale if isinstance(scale, Tensor) else scale.storage.data
        rows, columns = values.shape[1], values.shape[2] // 16
        return self.noted(data, lambda: rows_of(scale, "MXFP4 scales")[:, :rows, :columns].contiguous())

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return bias if bias is None else self.noted(bias, lambda: bias.to(torch.bfloat16))

    def noted(self, source: Tensor, read: Callable[[], Tensor]) -> Tensor:
        """Return what a function reads of a tensor. Note a copy, to write it again."""
        copy = read()
        if copy.data_ptr() != source.data_ptr():
            self.copies = *self.copies, (read, copy)
        return copy

    def refresh(self):
        for read, copy in self.copies:
            copy.copy_(read())

    def reads(self, w1, w2) -> bool:
        """True if the op reads a layer's weights. Else vLLM's experts serve it from now on."""
        try:
            self.readable(w1, w2)
        except ValueError as why:
            self.refused = str(why)
            say_refused(self.refused)
            self.leave()
            return False
        return True


def kept(oracle, backend, routes: bool):
    """Return vLLM's experts for a backend, those that route or the others. None if it has none, and on CPU."""
    if seam.served_platform() == "cpu":
        return None
    return next((one for one in oracle.backend_to_kernel_cls(backend) if one.is_monolithic() == routes), None)


def modular(oracle, backend, scheme: tuple) -> type:
    """Return the plugin's experts for tokens that vLLM has routed."""

    class RocmOpsMxfp4Experts(Reads, experts.modular("", (scheme,), oracle, backend)):
        @staticmethod
        def _supports_parallel_config(config):  # load balancing moves parameters, of which these experts have copies
            moves = config.enable_eplb and backend.name != "EMULATION"
            return experts.Predicates._supports_parallel_config(config) and not moves

        def moe_problem_size(self, a1, w1, w2, topk_ids):
            return (super() if self.baseline is None else self.baseline).moe_problem_size(a1, w1, w2, topk_ids)

        def apply(self, output, hidden_states, w1, w2, *others, **more):
            apply = super().apply if self.reads(w1, w2) else self.baseline.apply
            return apply(output, hidden_states, w1, w2, *others, **more)

    return finished(RocmOpsMxfp4Experts, f"RocmOpsMxfp4{backend.name.title()}Experts", oracle, backend, scheme, False)


def routing(oracle, backend, scheme: tuple) -> type:
    """Return the plugin's experts that route tokens, as vLLM's for this backend do."""
    from vllm.model_executor.layers.fused_moe import modular_kernel

    class RocmOpsRoutingMxfp4Experts(Reads, experts.Predicates, modular_kernel.FusedMoEExpertsMonolithic):
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

        def leave(self):
            self.apply = self.baseline.apply

        def apply(
            self,
            hidden_states,
            w1,
            w2,
            router_logits,
            activation,
            global_num_experts,
            expert_map,
            a1q_scale,
            apply_router_weight_on_input,
            *others,
            **more,
        ):
            dtype, options = hidden_states.dtype, (expert_map, apply_router_weight_on_input)
            if self.reads(w1, w2):
                values = self.readable(w1, w2)
                call = self.topk, torch.int32, *options, activation, global_num_experts
                choice = experts.choice_of(self, len(hidden_states), COMPARISON, *values, dtype, *call)
                if choice.plugin_serves(len(hidden_states)):
                    routed = *values, *self.route(router_logits)
                    arguments = experts.op_arguments(self, hidden_states, *routed, *options, None, dtype, activation)
                    if (output := ops.fused_experts.run_kernels(*arguments)) is not None:
                        return output
            vllm = router_logits, activation, global_num_experts, expert_map, a1q_scale, apply_router_weight_on_input
            return self.baseline.apply(hidden_states, w1, w2, *vllm, *others, **more)

        def route(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
            """Return the weights and ids [tokens, topk] of the tokens' experts."""
            return routing_experts.route(self.method, self.topk, router_logits, *(None,) * 3, 1.0, has_baseline=True)

    name = f"RocmOpsRoutingMxfp4{backend.name.title()}Experts"
    return finished(RocmOpsRoutingMxfp4Experts, name, oracle, backend, scheme, True)


def finished(made: type, name: str, oracle, backend, scheme: tuple, routes: bool) -> type:
    """Return a class with its attributes. It is asked only where vLLM chose the experts that it keeps, beside AITER or not."""
    made = experts.finished(made, name.replace("_", ""), (scheme,), oracle, backend)
    made.baseline_class, made.beside_aiter = staticmethod(lambda: kept(oracle, backend, routes)), False
    return made


class RoutedExperts(experts.Experts):
    """Calls of experts that route: they get logits in place of weights and ids."""

    def arguments(self, layer, x, seed):
        *_, total = layer
        generator = torch.Generator(x.device).manual_seed(seed)
        places = torch.rand(len(x), total, generator=generator, device=x.device).argsort(1)
        return layer, x, ((places - total // 2) / 16).to(x.dtype)  # to 512 experts no two logits are equal in bf16

    def plugin(self, layer, x, logits):
        return super().plugin(layer, x, *layer[3].route(logits))

    def baseline(self, layer, x, logits):
        w1, w2, _, holder, _, _, expert_map, on_input, activation, total = layer
        options = activation, total, expert_map, None, on_input
        return holder.baseline.apply(x, *holder.held(w1, w2), logits, *options)

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
    """Have vLLM put the plugin's experts around those that it selects."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.utils import quant_utils

    scheme = getattr(quant_utils, SCHEME[0]), None
    for name in filter(mxfp4.Mxfp4MoeBackend.__members__.get, BACKENDS):
        backend = mxfp4.Mxfp4MoeBackend[name]
        PLUGIN_EXPERTS.extend(make(mxfp4, backend, scheme) for make in (routing, modular))

    def wrapped(select):
        def selects(config, activation_key=None):
            given = (config,) if activation_key is None else (config, activation_key)
            return choose(lambda: select(*given), config, scheme)

        selects.__name__ = select.__name__
        return selects

    for name in SELECTS:
        select = getattr(mxfp4, name)
        experts.replace(select, wrapped(select))


def choose(vllm_selects, config, scheme: tuple) -> tuple:
    """Return a backend and its experts: the plugin's around those that vLLM selects, or vLLM's."""
    emulated = PLUGIN_EXPERTS[-1]
    if config.in_dtype != torch.bfloat16:
        say_refused(f"MXFP4 weights with {config.in_dtype}")
        return vllm_selects()
    if seam.served_platform() == "cpu":
        return experts.select([emulated], vllm_selects, config, *scheme)
    selected = vllm_selects()
    around = [one for one in PLUGIN_EXPERTS if (one.backend, one.baseline_class()) == selected]
    if not around:
        say_refused(f"MXFP4 weights as vLLM's backend {selected[0].name} holds them")
        return selected
    chosen = experts.select(around, lambda: selected, config, *scheme)
    if chosen[1] is emulated:
        say_bf16_tokens()
    return chosen


@functools.cache
def say_bf16_tokens() -> None:
    """Log once that vLLM's emulation rounds tokens and the plugin does not."""
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
