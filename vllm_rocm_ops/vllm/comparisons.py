"""Map each op to its `Comparison`: the plugin's kernel and vLLM's for the same call; tell which serves a model's call.

The commands know a model's call by op and arguments. For them each entry also has

    limit                        the token limit of the plugin's kernel before timing
    by_attention                 whether it serves only if timed, or with VLLM_ROCM_OPS_ATTENTION=1
    layers_of(a)                 the layer descriptions under which a call with these arguments may have been timed
"""

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention import (
    gated_delta_net_comparison,
    mla_absorb,
    mla_pre_attention,
    mla_rotation,
    rope_pre_attention,
)
from vllm_rocm_ops.vllm.graph import norm_outputs
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe import routing_gate, shared_expert_gate
from vllm_rocm_ops.vllm.selection.kernel_selection import Record, at_some_size, record_here, serves_by_tokens, types
from vllm_rocm_ops.vllm.selection.key import EAGER, ONE_PLUS, SEPARATE, Key

COMPARISONS = {kernels.op: kernels for name in seam.in_folder("linear") for kernels in seam.load(name).comparisons}
COMPARISONS |= {kernels.op: kernels for kernels in (experts.COMPARISON, mla_absorb.COMPARISON)}
RECORDED = {
    ops.router_gemm_topk: routing_gate.shapes_of,
    ops.mla_norm_rope_and_cache: mla_pre_attention.shapes_of,
    ops.batched_gemm_rope: lambda *call: [mla_rotation.shape_of(*call)],
    ops.rope_and_cache: rope_pre_attention.shapes_of,
    ops.qk_norm_rope_and_cache: rope_pre_attention.shapes_of,
    ops.gated_delta_net_decode: gated_delta_net_comparison.shapes_of,
}
"""Functions that return the shapes under which a model's call may have been timed, from its parameters and dtype."""
ATTENTION = ops.paged_attention_decode, ops.mla_decode
FORCED = "VLLM_ROCM_OPS_ATTENTION=1"
UNMEASURED = "unmeasured: {} until the plugin is measured faster"


def shapes_of(call, arch: Arch) -> list[str]:
    """Return the shapes, under which a call may have been measured."""
    if named := RECORDED.get(call.op):
        return named(call.parameters, call.dtype)
    a = call.op.Arguments(*call.case(2).make("meta", torch.Generator(), arch.fp8_dtype))
    if in_vllm := COMPARISONS.get(call.op):
        return [in_vllm.describe(layer) + call.traits for layer in in_vllm.layers_of(a)]
    with_gate = hasattr(a, "expert_gate")
    if not hasattr(a, "quant_dtype") and not with_gate:
        return []
    columns = a.input.shape[1] // (1 if hasattr(a, "weight") or hasattr(a, "gate") else 2)
    residuals = ("", " residual") if getattr(a, "residual", None) is None else (" residual",)
    start, end = f"{columns} {types(a.input.dtype)}", ONE_PLUS * getattr(a, "one_plus_weight", False)
    end += norm_outputs.BESIDE * (call.op is norm_outputs.OP and call.layer == "input norm")
    end += shared_expert_gate.shape_suffix(a.tokens.shape[1]) if with_gate else ""
    return [f"{start}{residual}{way}{end}" for residual in residuals for way in ("", " column-major", " bound")]


def keys_of(call, arch: Arch, record: Record) -> list[Key]:
    """Return the keys of a call's measurements, the one that decides first. Compiled comes before eager."""
    shapes = shapes_of(call, arch) if record.shapes else []
    keys = sorted(
        (key for key in record.shapes if not key.baseline.flag), key=lambda key: key.baseline.scope == EAGER.scope
    )
    return [key for shape in shapes for key in keys if (key.op, key.shape) == (call.op.name, shape)]


