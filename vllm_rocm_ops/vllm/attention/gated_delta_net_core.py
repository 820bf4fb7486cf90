"""Run what a layer of Gated DeltaNet does between its projections: by the op, or by vLLM's own `forward`, for the seam gated_delta_net.py."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.tensors import aligned
from vllm_rocm_ops.ops.gated_delta_net_decode import SIZE
from vllm_rocm_ops.ops.shared import gated_delta_net as reference
from vllm_rocm_ops.ops.shared.gated_delta_net import MOST_PROJECTED
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import decoder, mla_v_up

OP = ops.gated_delta_net_decode
CLASS = "QwenGatedDeltaNetAttention"

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
    """Hold what a layer projected, in place of its hidden states."""

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
    """Do what a layer does between its projections.

    Attributes:
        kind: How it quantizes its result, "static" or "groups", or empty.
        projects: Whether it gets the tokens in place of b and a, which a step's launch or in_proj_ba projects.
    """

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer
        self.kind, self.key = output_kind(layer)
        self.projects = may_project(layer)

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

    def ba(self, gates: Tensor) -> Tensor:
        """Return b and a, of tokens if the layer projects them."""
        return self.layer.in_proj_ba(gates)[0] if self.projects else gates

    def arguments(self, qkvz: Tensor, gates: Tensor, requests: Requests, outputs: tuple) -> tuple:
        """Return the arguments of the launch. `gates` are b and a, or the tokens."""
        layer, (out, *scales), (conv, state) = self.layer, outputs, self.states()
        projects = self.projects and requests.row_starts is None and len(requests.slots) <= MOST_PROJECTED
        ba, of_ba = (None, (gates, layer.in_proj_ba.weight)) if projects else (self.ba(gates), ())
        weight, norm = layer.conv1d.weight, layer.norm
        return (
            *(qkvz, ba, layer.gqa_interleaved_layout, conv, weight.view(weight.shape[0], -1), state),
            *(layer.A_log, layer.dt_bias, norm.weight, norm.eps, requests.slots),
            *(out, requests.accepted, requests.row_starts, *scales, *of_ba),
        )

    def advance(self, qkvz: Tensor, gates: Tensor, metadata, outputs: tuple) -> bool:
        """Run a step by the op. False, with nothing run, for steps that have not decode rows alone."""
        requests = requests_of(metadata)
        if requests is None or requests.slots.dtype != torch.int32:
            return False
        return decoder.run(OP, *self.arguments(qkvz, gates, requests, outputs)) is not None

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
    qkvz: Tensor, gates: Tensor, out: Tensor, scale: Tensor | None, groups: Tensor | None, layer_name
) -> None:
    """Run what a layer does between its projections, into `out` and, if it has scales per 128 columns, `groups`.

    `gates` are b and a, or the tokens of a layer whose launch projects them.
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    core, found = context.no_compile_layers[_resolve_layer_name(layer_name)].rocm_ops_core, context.attn_metadata
    metadata = found.get(core.layer.prefix) if isinstance(found, dict) else None  # None in vLLM's profile run
    if metadata is not None and core.advance(qkvz, gates, metadata, (out, scale, groups)):
        return
    made = core.by_vllm(core.eager, qkvz, core.ba(gates))
    if core.kind:
        mla_v_up.quantize(made, out, scale, groups)
    else:
        out.copy_(made)


# The layers


class OneLaunch:
    """Mix into the class of a layer."""

    rocm_ops_core: Core

    def forward(self, hidden_states: Tensor) -> Tensor:
        from vllm.utils.torch_utils import _encode_layer_name

        qkvz, _ = self.in_proj_qkvz(hidden_states)
        core = self.rocm_ops_core
        gates = hidden_states if core.projects else self.in_proj_ba(hidden_states)[0]
        outputs = core.outputs(qkvz)
        torch.ops.vllm_rocm_ops.gated_delta_net(qkvz, gates, *outputs, _encode_layer_name(self.prefix))
        output, _ = self.out_proj(core.handed_over(*outputs, qkvz.dtype))
        return output


def plain_of(layer: torch.nn.Module) -> type:
    """Return vLLM's class of a layer."""
    return seam.plain_of(layer, OneLaunch)


def adopt(layer: torch.nn.Module, serves: bool) -> None:
    """Give a layer the plugin's class, or vLLM's."""
    plain = plain_of(layer)
    layer.__class__ = seam.mixed(OneLaunch, plain) if serves else plain
    layer.rocm_ops_core = Core(layer) if serves else None


def may_project(layer: torch.nn.Module) -> bool:
    """True if a step's launch may project b and a: by a 16-bit weight of one linear layer of vLLM's, of which tokens have few columns."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    if layer.num_spec:  # steps with drafts get b and a
        return False
    linear = layer.in_proj_ba
    weight, method = getattr(linear, "weight", None), getattr(linear, "quant_method", None)
    is_plain = isinstance(linear, LinearBase) and isinstance(method, UnquantizedLinearMethod)  # not LoRA's
    if not is_plain or linear.bias is not None or weight.dim() != 2 or weight.dtype != torch.bfloat16:
        return False
    rows, columns = weight.shape
    return reference.may_project(columns) and aligned(weight) and rows == 2 * layer.num_v_heads // layer.tp_size


def output_kind(layer: torch.nn.Module) -> tuple[str, object]:
    """Return how a layer's result is quantized, "static" or "groups", and vLLM's key of it; empty if it is not."""
    if "quantized_input" not in seam.active() or not hasattr(layer.out_proj, "vllm_rocm_ops_quantize"):
        return "", None
    from vllm_rocm_ops.vllm.graph import fused_quant

    kinds = {fused_quant.kFp8StaticTensorSym: "static", fused_quant.kFp8Dynamic128Sym: "groups"}
    columns = layer.num_v_heads // layer.tp_size * layer.head_v_dim
    key = fused_quant.key_of(layer.out_proj, columns, tuple(kinds))
    scale = getattr(layer.out_proj, "input_scale", None)
    if key is None or (kinds[key] == "static" and (scale is None or scale.numel() != 1)):
        return "", None
    return kinds[key], key
