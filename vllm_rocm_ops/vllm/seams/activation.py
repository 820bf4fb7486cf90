"""Seam: vLLM's `SiluAndMul` runs our SwiGLU ops, which also quantize for a linear that takes quantized input.

In a compiled graph an activation that does not quantize is ours where the compiler would fuse it with nothing, see norm.py.
"""

from vllm_rocm_ops.vllm import seam


def probe() -> None:
    """`SiluAndMul` is a `CustomOp` that a plugin may replace, and vLLM's table of fused activations exists."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fusion import fused_act_quant

    seam.require(issubclass(SiluAndMul, CustomOp), "SiluAndMul as a CustomOp")
    seam.require("SiluAndMul" not in op_registry_oot, "a free SiluAndMul: another plugin has replaced it")
    seam.require_parameters(CustomOp.dispatch_forward, "compile_native")
    seam.require_parameters(SiluAndMul.forward_native, "x")
    seam.require(isinstance(getattr(fused_act_quant, "_FUSED_ACT_QUANT", None), dict), "_FUSED_ACT_QUANT")
    seam.require_parameters(fused_act_quant.maybe_fused_act_quant, "act_fn", "x", "linear")


def install() -> None:
    """Register the subclass by vLLM's `register_oot`, and its rows in vLLM's table of fused activations."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fusion.fused_act_quant import _FUSED_ACT_QUANT

    from vllm_rocm_ops import ops
    from vllm_rocm_ops.vllm import fused_quant, native_rows

    keys = fused_quant.runnable(fused_quant.ACTIVATIONS)

    @SiluAndMul.register_oot
    class RocmOpsSiluAndMul(SiluAndMul):
        """vLLM's SiluAndMul, with our ops for the inputs that they take."""

        consumer: tuple[torch.nn.Module, str] | None = None
        """The one linear that reads the result: its parent module, and its name in the parent."""
        stands_alone = False
        """Whether the compiler would fuse the activation with nothing behind it."""
        is_behind = False
        """Whether the compiler makes the input."""

        def dispatch_forward(self, compile_native: bool):
            """Return our forward. Keep the one that vLLM chose, compiled or not."""
            self.vllm_forward = super().dispatch_forward(compile_native)
            return self.rocm_ops_forward

        def rocm_ops_forward(self, x):
            """Our op, or vLLM's forward for inputs that the kernels do not take."""
            linear = None if self.consumer is None else getattr(*self.consumer)
            key = fused_quant.key_of(linear, x.shape[-1] // 2, keys)
            fuses = torch.compiler.is_compiling() and (self.is_behind or (key is None and not self.stands_alone))
            if fuses or key not in keys or x.dtype not in fused_quant.DTYPES or not fused_quant.in_rows(x):
                return self.vllm_forward(x)
            if key is not None:
                return fused_quant.silu_and_mul(linear, key, x)
            return ops.silu_and_mul.call(x)

    native_rows.install(native_rows.ACTIVATIONS)

    def fused(x, linear):
        key = fused_quant.key_of(linear, x.shape[-1] // 2, keys)
        if key is None or x.dtype not in fused_quant.DTYPES or not fused_quant.in_rows(x):
            return SiluAndMul.forward_native(x)
        return fused_quant.silu_and_mul(linear, key, x)

    for key in keys:
        if key is not None:
            _FUSED_ACT_QUANT[RocmOpsSiluAndMul, key] = fused


SEAM = seam.Seam(
    name="activation",
    replaces="SiluAndMul, through CustomOp.register_oot; its rows in layers/fusion/fused_act_quant.py",
    probe=probe,
    install=install,
)
