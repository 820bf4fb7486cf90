"""Norms and activations of a model are told their consumer, the linear that alone reads their result. No forward is rewritten.

Which it is says the source of the model's forwards, see readers.py.
"""

import collections
import logging

from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_rocm_ops.vllm.readers import Model, Readers

logger = logging.getLogger("vllm.vllm_rocm_ops")

LEAVES = (LinearBase, AttentionLayerBase, MoERunnerInterface)
"""What the compiler takes as a whole, but for the quantization of a linear's input."""


def set_consumers(model: nn.Module) -> None:
    """Set the consumers of all our norms and activations of a model, and say how many there are and why others have none."""
    producers = [layer for layer in model.modules() if hasattr(type(layer), "consumer")]
    if not producers:
        return
    known, linked, left = Model(model, LEAVES), collections.Counter(), collections.Counter()
    for layer in producers:
        readers = known.readers(layer)
        if getattr(readers, "feeds_norm", False):
            for beside in known.owners[layer][-1][0].children():
                if beside is not layer and hasattr(type(beside), "consumer"):
                    beside.is_behind = True
        why = readers if isinstance(readers, str) else set_readers(layer, readers)
        owner, name = known.owners[layer][-1]
        (left if why else linked)[f"{type(owner).__name__}.{name}" + (f" ({why})" if why else "")] += 1
    for text, found in (("quantize for the one linear that reads them", linked), ("have no such linear", left)):
        if found:
            places = "; ".join(f"{count} {place}" for place, count in sorted(found.items()))
            logger.info("vllm-rocm-ops: links: in %s %s: %s", type(model).__name__, text, places)


def set_readers(layer: nn.Module, readers: Readers) -> str:
    """Tell a norm or an activation of ours who reads its result; or say why it has no consumer. A consumer is kept by name, as LoRA
    may wrap the linear later."""
    parts = list(readers.parts.values())
    if not getattr(layer, "overwrites_residual", True):
        layer.overwrites_residual = readers.pairs == readers.overwritten
    is_read = bool(parts) or readers.leaves_graph
    layer.is_behind |= readers.is_behind
    layer.stands_alone = is_read and not readers.others and all(is_opaque(layer, getattr(*part)) for part in parts)
    if readers.others:
        return f"read by {', '.join(readers.others)}"
    linear = len(parts) == 1 and isinstance(getattr(*parts[0]), LinearBase)
    if not linear or readers.as_tensor or readers.leaves_graph:
        return f"read by {', '.join([name for _, name in parts] + ['its caller'] * readers.leaves_graph) or 'nothing'}"
    layer.consumer = parts[0]
    return ""


def is_opaque(layer: nn.Module, reader: nn.Module) -> bool:
    """Whether the compiler fuses nothing of a reader with the layer in front: experts and attention are whole to it, and so are linears
    that take the result as it is."""
    if not isinstance(reader, LinearBase):
        return True
    if not isinstance(reader.quant_method, UnquantizedLinearMethod):
        return False
    return len({parameter.dtype for parameter in (*layer.parameters(), reader.weight)}) == 1
