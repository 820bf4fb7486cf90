"""Seam: vLLM's `SiluAndMul` runs our SwiGLU ops, which also quantize for a linear that takes quantized input.

In a model that vLLM compiles it is a marker, and graph.py decides, with the quantization behind it. Elsewhere, as within experts, which
are whole to the compiler, an activation knows the linear behind it (`consumer`).
"""

from vllm_rocm_ops.vllm import seam


def probe() -> None:
    """`SiluAndMul` is a `CustomOp` that a plugin may replace."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.activation import SiluAndMul

    seam.require(issubclass(SiluAndMul, CustomOp), "SiluAndMul as a CustomOp")
    seam.require("SiluAndMul" not in op_registry_oot, "a free SiluAndMul: another plugin has replaced it")
    seam.require_parameters(CustomOp.dispatch_forward, "compile_native")
    seam.require_parameters(SiluAndMul.forward_native, "x")


def install() -> None:
    """Register the subclass by vLLM's `register_oot`."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_rocm_ops import ops
    from vllm_rocm_ops.vllm.fusion import fused_quant, markers, native_rows

    keys = fused_quant.runnable(fused_quant.ACTIVATIONS)

    class RocmOpsSiluAndMul(SiluAndMul):
        """vLLM's SiluAndMul, with our ops for the inputs that they take."""

        consumer: tuple[torch.nn.Module, str] | None = None
        """The linear that alone reads the result: its parent module, and its name there, which LoRA may give to another later."""

        def dispatch_forward(self, compile_native: bool):
            """Return our forward. Keep the one that vLLM chose."""
            self.vllm_forward = super().dispatch_forward(compile_native)
            uncompiled = super().dispatch_forward(compile_native=False)
            self.traced = markers.of_activation(uncompiled) if markers.runs_passes() else uncompiled
            return self.rocm_ops_forward

        def rocm_ops_forward(self, x):
            """Run our op, or vLLM's forward for inputs that the kernels do not take."""
            if torch.compiler.is_compiling():
                return self.traced(x)
            if x.dtype not in fused_quant.DTYPES or not fused_quant.in_rows(x):
                return self.vllm_forward(x)
            linear = None if self.consumer is None else getattr(*self.consumer)
            key = fused_quant.key_of(linear, x.shape[-1] // 2, keys)
            return ops.silu_and_mul.call(x) if key is None else fused_quant.silu_and_mul(linear, key, x)

    if None in keys:
        seam.replace(SiluAndMul, RocmOpsSiluAndMul)
    native_rows.install(native_rows.ACTIVATIONS)


SEAM = seam.Seam(
    name="activation",
    replaces="SiluAndMul, through CustomOp.register_oot",
    probe=probe,
    install=install,
    ops=("silu_and_mul",),
)
