"""What vLLM calls each op for: by op, its kernels beside vLLM's, as kernel_selection.py asks them.

For the commands, which know a call of a model by its op and arguments, each has besides

    limit                        the most tokens that ours takes where nothing was measured
    layers_of(a)                 the layers as which a call with these arguments may have been measured
    exact_of(a, rows, columns)   these rows and columns of the call's result, in float32
"""

from vllm_rocm_ops.vllm.attention import absorbed_products
from vllm_rocm_ops.vllm.experts import base as experts
from vllm_rocm_ops.vllm.linear import block_scaled_linear, int8_linear, mxfp8_linear, scaled_linear, unquantized_linear

KERNELS = {
    kernels.op: kernels
    for kernels in (
        scaled_linear.KERNELS,
        scaled_linear.GATED,
        block_scaled_linear.KERNELS,
        mxfp8_linear.KERNELS,
        int8_linear.KERNELS,
        unquantized_linear.KERNELS,
        experts.KERNELS,
        absorbed_products.KERNELS,
    )
}
