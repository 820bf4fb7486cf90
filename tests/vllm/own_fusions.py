"""Count the fusions of norms and quantizations that vLLM's own pass finds after the plugin's pass.

The process has that vLLM's Python files, on its ROCm platform with a faked machine. It prints, by form, key and
residual, the fusions in a graph with the plugin's markers and in one without.
"""

import contextlib
import json
import os

import passes

from vllm_rocm_ops.vllm.meta import simulated

SCHEMAS = (
    *passes.SCHEMAS,
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed=False, bool dummy_is_tma_aligned=False) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()",
    "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
)
KEYS = ("kFp8StaticTensorSym", "kFp8DynamicTokenSym", "kFp8Dynamic128Sym")


def main(aiter: str) -> None:
    """Print the answers as JSON, without AITER ("0") or with it ("1"), which has its own pass."""
    os.environ["VLLM_ROCM_USE_AITER"] = aiter
    simulated.amd("gfx942", aiter == "1")
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
        library.impl(schema.partition("(")[0], lambda *_, **__: None, "Meta")
    os.environ["VLLM_ROCM_OPS_SEAMS"] = "all"
    from vllm.config import CompilationConfig, CompilationMode, DeviceConfig, VllmConfig, set_current_vllm_config

    from vllm_rocm_ops.vllm import register

    register()
    answers = {}
    for form in ("custom op",) if aiter == "1" else ("custom op", "native"):
        settings = CompilationConfig(custom_ops=["none", "+quant_fp8"] if form == "custom op" else ["none"])
        settings.mode = CompilationMode.VLLM_COMPILE
        config = VllmConfig(device_config=DeviceConfig("cuda"), compilation_config=settings)
        with set_current_vllm_config(config, check_compile=False):
            answers |= {f"{form} {what}": found for what, found in matches(config, form == "native", aiter == "1")}
    print("\n" + json.dumps(answers))


def matches(config, native: bool, aiter: bool):
    """Yield a key and whether there is a residual, and the fusions of vLLM's pass with markers and without."""
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._inductor import config as inductor
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from vllm_rocm_ops.vllm.graph import rewrite

    if aiter:
        from vllm.compilation.passes.fusion.rocm_aiter_fusion import RocmAiterRMSNormQuantFusionPass as Theirs
    else:
        from vllm.compilation.passes.fusion.rms_quant_fusion import RMSNormQuantFusionPass as Theirs
    theirs = Theirs(config)
    rewrite.choices.on = frozenset()  # all are vLLM's
    for key in KEYS:
        scale = getattr(quant_utils, key).scale
        quant = QuantFP8(scale.static, scale.group_shape, use_ue8m0=False, compile_native=False)
        forward = (QuantFP8.forward_native if native else QuantFP8.forward_hip).__get__(quant)
        for adds in (False, True):

            def function(tokens, x, weight, residual, at, quantize, static=scale.static, adds=adds):
                if adds:
                    y, residual = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, 1e-6)
                else:
                    y = torch.ops.vllm_ir.rms_norm(x, weight, 1e-6)
                return (*(quantize(y, at) if static else quantize(y)), *([residual] if adds else []))

            found = []
            for quantize in (quant.marked, forward):
                environment = ShapeEnv()
                with FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment), contextlib.ExitStack() as stack:
                    stack.enter_context(inductor.patch(enable_auto_functionalized_v2=False))
                    stack.enter_context(pass_context(Range(1, 64)))
                    tokens = environment.create_symintnode(
                        environment.create_symbol(5, ConstantSource("tokens")), hint=5, source=ConstantSource("tokens")
                    )
                    sizes = (tokens, 256), (256,), (tokens, 256)
                    inputs = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
                    inputs = [tokens, *inputs, torch.empty(1, device="cuda")]  # as vLLM's pieces have it
                    traced = functional(lambda *given, quantize=quantize: function(*given, quantize))
                    module = make_fx(traced, select_decomp_table())(*inputs)
                    view_to_reshape(module)
                    rewrite.Fusion(config)(module.graph)
                    theirs(module.graph)
                found.append(theirs.matched_count)
            yield f"{key} {adds}", found


def functional(function):
    """Return a function whose kernels do not write their arguments, as in a compiled model."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    return dispatch_functionalize(function, FunctionalTensorMode())
