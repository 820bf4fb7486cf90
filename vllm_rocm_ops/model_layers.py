"""What one rank calls in a step of a model: each op with its arguments, from a Hugging Face config.json and the division.

`calls(read(model), tp, ep)` lists them as vLLM with this package runs them: linear layers; the norms and activations around
them, which in models that are linked (see vllm/seams/links.py) quantise for the one linear that reads their result; routing and
experts. What runs no op of ours is left out: attention, rotary embeddings, collectives, Qwen3's norms of queries and keys, and
in DeepSeek the bf16 products that latent attention absorbs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.families.gemm import BLOCK
from vllm_rocm_ops.op import Case, Op
from vllm_rocm_ops.ops.mxfp8_scaled_mm import BLOCK as MX_BLOCK
from vllm_rocm_ops.vllm.seams import links

SHIPPED = Path(__file__).parent / "models"
VOCABULARY_UNIT = 64  # vLLM pads to a multiple
MOST_LAYERS, MOST_SIZE = 4096, 2**20

# How a linear layer is quantised: weights are e4m3 in all but the first.
UNQUANTIZED = "none"
STATIC = "static"  # one scale for the input, known beforehand
TENSOR = "tensor"  # one scale for the input, found by vLLM
TOKEN = "token"  # a scale per token and per output channel
BLOCKS = "block"  # a scale per 1x128 of the input and per 128x128 of the weight
MX = "mx"  # an e8m0 scale per 32 of both; e4m3fn on every GPU


class Inputs(NamedTuple):
    """What arguments are made with: random ones with the generator, on its device; on the meta device none."""

    device: str
    generator: torch.Generator
    fp8_dtype: torch.dtype
    dtype: torch.dtype

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed, of the model's dtype or another."""
        return self._tensor(torch.randn, shape, dtype or self.dtype)

    def scales(self, *shape: int) -> Tensor:
        """float32 in [0.5, 1.5)."""
        scales = self._tensor(torch.rand, shape, torch.float32)
        return scales if scales.is_meta else scales + 0.5

    def exponents(self, *shape: int) -> Tensor:
        """e8m0 scales as uint8, of 2^-2 to 2^3."""
        return (self.scales(*shape) * 6 + 122).to(torch.uint8)

    def _tensor(self, random: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = random(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(dtype).to(self.device)


@dataclass(frozen=True)
class LayerCall:
    """One call of an op. `arguments(tokens, inputs, *parameters)` makes the op's arguments; `count` is how often a decode step
    has the call, 0 if only prefill has it."""

    layer: str
    op: Op
    arguments: Callable[..., tuple]
    parameters: tuple
    dtype: torch.dtype
    count: int = 1

    def case(self, tokens: int) -> Case:
        """The call with so many tokens, as a case of its op. On a GPU the generator may be one of that GPU."""

        def make(device: str, generator: torch.Generator, fp8_dtype: torch.dtype) -> tuple:
            return self.arguments(tokens, Inputs(device, generator, fp8_dtype, self.dtype), *self.parameters)

        return Case(f"{self.layer} {tokens}", make)


# Models


def shipped() -> list[str]:
    """The names of the models whose config.json is part of the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def read(model: str) -> dict:
    """The configuration of a model: a config.json, a folder with one, or a shipped name. Raises ValueError."""
    candidates = (Path(model), Path(model) / "config.json", SHIPPED / model / "config.json")
    try:
        path = next(path for path in candidates if path.is_file())
    except (StopIteration, OSError, ValueError):
        wanted = f"a config.json, a folder with one, or one of {', '.join(shipped())}"
        raise ValueError(f"model must be {wanted}, got {_shown(model)}") from None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "architectures" not in config:
        raise ValueError(f"{path} is no model's configuration: it has no architectures")
    return config


def _shown(value: object) -> str:
    """A value that a message can hold."""
    text = str(value) or "an empty text"
    return text if len(text) <= 60 else f"{text[:60]}..."


def sequence(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """All calls of one rank in the order of a step. Layers are divided over `tp` GPUs; routed experts too, or, whole, over `ep`
    GPUs, 0 for those of `tp`. Raises ValueError for a model that is not known or cannot be divided so."""
    names = _names(config, "architectures")
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ValueError(f"architectures must have one of {', '.join(FAMILIES)}, got {', '.join(names)}")
    try:
        return list(family(_Model(config, tp, ep)))
    except KeyError as error:
        raise ValueError(f"the configuration of {names[0]} lacks {error.args[0]}") from None


def calls(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """All calls of `sequence`, equal ones once with their count."""
    found = Counter(sequence(config, tp, ep))
    return [dataclasses.replace(call, count=call.count * times) for call, times in found.items()]


class _Model:
    """A configuration and how it is divided."""

    def __init__(self, config: dict, tp: int, ep: int | None):
        self.config, self.tp, self.ep = config, tp, tp if ep == 0 else ep
        self.hidden = self["hidden_size"]
        self.layers = self.size("num_hidden_layers", most=MOST_LAYERS)
        self.linked = any(name in links.ARCHITECTURES for name in config["architectures"])
        name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        self.dtype = torch.float16 if name == "float16" else torch.bfloat16
        self._quantization, self._ignored = _quantization(_section(config, "quantization_config"))

    def __getitem__(self, key: str) -> int:
        return self.size(key)

    def size(self, key: str, least: int = 1, most: int = MOST_SIZE, default: int | None = None) -> int:
        """A whole number of the configuration, within these bounds. A default stands in for one that is not there or null."""
        size = self.config[key] if default is None else self.config.get(key)
        if size is None and default is not None:
            return default
        if type(size) is not int or not least <= size <= most:
            raise ValueError(f"{key} must be a whole number from {least} to {most}, got {_shown(size)}")
        return size

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the configuration."""
        number = self.config[key] if default is None else self.config.get(key, default)
        if type(number) not in (int, float) or not 0 <= number < MOST_SIZE:
            raise ValueError(f"{key} must be a number from 0 to {MOST_SIZE}, got {_shown(number)}")
        return float(number)

    def part(self, key: str, unit: int = 1) -> int:
        """A rank's part of a size, which is padded to a multiple of `unit`."""
        size = -(-self[key] // unit) * unit
        if self.tp < 1 or size % self.tp:
            raise ValueError(f"tp must divide {key}={size}, got {self.tp}")
        return size // self.tp

    def quantization(self, *modules: str) -> str:
        """How the linear layer that holds these modules of the checkpoint is quantised."""
        return UNQUANTIZED if all(map(self._ignored, modules)) else self._quantization

    def _call(self, layer: str, op: Op, arguments: Callable, *parameters, count: int = 1) -> LayerCall:
        return LayerCall(layer, op, arguments, parameters, self.dtype, count)

    def linear(self, layer: str, n: int, k: int, quantization: str, count: int = 1) -> LayerCall:
        """A product with a weight [n, k] of the rank."""
        if quantization == UNQUANTIZED:
            return self._call(layer, ops.unquantized_gemm, _unquantized, n, k, count=count)
        if quantization == BLOCKS:
            return self._call(layer, ops.block_scaled_mm, _block_scaled, n, k, count=count)
        if quantization == MX:
            return self._call(layer, ops.mxfp8_scaled_mm, _mx_scaled, n, k, count=count)
        return self._call(layer, ops.scaled_mm, _scaled, n, k, quantization == TOKEN, count=count)

    def norm(self, layer: str, hidden: int, quantization: str = UNQUANTIZED, residual: bool = True) -> LayerCall:
        """An RMSNorm, of `residual += input` if there is a residual; where linked, quantised for a linear that is quantised so."""
        plain = ops.fused_add_rms_norm if residual else ops.rms_norm
        static = ops.fused_add_rms_norm_static_fp8_quant if residual else ops.rms_norm_static_fp8_quant
        op, arguments = {
            STATIC: (static, _static_norm),
            TOKEN: (ops.rms_norm_dynamic_per_token_quant, _token_norm),
            BLOCKS: (ops.rms_norm_per_block_quant, _block_norm),
        }.get(quantization if self.linked else UNQUANTIZED, (plain, _norm))
        return self._call(layer, op, arguments, hidden, residual, self.number("rms_norm_eps"))

    def activation(self, layer: str, hidden: int, quantization: str) -> LayerCall:
        """SwiGLU with so many columns of output; where linked, quantised for a linear that is quantised so."""
        op, arguments = {
            STATIC: (ops.silu_and_mul_quant, _static_activation),
            TOKEN: (ops.silu_and_mul_per_token_quant, _dynamic_activation),
            BLOCKS: (ops.silu_and_mul_per_block_quant, _dynamic_activation),
        }.get(quantization if self.linked else UNQUANTIZED, (ops.silu_and_mul, _activation))
        return self._call(layer, op, arguments, hidden)

    def mlp(self, layer: str, module: str, intermediate: int) -> Iterator[LayerCall]:
        """gate_up, SwiGLU and down with so many columns between them."""
        down = self.quantization(f"{module}.down_proj")
        gate_up = self.quantization(f"{module}.gate_proj", f"{module}.up_proj")
        yield self.linear(f"{layer}gate_up", 2 * intermediate, self.hidden, gate_up)
        yield self.activation(f"{layer}SwiGLU", intermediate, down)
        yield self.linear(f"{layer}down", self.hidden, intermediate, down)

    def experts(self, module: str, count: str) -> Iterator[LayerCall]:
        """The choice of experts for each token, and the experts that the rank has of all, of which there are `count`."""
        experts = self[count]
        topk = self.size("num_experts_per_tok", most=experts)
        renormalize = bool(self.config.get("norm_topk_prob"))
        groups = tuple(self.size(key, least=0, most=experts, default=1) or 1 for key in ("n_group", "topk_group"))
        scoring, scale = self.config.get("scoring_func", "softmax"), self.number("routed_scaling_factor", 1.0)
        has_bias = self.config.get("topk_method") == "noaux_tc"
        if (scoring, groups[0], scale, has_bias) == ("softmax", 1, 1.0, False):
            yield self._call("routing", ops.topk_softmax, _softmax_routing, experts, topk, renormalize)
        else:
            how = experts, topk, renormalize, *groups, scoring, scale, has_bias
            yield self._call("routing", ops.grouped_topk, _routing, *how)
        here, intermediate = experts, self["moe_intermediate_size"]
        if self.ep is None:
            intermediate = self.part("moe_intermediate_size")
        elif self.ep < 1 or experts % self.ep:
            raise ValueError(f"ep must divide {count}={experts}, got {self.ep}")
        else:
            here = experts // self.ep
        quantization = self.quantization(*(f"{module}.0.{name}_proj" for name in ("gate", "up", "down")))
        sizes = experts, here, topk, self.hidden, intermediate
        yield self._call("experts", ops.fused_experts, _experts, *sizes, quantization)

    def head(self) -> Iterator[LayerCall]:
        """What follows the layers."""
        yield self.norm("final norm", self.hidden)
        yield self.linear("lm_head", self.part("vocab_size", VOCABULARY_UNIT), self.hidden, UNQUANTIZED)


def _attention(model: _Model, layer: int) -> Iterator[LayerCall]:
    """What is around attention with grouped queries."""
    heads, kv_heads = model.part("num_attention_heads"), model["num_key_value_heads"]
    if kv_heads % model.tp and model.tp % kv_heads:
        raise ValueError(f"tp must divide num_key_value_heads={kv_heads} or be a multiple of it, got {model.tp}")
    kv_heads = max(kv_heads // model.tp, 1)
    head_dim = model.size("head_dim", default=max(model.hidden // model["num_attention_heads"], 1))
    module = f"model.layers.{layer}.self_attn"
    qkv = model.quantization(*(f"{module}.{name}_proj" for name in "qkv"))
    yield model.norm("input norm", model.hidden, qkv, residual=layer > 0)
    yield model.linear("qkv", (heads + 2 * kv_heads) * head_dim, model.hidden, qkv)
    yield model.linear("o", model.hidden, heads * head_dim, model.quantization(f"{module}.o_proj"))


def _dense(model: _Model, layer: int, name: str = "") -> Iterator[LayerCall]:
    """The second half of a layer without experts."""
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
        raise ValueError(f"mlp_only_layers must be a list, got {_shown(dense)}")
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
            if shared := model.size("n_shared_experts", least=0, default=0):
                intermediate = model.part("moe_intermediate_size") * shared
                yield from model.mlp("shared ", f"{module}.mlp.shared_experts", intermediate)
        else:
            yield from _dense(model, i, "dense ")
    yield from model.head()


def _has_experts(model: _Model, layer: int) -> bool:
    first, every = model.size("first_k_dense_replace", least=0), model.size("moe_layer_freq", default=1)
    return bool(model.size("n_routed_experts", least=0, default=0)) and layer >= first and layer % every == 0


FAMILIES: dict[str, Callable[[_Model], Iterator[LayerCall]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}


# Quantisation


def _section(config: dict, key: str) -> dict:
    """A part of a configuration; empty where it is not there or null."""
    part = config.get(key)
    if part is not None and type(part) is not dict:
        raise ValueError(f"{key} must be an object, got {_shown(part)}")
    return part or {}


def _names(config: dict, *keys: str) -> list[str]:
    """The first list of names that a configuration has under one of these keys; empty if it has none."""
    key = next((key for key in keys if config.get(key)), keys[0])
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, got {_shown(names)}")
    for expression in (name[3:] for name in names if name.startswith("re:")):
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"{key} has re:{_shown(expression)}, which is no expression: {error}") from None
    return names


def _quantization(config: dict) -> tuple[str, Callable[[str], bool]]:
    """How linear layers are quantised by a `quantization_config`, and which modules are not. Raises ValueError."""
    method = config.get("quant_method")
    if method is None:
        return UNQUANTIZED, lambda module: True
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"quant_method must be one of {', '.join(METHODS)}, got {_shown(method)}")
    quantization, ignored = METHODS[method](config)
    return quantization, functools.partial(_matches, tuple(ignored))


def _matches(patterns: tuple[str, ...], module: str) -> bool:
    """Whether a module is named by a list: in full, by its last part, as `re:<expression>`, or with wildcards."""
    return any(
        re.match(pattern[3:], module)
        if pattern.startswith("re:")
        else fnmatch.fnmatchcase(module, pattern) or module.endswith("." + pattern)
        for pattern in patterns
    )


def _fp8(config: dict) -> tuple[str, list[str]]:
    ignored = _names(config, "ignored_layers", "modules_to_not_convert")
    if config.get("weight_block_size") is not None:
        return _blocks(config, "weight_block_size"), ignored
    return STATIC if config.get("activation_scheme") == "static" else TENSOR, ignored


def _blocks(config: dict, key: str) -> str:
    if config[key] != [BLOCK, BLOCK]:
        raise ValueError(f"{key} must be {[BLOCK, BLOCK]}, got {_shown(config[key])}")
    return BLOCKS


def _compressed_tensors(config: dict) -> tuple[str, list[str]]:
    ignored, groups = _names(config, "ignore"), _section(config, "config_groups")
    group = _section(groups, next(iter(groups), "group_0"))
    weights, inputs = _section(group, "weights"), _section(group, "input_activations")
    if len(groups) != 1 or [(q.get("type"), q.get("num_bits")) for q in (weights, inputs)] != [("float", 8)] * 2:
        raise ValueError("config_groups must have one group, with weights and inputs in 8-bit float")
    if all(tuple(map(q.get, ("strategy", "group_size", "scale_dtype"))) == MX_STRATEGY for q in (weights, inputs)):
        return MX, ignored
    if weights.get("strategy") == "block":
        return _blocks(weights, "block_structure"), ignored
    return TOKEN if inputs.get("dynamic") else STATIC, ignored


def _modelopt(config: dict) -> tuple[str, list[str]]:
    algorithm = config.get("quant_algo")
    if algorithm != "MXFP8":
        raise ValueError(f"modelopt must have MXFP8 for its quant_algo, got {_shown(algorithm)}")
    return MX, _names(config, "ignore", "exclude_modules")


def _quark(config: dict) -> tuple[str, list[str]]:
    """Layers of their own may differ in their outputs alone, which is how Quark writes that a cache is quantised."""

    def of(whole: dict) -> tuple[dict, dict]:
        return _section(whole, "weight"), _section(whole, "input_tensors")

    weights, inputs = of(_section(config, "global_quant_config"))
    layers = _section(config, "layer_quant_config")
    same = all(of(_section(layers, name)) == (weights, inputs) for name in layers)
    if [q.get("dtype") for q in (weights, inputs)] != ["fp8_e4m3"] * 2 or not same:
        raise ValueError("global_quant_config must have weights and inputs in fp8_e4m3, the same in all layers")
    ignored = _names(config, "exclude")
    if not inputs.get("is_dynamic"):
        return STATIC, ignored
    return TOKEN if inputs.get("qscheme") == "per_channel" else TENSOR, ignored


MX_STRATEGY = ("group", MX_BLOCK, "torch.uint8")
METHODS: dict[str, Callable[[dict], tuple[str, list[str]]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: (TOKEN, _names(config, "modules_to_not_convert")),
    "compressed-tensors": _compressed_tensors,
    "quark": _quark,
    "modelopt": _modelopt,
    "mxfp8": lambda config: (MX, _names(config, "ignored_layers", "modules_to_not_convert")),
}


# Arguments of the ops, in their order


def _scaled(tokens: int, inputs: Inputs, n: int, k: int, per_row: bool) -> tuple:
    a, b = (inputs.values(rows, k, dtype=inputs.fp8_dtype) for rows in (tokens, n))
    scales = (inputs.scales(rows if per_row else 1, 1) for rows in (tokens, n))
    return a, b.t(), *scales, inputs.dtype


def _block_scaled(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    a, b = (inputs.values(rows, k, dtype=inputs.fp8_dtype) for rows in (tokens, n))
    blocks = -(-k // BLOCK)
    return a, b, inputs.scales(tokens, blocks), inputs.scales(-(-n // BLOCK), blocks), inputs.dtype


def _mx_scaled(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    a, b = (inputs.values(rows, k, dtype=torch.float8_e4m3fn) for rows in (tokens, n))
    return a, b, *(inputs.exponents(rows, k // MX_BLOCK) for rows in (tokens, n)), inputs.dtype


def _unquantized(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    return inputs.values(tokens, k), inputs.values(n, k)


def _norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    rows = [inputs.values(tokens, hidden) for _ in range(2 if residual else 1)]
    return *rows, inputs.values(hidden), epsilon


def _static_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    *tensors, epsilon = _norm(tokens, inputs, hidden, residual, epsilon)
    return *tensors, inputs.scales(1), epsilon, inputs.fp8_dtype


def _token_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    x, *rest, weight, epsilon = _norm(tokens, inputs, hidden, residual, epsilon)
    return x, weight, epsilon, inputs.fp8_dtype, None, *(rest or [None])


def _block_norm(tokens: int, inputs: Inputs, hidden: int, residual: bool, epsilon: float) -> tuple:
    *quantized, upper_bound, rest = _token_norm(tokens, inputs, hidden, residual, epsilon)
    return *quantized, BLOCK, False, upper_bound, rest


def _activation(tokens: int, inputs: Inputs, hidden: int) -> tuple:
    return (inputs.values(tokens, 2 * hidden),)


def _static_activation(tokens: int, inputs: Inputs, hidden: int) -> tuple:
    return inputs.values(tokens, 2 * hidden), inputs.scales(1), inputs.fp8_dtype


def _dynamic_activation(tokens: int, inputs: Inputs, hidden: int) -> tuple:
    return inputs.values(tokens, 2 * hidden), inputs.fp8_dtype


def _routing(tokens: int, inputs: Inputs, experts: int, topk: int, renormalize: bool, *rest) -> tuple:
    *how, has_bias = rest
    return inputs.values(tokens, experts), topk, renormalize, *how, inputs.scales(experts) if has_bias else None


def _softmax_routing(tokens: int, inputs: Inputs, experts: int, topk: int, renormalize: bool) -> tuple:
    return inputs.values(tokens, experts), topk, renormalize, None


def _experts(
    tokens: int, inputs: Inputs, experts: int, here: int, topk: int, hidden: int, intermediate: int, quantization: str
) -> tuple:
    """Each token goes to `topk` of all experts, all as likely; the rank has the first of them."""
    w1, w2 = (here, 2 * intermediate, hidden), (here, hidden, intermediate)
    weight_dtype = {UNQUANTIZED: None, MX: torch.float8_e4m3fn}.get(quantization, inputs.fp8_dtype)

    def scale(weight: tuple[int, int, int]) -> Tensor | None:
        if quantization == UNQUANTIZED:
            return None
        _, n, k = weight
        if quantization == MX:
            return inputs.exponents(here, n, k // MX_BLOCK)
        of_one = {BLOCKS: (-(-n // BLOCK), -(-k // BLOCK)), TOKEN: (n,)}.get(quantization, ())
        return inputs.scales(here, *of_one)

    weights, ids = inputs.scales(tokens, experts).topk(topk)
    expert_map = None
    if here < experts:
        numbers = torch.arange(experts, dtype=torch.int32, device=weights.device)
        expert_map = torch.where(numbers < here, numbers, -1)
    static = [inputs.scales(1) if quantization == STATIC else None for _ in range(2)]
    values = inputs.values(tokens, hidden), *(inputs.values(*size, dtype=weight_dtype) for size in (w1, w2))
    return *values, weights, ids.int(), inputs.dtype, scale(w1), scale(w2), *static, expert_map
