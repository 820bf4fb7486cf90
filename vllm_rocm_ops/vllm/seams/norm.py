"""Seam: vLLM's `RMSNorm` and `GemmaRMSNorm`, that of 1 + weight, run our RMSNorm ops, which also quantize if the norm knows its
consumer (see links.py and patches/).

In a compiled graph a norm that does not quantize is ours where the compiler would fuse it with nothing, as in front of experts.
Elsewhere it is vLLM's, which Inductor fuses: q and k norms with the rotary embedding, others with a quantization that is not ours or with what computes their input.

Some of vLLM's compiler passes look for vLLM's own RMSNorm: AITER's all-reduce with RMSNorm, for which row_selection.py leaves norms,
and its dual RMSNorm for latent attention, which finds none while this seam is on. `VLLM_ROCM_OPS_SEAMS=-norm` turns the seam off, so
that both can be measured.
"""

import importlib.util

from vllm_rocm_ops.vllm import seam

CLASSES = {"RMSNorm": False, "GemmaRMSNorm": True}
"""vLLM's norms -> whether 1 + weight takes the weight's place."""


def probe() -> None:
    """Both are a `CustomOp` that a plugin may replace, and choose their forward in `dispatch_forward`."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers import layernorm

    seam.require_parameters(CustomOp.dispatch_forward, "compile_native")
    for name in CLASSES:
        norm = getattr(layernorm, name, None)
        seam.require(isinstance(norm, type) and issubclass(norm, CustomOp), f"{name} as a CustomOp")
        seam.require(name not in op_registry_oot, f"a free {name}: another plugin has replaced it")
        seam.require_parameters(norm.forward_native, "x", "residual")
        seam.require_parameters(norm.__init__, "hidden_size", "eps")
    names = "hidden_size", "eps", "var_hidden_size", "has_weight", "dtype"
    seam.require_parameters(layernorm.RMSNorm.__init__, *names)


def install() -> None:
    """Register the subclasses by vLLM's `register_oot`."""
    from vllm import envs
    from vllm.model_executor.layers import layernorm

    from vllm_rocm_ops.vllm import fused_quant, native_rows

    keys = fused_quant.runnable(fused_quant.NORMS)
    # A patched vLLM passes norms the linear that reads their result, see patches/. Looked up before anything is registered.
    table = "vllm.model_executor.layers.fusion.fused_norm_quant"
    offers = importlib.util.find_spec(table) and not envs.VLLM_BATCH_INVARIANT
    fused = importlib.import_module(table)._FUSED_NORM_QUANT if offers else {}
    ours = [made_of(getattr(layernorm, name), one_plus, keys) for name, one_plus in CLASSES.items()]
    native_rows.install(native_rows.NORMS)
    fused |= {(norm, key): norm.for_linear for norm in ours for key in keys if key is not None}


def made_of(norm: type, one_plus: bool, keys: tuple) -> type:
    """Our subclass of a norm of vLLM's, registered in its place."""
    import torch
    from vllm import envs

    from vllm_rocm_ops import ops
    from vllm_rocm_ops.vllm import fused_quant

    class RocmOpsNorm(norm):
        """vLLM's norm, with our ops for the inputs that they take."""

        consumer: tuple[torch.nn.Module, str] | None = None
        """The one linear that reads the result: its parent module, and its name in the parent."""
        stands_alone = False
        """Whether the compiler would fuse the norm with nothing behind it."""
        is_behind = False
        """Whether the compiler makes the input, as that of Gemma's norms by another norm: it fuses both, and the quantization."""
        overwrites_residual = not one_plus
        """Whether the residual may be updated in place. vLLM's own norm of 1 + weight leaves it, so there the model must say so."""

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
                getattr(self, "variance_size_override", None) is None
                and getattr(self, "has_weight", True)
                and x.dtype == self.weight.dtype
                and x.dtype in fused_quant.DTYPES
                and (fused_quant.in_rows(x) or (residual is None and fused_quant.in_heads(x)))
                and (residual is None or (self.overwrites_residual and fused_quant.in_rows(residual)))
            )
            key = fused_quant.key_of(linear, x.shape[-1], keys)
            fuses = torch.compiler.is_compiling() and (self.is_behind or (key is None and not self.stands_alone))
            if not takes or fuses or key not in keys:
                return self.vllm_forward(x, residual)
            weight, epsilon = self.weight.data, self.variance_epsilon
            if key is not None:
                result = fused_quant.rms_norm(linear, key, x, residual, weight, epsilon, one_plus)
            elif residual is None:
                result = ops.rms_norm.call(x, weight, epsilon, one_plus)
            else:
                result = ops.fused_add_rms_norm.call(x, residual, weight, epsilon, one_plus)
            return result if residual is None else (result, residual)

    RocmOpsNorm.__name__ = RocmOpsNorm.__qualname__ = f"RocmOps{norm.__name__}"
    return norm.register_oot(RocmOpsNorm)


SEAM = seam.Seam(
    name="norm",
    replaces="RMSNorm and GemmaRMSNorm, through CustomOp.register_oot",
    probe=probe,
    install=install,
)
