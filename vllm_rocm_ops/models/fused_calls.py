"""List the launches of the plugin that replace several of a model's step, each a row of `FUSIONS`.

`layers.sequence` has the launches that they replace. Explanations, predictions and steps of models read only the rows.
Their recorded times are found by `vllm.comparisons`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op
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


class Step(NamedTuple):
    """A step of a model: the calls of `layers.sequence`, and those that it omits in each of `layers`."""

    config: dict
    calls: list[LayerCall]
    layers: int
    attention: LayerCall
    absorbed: list[LayerCall]


Found = Iterator[tuple[tuple[LayerCall | str, ...], tuple]]


@dataclass(frozen=True)
class Fusion:
    """One launch in place of several.

    Attributes:
        op: Its op.
        arguments: Makes the op's arguments, as in a `LayerCall`.
        find: Yields each place in a step: the launches replaced, in order, and the parameters of the call. A launch that is
            no op is a name.
        apart: What runs where the plugin does not serve.
        needs_parts: Whether the plugin must serve the replaced calls too. It was then timed against these.
        needs_all: Whether it must be faster than each recorded baseline.
        by_attention: Whether it serves only if timed, or with VLLM_ROCM_OPS_ATTENTION=1.
    """

    op: Op
    arguments: Callable[..., tuple]
    find: Callable[[Step], Found]
    apart: str = "two launches"
    needs_parts: bool = False
    needs_all: bool = False
    by_attention: bool = True


@dataclass(frozen=True)
class FusedCall(LayerCall):
    """A call of a fusion's op, named after the launches that it replaces."""

    launches: tuple[LayerCall | str, ...] = ()
    fusion: Fusion | None = None

    @property
    def parts(self) -> tuple[LayerCall, ...]:
        """Return the calls among the launches, as often as this call."""
        return tuple(
            dataclasses.replace(launch, count=self.count) for launch in self.launches if isinstance(launch, LayerCall)
        )


def calls(config: dict, tp: int = 1, ep: int | None = None, rocm_cache_layout: bool = True) -> list[FusedCall]:
    """Return one rank's distinct fused calls, with ROCM_ATTN's cache or the packed one."""
    attention, *absorbed = layers.attention(config, tp, rocm_cache_layout), *layers.absorbed(config, tp)
    once = [dataclasses.replace(call, count=1) for call in (attention, *absorbed)]
    step = Step(config, layers.sequence(config, tp, ep), attention.count, once[0], once[1:])
    counts = Counter((row, *each) for row in FUSIONS for each in row.find(step))
    result = []
    for (row, launches, parameters), times in counts.items():
        layer = " + ".join(launch if isinstance(launch, str) else launch.layer for launch in launches)
        made = layer, row.op, row.arguments, parameters, attention.dtype, times
        result.append(FusedCall(*made, launches, row))
    return result


def quantized_hidden(config: dict, tp: int = 1, ep: int | None = None) -> list[LayerCall]:
    """Return the norm before experts, with the quantization of their hidden states, and the experts that read it.

    They replace the calls of these layers in `sequence`; the shared experts' input then needs no quantization launch. Empty for
    experts without block scales, and if vLLM runs the norm before them.
    """
    by_layer = {call.layer: call for call in layers.calls(config, tp, ep) if call.layer in (EXPERTS_NORM, EXPERTS)}
    norm, experts = by_layer.get(EXPERTS_NORM), by_layer.get(EXPERTS)
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


# Where a step has the launches


def _gated(step: Step) -> Found:
    """Find gate_up before SwiGLU, with static scales and no bias."""
    for product, activation in itertools.pairwise(step.calls):
        *sizes, traits = product.parameters[:2], product.parameters[2:]
        if (product.op, activation.op, traits) == (ops.scaled_mm, ops.silu_and_mul_quant, (False,)):
            yield (product, activation), *sizes


def _router(step: Step) -> Found:
    """Find a router's GEMM before its top-k; parameters are the GEMM's sizes, then `grouped_topk`'s without the experts."""
    for product, choice in itertools.pairwise(step.calls):
        if product.layer == "router" and product.op is ops.unquantized_gemm and len(product.parameters) == 2:
            plain = {ops.grouped_topk: (), ops.topk_softmax: PLAIN_ROUTING}.get(choice.op)
            if plain is not None:
                yield (product, choice), (*product.parameters, *choice.parameters[1:], *plain)


def _latents(step: Step) -> Found:
    """Find the MLA norms and the cache write, unless q is MX-FP8; a model may lack the query latent."""
    q, kinds = None, {op: kind for kind, (op, _) in NORMS.items()}
    for call in step.calls:
        q = call if call.layer == "q_a norm" else q
        if call.layer == "kv_a norm":
            kind, columns = (kinds[q.op], q.parameters[0]) if q else (UNQUANTIZED, 0)
            size, _, epsilon = call.parameters
            if kind != MX:
                launches = *([q] if q else []), call, CACHE_WRITE
                yield launches, ((columns, size), step.config["qk_rope_head_dim"], kind, epsilon)
            q = None


def _queries(step: Step) -> Found:
    """Find the rotation of queries before W_UK, where the launch that writes the cache rotates keys."""
    for product in step.absorbed[:1] * step.layers:
        yield (ROTATION, product), (*product.parameters[:3], step.config["qk_rope_head_dim"])


def _heads(is_normed: bool, step: Step) -> Found:
    """Find the rotation before the cache write, with norms before it or without."""
    if not step.absorbed and has_norms(step.config) == is_normed:
        *heads, positions, rocm_cache_layout = step.attention.parameters
        rotary = int(heads[-1] * (step.config.get("partial_rotary_factor") or 1))
        launches = *[HEAD_NORMS] * is_normed, ROTATION, CACHE_WRITE
        yield from [(launches, (*heads, rotary, positions, rocm_cache_layout))] * step.layers


def _quantized(is_latent: bool, step: Step) -> Found:
    """Find attention, or W_UV after it, before the quantization of o's input."""
    name, ignored = model_config.quantization(model_config.section(step.config, "quantization_config"))
    kind, products = KINDS.get(name), step.absorbed[1:] if is_latent else [step.attention][bool(step.absorbed) :]
    for product in products:
        if kind == "groups" and product.parameters[2] == BLOCK or kind == "static" and not is_latent:
            taken = (not ignored(f"model.layers.{layer}.self_attn.o_proj") for layer in range(step.layers))
            yield from [((product, QUANTIZATION), (*product.parameters, kind))] * sum(taken)


OF_SEQUENCE = (
    Fusion(ops.scaled_mm_silu_and_mul_quant, model_arguments.gated, _gated, needs_parts=True, by_attention=False),
    Fusion(ops.router_gemm_topk, model_arguments.router, _router, needs_all=True, by_attention=False),
    Fusion(ops.mla_norm_rope_and_cache, model_arguments.mla_norms, _latents, apart="vLLM's kernel"),
)
"""Fusions of what `layers.sequence` has."""
AROUND_ATTENTION = (
    Fusion(ops.batched_gemm_rope, model_arguments.rotated_absorbed, _queries, needs_parts=True),
    Fusion(ops.rope_and_cache, model_arguments.rotation, partial(_heads, False)),
    Fusion(ops.qk_norm_rope_and_cache, model_arguments.normed_rotation, partial(_heads, True), "three launches"),
    Fusion(ops.batched_gemm, model_arguments.quantized_v_up, partial(_quantized, True)),
    Fusion(ops.paged_attention_decode, model_arguments.quantized_attention, partial(_quantized, False)),
)
FUSIONS = OF_SEQUENCE + AROUND_ATTENTION
