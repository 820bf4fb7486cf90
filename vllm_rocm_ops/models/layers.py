"""List the ops that one rank calls in a step of a model, from a Hugging Face config.json, TP and EP.

`calls(model_config.read(model), tp, ep)` lists them as vLLM with this package runs them: linear layers; the norms and activations
around them, with quantization for the linears that read their result (see vllm/graph/rewrite.py); routing and experts. It omits
launches that are not ops of this package: attention, RoPE, collectives, QK norms in Qwen3 and GLM, experts in INT8, DeepSeek's
absorbed GEMMs, and GLM's router with the norm before it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models.arguments import Inputs
from vllm_rocm_ops.models.config import BLOCKS, INT8, INT8_STATIC, MX, STATIC, TOKEN, UNQUANTIZED

VOCABULARY_UNIT = 64  # vLLM pads the vocabulary to a multiple
MAX_LAYERS, MAX_SIZE = 4096, 2**20
POSITIONS = 8192  # default of max_position_embeddings
ATTENTION = ops.paged_attention_decode, ops.mla_decode
"""Decode attention ops, which vLLM calls if they were measured to be faster at every sequence length."""
LINEARS = (
    ops.scaled_mm,
    ops.scaled_mm_silu_and_mul_quant,
    ops.block_scaled_mm,
    ops.mxfp8_scaled_mm,
    ops.gemm,
    ops.unquantized_gemm,
)
"""Ops of linear layers."""
NORMS = {
    UNQUANTIZED: (ops.rms_norm, model_arguments.norm),
    STATIC: (ops.rms_norm_static_fp8_quant, model_arguments.static_norm),
    TOKEN: (ops.rms_norm_dynamic_per_token_quant, model_arguments.token_norm),
    BLOCKS: (ops.rms_norm_per_block_quant, model_arguments.block_norm),
    MX: (ops.rms_norm_mxfp8_quant, model_arguments.mx_norm),
}
"""Norms without a residual, by the quantization of the linear that reads them; others quantize in a second launch."""


@dataclass(frozen=True)
class LayerCall:
    """One call of an op.

    `arguments(tokens, inputs, *parameters)` makes the op's arguments; `count` is the number of calls per decode step, 0 for prefill
    only.
    """

    layer: str
    op: Op
    arguments: Callable[..., tuple]
    parameters: tuple
    dtype: torch.dtype
    count: int = 1
    fusion = None
    """The row of fused_calls.py that a call in place of others is of."""
    parts = ()
    """The calls that it replaces."""

    def case(self, tokens: int) -> Case:
        """Return the call with `tokens` tokens as a case of its op. On a GPU the generator may be on that GPU."""

        def make(device: str, generator: torch.Generator, fp8_dtype: torch.dtype) -> tuple:
            return self.arguments(tokens, Inputs(device, generator, fp8_dtype, self.dtype), *self.parameters)

        return Case(f"{self.layer} {tokens}", make)


def sequence(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return all calls of one rank in the order of a step.

    Args:
        config: A Hugging Face configuration.
        tp: Tensor parallel ranks.
        ep: Expert parallel ranks, 0 for `tp`; None divides experts by `tp`.

    Returns:
        The calls, repeated for each layer.

    Raises:
        ValueError: The model is unknown, or cannot be divided this way.
    """
    names = model_config.names(config, "architectures")
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ValueError(f"architectures must have one of {', '.join(FAMILIES)}, got {', '.join(names)}")
    try:
        return list(family(_Model(config, tp, ep)))
    except KeyError as error:
        raise ValueError(f"the configuration of {names[0]} lacks {error.args[0]}") from None


