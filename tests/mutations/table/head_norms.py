"""Bugs in norms over all heads before attention, and in AITER's shuffled cache."""

from vllm_rocm_ops import ops

from ..bug import Bug, Cases, Tests

HERE = Tests("test_rope_and_cache_seam.py")
OF_TWO = Tests("vllm/test_reduced_head_norms.py")
RANKS = Tests("emulator/test_all_reduce_qk_norm.py", module="all_reduce_qk_norm")

# fmt: off
BUGS = (
    Bug("a rank's own heads left out of the sum of all", "ops/all_reduce_qk_norm.hip", "peer == group.rank ? squares :",
        "peer == group.rank ? 0.0f :", RANKS),
    Bug("the sum of queries for that of keys", "ops/all_reduce_qk_norm.hip", "u32(token) * kNorms + u32(part)",
        "u32(token) * kNorms", RANKS),
    Bug("a mean over one rank's heads", "attention/rope_and_cache.h", "heads * ranks.ranks()", "heads",
        RANKS),
    Bug("the inverse of one rank's heads", "collectives/qk_norm.py", "problem_args(config, a, group.ranks)",
        "problem_args(config, a)", RANKS),
    Bug("an epoch that ends with a part of the blocks", "collectives/qk_norm.py", '"blocks": count', '"blocks": len(a.query)',
        RANKS),
    Bug("more blocks of head norms than are resident", "collectives/qk_norm.py", "blocks(config, a) <= group.blocks", "True",
        RANKS),
    Bug("the first head's weight for all", "attention/rope_and_cache.h", "(kAllHeads ? head * 2 * kChunk * p.head_vecs : 0)",
        "0", Cases(ops.qk_norm_rope_and_cache, "minimax-m2", on="gfx950", said="output query_out: error|NaNs differ")),
    Bug("norms summed over ranks as if by one", "vllm/attention/rope_pre_attention.py",
        "(norms[0].tp_world == 1 or over_ranks and has_reduced_op())", "True", OF_TWO),
    Bug("one rank's heads as the exact norm's", "vllm/attention/reduced_head_norms.py",
        "*args, means=means)", "*args)", OF_TWO),
    Bug("head norms in one launch that no rank agreed on", "vllm/attention/reduced_head_norms.py",
        "if not front.shared.serves(front.call, len(qkv)):", "if False:", OF_TWO),
    Bug("equal bits wanted of ranks with heads of their own", "vllm/attention/reduced_head_norms.py",
        "is_equal_on_ranks = False", "is_equal_on_ranks = True", OF_TWO),
    Bug("norms of another group's ranks", "vllm/attention/reduced_head_norms.py", "if part.ranks == group.world_size:",
        "if True:", OF_TWO),
    Bug("attention that reads queries without their norm", "vllm/attention/reduced_head_norms.py",
        "attention.args, attention.kwargs = (*outs, ", "attention.args, attention.kwargs = (*attention.args[:2], ", OF_TWO),
    Bug("norms marked that stay vLLM's", "vllm/graph/markers.py", "if not getattr(q_norm, model_queries.MARKED, False) or",
        "if", HERE),
    Bug("shuffled values in the order of keys", "vllm/attention/backends.py", "(heads, slots // x, size, x)",
        "(heads, size // x, slots, x)", Tests("test_decode_attention.py::test_aiters_shuffled_cache_is_read")),
)
# fmt: on
