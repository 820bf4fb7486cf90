"""Run vLLM's `RMSNorm` and `GemmaRMSNorm` by the RMSNorm ops.

In a model that vLLM compiles a norm is a node of its IR, and rewrite.py replaces it, with the quantization after it. This
seam serves eager code, where a norm runs alone. `VLLM_ROCM_OPS_SEAMS=-norm` turns off both.
"""

from vllm_rocm_ops.vllm import seam

CLASSES = {"RMSNorm": False, "GemmaRMSNorm": True}
"""vLLM's norms -> whether they multiply by 1 + weight."""


def probe() -> None:
    """Raise `Unavailable` unless both are a `CustomOp` that a plugin may replace, with forwards as expected."""
    from vllm.model_executor.layers import layernorm

    for name in CLASSES:
        norm = seam.replaceable(layernorm, name)
        seam.require_parameters(norm.forward_native, "x", "residual")
        seam.require_parameters(norm.__init__, "hidden_size", "eps")
    names = "hidden_size", "eps", "var_hidden_size", "has_weight", "dtype"
    seam.require_parameters(layernorm.RMSNorm.__init__, *names)


def install() -> None:
    """Register the subclasses through vLLM's `register_oot`."""
    from vllm.model_executor.layers import layernorm

    from vllm_rocm_ops.vllm.graph import fused_quant, norm_outputs, vllm_row_kernels  # noqa: F401

    if None in fused_quant.runnable(fused_quant.NORMS):
        for name, one_plus in CLASSES.items():
            made_of(getattr(layernorm, name), one_plus)
    vllm_row_kernels.install(vllm_row_kernels.NORMS)


def made_of(norm: type, one_plus: bool) -> type:
    """Register the subclass of a norm of vLLM's in its place."""
    import torch
    from vllm import envs

    from vllm_rocm_ops import ops
    from vllm_rocm_ops.vllm.graph import fused_quant

    class RocmOpsNorm(norm):
        """Run vLLM's eager norm by the plugin's ops, for the inputs that they support."""

        one_plus_weight = one_plus

        def dispatch_forward(self, compile_native: bool):
            """Return the plugin's forward. Keep vLLM's."""
            self.vllm_forward = super().dispatch_forward(compile_native)
            return self.vllm_forward if envs.VLLM_BATCH_INVARIANT else self.rocm_ops_forward

        def rocm_ops_forward(self, x, residual=None):
            """Run the op, which updates the residual in place.

            vLLM's GemmaRMSNorm does not update its residual, so with a residual it stays vLLM's.
            """
            takes = (
                not torch.compiler.is_compiling()
                and getattr(self, "variance_size_override", None) is None
                and getattr(self, "has_weight", True)
                and x.dtype == self.weight.dtype
                and x.dtype in fused_quant.DTYPES
                and (fused_quant.in_rows(x) or (residual is None and fused_quant.in_heads(x)))
                and (residual is None or (not one_plus and fused_quant.in_rows(residual)))
            )
            if not takes:
                return self.vllm_forward(x, residual)
            if residual is None:
                return ops.rms_norm.call(x, self.weight.data, self.variance_epsilon, one_plus)
            return ops.fused_add_rms_norm.call(x, residual, self.weight.data, self.variance_epsilon, one_plus), residual

    RocmOpsNorm.__name__ = RocmOpsNorm.__qualname__ = f"RocmOps{norm.__name__}"
    return seam.replace(norm, RocmOpsNorm)


SEAM = seam.Seam(
    name="norm",
    replaces="RMSNorm and GemmaRMSNorm, through CustomOp.register_oot",
    probe=probe,
    install=install,
    ops=("rms_norm", "fused_add_rms_norm"),
)
