"""Fuse output quantization into decode attention, in the layers of the seams decode_attention and mla_attention.

vLLM's own pass, fuse_attn_quant, is off at every optimization level of 0.30 to 0.33, supports static scales only, and
needs attention inside a compiled piece: with `-cc.pass_config.fuse_attn_quant=true` vLLM gives up piecewise graphs,
unless `-cc.use_inductor_graph_partition=true` is set too. This seam changes a model's whole graph before vLLM splits it
at attention:

    attention -> views -> equal quantizations       attention with an e4m3 output, and its scale, or scales per 128 that
        it writes

where nothing else reads the result. vLLM's ops have both arguments. `PRODUCERS` has what quantizes the result of each:
attention itself, or in MLA layers W_UV's GEMM after it, by scales per 128 only (mla_v_up.py). Calls that no kernel supports
run vLLM's implementation: with the scale where it supports one, else followed by vLLM's quantization, as in the original
graph.

Selected before vLLM compiles: for layers whose attention won at some batch size in an earlier start on this GPU, or
wherever it fits with VLLM_ROCM_OPS_ATTENTION=1. The first start times attention alone. The next start has the changed
graph and times the fused op against vLLM's kernels, and against the plugin's attention followed by vLLM's quantization.
From then on these times decide, and vLLM's graph stays unchanged where one of the two was as fast.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.quantization import OUTPUTS
from vllm_rocm_ops.ops.paged_attention_decode import GROUP
from vllm_rocm_ops.ops.shared.attention import ELEMENTS
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import mla_v_up, split, timing
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.selection.kernel_selection import Decided, at_some_size
from vllm_rocm_ops.vllm.selection.key import SEPARATE, Baseline

logger = logging.getLogger("vllm.vllm_rocm_ops")

_fused: dict[str, frozenset[str]] = {}
"""The kinds that a layer may fuse, by layer name."""


# Attention with a key and a value per head


@functools.cache
def static_key():
    """Return vLLM's key of a static per-tensor scale."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    return kFp8StaticTensorSym


class QuantizingImpl:
    """Mix into the class of a layer's `DecodeImpl`."""

    rocm_ops_kinds: frozenset[str] = frozenset()
    """The kinds of quantization that the layer may fuse."""

    def baseline(self, scale: Tensor | None, groups: Tensor | None) -> Callable:
        """Return vLLM's method, followed by a separate quantization where it fuses none."""
        forward = super().baseline(scale, groups)
        supports = groups is None and (scale is None or super().fused_output_quant_supported(static_key()))
        return forward if supports else functools.partial(self.unfused, forward)

    def unfused(
        self, forward, layer, query, key, value, kv_cache, metadata, output, output_scale=None, output_block_scale=None
    ):
        """Run the unfused path: attention in 16 bits, then vLLM's quantization."""
        given = layer, query, key, value, kv_cache, metadata
        if metadata is None:  # vLLM's profile run: forward fills the output
            if output_block_scale is not None:
                output_block_scale.fill_(1.0)
            return forward(*given, output)
        dtype = query.dtype if query.dtype in ELEMENTS else self.rocm_ops.config.model_config.dtype  # it may be FP8
        plain = output.new_empty(output.shape, dtype=dtype)
        forward(*given, plain)
        mla_v_up.quantize(plain.flatten(1), output.flatten(1), output_scale, output_block_scale)
        return output

    def fused_output_quant_supported(self, quant_key):
        fuses = quant_key == static_key() and "static" in self.rocm_ops_kinds
        return super().fused_output_quant_supported(quant_key) or fuses


def wins(decoder, quantized: str, decided: Decided, beside: Baseline) -> bool | None:
    """True if the plugin won against a baseline at some batch size at every context length. None if it was not timed."""
    layer, longest = (decoder.op.name, decoder.describe(), beside), decoder.config.model_config.max_model_len
    tables = [
        served
        for (*call, decode), served in decided.shapes.items()
        if (*call,) == layer and (decode.quantized, decode.longest) == (OUTPUTS.get(quantized, ""), longest)
    ]
    return at_some_size(tables) if tables else None


def may_quantize(decoder, quantized: str, decided: Decided) -> bool:
    """True if a layer's attention fuses this kind of quantization."""
    if decoder.unsupported_reason or (quantized == "groups" and decoder.impl.head_size != GROUP):
        return False
    if decoder.is_forced or decoder.op.name in decided.off:
        return decoder.is_forced
    if wins(decoder, quantized, decided, SEPARATE) is False:
        return False
    measured = wins(decoder, quantized, decided, Baseline(decoder.backend.name))
    return bool(wins(decoder, "", decided, Baseline(decoder.backend.name)) if measured is None else measured)


