"""Run a decode step of Gated DeltaNet in one launch, between the projections of a layer of Qwen3-Next or Qwen3.5.

vLLM's layer reorders what it projects, runs convolution and recurrence in an op at which a compiled model is split, and
then the gated norm, with out_proj's quantization. A layer that this seam serves has a subclass, whose `forward` calls one
op with both projections' results. vLLM splits a model there, too. The op finds the step's slots and the layer's states as
vLLM's does, so nothing here outlives a step. If a step has decode rows alone, with drafts or without, the op is one
launch. Otherwise, as in prefill and in steps that mix both, it calls vLLM's own `forward` with both results in place of
the projections, and quantizes what that hands to out_proj.

A launch also projects b and a, for up to 64 requests without drafts, if in_proj_ba is a linear layer of 16 bits: then the op gets the
tokens, and calls in_proj_ba in other steps. in_proj_qkvz cannot have these columns where it multiplies in FP8.

out_proj gets a quantized input where its kernel accepts one with a static scale, or with scales per 128 columns, which
are a head (graph/input_quantization.py). A scale per token is one of all heads: such layers get 16 bits.

Selected once for all token counts, before vLLM compiles (compiled_ops.py): where one launch was timed to be faster than
vLLM's own launches (gated_delta_net_comparison.py), or wherever it fits with VLLM_ROCM_OPS_ATTENTION=1.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import torch

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends, split
from vllm_rocm_ops.vllm.attention.gated_delta_net_core import CLASS, adopt, gated_delta_net, plain_of
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops
from vllm_rocm_ops.vllm.moe import expert_support

MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
CORE, NAME = "vllm::qwen_gdn_attention_core", "gated_delta_net"
TORCH_OP = f"vllm_rocm_ops::{NAME}"
"""The ops at which vLLM splits a compiled model: vLLM's convolution and recurrence, and the op that has them inside."""
SILU = "silu", "swish"
WHAT = "layers of Gated DeltaNet"


# The layers


def unsupported_features(layer: torch.nn.Module) -> Iterator[str]:
    """Yield the features of a layer that the op does not support."""
    from vllm import envs as vllm_envs

    norm = layer.norm
    if getattr(layer, "in_proj_qkvz", None) is None or hasattr(layer, "in_proj_qkv"):
        yield "qkv and z from two projections"
    if layer.tp_size > 1 and getattr(layer, "disable_tp_for_ba_proj", False):
        yield "b and a of all ranks"
    if layer.activation not in SILU or norm.activation not in SILU:
        yield f"activation {layer.activation}, of the gate {norm.activation}"
    if not norm.norm_before_gate or norm.group_size not in (None, layer.head_v_dim) or norm.bias is not None:
        yield "another gated norm"
    if layer.conv1d.bias is not None:
        yield "a convolution with a bias"
    run = getattr(layer, "_forward_method", None)
    if not inspect.ismethod(run) or run.__func__ not in vars(plain_of(layer)).values():
        yield "another forward"
    if vllm_envs.VLLM_BATCH_INVARIANT:
        yield "batch invariance"


def parts(model: torch.nn.Module, compiles: bool) -> Iterator[compiled_ops.LayerPart]:
    """Yield the layers of a model that the op may serve. Its class is not imported for models without it."""
    from vllm.config import get_current_vllm_config

    from vllm_rocm_ops.vllm.attention.gated_delta_net_comparison import GatedDeltaNetPart

    plain = getattr(sys.modules.get(MODULE), CLASS, None)
    if plain is None:
        return
    config = get_current_vllm_config()
    for layer in model.modules():
        if plain_of(layer) is not plain:
            continue
        adopt(layer, False)
        if why := next(unsupported_features(layer), ""):
            expert_support.log_unsupported(why, WHAT)
            continue
        part = GatedDeltaNetPart(layer, config, compilation.baseline_of(config, model)(True, has_pass=False))
        if part.has_kernels():
            yield part
        else:
            expert_support.log_unsupported(f"{part.pattern.shape}, which no kernel supports", WHAT)


def probe() -> None:
    """Raise `Unavailable` unless vLLM's layer, its op and the step's metadata are as expected. Reads sources."""
    from vllm.config import CompilationConfig

    split.probe_layer_ops()
    seam.require(CORE in CompilationConfig._attention_ops, f"{CORE} among CompilationConfig._attention_ops")
    for name in ("forward", "forward_cuda", "forward_hip", "forward_cpu"):
        backends.require_method(f"{MODULE}.{CLASS}", name, "hidden_states")


def install() -> None:
    """Define the op, and have vLLM split compiled models at it. `parts` has layers timed."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    split.define(gated_delta_net, "out", "groups", around=eager_break_during_capture)
    split.also_at(TORCH_OP, CORE)
    compiled_ops.pattern_finders.append(parts)


SEAM = seam.Seam(
    name="gated_delta_net",
    replaces=f"the forward of {CLASS} between its projections; CompilationConfig.set_splitting_ops_for_v1",
    probe=probe,
    install=install,
    ops=("gated_delta_net_decode",),
)
