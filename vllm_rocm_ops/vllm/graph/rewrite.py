"""Put the plugin's norms and activations into vLLM's compiled graph, fused with the quantization after them.

vLLM's platform names the class that runs the passes on each piece of a compiled model. There norms are nodes of vLLM's
IR, quantizations and activations are markers (markers.py). This pass runs before vLLM's and replaces

    norm -> quantizations         its only readers, by one op, where it was timed to be faster
    norm -> experts               by an op that also quantizes, where it was timed to be faster (moe/quantized_input.py)
    norm -> quantizations, GEMMs  likewise, by scales per 128 (norm_outputs.py)
    activation -> quantizations   likewise; a static one with the linear before it, if nothing else reads that
    x * sigmoid -> quantizations  likewise, as attention's output with its gate, which may stay where a projection wrote it
    all-reduce -> norm            of either kind, by one op, where all ranks timed it to be faster (all_reduce_norm.py)
    norm, activation              by the op alone, where the compiler would fuse nothing with it
    sum -> (all-reduce ->) norm   by the norm's op, such as the sum of routed and shared experts
    every other marker            by what vLLM would have traced, so that its passes match

An op that updates a residual is functional until vLLM's last pass, as vLLM's are. Then it works in place.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.compilation.passes.fx_utils import is_func
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.utility.noop_elimination import NoOpEliminationPass
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op, registered
from vllm_rocm_ops.vllm.graph import all_reduce_norm, fused_quant, markers, queries
from vllm_rocm_ops.vllm.graph.compiled_ops import choices, norm_rules, two_output_rules
from vllm_rocm_ops.vllm.graph.markers import ACTIVATION, BOTH_NORMS, MX_QUANTIZATION, QUANTIZATION, ROTATION, lower
from vllm_rocm_ops.vllm.graph.queries import addends, are_alike, is_materialized, is_view, unviewed
from vllm_rocm_ops.vllm.linear import scaled_linear

aten = torch.ops.aten
LINEAR, GATED = (
    getattr(torch.ops.vllm_rocm_ops, kernels.run.__name__).default
    for kernels in (scaled_linear.COMPARISON, scaled_linear.GATED)
)
NORM, ADD_NORM = torch.ops.vllm_ir.rms_norm.default, torch.ops.vllm_ir.fused_add_rms_norm.default
ALL_REDUCE = torch.ops.vllm.all_reduce.default
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
EPSILONS = 1e-5, 1e-6  # of vLLM's patterns


class Producer:
    """A norm or an activation in a graph, and the readers of its result."""

    name = ""
    table: ClassVar[dict] = {}
    residual: fx.Node | None = None
    added: fx.Node | None = None

    def __init__(self, node: fx.Node):
        self.node = self.result = node

    def arguments(self) -> dict[str, object]:
        return {"input": self.node.args[0]}

    def supports(self) -> bool:
        """True if the kernels support the inputs for any token count."""
        x = self.node.args[0]
        rows = x.meta["val"]
        return rows.dtype in fused_quant.DTYPES and fused_quant.in_rows(rows)

    def op(self, key) -> Op:
        return fused_quant.op_of(self.table, key, self.residual is not None)


class Norm(Producer):
    """A norm, with its residual if it has one."""

    name, table = "norm", fused_quant.NORMS

    def __init__(self, node: fx.Node):
        self.node, adds = node, node.target is ADD_NORM
        parts = {user.args[1]: user for user in node.users if is_func(user, operator.getitem)}
        self.result, self.added = (parts.get(0), parts.get(1)) if adds else (node, None)
        self.residual = node.args[1] if adds else None
        self.weight, self.epsilon, *sizes = node.args[2:] if adds else node.args[1:]
        self.is_partial = any(size is not None for size in sizes)
        self.one_plus = False
        if isinstance(self.weight, fx.Node) and (inner := one_plus_of(self.weight)) is not None:
            self.weight, self.one_plus = inner, True

    def arguments(self) -> dict[str, object]:
        given = {"weight": self.weight, "epsilon": self.epsilon, "one_plus_weight": self.one_plus}
        return super().arguments() | given | {"residual": self.residual}

    def supports(self) -> bool:
        x, weight = self.node.args[0].meta["val"], self.weight
        if not isinstance(weight, fx.Node) or weight.meta["val"].dtype != x.dtype or self.is_partial:
            return False
        return super().supports() and (self.residual is None or self.may_update(self.residual))

    def may_update(self, residual: fx.Node) -> bool:
        """True if a residual may be updated in place: no later reader, and not a caller's input."""
        is_last = not any(self.node < user for user in residual.users) and not is_view(residual)
        inputs = residual.graph.find_nodes(op="placeholder")
        is_given = residual not in inputs or inputs.index(residual) in get_pass_context().donated_input_ids
        return is_last and is_given and fused_quant.in_rows(residual.meta["val"])


