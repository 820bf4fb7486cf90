"""Name the launches that were recorded of a step, and choose the ops of norms and activations by their readers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import torch

from vllm_rocm_ops.core.quantization import BLOCKS, STATIC, UNQUANTIZED
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models.layers import ACTIVATIONS, GATED_NORM, NORMS, RESIDUAL
from vllm_rocm_ops.vllm.attention import rope_pre_attention
from vllm_rocm_ops.vllm.graph import norm_outputs
from vllm_rocm_ops.vllm.meta.install import install
from vllm_rocm_ops.vllm.meta.step import (
    ACTIVATION,
    EXPERTS_KIND,
    LINEAR,
    NORM,
    OPAQUE,
    OTHER,
    TOKENS,
    Record,
    Step,
)
from vllm_rocm_ops.vllm.selection.kernel_selection import types

LABELS = {
    "kv_a_proj_with_mqa": "kv_a (replicated)",
    "fused_qkv_a_proj": "fused q_a+kv_a (replicated)",
    "out_proj": "o",
    "gate": "router",
    "shared_expert_gate": "gate",
    "act_fn": "SwiGLU",
    "post_attention_layernorm": "post-attention norm",
    "norm": "final norm",
}
"""Names of layers, by the last part of their module's; others are that, without `_proj`."""


def layer_of(module: str) -> tuple[str, int] | None:
    """Return the name and the number of the decoder layer that has a module, None without."""
    found = re.match(r"(?:.*\.)?layers\.(\d+)(?=\.)", module)
    return (found[0], int(found[1])) if found else None


def add_unseen(step: Step, model: torch.nn.Module) -> None:
    """Add the modules with weights that no launch was recorded of, to the decoder layers that have launches."""
    ends = {found[0]: place for place, record in enumerate(step.records) if (found := layer_of(record.module))}
    more: dict[int, list[Record]] = {}
    for name, module in model.named_modules():
        found = layer_of(name)
        if module in step.seen or not found or found[0] not in ends or not module._parameters or [*module.children()]:
            continue
        runs = f"{type(module).__name__}, {rope_pre_attention.norm_refusal(module) or 'in another launch'}"
        more.setdefault(ends[found[0]], []).append(Record(name, OTHER, torch.get_default_dtype(), runs=runs))
    step.records = [each for place, record in enumerate(step.records) for each in (record, *more.get(place, ()))]


def named(records: list[Record]) -> list[Record]:
    """Name the launches, and choose the ops of norms and activations by their readers, as graph/rewrite.py does."""
    has_experts, block, result = any(record.kind == EXPERTS_KIND for record in records), "", []
    last: int | None = None
    for record in records:
        part = record.module.rpartition(".")[2]
        known = LABELS.get(
            part, part.removesuffix("_proj").replace("_layernorm", " norm").replace("layernorm", " norm")
        )
        shared, of_mlp = "shared" in record.module, part in ("gate_up_proj", "down_proj", "act_fn")
        if part == "norm" and layer_of(record.module):
            known = part
        record.layer = record.layer or ("shared " if shared else "dense " if has_experts and of_mlp else "") + known
    for record in records:
        if record.module not in (OPAQUE, "all-reduce"):  # which have no module, or one that layers share
            found = layer_of(record.module)
            if not (found and last is not None and found[1] < last):  # else a module that layers share
                block, last = found or (record.module, last)
        record.block = block
        if record.kind == NORM and record.quantization == "heads":
            record.layer = fused_calls.HEAD_NORMS
            if result and result[-1].layer == record.layer:
                continue
            record.parameters = record.traits
        elif record.parameters and record.kind in (NORM, ACTIVATION):
            quantized(record)
        for name in before(record):
            of = (record.quantization,)
            result.append(Record(record.module, OTHER, record.dtype, parameters=of, layer=name, block=block))
        result.append(record)
    return result


def quantized(record: Record) -> None:
    """Choose the op of a norm or activation: one that quantizes for linear layers if only they read it, and alike."""
    readers = {
        reader.quantization if isinstance(reader, Record) and reader.kind == LINEAR else OTHER
        for reader in record.readers
    }
    kind = readers.pop() if len(readers) == 1 else OTHER
    behind = record.kind == NORM and record.source is not None and record.source.kind == NORM
    if behind or any(isinstance(reader, str) or reader.kind == NORM for reader in record.readers):
        record.op, record.parameters, record.runs = None, (), "vLLM's compiler, with what reads it"
        return
    if kind == STATIC and len(record.readers) > 1:
        kind = OTHER
    if record.kind == ACTIVATION:
        record.op = ACTIVATIONS.get(kind, ACTIVATIONS[UNQUANTIZED])[0].name
        return
    if is_before_two(record):
        record.op = norm_outputs.OP.name
        return
    op, _ = NORMS.get(kind, NORMS[UNQUANTIZED])
    record.op = (RESIDUAL.get(op, op) if record.parameters[1] else op).name
    if any(isinstance(reader, Record) and reader.layer.startswith("dense ") for reader in record.readers):
        record.layer = f"dense {record.layer}"


def is_before_two(norm: Record) -> bool:
    """True if a norm with a residual is read by two projections, of which one quantizes by blocks (graph/norm_outputs.py)."""
    kinds = {
        reader.module.rpartition(".")[2]: reader.quantization for reader in norm.readers if isinstance(reader, Record)
    }
    return norm.parameters[1] and kinds == dict(zip(norm_outputs.LINEARS, (BLOCKS, UNQUANTIZED)))


def before(record: Record) -> Iterator[str]:
    """Yield the quantization of a linear layer's input that is a launch of its own, on both sides."""
    if record.kind != LINEAR or record.quantization in (None, UNQUANTIZED):
        return
    if record.source is not None and record.source.layer in (fused_calls.ATTENTION, fused_calls.V_UP, GATED_NORM):
        yield fused_calls.QUANTIZATION
    if record.layer == "shared gate_up":
        yield fused_calls.SHARED_QUANTIZATION


def blocks_of(model: torch.nn.Module, config) -> list:
    """Run a decode step, and return its launches as `model` answers them."""
    step = Step({module: name for name, module in model.named_modules()}, config.model_config.max_model_len)
    install(step, model)
    ids = torch.empty(TOKENS, dtype=torch.long, device="meta")
    with step:
        hidden = model(input_ids=ids, positions=ids.clone())
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        model.compute_logits(hidden.new_empty(hidden.shape))  # outside of vLLM's graph: it fuses no norm with lm_head
    add_unseen(step, model)
    blocks: list = []
    for _, records in itertools.groupby(named(step.records), lambda record: record.block):
        block = [[r.layer, r.op, list(r.parameters), types(r.dtype), r.runs] for r in records]
        if blocks and blocks[-1][1] == block:
            blocks[-1][0] += 1
        else:
            blocks.append([1, block])
    return blocks
