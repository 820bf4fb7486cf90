"""Count the kernels that vLLM's compiled graphs would launch on a GPU.

Inductor's own scheduler fuses each graph as for Triton, on a faked device, and no code is generated. The engine then
runs the graph itself, node by node.
"""

import copy
import json
import types

import torch
from passes import AsItIs
from torch._dynamo import device_interface
from torch._functorch import config as autograd_config
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda:0")
MARK = "KERNELS "
"""The prefix of an output line with a graph's counts."""


def install() -> None:
    """Replace Inductor's compilation by counting."""
    properties = types.SimpleNamespace(
        name="MI300X",
        multi_processor_count=304,
        major=9,
        minor=4,
        warp_size=64,
        total_memory=192 << 30,
        regs_per_multiprocessor=131072,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
    )
    interface = device_interface.CudaInterface
    interface.is_available = staticmethod(lambda: True)
    interface.get_compute_capability = staticmethod(lambda *_: 90)
    interface.get_device_properties = interface.Worker.get_device_properties = staticmethod(lambda *_: properties)
    torch.cuda.current_device, torch.cuda.device_count = (lambda: 0), (lambda: 1)
    scheduler.has_triton = lambda *_: True
    reinplace._inplace_generalized_scatter = scattered
    autograd_config.enable_autograd_cache = config.fx_graph_cache = False
    compile_fx._InProcessFxCompile.codegen_and_compile = run_and_count


def scattered(inp, src, view_ops):
    """Write to a slice without the copy by which Inductor checks shapes: there is no device to copy on."""
    return inp


def run_and_count(self, graph_module, inputs, *_):
    print("\n" + MARK + json.dumps(counts(graph_module, inputs)), flush=True)
    return AsItIs(gm=lambda values: graph_module(*values))


def moved(value):
    """Return the same values on the GPU."""

    def move(part):
        if isinstance(part, FakeTensor):
            with part.fake_mode:
                return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=DEVICE)
        return DEVICE if isinstance(part, torch.device) else part

    return tree_map(move, value)


def counts(graph_module, inputs) -> dict[str, int]:
    """Return how often each op is called, and, as "generated", the number of Inductor's kernels."""
    graph_module = copy.deepcopy(graph_module)
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    found: dict[str, int] = {}
    with V.set_fake_mode(mode):
        for node in graph_module.graph.nodes:
            node.args, node.kwargs = moved(node.args), moved(node.kwargs)
            node.meta |= {name: moved(value) for name, value in node.meta.items() if name == "val"}
        inputs = [moved(value) for value in inputs]
        compile_fx.record_original_output_strides(graph_module)
        compile_fx._recursive_post_grad_passes(graph_module, is_inference=True)
        graph = GraphLowering(graph_module, inputs, mode.shape_env, graph_id=0, is_inference=True)
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                name = launched(node)
                if name:
                    found[name] = found.get(name, 0) + 1
    return found


def launched(node) -> str:
    """Return the name of what a node of the schedule launches, or "" if nothing."""
    kind, called = type(node).__name__, node.node
    if "Extern" not in kind:
        return "" if "Nop" in kind else "generated"
    if type(called).__name__ == "MultiOutput":
        return ""
    return str(getattr(called, "op_overload", None) or type(called).__name__).removesuffix(".default")
