"""Run a decode step of Gated DeltaNet in one launch, between the projections of a layer of Qwen3-Next or Qwen3.5.

vLLM's layer reorders what it projects, runs convolution and recurrence in an op at which a compiled model is split, and
then the gated norm, with out_proj's quantization. A layer that this seam serves has a subclass, whose `forward` calls one
op with both projections' results. vLLM splits a model there, too. The op finds the step's slots and the layer's states as
vLLM's does, so nothing here outlives a step. If a step has decode rows alone, with drafts or without, the op is one
launch. Otherwise, as in prefill and in steps that mix both, it calls vLLM's own `forward` with both results in place of
the projections, and quantizes what that hands to out_proj.

out_proj gets a quantized input where its kernel accepts one with a static scale, or with scales per 128 columns, which
are a head (graph/input_quantization.py). A scale per token is one of all heads: such layers get 16 bits.

Selected once for all token counts, before vLLM compiles (compiled_ops.py): where one launch was timed to be faster than
vLLM's own launches (gated_delta_net_timing.py), or wherever it fits with VLLM_ROCM_OPS_ATTENTION=1.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.gated_delta_net_decode import SIZE
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import decoder, mla_v_up, split
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops
from vllm_rocm_ops.vllm.moe import expert_support

OP = ops.gated_delta_net_decode
MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
CLASS = "QwenGatedDeltaNetAttention"
CORE, NAME = "vllm::qwen_gdn_attention_core", "gated_delta_net"
TORCH_OP = f"vllm_rocm_ops::{NAME}"
"""The ops at which vLLM splits a compiled model: vLLM's convolution and recurrence, and the op that has them inside."""
SILU = "silu", "swish"
WHAT = "layers of Gated DeltaNet"


# A step


class Requests(NamedTuple):
    """The requests of a step of decode rows: slots [requests, rows], and with drafts accepted rows and first rows."""

    slots: Tensor
    accepted: Tensor | None = None
    row_starts: Tensor | None = None


def requests_of(metadata) -> Requests | None:
    """Return the requests of a step by vLLM's metadata, None unless all of them are decoding.

    Drafts come with a request's mask, and decodes beside them as prefills.
    """
    if metadata.num_prefills:
        return None
    if metadata.spec_sequence_masks is None:
        slots = metadata.non_spec_state_indices_tensor
        return Requests(slots[: metadata.num_actual_tokens, None]) if metadata.num_decodes else None
    if metadata.num_decodes:
        return None
    accepted = metadata.num_accepted_tokens
    requests = len(accepted)
    return Requests(
        metadata.spec_state_indices_tensor[:requests], accepted, metadata.spec_query_start_loc[: requests + 1]
    )


class Projected:
    """What a layer projected, in place of its hidden states."""

    def __init__(self, qkvz: Tensor, ba: Tensor):
        self.qkvz, self.ba, self.dtype, self.device, self.shape = qkvz, ba, qkvz.dtype, qkvz.device, qkvz.shape

    def size(self, dim: int) -> int:
        return self.qkvz.size(dim)


class Given(torch.nn.Module):
    """Stand in for a projection: return a part of what was projected, or the input."""

    def __init__(self, name: str = ""):
        super().__init__()
        self.name = name

    def forward(self, x):
        return getattr(x, self.name) if self.name else x, None


class GatedNorm(torch.nn.Module):
    """Stand in for a layer's norm: call vLLM's kernel, which a compiled model replaces by compiled code."""

    def __init__(self, norm: torch.nn.Module):
        super().__init__()
        self.run = norm.forward_cuda

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.run(x, z)


