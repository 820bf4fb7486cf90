"""List fused calls that replace several launches of a model's step; `layers.sequence` has the unfused ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

from vllm_rocm_ops import ops
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers
from vllm_rocm_ops.models.config import BLOCKS, MX, STATIC, UNQUANTIZED
from vllm_rocm_ops.models.layers import NORMS, LayerCall
from vllm_rocm_ops.ops.shared.gemm import BLOCK

ATTENTION, QUANTIZATION, V_UP = "attention", "o's input quantization", "W_UV"
HEAD_NORMS, ROTATION, CACHE_WRITE = "norms of q and k", "rotation", "cache write"
"""Launches around attention, the only one of them that is an op by itself."""
SHARED_QUANTIZATION, EXPERTS_NORM, EXPERTS = "shared experts' input quantization", "post-attention norm", "experts"
SHARED_SUM = "sum with shared experts"
NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Models with QK norms; others declare them in their configuration."""
PLAIN_ROUTING = 1, 1, "softmax", 1.0, False
"""`grouped_topk`'s parameters with which it routes as `topk_softmax`: groups, scores, scale, and whether there is a bias."""
KINDS = {STATIC: "static", BLOCKS: "groups"}
"""Quantizations of o's input that the attention op fuses, by its argument."""
ROTATIONS = ops.rope_and_cache, ops.qk_norm_rope_and_cache
"""Ops that rotate queries and keys of heads, and write them to caches."""


def gated_linear(product: LayerCall, activation: LayerCall) -> LayerCall | None:
    """Return the call that fuses gate_up, SwiGLU and static quantization for few tokens; None for other calls."""
    if (product.op, activation.op) != (ops.scaled_mm, ops.silu_and_mul_quant) or product.parameters[2:] != (False,):
        return None
    layer, op = f"{product.layer} + {activation.layer}", ops.scaled_mm_silu_and_mul_quant
    return dataclasses.replace(
        product, layer=layer, op=op, arguments=model_arguments.gated, parameters=product.parameters[:2]
    )


def one_router(product: LayerCall, choice: LayerCall) -> LayerCall | None:
    """Return the call that fuses a router's GEMM with its top-k for few tokens; None for other calls.

    Its parameters are the GEMM's two sizes and the parameters of `grouped_topk` after the number of experts.
    """
    if (product.layer, product.op) != ("router", ops.unquantized_gemm) or len(product.parameters) != 2:
        return None
    if choice.op not in (ops.grouped_topk, ops.topk_softmax) or choice.dtype != product.dtype:
        return None
    how = choice.parameters[1:] if choice.op is ops.grouped_topk else (*choice.parameters[1:], *PLAIN_ROUTING)
    op, arguments, layer = ops.router_gemm_topk, model_arguments.router, f"{product.layer} + {choice.layer}"
    return dataclasses.replace(product, layer=layer, op=op, arguments=arguments, parameters=(*product.parameters, *how))


def router_of(call: LayerCall) -> tuple[LayerCall, LayerCall]:
    """Return the two calls that a call of `one_router` replaces."""
    (product, choice), (experts, _, *how) = call.layer.split(" + "), call.parameters
    sizes, arguments = call.parameters[:2], model_arguments.unquantized
    is_plain = tuple(how[2:]) == PLAIN_ROUTING
    op, routing = (
        (ops.topk_softmax, model_arguments.softmax_routing) if is_plain else (ops.grouped_topk, model_arguments.routing)
    )
    given = experts, *(how[:2] if is_plain else how)
    return (
        dataclasses.replace(call, layer=product, op=ops.unquantized_gemm, arguments=arguments, parameters=sizes),
        dataclasses.replace(call, layer=choice, op=op, arguments=routing, parameters=given),
    )