def kinds_of_heads(decoder, layer: torch.nn.Module, decided: Decided) -> frozenset[str]:
    """Return the kinds of output quantization that a layer's attention fuses, from the recorded decisions.

    Prepares the layer for them.
    """
    found = frozenset(quantized for quantized in OUTPUTS if may_quantize(decoder, quantized, decided))
    impl, decoder.quantized_contexts = decoder.impl, (AgainstTwoLaunches,)
    if found and not isinstance(impl, QuantizingImpl):
        impl.__class__ = seam.mixed(QuantizingImpl, type(impl))
    if isinstance(impl, QuantizingImpl):
        impl.rocm_ops_kinds = found
    return found


class AgainstTwoLaunches(timing.Context):
    """Time fused output quantization against the plugin's attention followed by vLLM's quantization."""

    beside = SEPARATE

    def baseline(self, query: Tensor, layer: timing.Layer, metadata) -> tuple[Tensor | None, ...]:
        plain, batch = layer.decoder.unquantized_output(query), (len(query) // self.query_len, self.query_len)
        output, *scales = timing.outputs(layer.decoder.quantized, plain)
        layer.decoder.run(batch, layer.module, query, layer.cache, metadata, plain)
        mla_v_up.quantize(plain.flatten(1), output.flatten(1), *scales)
        return output, *scales


# Decisions


class Producer(NamedTuple):
    """One of vLLM's attention ops, whose result a layer may quantize.

    Attributes:
        name: Its name in a graph.
        arguments: Its first arguments.
        kinds: Returns the kinds of quantization that a layer fuses, from its decoder and the recorded decisions.
    """

    name: str
    arguments: tuple[str, ...]
    kinds: Callable[[object, torch.nn.Module, Decided], frozenset[str]]

    def writes_scales(self) -> bool:
        """True if vLLM's op has the expected arguments, and declares its output and group scales as mutated.

        Without that a compiler may drop the write.
        """
        arguments = getattr(torch.ops.vllm, self.name.partition("::")[2]).default._schema.arguments
        written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
        names = tuple(argument.name for argument in arguments)
        return {"output", "output_block_scale"} <= written and names[: len(self.arguments)] == self.arguments


PRODUCERS = {
    ops.paged_attention_decode: Producer(split.ATTENTION, split.ARGUMENTS, kinds_of_heads),
    ops.mla_decode: Producer(
        "vllm::unified_mla_attention_with_output",
        ("q", "kv_c_normed", "k_pe", "output", "layer_name", "output_scale", "output_block_scale"),
        mla_v_up.kinds,
    ),
}
"""Producers by the op that serves their decode rows."""
ARGUMENTS = {producer.name: producer.arguments for producer in PRODUCERS.values()}


def decide(config, decided: Decided) -> str:
    """Decide for the layers of a loaded model, from the recorded decisions, and return what was decided."""
    _fused.clear()
    for name, layer in config.compilation_config.static_forward_context.items():
        decoder = getattr(getattr(layer, "impl", None), "rocm_ops", None)
        if decoder is not None:
            producer = PRODUCERS[decoder.op]
            _fused[name] = producer.kinds(decoder, layer, decided) if producer.writes_scales() else frozenset()
        elif "attn_backend" in vars(layer):
            _fused[name] = frozenset()
    fused = ", ".join(sorted(f"{name} {'/'.join(sorted(kinds))}" for name, kinds in _fused.items() if kinds))
    if not fused:
        _fused.clear()
        return ""
    split.before(fuse)
    return f"attention to e4m3 in {fused}"


def kinds_of(name: object) -> frozenset[str]:
    """Return the kinds that a layer may fuse, by its name in a graph.

    An unknown name may be any layer's: then return the kinds that all layers may fuse. PyTorch 2.11 passes names as
    graph inputs.
    """
    given = name.meta.get("example_value") if isinstance(name, fx.Node) else name
    given = getattr(given, "real_obj", given)
    given = getattr(given, "value", given)
    if isinstance(given, str):
        return _fused.get(given, frozenset())
    return frozenset.intersection(*_fused.values()) if _fused else frozenset()


# Graphs


class Fusion(NamedTuple):
    """An attention node and the quantizations that alone read its result. `views` begins with its allocation."""

    node: fx.Node
    views: list[fx.Node]
    markers: list[fx.Node]
    kind: str

    @classmethod
    def find(cls, node: fx.Node) -> Fusion | None:
        """Return the fusion at a node, if it is possible and was decided."""
        from vllm_rocm_ops.vllm.graph import markers

        given = dict(zip(ARGUMENTS[attention_of(node)], node.args)) | node.kwargs
        if given.get("output_scale") is not None or given.get("output_block_scale") is not None:
            return None
        views = views_of(given["output"])
        readers = {user for view in views for user in view.users} - {node, *views}
        equal = len({(reader.target, str(reader.args[1:])) for reader in readers}) == 1
        allocates = views[0].op == "call_function" and views[0].target is torch.empty and len(size_of(views[0])) == 2
        if not (equal and next(iter(readers)).target is markers.QUANTIZATION and allocates):
            return None
        fusion = cls(node, views, sorted(readers), kind_of(next(iter(readers))))
        is_there = fusion.kind != "static" or fusion.markers[0].args[1] < node
        return fusion if is_there and fusion.kind in kinds_of(given["layer_name"]) else None

    def apply(self) -> None:
        """Rewrite the graph: the quantized values become the output, the scales its scale."""
        graph, (values, scales) = self.node.graph, self.markers[0].meta["example_value"]
        scale, name = self.markers[0].args[1], "output_scale"
        for view in self.views:
            view.meta["example_value"] = like(view.meta["example_value"], values.dtype)
        self.views[0].kwargs = self.views[0].kwargs | {"dtype": values.dtype}
        if self.kind == "groups":
            name = "output_block_scale"
            with graph.inserting_after(self.views[0]):
                scale = allocate(graph, self.views[0], scales)
        self.node.kwargs = self.node.kwargs | {name: scale}
        for marker in self.markers:
            for part in list(marker.users):
                part.replace_all_uses_with((marker.args[0], scale)[part.args[1]])
                graph.erase_node(part)
            graph.erase_node(marker)


def fuse(graph: fx.Graph, splitting_ops: list[str]) -> int:
    """Fuse quantizations into attention in a model's graph, and return how many."""
    if not any(_fused.values()):
        return 0
    fusions = [fusion for node in graph.nodes if attention_of(node) if (fusion := Fusion.find(node)) is not None]
    for fusion in fusions:
        fusion.apply()
    if fusions:
        logger.info(
            "vllm-rocm-ops: output quantization is fused into attention in %d layers "
            "(VLLM_ROCM_OPS_SEAMS=-quantized_attention disables it)",
            len(fusions),
        )
    return len(fusions)


def attention_of(node: fx.Node) -> str:
    """Return vLLM's attention op with an output argument that a node calls, empty for other nodes."""
    return name if (name := split.op_of(node)) in ARGUMENTS else ""


def is_view(node: object) -> bool:
    """True if a node is a view or reshape."""
    return split.calls_method(node, "view", "reshape")


def views_of(node: fx.Node) -> list[fx.Node]:
    """Return a view's base and all views of it."""
    while is_view(node):
        node = node.args[0]
    views = [node]
    for view in views:
        views += [user for user in view.users if is_view(user)]
    return views


def size_of(node: fx.Node) -> tuple:
    """Return the size argument of a `torch.empty` node."""
    size = node.args[0] if len(node.args) == 1 else node.args
    if isinstance(size, fx.Node):
        size = size.args[0] if size.target is torch.Size else ()
    return tuple(size)


def kind_of(marker: fx.Node) -> str:
    """Return the kind of a quantization marker, empty if attention does not support it."""
    from vllm_rocm_ops.vllm.graph.markers import QuantTraits

    rows, scale, bound, traits = marker.args
    traits = QuantTraits(*traits)
    if (
        bound is not None
        or traits.tma_aligned
        or traits.ue8m0
        or traits.padding != -1
        or rows.meta["example_value"].dim() != 2
    ):
        return ""
    if traits.static:
        return "static" if (traits.rows, traits.columns) == (-1, -1) and isinstance(scale, fx.Node) else ""
    return "groups" if (traits.rows, traits.columns) == (1, GROUP) else ""


def like(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a fake value of another dtype."""
    return value.new_empty(value.shape, dtype=dtype)


def allocate(graph: fx.Graph, rows: fx.Node, scales: Tensor) -> fx.Node:
    """Allocate group scales for allocated rows, in the memory order of vLLM's quantization."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    tokens, device, columns = size_of(rows)[0], rows.kwargs.get("device"), scales.shape[1]
    is_transposed = columns > 1 and statically_known_true(scales.stride(0) == 1)
    size = (columns, tokens) if is_transposed else (tokens, columns)
    made = graph.call_function(torch.empty, (size,), {"dtype": scales.dtype, "device": device})
    made.meta["example_value"] = scales.new_empty(scales.shape[::-1] if is_transposed else scales.shape)
    if not is_transposed:
        return made
    with graph.inserting_after(made):
        turned = graph.call_method("t", (made,))
    turned.meta["example_value"] = made.meta["example_value"].t()
    return turned


# The seam


SEAM = seam.Seam(
    name="quantized_attention",
    replaces="split_graph of vllm.compilation.backends, quantizations are fused into attention before it; MLAAttention.forward_impl",
    probe=split.probe,
    install=lambda: compiled_ops.deciders.append(decide),  # vLLM's function is wrapped once a model is loaded
    ops=("paged_attention_decode",),
    requires=("decode_attention", "fusion"),
)
