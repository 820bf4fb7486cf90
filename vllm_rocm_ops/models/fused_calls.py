"""List the launches of the plugin that replace several of a model's step, each a row of `FUSIONS`.

`layers.launches` has the launches that they replace. Explanations, predictions and steps of models read only the rows.
Their recorded times are found by `vllm.comparisons`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.quantization import BLOCKS, MX, OUTPUTS, STATIC, TOKEN, UNQUANTIZED
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers
from vllm_rocm_ops.models.arguments import PAGE
from vllm_rocm_ops.models.layers import DELTA_NET, GATED_NORM, NORMS, Launch, LayerCall
from vllm_rocm_ops.ops.shared import by_quantization
from vllm_rocm_ops.ops.shared.gated_delta_net import MOST_PROJECTED, may_project
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.ops.shared.inputs import Inputs

ATTENTION, QUANTIZATION, V_UP = "attention", "o's input quantization", "W_UV"
HEAD_NORMS, ROTATION, CACHE_WRITE = "norms of q and k", "rotation", "cache write"
"""Launches around attention, which alone is an op by itself."""
SHARED_QUANTIZATION, EXPERTS_NORM, EXPERTS = "shared experts' input quantization", "post-attention norm", "experts"
GATES = "in_proj_ba"
"""The projection of Gated DeltaNet's b and a."""
SHARED_SUM, SHARED_ACTIVATION, SHARED_GATE = "sum with shared experts", "shared SwiGLU", "shared gate"
PLAIN_ROUTING = 1, 1, "softmax", 1.0, False
"""`grouped_topk`'s parameters with which it routes as `topk_softmax`: groups, scores, scale, and whether there is a bias."""
EXPERT_GATES = {
    layers.ACTIVATIONS[kind][0]: gated
    for kind, gated in layers.with_arguments(by_quantization.EXPERT_GATES, model_arguments.expert_gate).items()
}
"""A shared expert's activation with its gate, in place of the activation alone."""
KINDS = {STATIC: "static", BLOCKS: "groups"}
"""Quantizations of o's input that the attention op fuses, by its argument."""


Step = Sequence[LayerCall | Launch]
"""The launches of a step, in order."""
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
        most: The most tokens at which it replaces the calls among its launches, None for any number.
        traits: Text that follows the name of the op's shape in a record of times, by the call's last parameter.
    """

    op: Op
    arguments: Callable[..., tuple]
    find: Callable[[Step], Found]
    apart: str = "two launches"
    needs_parts: bool = False
    needs_all: bool = False
    by_attention: bool = True
    most: int | None = None
    traits: Mapping[object, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class FusedCall(LayerCall):
    """A call of a fusion's op, named after the launches that it replaces."""

    launches: tuple[LayerCall | str, ...] = ()
    fusion: Fusion | None = None

    @property
    def traits(self) -> str:
        return self.fusion.traits.get(self.parameters[-1], "")

    @property
    def parts(self) -> tuple[LayerCall, ...]:
        """Return the calls among the launches, as often as this call."""
        return tuple(
            dataclasses.replace(launch, count=self.count) for launch in self.launches if isinstance(launch, LayerCall)
        )

    def has_parts(self, tokens: int) -> bool:
        """True if it replaces `parts` at this number of tokens."""
        return self.fusion.most is None or tokens <= self.fusion.most

    def layer_at(self, tokens: int) -> str:
        """Return the names of the launches that it replaces at this number of tokens."""
        has_parts = self.has_parts(tokens)
        return joined(launch for launch in self.launches if has_parts or isinstance(launch, str))


def calls(
    config: dict, tp: int = 1, ep: int | None = None, rocm_cache_layout: bool = True, arch: str = layers.ARCH
) -> list[FusedCall]:
    """Return one rank's distinct fused calls, with ROCM_ATTN's cache or the packed one."""
    step = layers.launches(config, tp, ep, arch, rocm_cache_layout)
    counts = Counter((row, *each) for row in FUSIONS for each in row.find(step))
    result = []
    for (row, launches, parameters), times in counts.items():
        layer = joined(launches)
        dtype = next(launch.dtype for launch in step if isinstance(launch, LayerCall))
        result.append(FusedCall(layer, row.op, row.arguments, parameters, dtype, times, launches, row))
    return result


def joined(launches: Iterable[LayerCall | str]) -> str:
    """Return the layers of launches as one name."""
    return " + ".join(launch if isinstance(launch, str) else launch.layer for launch in launches)