class Activation(Producer):
    """A SiluAndMul."""

    name, table = "activation", fused_quant.ACTIVATIONS

    def linear(self) -> fx.Node | None:
        """Return the plugin's linear before the activation, if nothing else reads it."""
        x = self.node.args[0]
        return x if is_func(x, LINEAR) and x.args[4] is None and len(x.users) == 1 else None


class OutputGate(Producer):
    """A product with the sigmoid of a gate. `gate` may be heads apart, whose copy to rows falls away."""

    name, table = "activation", fused_quant.GATES

    def __init__(self, node: fx.Node):
        super().__init__(node)
        self.input, self.gate = queries.gated(node) or (node.args[0], None)

    def arguments(self) -> dict[str, object]:
        return {"input": self.input, "gate": self.gate}

    def supports(self) -> bool:
        if self.gate is None:
            return False
        x, gate = self.input.meta["val"], self.gate.meta["val"]
        fits = x.dtype in fused_quant.DTYPES and gate.dtype == x.dtype and fused_quant.in_rows(x)
        return fits and x.dim() == 2 and (fused_quant.in_rows(gate) or fused_quant.in_heads(gate))


class Fusion(VllmInductorPass):
    """Put the plugin's ops into a piece of a compiled model."""

    def __init__(self, config):
        super().__init__(config)
        self.runnable = {kind: fused_quant.runnable(kind.table) for kind in (Norm, Activation, OutputGate)}
        self.traces: dict[tuple, fx.Graph] = {}  # a model has few kinds of markers in many places

    @VllmInductorPass.time_and_log
    def __call__(self, graph: fx.Graph) -> None:
        kinds = {NORM: Norm, ADD_NORM: Norm, ACTIVATION: Activation, aten.mul.Tensor: OutputGate}
        for node in [node for node in graph.nodes if node.op == "call_function" and node.target in kinds]:
            producer = kinds[node.target](node)
            if not (producer.name in choices.on and self.take(producer)) and node.target is ACTIVATION:
                lower(node, self.traces)
        graph.eliminate_dead_code()
        for node in [node for node in graph.nodes if node.target in (QUANTIZATION, ROTATION, BOTH_NORMS)]:
            lower(node, self.traces)
        graph.eliminate_dead_code()

    def take(self, producer: Producer) -> bool:
        """Replace a producer by an op, and return whether the plugin serves it."""
        readers = list(producer.result.users) if producer.result is not None else []
        if not readers or not producer.supports() or makes_with_norm(producer.node.args[0]):
            return False
        if self.quantize(producer, readers):
            return True
        quantizes = [reader for reader in readers if reader.target is QUANTIZATION]
        if quantizes and producer.name == "norm":
            return any(rule(producer, readers, quantizes, self.summed) for rule in two_output_rules)
        if quantizes or None not in producer.table or not all(map(is_materialized, readers)):
            return False
        is_all_reduced = producer.name == "norm" and self.is_all_reduced(producer, None)
        rules = norm_rules if producer.name == "norm" and not is_all_reduced else ()
        if any(rule(producer, readers, self.summed) for rule in rules):
            return True
        op, given = producer.op(None), producer.arguments()
        summed = self.summed(producer, op, given, is_all_reduced)
        if (is_all_reduced and summed is None) or None not in self.runnable[type(producer)]:
            return False
        if summed is not None or op.torch_op is not producer.node.target:
            insert(producer, op, given, [], summed)
        return True

    def quantize(self, producer: Producer, readers: list[fx.Node]) -> bool:
        """Replace a producer and equal quantizations, its only readers. Return whether it did."""
        is_one_kind = len({(reader.target, str(reader.args)) for reader in readers}) == 1
        if not is_one_kind or readers[0].target not in (QUANTIZATION, MX_QUANTIZATION):
            return False
        key, given = quantization(readers[0])
        if key is None or key not in self.runnable[type(producer)]:
            return False
        if producer.name == "norm" and self.is_all_reduced(producer, key):
            return False
        op, given = producer.op(key), given | producer.arguments()
        outputs = outputs_of(op, given)
        columns = producer.result.meta["val"].shape[-1]
        made = (outputs, given["scale"].meta["val"]) if "scale" in op.Arguments._fields else outputs
        is_like = are_alike(made, readers[0].meta["val"])
        if not is_like or not self.plugin_serves(producer, key, given, columns):
            return False
        if producer.added is not None and any(user < place_of(producer, given) for user in producer.added.users):
            return False
        if op is ops.silu_and_mul_quant and (linear := producer.linear()) is not None:
            insert_gated(producer, linear, given["scale"], readers)
        else:
            insert(producer, op, given, readers, self.summed(producer, op, given))
        return True

    def plugin_serves(self, producer: Producer, key, given: dict, columns: int) -> bool:
        """Return the decision for a pattern.

        A model's first norm, without residual, follows the others. An untimed pattern is the plugin's unless a vLLM
        pass covers it, as none covers MX-FP8.
        """
        traits = given.get("scale_ub") is not None, given.get("is_scale_transposed", False)
        traits += (given.get("one_plus_weight", False),)
        dtype = given["input"].meta["val"].dtype
        for adds in (producer.residual is not None, True):
            op = fused_quant.op_of(producer.table, key, adds)
            if op.name in choices.off:
                return False
            decided = choices.decisions.get(fused_quant.pattern(op, columns, dtype, adds, *traits))
            if decided is not None:
                return decided
        passes = self.pass_config
        fuses = {Norm: passes.fuse_norm_quant, Activation: passes.fuse_act_quant}.get(type(producer), False)
        return key == fused_quant.MX or not fuses

    def is_all_reduced(self, norm: Norm, key) -> bool:
        """True if vLLM fuses a norm with AITER's all-reduce before it."""
        before = unviewed(norm.node.args[0])
        return key in choices.all_reduced and norm.epsilon in EPSILONS and "all_reduce" in str(before.target)

    def summed(self, producer: Producer, op: Op, given: dict, everywhere: bool = False) -> fx.Node | None:
        """Return the all-reduce before a norm, if the norm is its only reader and both are to be one launch."""
        before = producer.node.args[0]
        if not (producer.name == "norm" and is_func(before, ALL_REDUCE) and len(before.users) == 1):
            return None
        return before if all_reduce_norm.wins(all_reduce_norm.group_of(before), op, given, everywhere) else None

    def uuid(self) -> str:
        """Return a hash of the source and the choices."""
        rules = *norm_rules, *two_output_rules
        modules = [sys.modules[name] for name in (__name__, *(rule.__module__ for rule in rules))]
        modules += [markers, queries, all_reduce_norm]
        sources = [Path(module.__file__).read_text() for module in modules]
        made = (
            sorted(choices.decisions.items()),
            sorted(choices.off),
            sorted(map(str, choices.all_reduced)),
            sorted(choices.on),
            all_reduce_norm.state(),
        )
        return VllmInductorPass.hash_source(*sources, *map(str, made))