def calls(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the distinct calls of `sequence` with their counts."""
    counts = Counter(sequence(config, tp, ep))
    return [dataclasses.replace(call, count=call.count * times) for call, times in counts.items()]


def attention(config: dict, tp: int = 1, rocm_cache_layout: bool = True) -> LayerCall:
    """Return decode attention, once per layer, with ROCM_ATTN's cache or the packed one.

    `sequence` omits it, as vLLM chooses between the op and its own kernel at startup.
    """
    model = _Model(config, tp, None)
    heads, positions = model.part("num_attention_heads"), model.size("max_position_embeddings", default=POSITIONS)
    if "kv_lora_rank" in config:
        rope = model["qk_rope_head_dim"]
        sizes = heads, model["kv_lora_rank"], rope, model["qk_nope_head_dim"] + rope, positions
        return LayerCall("attention", ops.mla_decode, model_arguments.mla_attention, sizes, model.dtype, model.layers)
    sizes = heads, *_kv_heads(model), positions, rocm_cache_layout
    op = ops.paged_attention_decode
    return LayerCall("attention", op, model_arguments.heads_attention, sizes, model.dtype, model.layers)


def absorbed(config: dict, tp: int = 1) -> list[LayerCall]:
    """Return the absorbed GEMMs of MLA decode (W_UK, W_UV), which `sequence` omits too."""
    if "kv_lora_rank" not in config:
        return []
    model = _Model(config, tp, None)
    heads, latent = model.part("num_attention_heads"), model["kv_lora_rank"]
    sizes = {"W_UK": (model["qk_nope_head_dim"], latent, True), "W_UV": (latent, model["v_head_dim"], False)}
    op, arguments = ops.batched_gemm, model_arguments.absorbed
    return [LayerCall(n, op, arguments, (heads, *shape), model.dtype, model.layers) for n, shape in sizes.items()]


class _Model:
    """A configuration with its TP and EP."""

    def __init__(self, config: dict, tp: int, ep: int | None):
        self.config, self.tp, self.ep = config, tp, tp if ep == 0 else ep
        self.hidden = self["hidden_size"]
        self.layers = self.size("num_hidden_layers", largest=MAX_LAYERS)
        name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        self.dtype = torch.float16 if name == "float16" else torch.bfloat16
        self._quantization, self._ignored = model_config.quantization(
            model_config.section(config, "quantization_config")
        )

    def __getitem__(self, key: str) -> int:
        return self.size(key)

    def size(self, key: str, least: int = 1, largest: int = MAX_SIZE, default: int | None = None) -> int:
        """Return an integer of the configuration within bounds. A default replaces one that is missing or null."""
        size = self.config[key] if default is None else self.config.get(key)
        if size is None and default is not None:
            return default
        if type(size) is not int or not least <= size <= largest:
            raise ValueError(f"{key} must be a whole number from {least} to {largest}, got {model_config.shown(size)}")
        return size

    def number(self, key: str, default: float | None = None) -> float:
        number = self.config[key] if default is None else self.config.get(key, default)
        if type(number) not in (int, float) or not 0 <= number < MAX_SIZE:
            raise ValueError(f"{key} must be a number from 0 to {MAX_SIZE}, got {model_config.shown(number)}")
        return float(number)

    def part(self, key: str, unit: int = 1) -> int:
        """Return a rank's share of a size padded to a multiple of `unit`."""
        size = -(-self[key] // unit) * unit
        if self.tp < 1 or size % self.tp:
            raise ValueError(f"tp must divide {key}={size}, got {self.tp}")
        return size // self.tp

    def quantization(self, *modules: str) -> str:
        """Return the quantization of the linear layer with these modules of the checkpoint."""
        return UNQUANTIZED if all(map(self._ignored, modules)) else self._quantization

    def _call(self, layer: str, op: Op, arguments: Callable, *parameters, count: int = 1) -> LayerCall:
        return LayerCall(layer, op, arguments, parameters, self.dtype, count)

    def linear(self, layer: str, n: int, k: int, quantization: str, count: int = 1, bias: bool = False) -> LayerCall:
        """Return a linear layer with weight [n, k] on this rank. vLLM adds the bias of a block-scaled one separately."""
        sizes, has_bias = (n, k), (True,) if bias else ()
        if quantization == UNQUANTIZED:
            op, arguments = ops.unquantized_gemm, model_arguments.unquantized
        elif quantization == BLOCKS:
            op, arguments, has_bias = ops.block_scaled_mm, model_arguments.block_scaled, ()
        elif quantization == MX:
            op, arguments = ops.mxfp8_scaled_mm, model_arguments.mx_scaled
        elif quantization in (INT8, INT8_STATIC):
            op, arguments, sizes = ops.gemm, model_arguments.int8_scaled, (*sizes, quantization == INT8)
        else:
            op, arguments, sizes = ops.scaled_mm, model_arguments.scaled, (*sizes, quantization == TOKEN)
        return self._call(layer, op, arguments, *sizes, *has_bias, count=count)

    def norm(self, layer: str, hidden: int, quantization: str = UNQUANTIZED, residual: bool = True) -> LayerCall:
        """Return an RMSNorm, optionally with a residual add, quantized for the linear that reads it."""
        op, arguments = NORMS.get(quantization, NORMS[UNQUANTIZED])
        with_residual = {ops.rms_norm: ops.fused_add_rms_norm}
        with_residual[ops.rms_norm_static_fp8_quant] = ops.fused_add_rms_norm_static_fp8_quant
        op = with_residual.get(op, op) if residual else op
        return self._call(layer, op, arguments, hidden, residual, self.number("rms_norm_eps"))

    def activation(self, layer: str, hidden: int, quantization: str) -> LayerCall:
        """Return SwiGLU with `hidden` output columns, quantized for the linear that reads it."""
        op, arguments = {
            STATIC: (ops.silu_and_mul_quant, model_arguments.static_activation),
            TOKEN: (ops.silu_and_mul_per_token_quant, model_arguments.dynamic_activation),
            BLOCKS: (ops.silu_and_mul_per_block_quant, model_arguments.dynamic_activation),
            MX: (ops.silu_and_mul_mxfp8_quant, model_arguments.activation),
        }.get(quantization, (ops.silu_and_mul, model_arguments.activation))
        return self._call(layer, op, arguments, hidden)

    def mlp(self, layer: str, module: str, intermediate: int) -> Iterator[LayerCall]:
        """Yield gate_up, SwiGLU and down with `intermediate` columns between them."""
        down = self.quantization(f"{module}.down_proj")
        gate_up = self.quantization(f"{module}.gate_proj", f"{module}.up_proj")
        yield self.linear(f"{layer}gate_up", 2 * intermediate, self.hidden, gate_up)
        yield self.activation(f"{layer}SwiGLU", intermediate, down)
        yield self.linear(f"{layer}down", self.hidden, intermediate, down)

    def experts(self, module: str, count: str) -> Iterator[LayerCall]:
        """Yield the routing, and this rank's experts; `count` is the key of the number of experts."""
        quantization = self.quantization(*(f"{module}.0.{name}_proj" for name in ("gate", "up", "down")))
        if quantization not in model_config.EXPERTS:
            return  # these, and their routing, run in vLLM
        experts = self[count]
        topk = self.size("num_experts_per_tok", largest=experts)
        renormalize = bool(self.config.get("norm_topk_prob"))
        groups = tuple(self.size(key, least=0, largest=experts, default=1) or 1 for key in ("n_group", "topk_group"))
        scoring, scale = self.config.get("scoring_func", "softmax"), self.number("routed_scaling_factor", 1.0)
        has_bias = self.config.get("topk_method") == "noaux_tc"
        if (scoring, groups[0], scale, has_bias) == ("softmax", 1, 1.0, False):
            yield self._call("routing", ops.topk_softmax, model_arguments.softmax_routing, experts, topk, renormalize)
        else:
            routing = experts, topk, renormalize, *groups, scoring, scale, has_bias
            yield self._call("routing", ops.grouped_topk, model_arguments.routing, *routing)
        here, intermediate = experts, self["moe_intermediate_size"]
        if self.ep is None:
            intermediate = self.part("moe_intermediate_size")
        elif self.ep < 1 or experts % self.ep:
            raise ValueError(f"ep must divide {count}={experts}, got {self.ep}")
        else:
            here = experts // self.ep
        sizes = experts, here, topk, self.hidden, intermediate
        yield self._call("experts", ops.fused_experts, model_arguments.experts, *sizes, quantization)

    def head(self) -> Iterator[LayerCall]:
        yield self.norm("final norm", self.hidden)
        yield self.linear("lm_head", self.part("vocab_size", VOCABULARY_UNIT), self.hidden, UNQUANTIZED)


def _kv_heads(model: _Model) -> tuple[int, int]:
    """Return a rank's KV heads, and their size."""
    kv_heads = model["num_key_value_heads"]
    if kv_heads % model.tp and model.tp % kv_heads:
        raise ValueError(f"tp must divide num_key_value_heads={kv_heads} or be a multiple of it, got {model.tp}")
    head_dim = model.size("head_dim", default=max(model.hidden // model["num_attention_heads"], 1))
    return max(kv_heads // model.tp, 1), head_dim


def _attention(model: _Model, layer: int, bias: bool = False) -> Iterator[LayerCall]:
    """Yield the calls around GQA attention, whose qkv may have a bias."""
    heads, (kv_heads, head_dim) = model.part("num_attention_heads"), _kv_heads(model)
    module = f"model.layers.{layer}.self_attn"
    qkv = model.quantization(*(f"{module}.{name}_proj" for name in "qkv"))
    yield model.norm("input norm", model.hidden, qkv, residual=layer > 0)
    yield model.linear("qkv", (heads + 2 * kv_heads) * head_dim, model.hidden, qkv, bias=bias)
    yield model.linear("o", model.hidden, heads * head_dim, model.quantization(f"{module}.o_proj"))


def _dense(model: _Model, layer: int, name: str = "") -> Iterator[LayerCall]:
    """Yield the MLP half of a layer without experts."""
    module = f"model.layers.{layer}.mlp"
    gate_up = model.quantization(f"{module}.gate_proj", f"{module}.up_proj")
    yield model.norm(f"{name}post-attention norm", model.hidden, gate_up)
    yield from model.mlp(name, module, model.part("intermediate_size"))


def _llama(model: _Model) -> Iterator[LayerCall]:
    for i in range(model.layers):
        yield from _attention(model, i)
        yield from _dense(model, i)
    yield from model.head()


def _qwen3_moe(model: _Model) -> Iterator[LayerCall]:
    experts, every = model.size("num_experts", least=0), model.size("decoder_sparse_step", default=1)
    dense = model.config.get("mlp_only_layers") or []
    if type(dense) is not list:
        raise ValueError(f"mlp_only_layers must be a list, got {model_config.shown(dense)}")
    for i in range(model.layers):
        yield from _attention(model, i)
        if experts and i not in dense and (i + 1) % every == 0:
            module = f"model.layers.{i}.mlp"
            yield model.norm("post-attention norm", model.hidden)
            yield model.linear("router", experts, model.hidden, model.quantization(f"{module}.gate"))
            yield from model.experts(f"{module}.experts", "num_experts")
        else:
            yield from _dense(model, i, "dense ")
    yield from model.head()


def _deepseek(model: _Model) -> Iterator[LayerCall]:
    heads = model.part("num_attention_heads")
    q_rank = None if model.config["q_lora_rank"] is None else model["q_lora_rank"]
    kv_rank, rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    nope, v = model["qk_nope_head_dim"], model["v_head_dim"]
    kv_a = kv_rank + rope
    for i in range(model.layers):
        module = f"model.layers.{i}"
        attention = f"{module}.self_attn"
        if q_rank is None:
            yield model.norm("input norm", model.hidden, residual=i > 0)
            q = model.quantization(f"{attention}.q_proj")
            yield model.linear("q", heads * (nope + rope), model.hidden, q)
            kv = model.quantization(f"{attention}.kv_a_proj_with_mqa")
            yield model.linear("kv_a (replicated)", kv_a, model.hidden, kv)
        else:
            latent = model.quantization(f"{attention}.q_a_proj", f"{attention}.kv_a_proj_with_mqa")
            q_b = model.quantization(f"{attention}.q_b_proj")
            yield model.norm("input norm", model.hidden, latent, residual=i > 0)
            yield model.linear("fused q_a+kv_a (replicated)", q_rank + kv_a, model.hidden, latent)
            yield model.norm("q_a norm", q_rank, q_b, residual=False)
            yield model.linear("q_b", heads * (nope + rope), q_rank, q_b)
        yield model.norm("kv_a norm", kv_rank, residual=False)
        kv_b = model.quantization(f"{attention}.kv_b_proj")
        yield model.linear("kv_b (prefill)", heads * (nope + v), kv_rank, kv_b, count=0)
        yield model.linear("o", model.hidden, heads * v, model.quantization(f"{attention}.o_proj"))
        if _has_experts(model, i):
            yield model.norm("post-attention norm", model.hidden)  # read by the router and by experts
            yield model.linear("router", model["n_routed_experts"], model.hidden, UNQUANTIZED)
            yield from model.experts(f"{module}.mlp.experts", "n_routed_experts")
            yield from _shared(model, i)
        else:
            yield from _dense(model, i, "dense ")
    yield from model.head()


def _glm4_moe(model: _Model) -> Iterator[LayerCall]:
    """Yield GLM's calls. In MoE layers vLLM runs the float32 router, and the norm that its compiler fuses with the cast."""
    model.config = model.config | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # as in vLLM's class
    for i in range(model.layers):
        yield from _attention(model, i, bias=bool(model.config.get("attention_bias")))
        if _has_experts(model, i):
            for call in model.experts(f"model.layers.{i}.mlp.experts", "n_routed_experts"):
                yield dataclasses.replace(call, dtype=torch.float32) if call.layer == "routing" else call
            yield from _shared(model, i)
        else:
            yield from _dense(model, i, "dense ")
    yield from model.head()


def _shared(model: _Model, layer: int) -> Iterator[LayerCall]:
    """Yield the calls of shared experts."""
    if shared := model.size("n_shared_experts", least=0, default=0):
        intermediate = model.part("moe_intermediate_size") * shared
        yield from model.mlp("shared ", f"model.layers.{layer}.mlp.shared_experts", intermediate)


def _has_experts(model: _Model, layer: int) -> bool:
    first, every = model.size("first_k_dense_replace", least=0), model.size("moe_layer_freq", default=1)
    return bool(model.size("n_routed_experts", least=0, default=0)) and layer >= first and layer % every == 0


FAMILIES: dict[str, Callable[[_Model], Iterator[LayerCall]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "Glm4MoeForCausalLM": _glm4_moe,
}
