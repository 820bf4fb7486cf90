"""Mark quantizations, activations and rotations, each as one node of a traced model, and lower what no op takes.

vLLM computes them in different forms: aten chains, `_C` kernels, AITER's. While vLLM traces a model for its compiled
mode, each is a marker: an op that records how vLLM would compute it. rewrite.py replaces markers by the plugin's ops, or
by what vLLM would have traced. A marker that runs computes the same. A quantization to MX-FP8 is one op in all of
vLLM's forms and needs no marker.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.utils import mxfp8_utils  # noqa: F401  defines vllm::mxfp8_quantize

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import op
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import model_queries

aten = torch.ops.aten
_quantize: dict[tuple[int, ...], Callable] = {}
_activate: list[Callable] = []
_sections: dict[tuple[int, ...], torch.nn.Module] = {}
_normalize: list[Callable] = []
OF_SECTIONS = "head_size", "rotary_dim", "mrope_section", "mrope_interleaved", "apply_rotary_emb"
"""Attributes that vLLM's rotation by sections reads, besides the table."""


class QuantTraits(NamedTuple):
    """The traits, as integers, that distinguish vLLM's quantizations."""

    static: int
    rows: int
    columns: int
    column_major: int
    tma_aligned: int
    ue8m0: int
    padding: int


def quantize(x: Tensor, scale: Tensor | None, bound: Tensor | None, traits: list[int]) -> tuple[Tensor, Tensor]:
    """Return vLLM's quantization of x and its scales. A static scale is returned as given."""
    return _quantize[tuple(traits)](x, scale, bound)


def marked_quant(x: Tensor, scale: Tensor | None, bound: Tensor | None, traits: list[int]) -> tuple[Tensor, Tensor]:
    """Do as `quantize`, with a copy of a static scale: an op returns no argument."""
    values, scales = quantize(x, scale, bound, traits)
    return values, scales if scale is None else scales.clone()


def marked_rotation(
    positions: Tensor, q: Tensor, k: Tensor, table: Tensor, sizes: list[int], is_neox: bool, norms: bool
) -> tuple[Tensor, Tensor]:
    """Return vLLM's rotation of q and k. `sizes` are a head's elements, the rotated ones, and the pairs of each section if it has some.

    `norms` tells rope_and_cache.py whether to serve the norms before.
    """
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

    if len(sizes) == 2:
        return RotaryEmbedding.forward_static(positions, q, k, *sizes, table, is_neox)
    rotary = _sections[(*sizes, int(is_neox))]
    own = types.SimpleNamespace(**{name: getattr(rotary, name) for name in OF_SECTIONS})
    own._match_cos_sin_cache_dtype = lambda query: table
    return MRotaryEmbedding.forward_native(own, positions, q, k)


