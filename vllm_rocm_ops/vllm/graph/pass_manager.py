"""Add the plugin's pass to vLLM's compiled mode.

The pass fuses norms and activations with the quantization after them (rewrite.py). While vLLM traces a model that it
compiles, markers tell quantizations apart (markers.py). Elsewhere vLLM's code runs.
"""

import inspect

from vllm_rocm_ops.vllm import seam

MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
PARAMETERS = ("static", "group_shape", "num_token_padding", "column_major_scales")


def probe() -> None:
    """Raise `Unavailable` unless the seam fits this vLLM.

    The platform uses vLLM's own pass manager, norms are nodes of its IR, and a plugin may replace QuantFP8.
    """
    import torch
    import vllm.ir.ops
    from vllm.compilation.passes.inductor_pass import get_pass_context
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.quantization import input_quant_fp8
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils  # noqa: F401
    from vllm.platforms import current_platform

    named = getattr(current_platform, "get_pass_manager_cls", lambda: None)()
    seam.require(named == MANAGER, f"{MANAGER} as the platform's passes, got {named}")
    seam.require_parameters(get_pass_context)
    seam.require_parameters(get_current_vllm_config_or_none)
    for name in ("rms_norm", "fused_add_rms_norm"):
        seam.require(hasattr(vllm.ir.ops, name) and hasattr(torch.ops.vllm_ir, name), f"vllm_ir::{name}")
    seam.require(hasattr(torch.ops.vllm, "mxfp8_quantize"), "torch.ops.vllm.mxfp8_quantize")
    quantization = seam.replaceable(input_quant_fp8, "QuantFP8")
    seam.require_parameters(quantization.__init__, *PARAMETERS)
    seam.require("use_ue8m0" in inspect.signature(quantization.__init__).parameters, "QuantFP8's use_ue8m0")
    seam.require_parameters(quantization.forward_native, "x", "scale", "scale_ub")


def install() -> None:
    """Name the plugin's pass manager, and register the subclass through vLLM's `register_oot`."""
    import torch
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.platforms import current_platform

    from vllm_rocm_ops.vllm.graph import markers

    class RocmOpsQuantFP8(QuantFP8):
        """Mark vLLM's quantization in models that it compiles."""

        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.vllm_forward = self._forward_method
            if markers.runs_passes():
                self.marked = markers.of_quantization(self, self.dispatch_forward(compile_native=False))
                self._forward_method = self.rocm_ops_forward

        def rocm_ops_forward(self, *arguments, **keywords):
            forward = self.marked if torch.compiler.is_compiling() else self.vllm_forward
            return forward(*arguments, **keywords)

    seam.replace(QuantFP8, RocmOpsQuantFP8)
    type(current_platform).get_pass_manager_cls = classmethod(
        lambda cls: "vllm_rocm_ops.vllm.graph.rewrite.PassManager"
    )


SEAM = seam.Seam(
    name="fusion",
    replaces="the platform's get_pass_manager_cls; QuantFP8, through CustomOp.register_oot",
    probe=probe,
    install=install,
)
