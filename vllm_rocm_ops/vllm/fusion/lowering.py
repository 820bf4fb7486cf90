"""Replace a marker (markers.py) that no op takes by what vLLM would have traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_rocm_ops.vllm.fusion import markers

aten = torch.ops.aten


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
        traced = traces[key] = trace(markers.FORMS[marker.target], marker.args)
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