def marked_norms(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return vLLM's norms over all heads of q and of k, which it computes together."""
    norms = (types.SimpleNamespace(weight=weight, variance_epsilon=epsilon) for weight in (q_weight, k_weight))
    return _normalize[0](*norms, q, k)


def activate(x: Tensor) -> Tensor:
    """Return vLLM's SiluAndMul of x."""
    return _activate[0](x)


QUANTIZATION, ROTATION, BOTH_NORMS = (op.define(form, form) for form in (marked_quant, marked_rotation, marked_norms))
MX_QUANTIZATION = torch.ops.vllm.mxfp8_quantize.default
ACTIVATION = ops.silu_and_mul.torch_op
FORMS = {QUANTIZATION: quantize, ACTIVATION: activate, ROTATION: marked_rotation, BOTH_NORMS: marked_norms}
"""Markers, and what vLLM traces in their place. The activation's marker is the plugin's own op."""


def runs_passes() -> bool:
    """True if vLLM runs its passes, and the plugin's, on the model being built."""
    config = get_current_vllm_config_or_none()
    if config is None or "fusion" not in seam.active():
        return False
    settings = config.compilation_config
    return settings.mode == CompilationMode.VLLM_COMPILE and settings.backend in ("", "inductor")


def of_quantization(quant: torch.nn.Module, forward: Callable) -> Callable:
    """Return a forward that marks one of vLLM's quantizations while a model is traced; `forward` computes it uncompiled.

    No form of vLLM's reads `use_triton`.
    """
    group, padding = quant.group_shape, quant.num_token_padding
    traits = QuantTraits(
        quant.static,
        group.row,
        group.col,
        quant.column_major_scales,
        getattr(quant, "tma_aligned_scales", False),
        bool(quant.use_ue8m0),
        -1 if padding is None else padding,
    )
    numbers = list(map(int, traits))
    _quantize[tuple(numbers)] = forward

    def marked(x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False):
        return QUANTIZATION(x, scale, scale_ub, numbers)

    return marked


def of_activation(forward: Callable) -> Callable:
    """Return a forward that marks vLLM's SiluAndMul while a model is traced."""
    _activate[:] = [forward]
    return ACTIVATION


def of_norms(norms: tuple[torch.nn.Module, torch.nn.Module], marks: bool) -> None:
    """Have the norms of queries and keys of a layer marked, or not, while a model is traced. Their class computes both."""
    cls = type(norms[0])
    if not _normalize:
        forward = cls.forward_qk
        _normalize.append(forward)

        def marked(q_norm: torch.nn.Module, k_norm: torch.nn.Module, q: Tensor, k: Tensor):
            if not getattr(q_norm, model_queries.MARKED, False) or not torch.compiler.is_compiling():
                return forward(q_norm, k_norm, q, k)
            return BOTH_NORMS(q, k, q_norm.weight, k_norm.weight, q_norm.variance_epsilon)

        cls.forward_qk = staticmethod(marked)
    for norm in norms:
        setattr(norm, model_queries.MARKED, marks)


def of_rotation(rotary: torch.nn.Module, norms: bool) -> Callable:
    """Return a forward that marks vLLM's RotaryEmbedding, or MRotaryEmbedding, while a model is traced."""
    sizes = [rotary.head_size, rotary.rotary_dim]
    sections = list(getattr(rotary, "mrope_section", None) or ())
    _sections[(*sizes, *sections, int(rotary.is_neox_style))] = rotary

    def marked(positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None):
        if key is None or offsets is not None or not torch.compiler.is_compiling():
            given = () if offsets is None else (offsets,)
            return rotary.forward_native(positions, query, key, *given)
        of = sizes + sections * (positions.dim() == 2)
        return ROTATION(positions, query, key, rotary.cos_sin_cache, of, rotary.is_neox_style, norms)

    return marked


# Lowering: markers that no op takes


def trace(function: Callable, args: tuple) -> fx.Graph:
    """Trace a function of nodes and constants. Kernels that mutate arguments become functional, as in vLLM's graph."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    def called(*tensors):
        values = iter(tensors)
        return function(*(next(values) if isinstance(arg, fx.Node) else arg for arg in args))

    tensors = [arg.meta["val"] for arg in args if isinstance(arg, fx.Node)]
    with enable_python_dispatcher(), detect_fake_mode(tensors):
        traced = make_fx(dispatch_functionalize(called, FunctionalTensorMode()), select_decomp_table())(*tensors).graph
    for view in traced.find_nodes(op="call_function", target=aten.view.default):
        view.target = aten.reshape.default  # as Inductor has it where passes run
    traced.eliminate_dead_code()
    return traced


def size_in(graph: fx.Graph, size: torch.SymInt) -> fx.Node | None:
    """Return the graph input that holds a size.

    Reading the size from a result would add a reader, and vLLM's patterns would not match it.
    """
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return node
    return None


def lower(marker: fx.Node, traces: dict[tuple, fx.Graph]) -> None:
    """Replace a marker by what vLLM would have traced."""
    inputs, copies = [arg for arg in marker.args if isinstance(arg, fx.Node)], {}
    values = [arg.meta["val"] for arg in inputs]
    facts = [(value.shape, value.stride(), value.dtype, value.device) for value in values]
    constants = [arg for arg in marker.args if not isinstance(arg, fx.Node)]
    key = values[0].fake_mode, marker.target, str(constants), str(facts)
    traced = traces.get(key)
    if traced is None:
        traced = traces[key] = trace(FORMS[marker.target], marker.args)
    inputs = iter(inputs)
    with marker.graph.inserting_before(marker):
        for node in traced.nodes:
            if node.op == "placeholder":
                copies[node] = next(inputs)
            elif node.target is aten.sym_size.int and (size := size_in(marker.graph, node.meta["val"])) is not None:
                copies[node] = size
            elif node.op == "output":
                results = fx.map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = marker.graph.node_copy(node, copies.__getitem__)
    if isinstance(results, fx.Node):
        marker.replace_all_uses_with(results)
    else:
        for user in list(marker.users):
            user.replace_all_uses_with(results[user.args[1]])
            marker.graph.erase_node(user)
    marker.graph.erase_node(marker)
