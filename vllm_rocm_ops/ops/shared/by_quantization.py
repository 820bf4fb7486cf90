"""Name the ops of norms, activations and gates by the quantization of their result.

The op without a residual comes first, then the one with, where it is another.
"""

from vllm_rocm_ops.core.quantization import BLOCKS, MX, STATIC, TOKEN, UNQUANTIZED

NORMS = {
    UNQUANTIZED: ("rms_norm", "fused_add_rms_norm"),
    STATIC: ("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"),
    TOKEN: ("rms_norm_dynamic_per_token_quant",),
    BLOCKS: ("rms_norm_per_block_quant",),
    MX: ("rms_norm_mxfp8_quant",),
}
ACTIVATIONS, GATES, EXPERT_GATES = (
    {
        UNQUANTIZED: (name,),
        STATIC: (f"{name}_quant",),
        TOKEN: (f"{name}_per_token_quant",),
        BLOCKS: (f"{name}_per_block_quant",),
        MX: (f"{name}_mxfp8_quant",),
    }
    for name in ("silu_and_mul", "sigmoid_and_mul", "silu_and_mul_with_expert_gate")
)
del GATES[UNQUANTIZED]  # alone it stays the compiler's