def two_launches(call: LayerCall) -> tuple[LayerCall, LayerCall]:
    """Return the two calls that a call of `one_launch` replaces."""
    (product, activation), (n, k) = call.layer.split(" + "), call.parameters
    made = (product, ops.scaled_mm, model_arguments.scaled, (n, k, False)), (
        activation, ops.silu_and_mul_quant, model_arguments.static_activation, (n // 2,)
    )  # fmt: skip
    return tuple(LayerCall(*of, call.dtype, call.count) for of in made)


def pre_attention(q: LayerCall | None, kv: LayerCall, rope: int) -> LayerCall | None:
    """Return the call that fuses the MLA norms, the rotation of keys and the cache write, or None if q is MX-FP8.

    `q` is the norm of the query latent, which a model may lack, `kv` the norm of the key latent.
    """
    size, epsilon = kv.parameters[0], kv.parameters[-1]
    kinds = {op: kind for kind, (op, _) in NORMS.items()}
    kind = UNQUANTIZED if q is None else kinds[q.op]
    if kind == MX:
        return None
    layer = " + ".join([*([q.layer] if q else []), kv.layer, CACHE_WRITE])
    parameters = (q.parameters[0] if q else 0, size), rope, kind, epsilon
    op, arguments = ops.mla_norm_rope_and_cache, model_arguments.mla_norms
    return LayerCall(layer, op, arguments, parameters, kv.dtype, kv.count)


def norms_of(call: LayerCall) -> tuple[LayerCall, ...]:
    """Return the calls of `sequence` that a call of `one_front` replaces, besides launches that are not ops."""
    sizes, _, kind, epsilon = call.parameters
    made = zip(call.layer.split(" + "), [size for size in sizes if size], (kind,) * all(sizes) + (UNQUANTIZED,))
    return tuple(
        LayerCall(layer, *NORMS[how], (size, False, epsilon), call.dtype, call.count) for layer, size, how in made
    )


def pre_attentions(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the calls of `one_front` in a step."""
    found, q = Counter(), None
    for call in layers.sequence(config, tp, ep):
        q = call if call.layer == "q_a norm" else q
        if call.layer == "kv_a norm":
            found[pre_attention(q, call, config["qk_rope_head_dim"])] += 1
            q = None
    return [dataclasses.replace(call, count=call.count * times) for call, times in found.items() if call]


def _of_neighbors(join, config: dict, tp: int, ep: int | None) -> list[LayerCall]:
    """Return the calls that `join` makes of neighboring calls in a step."""
    found = Counter(filter(None, itertools.starmap(join, itertools.pairwise(layers.sequence(config, tp, ep)))))
    return [dataclasses.replace(call, count=times) for call, times in found.items()]


def gated(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the calls of `one_launch` in a step."""
    return _of_neighbors(gated_linear, config, tp, ep)


def routers(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the calls of `one_router` in a step."""
    return _of_neighbors(one_router, config, tp, ep)


def quantized_hidden(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the norm before experts, with the quantization of their hidden states, and the experts that read it.

    They replace the calls of these layers in `sequence`; the shared experts' input then needs no quantization launch. Empty for
    experts without block scales, and if vLLM runs the norm before them.
    """
    found = {call.layer: call for call in layers.calls(config, tp, ep) if call.layer in (EXPERTS_NORM, EXPERTS)}
    norm, experts = found.get(EXPERTS_NORM), found.get(EXPERTS)
    if norm is None or experts is None or norm.op is not ops.fused_add_rms_norm:
        return []
    if model_config.EXPERTS[experts.parameters[-1]].group != BLOCK or norm.parameters[0] % BLOCK:
        return []
    quantizes = {"op": ops.rms_norm_and_per_block_quant, "arguments": model_arguments.both_norm}
    return [
        dataclasses.replace(norm, **quantizes),
        dataclasses.replace(experts, parameters=(*experts.parameters, True)),
    ]


def has_norms(config: dict) -> bool:
    """True if a model has QK norms."""
    return bool(config.get("use_qk_norm")) or not set(NORMED).isdisjoint(model_config.names(config, "architectures"))


def around_attention(config: dict, tp: int = 1, rocm_cache_layout: bool = True) -> dict[tuple[str, ...], LayerCall]:
    """Return one rank's fused calls by the launches that they replace, with ROCM_ATTN's cache or the packed one."""
    if "kv_lora_rank" in config:
        found = rotated_absorbed(config, tp), quantized_v_up(config, tp)
    else:
        found = rotation(config, tp, rocm_cache_layout), quantized_attention(config, tp, rocm_cache_layout)
    return {tuple(call.layer.split(" + ")): call for call in found if call is not None}


def quantized_attention(config: dict, tp: int, rocm_cache_layout: bool) -> LayerCall | None:
    """Return decode attention with FP8 output; `count` is the layers whose o_proj takes FP8 input."""
    whole = layers.attention(config, tp, rocm_cache_layout)
    kind, count = quantized_o(config, whole.count)
    if not count or kind is None or (kind == "groups" and whole.parameters[2] != BLOCK):
        return None
    changed = {"arguments": model_arguments.quantized_attention, "parameters": (*whole.parameters, kind)}
    return dataclasses.replace(whole, layer=f"{ATTENTION} + {QUANTIZATION}", count=count, **changed)


def quantized_v_up(config: dict, tp: int) -> LayerCall | None:
    """Return MLA's W_UV with a result quantized per head, with the count of layers whose o takes it."""
    whole = next(call for call in layers.absorbed(config, tp) if call.layer == V_UP)
    kind, count = quantized_o(config, whole.count)
    if not count or kind != "groups" or whole.parameters[2] != BLOCK:
        return None
    changed = {"arguments": model_arguments.quantized_v_up, "parameters": (*whole.parameters, kind)}
    return dataclasses.replace(whole, layer=f"{V_UP} + {QUANTIZATION}", count=count, **changed)


def quantized_o(config: dict, count: int) -> tuple[str | None, int]:
    """Return the kind of o's input quantization, None if it is no kind that is fused, and the layers that have it."""
    name, ignored = model_config.quantization(model_config.section(config, "quantization_config"))
    return KINDS.get(name), sum(not ignored(f"model.layers.{i}.self_attn.o_proj") for i in range(count))


def attention_of(call: LayerCall) -> LayerCall:
    """Return the call that one with a fused quantization of o's input replaces."""
    layer, arguments = ATTENTION, model_arguments.heads_attention
    if call.op is ops.batched_gemm:
        layer, arguments = V_UP, model_arguments.absorbed
    return dataclasses.replace(call, layer=layer, arguments=arguments, parameters=call.parameters[:-1])


def rotated_absorbed(config: dict, tp: int) -> LayerCall:
    """Return the product with W_UK that also rotates q_pe, where a call of `one_front` rotates k_pe."""
    whole = layers.absorbed(config, tp)[0]
    op, arguments = ops.batched_gemm_rope, model_arguments.rotated_absorbed
    sizes = *whole.parameters[:3], config["qk_rope_head_dim"]
    return dataclasses.replace(whole, layer=f"{ROTATION} + {whole.layer}", op=op, arguments=arguments, parameters=sizes)


def absorbed_of(call: LayerCall) -> LayerCall:
    """Return the product that a call of `rotated_absorbed` replaces, besides the rotation."""
    op, arguments, sizes = ops.batched_gemm, model_arguments.absorbed, (*call.parameters[:3], True)
    layer = call.layer.removeprefix(f"{ROTATION} + ")
    return dataclasses.replace(call, layer=layer, op=op, arguments=arguments, parameters=sizes)


def rotation(config: dict, tp: int, rocm_cache_layout: bool) -> LayerCall:
    """Return the fused rotation and cache write of a model's layers."""
    whole = layers.attention(config, tp, rocm_cache_layout)
    heads, kv_heads, size, positions, _ = whole.parameters
    rotary = int(size * (config.get("partial_rotary_factor") or 1))
    sizes = heads, kv_heads, size, rotary, positions, rocm_cache_layout
    op, arguments, launches = ops.rope_and_cache, model_arguments.rotation, (ROTATION, CACHE_WRITE)
    if has_norms(config):
        op, arguments, launches = ops.qk_norm_rope_and_cache, model_arguments.normed_rotation, (HEAD_NORMS, *launches)
    return dataclasses.replace(whole, layer=" + ".join(launches), op=op, arguments=arguments, parameters=sizes)