def decision(call, keys: list[Key], record: Record, tokens: int) -> tuple[bool, str]:
    """Return whether the plugin or the baseline serves a call at this number of tokens, and why.

    The reason is a measurement on this machine or a fixed limit. It is empty for ops that no seam limits.
    """
    name, fusion, in_vllm = call.op.name, call.fusion, COMPARISONS.get(call.op)
    if name in record.off:
        return False, f"off on this GPU: {record.off[name]}"
    if call.op in ATTENTION:
        return attention_decision(call, record, tokens)
    by_attention, limit = getattr(fusion or in_vllm, "by_attention", False), getattr(in_vllm, "limit", None)
    baseline = "two launches" if fusion and (fusion.needs_parts or fusion.needs_all) else "vLLM"
    if by_attention and attention.is_forced():
        return limit is None or tokens <= limit, FORCED
    if not keys:
        if limit == 0 or by_attention or (fusion and fusion.needs_all):
            return False, UNMEASURED.format(baseline)
        if limit is None:
            return True, ""
        few = tokens <= limit
        return few, "unmeasured" if few else f"unmeasured: {baseline} above {limit} tokens"

    def runs_by(key: Key) -> bool:
        served_by = serves_by_tokens(key, record.shapes[key])
        return bool(served_by[0] if key.has_one_choice else tokens < len(served_by) and served_by[tokens])

    if fusion and fusion.needs_all:
        return all(map(runs_by, keys)), f"measured: against {' and '.join(str(key.baseline) for key in keys)}"
    runs, measured = runs_by(keys[0]), record.shapes[keys[0]]
    if times := measured.get(tokens):
        us = [
            f"{whose} {time:.1f} us"
            for whose, time in (("plugin", times.plugin_us), (baseline, times.baseline_us))
            if time is not None
        ]
        return runs, f"measured: {', '.join(us) or 'plugin not selected'}"
    return runs, f"measured at {', '.join(map(str, sorted(measured)))} tokens"


def served(call, arch: Arch, record: Record, tokens: int) -> tuple[bool, str]:
    """Return the decision for a call of a model; the plugin must also serve the calls that some fused calls replace."""
    if call.fusion and call.fusion.needs_parts:
        for part in call.parts:
            serves, said = served(part, arch, record, tokens)
            if not serves:
                return False, f"{part.layer}: {said}"
        given = call.case(tokens).make("meta", torch.Generator(), arch.fp8_dtype)
        explained = call.op.explain(*given, arch=arch)
        if not explained.launches:
            return False, explained.source
    return decision(call, keys_of(call, arch, record), record, tokens)


def attention_decision(call, record: Record, tokens: int) -> tuple[bool, str]:
    """Return the decision for attention.

    The plugin serves it where it was faster at every context length, in each measured backend of vLLM.
    """
    if attention.is_forced():
        return True, FORCED
    heads, *sizes = call.parameters
    is_paged = call.op is ops.paged_attention_decode
    heads_of_call = f"{heads}:{sizes[0]}x{sizes[1]}" if is_paged else f"{heads}x{sizes[0]}+{sizes[1]}"
    served_by = {
        key: serves_by_tokens(key, measured)
        for key, measured in record.shapes.items()
        if key.op == call.op.name and (key.decode.heads, key.decode.quantized) == (heads_of_call, call.traits)
    }
    separate = [served_by.pop(key) for key in list(served_by) if key.baseline == SEPARATE]
    served = list(served_by.values())
    if not served:
        return False, UNMEASURED.format("vLLM")
    if separate and not at_some_size(separate):
        return False, f"measured: not faster than {call.layer.replace(' + ', ' plus ')}"
    return all(
        tokens < len(table) and table[tokens] for table in served
    ), f"measured: {len(served)} (context length, backend) pairs"


def record_for(arch: Arch) -> Record:
    """Return the measurements of this machine, if its GPU has that architecture."""
    record = record_here()
    known = record.machine["arch"] == arch.name and record.machine["units"] == str(arch.compute_units)
    return record if known else Record({})