def quantized_hidden(config: dict, tp: int = 1, ep: int | None = None, arch: str = layers.ARCH) -> list[LayerCall]:
    """Return the norm before experts, with the quantization of their hidden states, and the experts that read it.

    They replace the calls of these layers in `sequence`; the shared experts' input then needs no quantization launch. Empty for
    experts without block scales, and if vLLM runs the norm before them.
    """
    by_layer = {
        call.layer: call for call in layers.calls(config, tp, ep, arch) if call.layer in (EXPERTS_NORM, EXPERTS)
    }
    norm, experts = by_layer.get(EXPERTS_NORM), by_layer.get(EXPERTS)
    if norm is None or experts is None or norm.op is not ops.fused_add_rms_norm:
        return []
    if model_config.EXPERTS[experts.parameters[5]].group != BLOCK or norm.parameters[0] % BLOCK:
        return []
    op = ops.rms_norm_and_per_block_quant
    return [
        dataclasses.replace(norm, op=op, arguments=layers.ARGUMENTS[op]),
        dataclasses.replace(experts, parameters=(*experts.parameters[:6], True, *experts.parameters[7:])),
    ]


# Where a step has the launches


def _pairs(step: Step) -> Iterator[tuple[LayerCall, LayerCall]]:
    """Yield calls that follow each other."""
    for pair in itertools.pairwise(step):
        if all(isinstance(launch, LayerCall) for launch in pair):
            yield pair


def _gated(step: Step) -> Found:
    """Find gate_up before SwiGLU, with static scales and no bias."""
    for product, activation in _pairs(step):
        *sizes, traits = product.parameters[:2], product.parameters[2:]
        if (product.op, activation.op, traits) == (ops.scaled_mm, ops.silu_and_mul_quant, (False,)):
            yield (product, activation), *sizes


def _router(step: Step) -> Found:
    """Find a router's GEMM before its top-k.

    Parameters are the GEMM's sizes, "float32" for such a weight, then `grouped_topk`'s without the experts. With that weight the GEMM has no
    op, and a top-k of vLLM's has none. Other gates beside shared experts keep two launches.
    """
    has_shared = any(launch.layer == SHARED_ACTIVATION for launch in step)
    for product, choice in itertools.pairwise(step):
        if (
            (product.layer, choice.layer) != ("router", "routing")
            or len(product.parameters) != 2
            or not choice.parameters
        ):
            continue
        plain = PLAIN_ROUTING if len(choice.parameters) == 3 else ()
        is_op = isinstance(product, LayerCall)
        if product.op is ops.unquantized_gemm and not has_shared if is_op else product.dtype == torch.float32:
            weight = () if is_op else ("float32",)
            launches = (each if isinstance(each, LayerCall) else each.layer for each in (product, choice))
            yield (*launches,), (*product.parameters, *weight, *choice.parameters[1:], *plain)


def _router_arguments(tokens: int, inputs: Inputs, experts: int, hidden: int, topk: int | str, *rest) -> tuple:
    """Return arguments of `router_gemm_topk`."""
    dtype = None
    if isinstance(topk, str):
        dtype, topk, *rest = getattr(torch, topk), *rest
    _, *options = model_arguments.routing(tokens, inputs, experts, topk, *rest)
    return inputs.values(tokens, hidden), inputs.values(experts, hidden, dtype=dtype), *options


def _expert_gates(activation: Op, step: Step) -> Found:
    """Find a shared expert's activation before its gate."""
    before: LayerCall | Launch | None = None
    for launch in step:
        if launch.layer == SHARED_ACTIVATION:
            before = launch
        elif launch.layer == SHARED_GATE and getattr(before, "op", None) is activation:
            if getattr(launch, "op", None) is ops.unquantized_gemm and launch.parameters[0] == 1:
                yield (before, launch), (before.parameters[0], launch.parameters[1])
            before = None


def _attentions(step: Step) -> Iterator[tuple[dict[str, LayerCall | Launch], LayerCall]]:
    """Yield each call of attention, with the launches of its layer before it by name."""
    before: dict[str, LayerCall | Launch] = {}
    for launch in step:
        if isinstance(launch, LayerCall) and launch.op in layers.ATTENTION:
            yield before, launch
            before = {}
        before[launch.layer] = launch


def _latents(step: Step) -> Found:
    """Find the MLA norms and the cache write, unless q is MX-FP8; a model may lack the query latent."""
    kinds = {op: kind for kind, (op, _) in NORMS.items()}
    for before, attention in _attentions(step):
        q, kv, rotation = before.get("q_a norm"), before.get("kv_a norm"), before.get(ROTATION)
        if attention.op is not ops.mla_decode or rotation is None:
            continue
        norms = [norm for norm in (q, kv) if norm is not None]
        if kv is None or not all(isinstance(norm, LayerCall) for norm in norms):
            continue
        kind, columns = (kinds[q.op], q.parameters[0]) if q else (UNQUANTIZED, 0)
        size, _, epsilon = kv.parameters
        if kind != MX:
            yield (*norms, CACHE_WRITE), ((columns, size), *rotation.parameters, kind, epsilon)


