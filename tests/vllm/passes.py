"""Run vLLM's compiled mode on CPU as on a GPU: pieces of a graph, vLLM's passes on each, experts as opaque ops.

vLLM's CPU platform compiles a model in one piece and runs no passes. Its build lacks kernels that the passes name; they
have schemas here. `install(generates=False)` runs each piece node by node after its passes, as Inductor's C++ takes
long to compile.
"""

import importlib
import sys

import torch
from torch._functorch import config as autograd
from torch._inductor import compile_fx, config
from torch._inductor.output_code import MockFXGraphCacheOutput

SCHEMAS = (
    (
        "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
        "float epsilon) -> ()"
    ),
    "fused_qk_norm_rope(Tensor! qkv) -> ()",
    (
        "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
        "Tensor? scale_ub, Tensor!? residual) -> ()"
    ),
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
)


class Platform:
    """vLLM's platform, except that it does not report a CPU."""

    def __init__(self, platform):
        self.platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str):
        return getattr(self.platform, name)


class AsItIs(MockFXGraphCacheOutput):
    """A graph that runs node by node."""

    def prepare_for_serialization(self) -> None:
        pass


def compile_and_keep_nothing(graph, inputs, dynamic_shapes, options, **_):
    """Compile a graph as `standalone_compile` does, without keeping its artifacts."""
    with sys.modules["torch._inductor.standalone_compile"]._standalone_context(graph, dynamic_shapes, False):
        return compile_fx.compile_fx(graph, inputs, **options)


def run_nodes(self, graph_module, inputs, *_):
    """Return a graph after its passes, to run node by node."""
    compile_fx.record_original_output_strides(graph_module)
    compile_fx._recursive_post_grad_passes(graph_module, is_inference=True)
    return AsItIs(gm=lambda values: graph_module(*values))


def define_schemas() -> torch.library.Library:
    """Define the kernels that vLLM's passes name, until `invalidate_schemas`."""
    import vllm._custom_ops  # noqa: F401  registers the existing ones

    library = torch.library.Library("_C", "FRAGMENT")
    for schema in SCHEMAS:
        if not hasattr(torch.ops._C, schema.partition("(")[0]):
            library.define(schema)
    return library


def invalidate_schemas(library: torch.library.Library) -> None:
    """Undo `define_schemas`."""
    names = {name.partition("::")[2].partition(".")[0] for name in library._op_defs}
    library._destroy()
    for name in names:
        vars(torch.ops._C).pop(name, None)


def install(generates: bool) -> None:
    """Make compiled models pass through vLLM's passes."""
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.platforms.cpu import CpuPlatform

    global library
    library = define_schemas()
    moe_runner.current_platform = Platform(moe_runner.current_platform)
    complete = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config) -> None:
        settings = vllm_config.compilation_config
        mode = settings.mode
        complete(cls, vllm_config)
        if mode == CompilationMode.VLLM_COMPILE:
            settings.mode, settings.backend, settings.ir_enable_torch_wrap, settings.compile_sizes = (
                mode,
                "inductor",
                True,
                [],
            )
            settings.pass_config.fuse_norm_quant = settings.pass_config.fuse_act_quant = (
                False  # vLLM imports these on GPUs only
            )

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    if not generates:
        autograd.enable_autograd_cache = config.fx_graph_cache = False
        config.force_disable_caches = True
        compile_fx._InProcessFxCompile.codegen_and_compile = run_nodes
        function = torch._inductor.standalone_compile  # the import of its module hides it
        importlib.import_module("torch._inductor.standalone_compile").standalone_compile = compile_and_keep_nothing
        torch._inductor.standalone_compile = function