def is_dim_first() -> bool:
    """True if vLLM keeps a convolution's rows of a channel together."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return is_conv_state_dim_first()


class Core:
    """What a layer does between its projections.

    Attributes:
        kind: How it quantizes its result, "static" or "groups", or empty.
    """

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer
        self.kind, self.key = output_kind(layer)

    def outputs(self, qkvz: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Allocate the result, and return it with its static scale and its scales per 128 columns."""
        layer, rows = self.layer, qkvz.shape[0]
        columns = layer.num_v_heads // layer.tp_size * layer.head_v_dim
        if not self.kind:
            return qkvz.new_empty((rows, columns)), None, None
        from vllm_rocm_ops.vllm.graph import fused_quant

        out = torch.empty((rows, columns), dtype=fused_quant.QUANT_DTYPE, device=qkvz.device)
        if self.kind == "static":
            return out, layer.out_proj.input_scale, None
        is_column_major = layer.out_proj.vllm_rocm_ops_column_major_scales
        shape = (columns // SIZE, rows) if is_column_major else (rows, columns // SIZE)
        scales = torch.empty(shape, dtype=torch.float32, device=qkvz.device)
        return out, None, scales.t() if is_column_major else scales

    def handed_over(self, out: Tensor, scale: Tensor | None, groups: Tensor | None, dtype: torch.dtype):
        """Return the result as out_proj takes it."""
        if not self.kind:
            return out
        from vllm_rocm_ops.vllm.graph import fused_quant

        return fused_quant.Quantized(out, scale if groups is None else groups, dtype, out.shape, self.key)

    def states(self) -> tuple[Tensor, Tensor]:
        """Return the states of the convolution [slots, channels, rows] and of the recurrence [slots, V heads, V, K]."""
        conv, state = self.layer.kv_cache[:2]
        return conv if is_dim_first() else conv.transpose(1, 2), state

    def arguments(self, qkvz: Tensor, ba: Tensor, requests: Requests, outputs: tuple) -> tuple:
        """Return the arguments of the launch."""
        layer, (out, *scales), (conv, state) = self.layer, outputs, self.states()
        weight, norm = layer.conv1d.weight, layer.norm
        return (
            *(qkvz, ba, layer.gqa_interleaved_layout, conv, weight.view(weight.shape[0], -1), state),
            *(layer.A_log, layer.dt_bias, norm.weight, norm.eps, requests.slots),
            *(out, requests.accepted, requests.row_starts, *scales),
        )

    def advance(self, qkvz: Tensor, ba: Tensor, metadata, outputs: tuple) -> bool:
        """Run a step by the op. False, with nothing run, for steps that have not decode rows alone."""
        requests = requests_of(metadata)
        if requests is None or requests.slots.dtype != torch.int32:
            return False
        return decoder.run(OP, *self.arguments(qkvz, ba, requests, outputs)) is not None

    def between(self, **given: torch.nn.Module) -> torch.nn.Module:
        """Return the layer with stand-ins for its projections, and for what is given. Parameters are the layer's."""
        layer = self.layer
        given |= {"in_proj_qkvz": Given("qkvz"), "in_proj_ba": Given("ba"), "out_proj": Given()}
        result = object.__new__(plain_of(layer))
        result.__dict__ |= {**vars(layer), "_modules": {**layer._modules, **given}}
        return result

    @functools.cached_property
    def eager(self) -> torch.nn.Module:
        """Return `between` for calls that nothing compiles."""
        norm = self.layer.norm
        return self.between(norm=GatedNorm(norm)) if norm.weight.is_cuda else self.between()

    def by_vllm(self, between: torch.nn.Module, qkvz: Tensor, ba: Tensor) -> Tensor:
        """Run a step by vLLM's `forward`, and return what it hands to out_proj."""
        return self.layer._forward_method.__func__(between, Projected(qkvz, ba))


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, out: Tensor, scale: Tensor | None, groups: Tensor | None, layer_name
) -> None:
    """Run what a layer does between its projections, into `out` and, if it has scales per 128 columns, `groups`."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    core, found = context.no_compile_layers[_resolve_layer_name(layer_name)].rocm_ops_core, context.attn_metadata
    metadata = found.get(core.layer.prefix) if isinstance(found, dict) else None  # None in vLLM's profile run
    if metadata is not None and core.advance(qkvz, ba, metadata, (out, scale, groups)):
        return
    made = core.by_vllm(core.eager, qkvz, ba)
    if core.kind:
        mla_v_up.quantize(made, out, scale, groups)
    else:
        out.copy_(made)


# The layers


class OneLaunch:
    """Mix into the class of a layer."""

    rocm_ops_core: Core

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project, run the op, and project its result."""
        from vllm.utils.torch_utils import _encode_layer_name

        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        core = self.rocm_ops_core
        outputs = core.outputs(qkvz)
        torch.ops.vllm_rocm_ops.gated_delta_net(qkvz, ba, *outputs, _encode_layer_name(self.prefix))
        output, _ = self.out_proj(core.handed_over(*outputs, qkvz.dtype))
        return output


