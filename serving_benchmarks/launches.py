"""Name the launches of a profiled decode step: what each kernel in a class of decode_profile.py computes, and its owner.

The names are of NVIDIA GPUs. A kernel without an entry is an error, so the first profile of another GPU adds its entries here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from decode_profile import ALL_REDUCE, EXPERTS, NORMS, REST, class_of

PLUGIN, VLLM, INDUCTOR, TORCH = "plugin", "vLLM", "Inductor", "PyTorch"
CUBLAS, FLASH, NCCL, CUDA, TRITON_KERNELS = "cuBLAS", "FlashAttention", "NCCL", "CUDA", "triton_kernels"


class Launch(NamedTuple):
    """The meaning of a kernel's name: what it computes, and its owner.

    `models` is a pattern of the models in which the name means this.
    """

    what: str
    owner: str
    models: str = ""


ATTENTION, COMBINE, WRITE = "attention", "attention: combine", "cache write"
Q_K, Q, K_PE = "rotation of q and k", "rotation of q", "rotation of k_pe"
Q_K_NORMS, FRONT = "norms and rotation of q and k", "MLA norms, rotation of k_pe, cache write"
Q_K_WRITE = "rotation of q and k, with norms, and cache write"
NORM, SWIGLU, SUM = "norms", "SwiGLU", "sum of routed and shared experts"
QUANTIZATION, QUERIES = "quantization of linears' inputs", "quantization of queries"
TOP_K, SORT, ROUTED_SUM = "experts: top-k", "experts: sort", "experts: sum"
FP8, BF16, ABSORPTION = "FP8 linears", "router and lm_head", "W_UK and W_UV"
REDUCE, LOGITS, EMBEDDING = "all-reduce, with the norm after it", "all-gather of logits", "token embedding"
RUNNER, FILLS, COPIES, PADDING = "input preparation, sampling", "fills", "copies", "expert ids of padding"
POINTWISE = "pointwise, drafting"
DELTA_NET, GATE, VALUES = "Gated DeltaNet", "attention's gate, quantization", "copies of b, a and z"
MLA, GQA, HYBRID = "deepseek", "llama|qwen3|minimax|gpt-oss", r"qwen3(-next|\.5)"

LAUNCHES: dict[str, dict[str, Launch | tuple[Launch, ...]]] = {
    # class -> pattern of the whole name -> the launch, or one for each group of models; the first match counts
    ALL_REDUCE: {
        r"all_reduce_qk_norm_rope_and_cache_\w+": Launch(Q_K_WRITE, PLUGIN),
        r"all_reduce_\w+": Launch(REDUCE, PLUGIN),
        r"void vllm::tensorrt_llm::minimax_reduce_qk_rms_\w+<.*": Launch(Q_K_NORMS, VLLM),
        r"void vllm::cross_device_reduce_\w+<.*": Launch(REDUCE, VLLM),
        r"ncclDevKernel_AllGather_\w+\(.*": Launch(LOGITS, NCCL),
    },
    "attention": {
        r"(mla|paged_attention)_decode_combine_\w+": Launch(COMBINE, PLUGIN),
        r"(mla|paged_attention)_decode_\w+": Launch(ATTENTION, PLUGIN),
        r"mla_norm_rope_and_cache_\w+": Launch(FRONT, PLUGIN),
        r"(qk_norm_)?rope_and_cache_\w+": Launch(Q_K_WRITE, PLUGIN),
        r"batched_gemm_rope_\w+": Launch(ABSORPTION, PLUGIN),
        r".*flash::FlashAttnFwdSm90<.*": Launch(ATTENTION, FLASH),
        r".*flash::FlashAttnFwdCombine<.*": Launch(COMBINE, FLASH),
        r"void flash::prepare_varlen_num_blocks_kernel<.*": Launch(ATTENTION, FLASH),
        r"_fwd_grouped_kernel_stage1": Launch(ATTENTION, VLLM),
        r"_fwd_kernel_stage2": Launch(COMBINE, VLLM),
        r"kernel_unified_attention\w*": Launch(ATTENTION, VLLM),
        r"reduce_segments": Launch(COMBINE, VLLM),
        r"reshape_and_cache_kernel_flash": Launch(WRITE, VLLM),
        r"void vllm::(reshape_and_cache_flash|concat_and_cache_mla)_kernel<.*": Launch(WRITE, VLLM),
        r"_fused_qk_rmsnorm_rope_gate_kernel": Launch(Q_K_NORMS, VLLM),
        r"triton_poi_fused_add_clone_copy_\w*neg\w*": Launch(Q, INDUCTOR),
        r"triton_poi_fused_add_clone_expand_\w*neg\w*": Launch(K_PE, INDUCTOR),
    },
    EXPERTS: {
        r"fused_experts_(tiled_)?(gate_up|down)_\w+": Launch(EXPERTS, PLUGIN),
        r"fused_moe_kernel": Launch(EXPERTS, VLLM),
        r"_matmul_ogs_\w+": Launch(EXPERTS, TRITON_KERNELS),
    },
    NORMS: {
        r"(fused_add_)?(sum_)?rms_norm_\w+": Launch(NORM, PLUGIN),
        r"silu_and_mul_\w+": Launch(SWIGLU, PLUGIN),
        r"sigmoid_and_mul_\w+": Launch(GATE, PLUGIN),
        r"void vllm::rms_norm_per_block_quant_kernel<.*": Launch(NORM, VLLM),
        r"void vllm::silu_and_mul_per_block_quant_kernel<.*": Launch(SWIGLU, VLLM),
        r"void vllm::scaled_fp8_quant_kernel_strided_group_shape<.*": Launch(QUERIES, VLLM),
        r"void per_token_group_quant_8bit_register_kernel<.*": Launch(QUANTIZATION, VLLM),
        r"void at::native::vectorized_elementwise_kernel<.*": Launch(NORM, TORCH),
        r"triton_red_fused_\w+rms_norm\w*": Launch(NORM, INDUCTOR),
        r"triton_poi_fused_\w*rsqrt_silu\w*|triton_per_fused_(1|_to_copy_mean_pow_0)": Launch(
            DELTA_NET, INDUCTOR, HYBRID
        ),
        r"triton_(per_fused_1|red_fused_2)": Launch(Q_K_NORMS, INDUCTOR, "minimax"),
        r"triton_poi_fused_\w*sigmoid\w*": Launch(GATE, INDUCTOR),
        r"triton_poi_fused_\w*silu\w*": Launch(SWIGLU, INDUCTOR),
        r"triton_poi_fused_\w*embedding_rms_norm\w*": Launch(NORM, INDUCTOR),
        r"triton_poi_fused_add_\w*rms_norm\w*": Launch(SUM, INDUCTOR),
        r"triton_poi_fused_\w*(clamp|scaled_linear)\w*": Launch(QUANTIZATION, INDUCTOR),
        r"triton_red_fused_\d+": (Launch(Q_K_NORMS, INDUCTOR, "qwen3"), Launch(NORM, INDUCTOR, MLA)),
        r"triton_per_fused_\d+": Launch(NORM, INDUCTOR, MLA),
    },
    "experts: routing, sorting, sums, quantization": {
        r"(moe|router_gemm)_topk_\w+": Launch(TOP_K, PLUGIN),
        r"fused_experts_quantize_\w+": Launch("experts: SwiGLU, quantization", PLUGIN),
        r"fused_experts_sum_\w+|fused_experts_tiled_combine": Launch(ROUTED_SUM, PLUGIN),
        r"fused_experts_tiled_sort_\w+": Launch(SORT, PLUGIN),
        r"void vllm::moe::(topkGating|grouped_topk_\w+)<.*": Launch(TOP_K, VLLM),
        r"void vllm::moe::(moe_align_block_size|count_and_sort_expert_tokens)_kernel<.*": Launch(SORT, VLLM),
        r"void vllm::moe::moe_sum_\w+<.*": Launch(ROUTED_SUM, VLLM),
        r"_topk_forward": Launch(TOP_K, TRITON_KERNELS),
        r"_combined_routing_\w+|_sum_bitmatrix_rows": Launch(SORT, TRITON_KERNELS),
        r"_reduce_grouped": Launch(ROUTED_SUM, TRITON_KERNELS),
    },
    "FP8 linears": {
        r"(block_)?scaled_mm_\w+": Launch(FP8, PLUGIN),
        r".*vllm::cutlass_3x_gemm_\w*fp8\w*<.*": Launch(FP8, VLLM),
    },
    "other GEMMs": {
        r"unquantized_gemm_\w+": Launch(BF16, PLUGIN),
        r"batched_gemm_\w+": Launch(ABSORPTION, PLUGIN),
        r"nvjet_\w+_64x8_64x16_2x1_\w+": (Launch(ABSORPTION, CUBLAS, MLA), Launch(BF16, CUBLAS, GQA)),
        r"void (dot_kernel|reduce_1Block_kernel)<.*": Launch("gate of the shared expert", CUBLAS),
        r"void fp32_router_gemm_kernel<.*": Launch(BF16, VLLM),
        r"nvjet_\w+|void cublasLt::splitKreduce_kernel<.*": Launch(BF16, CUBLAS),
    },
    REST: {
        r"gated_delta_net_decode_\w+": Launch(DELTA_NET, PLUGIN),
        r"_causal_conv1d_update_kernel|fused_(recurrent_gated|sigmoid_gating)_delta_rule_\w+": Launch(DELTA_NET, VLLM),
        r"triton_poi_fused_(_unsafe_view_clone_split_with_sizes_view_)?\d+": Launch(VALUES, INDUCTOR, HYBRID),
        r"_\w+_kernel": Launch(RUNNER, VLLM),
        r"void at::native::(index_elementwise|vectorized_gather|reduce|_scatter_gather_elementwise)_kernel<.*"
        r"|.*::elementwise_kernel_with_index<.*": Launch(RUNNER, TORCH),
        r"void at::native::\w+<.*FillFunctor<.*": Launch(FILLS, TORCH),
        r"void at::native::elementwise_kernel<.*masked.*": Launch(PADDING, TORCH),
        r"void at::native::.*CatArrayBatchedCopy\w*<.*": (
            Launch("concatenation of q", TORCH, MLA),
            Launch("concatenation, drafting", TORCH),
        ),
        r"void at::native::.*direct_copy_kernel.*": Launch(COPIES, TORCH),
        r"void at::native::(vectorized_|unrolled_)?elementwise_kernel<.*": Launch(POINTWISE, TORCH),
        r"Memcpy .*|Memset .*|memcpy32_post|memcpy128": Launch(COPIES, CUDA),
        r"void vllm::vocab_embedding::\w+<.*": Launch(EMBEDDING, VLLM),
        r"triton_poi_fused__to_copy_embedding_\d+": Launch(EMBEDDING, INDUCTOR),
        r"triton_poi_fused_add_mul_\d+": Launch(SUM, INDUCTOR),
        r"triton_poi_fused_0": (
            Launch("pointwise, dense layers", INDUCTOR, MLA),
            Launch(Q_K, INDUCTOR, "llama|gpt-oss"),
        ),
        r"triton_poi_fused_\d+": (
            Launch(K_PE, INDUCTOR, MLA),
            Launch(Q_K, INDUCTOR, "llama|minimax|gpt-oss"),
            Launch(Q_K_NORMS, INDUCTOR, "qwen3"),
        ),
    },
}


def entry(model: str, name: str) -> tuple[str, str, Launch]:
    """Return the class, the pattern and the launch of a kernel in a model's step. Raises ValueError for an unknown kernel."""
    kind = class_of(name)
    for pattern, meanings in LAUNCHES.get(kind, {}).items():
        for launch in [meanings] if isinstance(meanings, Launch) else meanings:
            if re.fullmatch(pattern, name) and re.match(launch.models, model):
                return kind, pattern, launch
    raise ValueError(f"launches.py has no entry for the kernel {name!r} of {model}, class {kind!r}")


def short(name: str) -> str:
    """Return a kernel's name without its namespaces, template arguments and Inductor's number."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.sub(r"^(cutlass::device_kernel<|flash::enable_sm90_or_later<)+", "", name)
    name = re.split(r"[<(]", name)[0].rpartition("::")[2].strip()
    return re.sub(r"_\d+$", "", name) if name.startswith("triton_") else name