def _mla_norms(
    tokens: int, inputs: Inputs, latents: tuple[int, int], rope: int, quantization: str, epsilon: float
) -> tuple:
    """Return arguments of `mla_norm_rope_and_cache`, optionally without a query latent; one page per token."""
    q, kv = latents
    weights = [inputs.values(size) if size else None for size in latents]
    groups = {TOKEN: 1, BLOCKS: -(-q // BLOCK)}.get(quantization)
    is_quantized = quantization in (STATIC, TOKEN, BLOCKS)
    places = torch.arange(tokens, device=inputs.device)
    outs = (
        inputs.values(tokens, q, dtype=inputs.fp8_dtype if is_quantized else None),
        *(inputs.values(tokens, size) for size in (kv, rope)),
    )
    return (
        inputs.values(tokens, q + kv + rope),
        *weights,
        epsilon,
        places,
        inputs.values(max(tokens, PAGE), rope),
        False,
        *(out if out.numel() or not tokens else None for out in outs),
        inputs.values(tokens, PAGE, kv + rope),
        places * PAGE,
        None,
        inputs.scales(1) if quantization == STATIC else None,
        inputs.scales(tokens, groups) if groups else None,
        None,
    )


def _queries(step: Step) -> Found:
    """Find the rotation of queries before W_UK, where the launch that writes the cache rotates keys."""
    for before, _ in _attentions(step):
        product, rotation = before.get("W_UK"), before.get(ROTATION)
        if isinstance(product, LayerCall) and rotation is not None:
            yield (ROTATION, product), (*product.parameters[:3], *rotation.parameters)


def _rotated_absorbed(tokens: int, inputs: Inputs, heads: int, k: int, n: int, rope: int) -> tuple:
    """Return arguments of `batched_gemm_rope`; x and q_pe are columns of one tensor."""
    q = inputs.values(tokens, heads, k + rope)
    places, table = torch.arange(tokens, device=inputs.device), inputs.values(max(tokens, PAGE), rope)
    return q[..., :k], inputs.values(heads, k, n), q[..., k:], places, table, False


def _heads(is_normed: bool, step: Step) -> Found:
    """Find the rotation before the cache write, with norms before it or without."""
    for before, attention in _attentions(step):
        rotation = before.get(ROTATION)
        is_paged = attention.op is ops.paged_attention_decode
        if is_paged and rotation is not None and CACHE_WRITE in before and (HEAD_NORMS in before) == is_normed:
            *heads, positions, rocm_cache_layout = attention.parameters
            launches = *[HEAD_NORMS] * is_normed, ROTATION, CACHE_WRITE
            traits = before[HEAD_NORMS].parameters if is_normed else ()
            yield launches, (*heads, *rotation.parameters, positions, rocm_cache_layout, *traits)


def _rotation(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, *rest) -> tuple:
    """Return arguments of `rope_and_cache`; queries, keys and values are columns of one qkv tensor."""
    *rows, places = _rows_of_heads(tokens, inputs, heads, kv_heads, size)
    return *rows, places, *_angles_and_cache(tokens, inputs, kv_heads, size, *rest), places


def _normed_rotation(
    tokens: int,
    inputs: Inputs,
    heads: int,
    kv_heads: int,
    size: int,
    rotary: int,
    positions: int,
    rocm_cache_layout: bool,
    one_plus: bool = False,
    is_gated: bool = False,
    height_pairs: int = 0,
    width_pairs: int = 0,
    over_all: bool = False,
) -> tuple:
    """Return arguments of `qk_norm_rope_and_cache`. Gates are between the queries."""
    query, key, value, places = _rows_of_heads(tokens, inputs, heads * (1 + is_gated), kv_heads, size)
    if is_gated:
        query = query.unflatten(1, (heads, 2 * size))[..., :size]
    sections = height_pairs, width_pairs
    norm = *(inputs.values(size * (count if over_all else 1)) for count in (heads, kv_heads)), 1e-6
    cache = _angles_and_cache(tokens, inputs, kv_heads, size, rotary, positions, rocm_cache_layout)
    table, is_neox, *caches = cache
    outs = (inputs.values(tokens, count, size) for count in (heads, kv_heads))
    at = places.expand(3, tokens).contiguous() if any(sections) else places
    more = (None, None, one_plus, *sections) if one_plus or any(sections) else ()
    return query, key, value, *norm, at, table, is_neox, *outs, *caches, places, *more


def _rows_of_heads(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values of one tensor, and a number per token, its position and slot."""
    qkv = inputs.values(tokens, (heads + 2 * kv_heads) * size)
    return *qkv.split([heads * size, kv_heads * size, kv_heads * size], 1), torch.arange(tokens, device=inputs.device)


def _angles_and_cache(
    tokens: int, inputs: Inputs, kv_heads: int, size: int, rotary: int, positions: int, rocm_cache_layout: bool
) -> tuple:
    _, width = model_arguments.pages(tokens, inputs, positions)
    caches = model_arguments.caches(tokens * width, inputs, kv_heads, size, rocm_cache_layout)
    return inputs.values(positions, rotary), True, *caches


def _quantized(is_latent: bool, step: Step) -> Found:
    """Find attention, or W_UV after it, before the quantization of o's input."""
    of = "W_UV" if is_latent else ATTENTION
    product = None
    for launch in step:
        if isinstance(launch, LayerCall) and launch.layer == of and launch.op is not ops.mla_decode:
            product = launch
        elif launch.layer == QUANTIZATION and product is not None:
            kind = KINDS.get(launch.parameters[0])
            if kind == "groups" and product.parameters[2] == BLOCK or kind == "static" and not is_latent:
                yield (product, QUANTIZATION), (*product.parameters, kind)
            product = None


def _quantized_attention(tokens: int, inputs: Inputs, heads: int, kv_heads: int, size: int, *rest) -> tuple:
    """Return arguments of decode attention with an e4m3 result, with a static scale or one per head."""
    *cache, kind = rest
    given = model_arguments.heads_attention(tokens, inputs, heads, kv_heads, size, *cache)
    out = inputs.values(tokens, heads, size, dtype=inputs.fp8_dtype)
    scales = (inputs.scales(1), None) if kind == "static" else (None, inputs.scales(tokens, heads))
    return *given, 1, None, None, None, 0, 0, False, out, *scales


def _quantized_v_up(tokens: int, inputs: Inputs, heads: int, k: int, n: int, transposed: bool, kind: str) -> tuple:
    """Return arguments of `batched_gemm` with an e4m3 result and a dynamic scale per head, the only `kind`."""
    out, scales = inputs.values(tokens, heads, n, dtype=inputs.fp8_dtype), inputs.scales(tokens, heads)
    return *model_arguments.absorbed(tokens, inputs, heads, k, n, transposed), out, scales


def _delta_nets(step: Step) -> Found:
    """Find Gated DeltaNet's convolution and recurrence, with the projection of b and a, the norm, and out_proj's quantization.

    The op has some of the quantizations.
    """
    for place, launch in enumerate(step):
        if launch.layer == DELTA_NET:
            after = step[place + 2] if place + 2 < len(step) else None
            kind = KINDS.get(after.parameters[0], "") if after is not None and after.layer == QUANTIZATION else ""
            gates = step[place - 1]
            projects = gates.layer == GATES and getattr(gates, "op", None) is ops.unquantized_gemm
            columns = gates.parameters[1] if projects and len(gates.parameters) == 2 else 0
            projects = may_project(columns)
            launches = *[gates] * projects, DELTA_NET, GATED_NORM, *[QUANTIZATION] * bool(kind)
            yield launches, (*launch.parameters, kind, columns * projects)


OF_SEQUENCE = (
    Fusion(
        ops.scaled_mm_silu_and_mul_quant,
        ops.scaled_mm_silu_and_mul_quant.linear,
        _gated,
        needs_parts=True,
        by_attention=False,
    ),
    Fusion(ops.router_gemm_topk, _router_arguments, _router, needs_all=True, by_attention=False),
    Fusion(ops.mla_norm_rope_and_cache, _mla_norms, _latents, apart="vLLM's kernel"),
    *(
        Fusion(op, arguments, partial(_expert_gates, activation), "four launches", by_attention=False)
        for activation, (op, arguments) in EXPERT_GATES.items()
    ),
)
"""Fusions of what `layers.sequence` has."""
AROUND_ATTENTION = (
    Fusion(ops.batched_gemm_rope, _rotated_absorbed, _queries, needs_parts=True),
    Fusion(ops.rope_and_cache, _rotation, partial(_heads, False)),
    Fusion(ops.qk_norm_rope_and_cache, _normed_rotation, partial(_heads, True), "three launches"),
    Fusion(ops.batched_gemm, _quantized_v_up, partial(_quantized, True), traits=OUTPUTS),
    Fusion(ops.paged_attention_decode, _quantized_attention, partial(_quantized, False), traits=OUTPUTS),
    Fusion(ops.gated_delta_net_decode, model_arguments.delta_net, _delta_nets, "vLLM's kernels", most=MOST_PROJECTED),
)
FUSIONS = OF_SEQUENCE + AROUND_ATTENTION