@functools.cache
def one_launch(plain: type) -> type:
    """Return the plugin's subclass of a layer's class."""
    return type(plain.__name__, (OneLaunch, plain), {"__module__": plain.__module__})


def plain_of(layer: torch.nn.Module) -> type:
    """Return vLLM's class of a layer."""
    return type(layer).__bases__[1] if isinstance(layer, OneLaunch) else type(layer)


def adopt(layer: torch.nn.Module, serves: bool) -> None:
    """Give a layer the plugin's class, or vLLM's."""
    plain = plain_of(layer)
    layer.__class__ = one_launch(plain) if serves else plain
    layer.rocm_ops_core = Core(layer) if serves else None


def output_kind(layer: torch.nn.Module) -> tuple[str, object]:
    """Return how a layer's result is quantized, "static" or "groups", and vLLM's key of it; empty if it is not."""
    if "quantized_input" not in seam.active():
        return "", None
    from vllm_rocm_ops.vllm.graph import fused_quant

    kinds = {fused_quant.kFp8StaticTensorSym: "static", fused_quant.kFp8Dynamic128Sym: "groups"}
    columns = layer.num_v_heads // layer.tp_size * layer.head_v_dim
    key = fused_quant.key_of(layer.out_proj, columns, tuple(kinds))
    scale = getattr(layer.out_proj, "input_scale", None)
    if key is None or (kinds[key] == "static" and (scale is None or scale.numel() != 1)):
        return "", None
    return kinds[key], key


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

    from vllm_rocm_ops.vllm.attention.gated_delta_net_timing import GatedDeltaNetPart

    plain = getattr(sys.modules.get(MODULE), CLASS, None)
    if plain is None:
        return
    config = get_current_vllm_config()
    for layer in model.modules():
        if plain_of(layer) is not plain:
            continue
        adopt(layer, False)
        if why := next(unsupported_features(layer), ""):
            expert_support.say_refused(why, WHAT)
            continue
        part = GatedDeltaNetPart(layer, config, compilation.baseline_of(config, model)(True, has_pass=False))
        if part.has_kernels():
            yield part
        else:
            expert_support.say_refused(f"{part.pattern.shape}, which no kernel supports", WHAT)


def probe() -> None:
    """Raise `Unavailable` unless vLLM's layer, its op and the step's metadata are as expected. Reads sources."""
    import ast

    from vllm.config import CompilationConfig

    split.probe_layer_ops()
    seam.require(CORE in CompilationConfig._attention_ops, f"{CORE} among CompilationConfig._attention_ops")
    classes = {node.name: node for node in seam.body_of(MODULE) if isinstance(node, ast.ClassDef)}
    seam.require(CLASS in classes, f"{MODULE}.{CLASS}")
    functions = {node.name: node for node in classes[CLASS].body if isinstance(node, ast.FunctionDef)}
    for name in ("forward", "forward_cuda", "forward_hip", "forward_cpu"):
        seam.require_in(functions, name, f"{CLASS}.{name}", 1, ("hidden_states",))


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
    after=("quantized_input",),
)
