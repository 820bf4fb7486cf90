"""Tell how vLLM compiles the models of a worker, and compile baselines in the same way."""

import contextlib
from collections.abc import Callable

import torch

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing
from vllm_rocm_ops.vllm.selection.key import COMPILED, EAGER, Baseline


def models_of(worker) -> list[torch.nn.Module]:
    """Return the model that a worker has loaded, and its draft model if there is one."""
    runner = worker.model_runner
    drafts = (
        getattr(getattr(runner, name, None), "model", None) for name in ("speculator", "drafter")
    )  # of runner V2, V1
    return [runner.get_model(), *(model for model in drafts if isinstance(model, torch.nn.Module))]


def compiler(config) -> Callable[[Callable], Callable]:
    """Return a function that compiles another as vLLM compiles a piece of the model.

    It uses the model's Inductor settings and vLLM's passes. The result supports any token count. Without Inductor
    functions are returned as they are.
    """
    from vllm.compilation.backends import VllmBackend
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.config.utils import Range

    if config.compilation_config.backend not in ("", "inductor"):
        return lambda function: function
    backend = VllmBackend(config)
    backend.pass_manager = PostGradPassManager()  # without the plugin's pass
    backend.configure_post_pass()
    max_tokens = config.scheduler_config.max_num_batched_tokens

    def inductor(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        with pass_context(Range(1, max_tokens)):
            return compile_fx(graph, inputs, config_patches=backend.inductor_config)

    def compiled(function: Callable) -> Callable:
        def graph(*tensors):
            return function(*tensors)

        graph.__code__ = graph.__code__.replace()  # Dynamo counts compilations per code object
        run = torch.compile(graph, backend=inductor, fullgraph=True)

        def call(*tensors):
            for tensor in tensors:
                if tensor is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return run(*tensors)

        return call

    return compiled


def start_compiler(compiles: Callable, wanted: dict) -> None:
    """Start the compiler if baselines are to be compiled, outside the time limit: vLLM needs it next anyway."""
    if kernel_timing.in_order(wanted, kernel_selection.record_here(), 1.0):
        with contextlib.suppress(Exception):  # timing reports it
            compiles()(torch.neg)(next(iter(wanted)).kernels.inputs(2, 0)[0])


def is_compiled(config, model: torch.nn.Module) -> bool:
    """True if vLLM compiles classes of a model and runs its passes on them. Some models have none."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Compiled
    from vllm.config import CompilationMode

    if config.compilation_config.mode != CompilationMode.VLLM_COMPILE:
        return False
    return any(isinstance(m, Compiled) and not getattr(m, "do_not_compile", True) for m in model.modules())


def baseline_of(config, model: torch.nn.Module) -> Callable[..., Baseline]:
    """Return a function that returns vLLM's kernel of a norm or an activation in a model.

    AITER, fused quantization, and compiled or eager, as opaque layers are: times against one do not hold for another.
    """
    from vllm import _aiter_ops

    passes, compiles = config.compilation_config.pass_config, is_compiled(config, model)
    runs = compiles and seam.served_platform() != "cpu"  # CPU sets these switches, too, but runs no passes
    first = config.kernel_config.ir_op_priority.rms_norm[:1]
    aiter = "AITER" * (first == ["aiter"] and _aiter_ops.IS_AITER_FOUND)

    def baseline(is_norm: bool, is_opaque: bool = False, has_pass: bool = True) -> Baseline:
        if not compiles or is_opaque:
            return EAGER._replace(name=aiter)
        is_fused = bool(runs and has_pass and (passes.fuse_norm_quant if is_norm else passes.fuse_act_quant))
        return COMPILED._replace(name=aiter, is_fused=is_fused)

    return baseline