def quantization(marker: fx.Node) -> tuple[object, dict[str, object]]:
    """Return vLLM's key of a quantization, None if unsupported, and the op arguments for it."""
    if marker.target is MX_QUANTIZATION:  # args after x: scale swizzling and alignment
        return (None if any(marker.args[1:]) or marker.kwargs else fused_quant.MX), {}
    _, scale, bound, traits = marker.args
    traits = markers.QuantTraits(*traits)
    if traits.tma_aligned or traits.ue8m0 or traits.padding != -1:
        return None, {}
    keys = {(key.scale.static, *key.scale.group_shape): key for key in fused_quant.KEYS}
    key = keys.get((bool(traits.static), traits.rows, traits.columns))
    given: dict[str, object] = {"quant_dtype": fused_quant.QUANT_DTYPE}
    if traits.static:
        return key, given | {"scale": scale}
    if traits.columns == fused_quant.GROUP:
        return key, given | {"group_size": fused_quant.GROUP, "is_scale_transposed": bool(traits.column_major)}
    return key, given | {"scale_ub": bound}


def outputs_of(op: Op, given: dict[str, object]):
    """Return what an op makes of a graph's nodes, without values."""
    values = fx.map_arg(given, lambda node: node.meta["val"])
    return op.allocate(op.Arguments(**{name: values[name] for name in op.Arguments._fields if name in values}))


def makes_with_norm(node: fx.Node) -> bool:
    """True if Inductor would fuse a norm into the kernel that produces `node`."""
    seen, left = set(), [node]
    while left:
        node = unviewed(left.pop())
        if node.target in (NORM, ADD_NORM):
            return True
        if node not in seen and not is_materialized(node):
            seen.add(node)
            left += node.all_input_nodes
    return False


