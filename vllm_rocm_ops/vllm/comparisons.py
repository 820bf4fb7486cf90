"""Map each op to its `Comparison`: the plugin's kernel and vLLM's for the same call, see kernel_selection.py.

The commands know a model's call by op and arguments. For them each entry also has

    limit                        the token limit of the plugin's kernel before timing
    by_attention                 whether it serves only if timed, or with VLLM_ROCM_OPS_ATTENTION=1
    layers_of(a)                 the layer descriptions under which a call with these arguments may have been timed
    exact_of(a, rows, columns)   these rows and columns of the call's result, in float32
"""

from vllm_rocm_ops.vllm.attention import mla_absorb
from vllm_rocm_ops.vllm.linear import block_scaled_linear, int8_linear, mxfp8_linear, scaled_linear, unquantized_linear
from vllm_rocm_ops.vllm.moe import base as experts

COMPARISONS = {
    kernels.op: kernels
    for kernels in (
        scaled_linear.COMPARISON,
        scaled_linear.GATED,
        block_scaled_linear.COMPARISON,
        mxfp8_linear.COMPARISON,
        int8_linear.COMPARISON,
        unquantized_linear.COMPARISON,
        experts.COMPARISON,
        mla_absorb.COMPARISON,
    )
}
