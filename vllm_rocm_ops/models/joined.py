"""Calls that are one launch in the place of several of a model's step: `layers.sequence` has those."""

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
from vllm_rocm_ops.ops.families.gemm import BLOCK

ATTENTION, QUANTIZATION = "attention", "o's input quantization"
HEAD_NORMS, ROTATION, CACHE_WRITE = "norms of q and k", "rotation", "cache write"
"""Launches of a step around attention, which alone is an op of ours."""
SHARED_QUANTIZATION, EXPERTS_NORM, EXPERTS = "shared experts' input quantization", "post-attention norm", "experts"
NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Models whose heads of queries and keys have norms; others say so."""
KINDS = {STATIC: "static", BLOCKS: "groups"}
"""Quantizations of o's input that attention's end has, as its op is told."""
ROTATIONS = ops.rope_and_cache, ops.qk_norm_rope_and_cache
"""Ops that VLLM_ROCM_OPS_ATTENTION=1 asks for, which are not measured."""


def one_launch(product: LayerCall, activation: LayerCall) -> LayerCall | None:
    """Return the call that does both, which vLLM may run for few tokens: gate_up, SwiGLU and static quantization. None for other calls."""
    if (product.op, activation.op) != (ops.scaled_mm, ops.silu_and_mul_quant) or product.parameters[2:] != (False,):
        return None
    layer, op = f"{product.layer} + {activation.layer}", ops.scaled_mm_silu_and_mul_quant
    return dataclasses.replace(
        product, layer=layer, op=op, arguments=model_arguments.gated, parameters=product.parameters[:2]
    )


def two_launches(call: LayerCall) -> tuple[LayerCall, LayerCall]:
    """Return the calls in whose place is one that `one_launch` gave."""
    (product, activation), (n, k) = call.layer.split(" + "), call.parameters
    made = (product, ops.scaled_mm, model_arguments.scaled, (n, k, False)), (
        activation, ops.silu_and_mul_quant, model_arguments.static_activation, (n // 2,)
    )  # fmt: skip
    return tuple(LayerCall(*of, call.dtype, call.count) for of in made)


def one_front(q: LayerCall | None, kv: LayerCall, rope: int) -> LayerCall | None:
    """Return the call in the place of latent attention's norms, the rotation of keys and the cache write, or None where q is MX-FP8: `q`
    is the norm of queries' latent, which a model may lack, `kv` the other one."""
    size, epsilon = kv.parameters[0], kv.parameters[-1]
    kinds = {op: kind for kind, (op, _) in NORMS.items()}
    kind = UNQUANTIZED if q is None else kinds[q.op]
    if kind == MX:
        return None
    layer = " + ".join([*([q.layer] if q else []), kv.layer, CACHE_WRITE])
    parameters = (q.parameters[0] if q else 0, size), rope, kind, epsilon
    op, arguments = ops.latent_norm_rope_and_cache, model_arguments.latent_norms
    return LayerCall(layer, op, arguments, parameters, kv.dtype, kv.count)


def norms_of(call: LayerCall) -> tuple[LayerCall, ...]:
    """Return the calls of `sequence` in whose place is one that `one_front` gave, among what is no op of ours."""
    sizes, _, kind, epsilon = call.parameters
    made = zip(call.layer.split(" + "), [size for size in sizes if size], (kind,) * all(sizes) + (UNQUANTIZED,))
    return tuple(
        LayerCall(layer, *NORMS[how], (size, False, epsilon), call.dtype, call.count) for layer, size, how in made
    )


def fronts(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the calls of `one_front` in a step. `sequence` has the norms in their place."""
    found, q = Counter(), None
    for call in layers.sequence(config, tp, ep):
        q = call if call.layer == "q_a norm" else q
        if call.layer == "kv_a norm":
            found[one_front(q, call, config["qk_rope_head_dim"])] += 1
            q = None
    return [dataclasses.replace(call, count=call.count * times) for call, times in found.items() if call]


def gated(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the calls of `one_launch` in a step. `sequence` has the two in their place."""
    found = Counter(filter(None, itertools.starmap(one_launch, itertools.pairwise(layers.sequence(config, tp, ep)))))
    return [dataclasses.replace(call, count=times) for call, times in found.items()]


def quantized_hidden(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """The norm in front of experts and these, where the norm quantizes their hidden states: `sequence` has calls of the same layers in their
    place. The quantization of shared experts' input is none then. Empty for a model whose experts have no scales per block, or whose norm
    in front of them is vLLM's."""
    found = {call.layer: call for call in layers.calls(config, tp, ep) if call.layer in (EXPERTS_NORM, EXPERTS)}
    norm, experts = found.get(EXPERTS_NORM), found.get(EXPERTS)
    if norm is None or experts is None or norm.op is not ops.fused_add_rms_norm:
        return []
    if experts.parameters[-1] != BLOCKS or norm.parameters[0] % BLOCK:
        return []
    quantizes = {"op": ops.rms_norm_and_per_block_quant, "arguments": model_arguments.both_norm}
    return [
        dataclasses.replace(norm, **quantizes),
        dataclasses.replace(experts, parameters=(*experts.parameters, True)),
    ]


def has_norms(config: dict) -> bool:
    """Return whether queries and keys have norms of their heads."""
    return bool(config.get("use_qk_norm")) or not set(NORMED).isdisjoint(model_config.names(config, "architectures"))


def around_attention(config: dict, tp: int = 1, native: bool = True) -> dict[tuple[str, ...], LayerCall]:
    """Return calls of one rank by the launches in whose place they are, with the cache of ROCM_ATTN or the packed one."""
    if "kv_lora_rank" in config:
        return {}
    found = rotation(config, tp, native), quantized_attention(config, tp, native)
    return {tuple(call.layer.split(" + ")): call for call in found if call is not None}


def quantized_attention(config: dict, tp: int, native: bool) -> LayerCall | None:
    """Return attention that quantizes its result, as often as o takes that."""
    whole = layers.attention(config, tp, native)
    name, ignored = model_config.quantization(model_config.section(config, "quantization_config"))
    count = sum(not ignored(f"model.layers.{i}.self_attn.o_proj") for i in range(whole.count))
    kind, size = KINDS.get(name), whole.parameters[2]
    if not count or kind is None or (kind == "groups" and size != BLOCK):
        return None
    changed = {"arguments": model_arguments.quantized_attention, "parameters": (*whole.parameters, kind)}
    return dataclasses.replace(whole, layer=f"{ATTENTION} + {QUANTIZATION}", count=count, **changed)


def attention_of(call: LayerCall) -> LayerCall:
    """Return attention alone, in whose place is a call of `quantized_attention`."""
    changed = {"arguments": model_arguments.heads_attention, "parameters": call.parameters[:-1]}
    return dataclasses.replace(call, layer=ATTENTION, **changed)


def rotation(config: dict, tp: int, native: bool) -> LayerCall:
    """Return rotation and cache write of a model's layers in one launch."""
    whole = layers.attention(config, tp, native)
    heads, kv_heads, size, positions, _ = whole.parameters
    rotary = int(size * (config.get("partial_rotary_factor") or 1))
    sizes = heads, kv_heads, size, rotary, positions, native
    op, arguments, launches = ops.rope_and_cache, model_arguments.rotation, (ROTATION, CACHE_WRITE)
    if has_norms(config):
        op, arguments, launches = ops.qk_norm_rope_and_cache, model_arguments.normed_rotation, (HEAD_NORMS, *launches)
    return dataclasses.replace(whole, layer=" + ".join(launches), op=op, arguments=arguments, parameters=sizes)