def one_plus_of(weight: fx.Node) -> fx.Node | None:
    """Return w where a weight is 1 + w in float32, as in Gemma's norms."""
    if not is_func(weight, aten.add.Tensor) or weight.args[1] != 1.0 or weight.kwargs:
        return None
    cast = weight.args[0]
    return cast.args[0] if isinstance(cast, fx.Node) and cast.target in CASTS else None


# Changes to a graph


def place_of(producer: Producer, given: dict) -> fx.Node:
    """Return the node before which all arguments exist: the producer, or the node after a later scale."""
    last = max([producer.node, *(value for value in given.values() if isinstance(value, fx.Node))])
    return producer.node if last is producer.node else last.next


def insert(
    producer: Producer,
    op: Op,
    given: dict,
    quantizes: list[fx.Node],
    summed: fx.Node | None = None,
    makes: tuple = (),
) -> list[fx.Node]:
    """Replace a producer, its quantizations and the all-reduce before it by an op.

    Return its outputs: `makes`, if it has more than the producer.
    """
    node, residual, is_static = producer.node, producer.residual, "scale" in op.Arguments._fields
    place = place_of(producer, given)
    given = dict(zip(op.Arguments._fields, op._defaults)) | given
    values = quantizes[0].meta["val"] if quantizes else makes or (producer.result.meta["val"],)
    values = values[:1] if is_static else values
    if summed is not None:
        given["input"] = summed.args[0]
    given |= addends(given)
    torch_op, called = op.torch_op, {name: given[name] for name in op.Arguments._fields}
    if summed is not None:
        values = all_reduce_norm.padded(*values)
        torch_op, called = all_reduce_norm.OP, all_reduce_norm.node_arguments(op, given, summed)
    with node.graph.inserting_before(place):
        if residual is None:
            fused = node.graph.call_function(torch_op, tuple(called.values()))
            fused.meta["val"] = values if len(values) > 1 else values[0]
        else:
            fused = node.graph.call_function(auto_functionalized, (torch_op,), called)
            fused.meta["val"] = (*values, residual.meta["val"])
        outputs = list(items(fused)) if isinstance(fused.meta["val"], tuple) else [fused]
    if residual is not None:
        added = outputs.pop()
        if producer.added is not None:
            producer.added.replace_all_uses_with(added)
    if not quantizes:
        producer.result.replace_all_uses_with(outputs[0])
    for user in [user for marker in quantizes for user in marker.users]:
        user.replace_all_uses_with(([outputs[0], given["scale"]] if is_static else outputs)[user.args[1]])
    return outputs


def insert_gated(producer: Producer, linear: fx.Node, scale: fx.Node, quantizes: list[fx.Node]) -> None:
    """Replace a linear, its activation and the static quantizations of that by one op."""
    a, b, scale_a, scale_b, _, *rest = linear.args
    with producer.node.graph.inserting_before(place_of(producer, {"scale": scale})):
        values = producer.node.graph.call_function(GATED, (a, b, scale_a, scale_b, scale, *rest))
    values.meta["val"] = quantizes[0].meta["val"][0]
    for user in [user for marker in quantizes for user in marker.users]:
        user.replace_all_uses_with((values, scale)[user.args[1]])


def items(node: fx.Node) -> Iterator[fx.Node]:
    """Yield nodes for the parts of a node's result."""
    for index, value in enumerate(node.meta["val"]):
        got = node.graph.call_function(operator.getitem, (node, index))
        got.meta["val"] = value
        yield got


def update_in_place(graph: fx.Graph) -> None:
    """Have ops update their residual in place, which `Norm.may_update` allowed."""
    plugin_ops = {all_reduce_norm.OP, *(op.torch_op for op in registered())}
    for node in graph.find_nodes(op="call_function", target=auto_functionalized):
        if node.args[0] not in plugin_ops:
            continue
        *parts, _ = node.meta["val"]
        with graph.inserting_before(node):
            called = graph.call_function(node.args[0], kwargs=node.kwargs)
            called.meta["val"] = tuple(parts) if len(parts) > 1 else parts[0]
            outputs = [*(items(called) if len(parts) > 1 else [called]), node.kwargs["residual"]]
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


class PassManager(PostGradPassManager):
    """Run vLLM's passes, with the plugin's before those that fuse."""

    def configure(self, config) -> None:
        """Add the plugin's pass after vLLM's removal of no-op views."""
        super().configure(config)
        place = sum(isinstance(entry, NoOpEliminationPass) for entry in self.passes[:1])
        self.passes.insert(place, Fusion(config))

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        update_in_place(graph)
