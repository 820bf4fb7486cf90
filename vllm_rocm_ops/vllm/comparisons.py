"""Map each op to its `Comparison`: the plugin's kernel and vLLM's for the same call, see kernel_selection.py.

The commands know a model's call by op and arguments. For them each entry also has

    limit                        the token limit of the plugin's kernel before timing
    by_attention                 whether it serves only if timed, or with VLLM_ROCM_OPS_ATTENTION=1
    layers_of(a)                 the layer descriptions under which a call with these arguments may have been timed
    exact_of(a, rows, columns)   these rows and columns of the call's result, in float32
"""

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm.attention import mla_absorb, mla_pre_attention, mla_rotation, rope_pre_attention
from vllm_rocm_ops.vllm.linear import block_scaled_linear, int8_linear, mxfp8_linear, scaled_linear, unquantized_linear
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe import routing_gate

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
RECORDED = {
    ops.router_gemm_topk: routing_gate.shapes_of,
    ops.mla_norm_rope_and_cache: mla_pre_attention.shapes_of,
    ops.batched_gemm_rope: lambda *call: [mla_rotation.shape_of(*call)],
    ops.rope_and_cache: rope_pre_attention.shapes_of,
    ops.qk_norm_rope_and_cache: rope_pre_attention.shapes_of,
}
"""Functions that return the shapes under which a model's call may have been timed, from its parameters and dtype."""
