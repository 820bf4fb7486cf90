"""Seam: vLLM's `RMSNorm` runs our RMSNorm ops, which also quantize if the norm knows its consumer (see links.py and patches/).

Some of vLLM's compiler passes look for vLLM's own RMSNorm: AITER's all-reduce with RMSNorm, and its dual RMSNorm for latent
attention. They find none while this seam is on. `VLLM_ROCM_OPS_SEAMS=-norm` turns the seam off, so that both can be measured.
"""

import importlib.util

from vllm_rocm_ops.vllm import seam


def probe() -> None:
    """`RMSNorm` is a `CustomOp` that a plugin may replace, and chooses its forward in `dispatch_forward`."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    seam.require(issubclass(RMSNorm, CustomOp), "RMSNorm as a CustomOp")
    seam.require("RMSNorm" not in op_registry_oot, "a free RMSNorm: another plugin has replaced it")
    seam.require_parameters(CustomOp.dispatch_forward, "compile_native")
    seam.require_parameters(RMSNorm.forward_native, "x", "residual")
    seam.require_parameters(RMSNorm.__init__, "hidden_size", "eps", "var_hidden_size", "has_weight", "dtype")


def install() -> None:
    """Register the subclass by vLLM's `register_oot`."""
    import torch
    from vllm import envs
    from vllm.model_executor.layers.layernorm import RMSNorm

    from vllm_rocm_ops.vllm import fused_quant, native_rows

    ops, keys = torch.ops.vllm_rocm_ops, fused_quant.runnable(fused_quant.NORMS)
    # A patched vLLM passes norms the linear that reads their result, see patches/. Looked up before anything is registered.
    table = "vllm.model_executor.layers.fusion.fused_norm_quant"
    offers = importlib.util.find_spec(table) and not envs.VLLM_BATCH_INVARIANT
    fused = importlib.import_module(table)._FUSED_NORM_QUANT if offers else {}

    @RMSNorm.register_oot
    class RocmOpsRMSNorm(RMSNorm):
        """vLLM's RMSNorm, with our ops for the inputs that they take."""

        consumer: tuple[torch.nn.Module, str] | None = None
        """The one linear that reads the result: its parent module, and its name in the parent."""

        def dispatch_forward(self, compile_native: bool):
            """Return our forward. Keep the one that vLLM chose, compiled or not."""
            self.vllm_forward = super().dispatch_forward(compile_native)
            return self.vllm_forward if envs.VLLM_BATCH_INVARIANT else self.rocm_ops_forward

        def rocm_ops_forward(self, x, residual=None):
            """Our op for the norm's consumer, if that is known."""
            return self.for_linear(x, residual, None if self.consumer is None else getattr(*self.consumer))

        def for_linear(self, x, residual, linear):
            """Our op for a linear, or vLLM's forward for inputs that the kernels do not take. Updates the residual in place."""
            takes = (
                self.variance_size_override is None
                and self.has_weight
                and x.dtype == self.weight.dtype
                and x.dtype in fused_quant.DTYPES
                and fused_quant.in_rows(x)
                and (residual is None or fused_quant.in_rows(residual))
            )
            key = fused_quant.key_of(linear, x.shape[-1], keys)
            if not takes or key not in keys:
                return self.vllm_forward(x, residual)
            weight, epsilon = self.weight.data, self.variance_epsilon
            if key is not None:
                result = fused_quant.rms_norm(linear, key, x, residual, weight, epsilon)
            elif residual is None:
                result = ops.rms_norm(x, weight, epsilon)
            else:
                result = ops.fused_add_rms_norm(x, residual, weight, epsilon)
            return result if residual is None else (result, residual)

    native_rows.install(native_rows.NORMS)
    fused |= {(RocmOpsRMSNorm, key): RocmOpsRMSNorm.for_linear for key in keys if key is not None}


SEAM = seam.Seam(
    name="norm",
    replaces="RMSNorm, through CustomOp.register_oot",
    probe=probe,
    install=install,
)
