"""Run vLLM's `SiluAndMul` by the SwiGLU ops, fused with the quantization of a linear's input.

In a model that vLLM compiles an activation is a marker, and rewrite.py selects the op, with the quantization after it. So it does for
the sigmoid of attention's output gate (output_gate.py).
Elsewhere, as inside experts, which are opaque to the compiler, an activation knows the linear that reads it
(`consumer`).
"""

from vllm_rocm_ops.vllm import seam


def probe() -> None:
    """Raise `Unavailable` unless `SiluAndMul` is a `CustomOp` that a plugin may replace."""
    from vllm.model_executor.layers import activation

    seam.require_parameters(seam.replaceable(activation, "SiluAndMul").forward_native, "x")


def install() -> None:
    """Register the subclass through vLLM's `register_oot`."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_rocm_ops.vllm.graph import compiled_ops, fused_quant, markers, output_gate, vllm_row_kernels

    keys = fused_quant.runnable(fused_quant.ACTIVATIONS)

    class RocmOpsSiluAndMul(SiluAndMul):
        """Run vLLM's SiluAndMul by the plugin's ops, for the inputs that they support."""

        consumer: tuple[torch.nn.Module, str] | None = None
        """The only linear that reads the result: its parent module, and its name there, which LoRA may rebind."""

        def dispatch_forward(self, compile_native: bool):
            """Return the plugin's forward. Keep vLLM's."""
            self.vllm_forward = super().dispatch_forward(compile_native)
            uncompiled = super().dispatch_forward(compile_native=False)
            self.traced = markers.of_activation(uncompiled) if markers.runs_passes() else uncompiled
            return self.rocm_ops_forward

        def rocm_ops_forward(self, x):
            """Run the op, or vLLM's forward for inputs that the kernels do not support."""
            if torch.compiler.is_compiling():
                return self.traced(x)
            if x.dtype not in fused_quant.DTYPES or not fused_quant.in_rows(x):
                return self.vllm_forward(x)
            linear = None if self.consumer is None else getattr(*self.consumer)
            key = fused_quant.key_of(linear, x.shape[-1] // 2, keys)
            return fused_quant.silu_and_mul(linear, key, x)

    if None in keys:
        seam.replace(SiluAndMul, RocmOpsSiluAndMul)
    compiled_ops.pattern_finders.append(output_gate.gates)
    vllm_row_kernels.install(vllm_row_kernels.ACTIVATIONS)


SEAM = seam.Seam(
    name="activation",
    replaces="SiluAndMul, through CustomOp.register_oot",
    probe=probe,
    install=install,
    ops=("silu_and_mul", "sigmoid_and_mul"),
)
