"""Bugs in norms over all heads before attention, and in AITER's shuffled cache."""

from vllm_rocm_ops import ops

from ..bug import Bug, Cases, Tests

HERE = Tests("test_rope_and_cache_seam.py")

# fmt: off
BUGS = (
    Bug("the first head's weight for all", "ops/rope_and_cache.hip", "(kAllHeads ? head * 2 * kChunk * p.head_vecs : 0)",
        "0", Cases(ops.qk_norm_rope_and_cache, "minimax-m2", on="gfx950", said="output query_out: error|NaNs differ")),
    Bug("norms summed over ranks as if by one", "vllm/attention/rope_pre_attention.py", "and norms[0].tp_world == 1", "", HERE),
    Bug("norms marked that stay vLLM's", "vllm/graph/markers.py", "if not getattr(q_norm, model_queries.MARKED, False) or",
        "if", HERE),
    Bug("shuffled values in the order of keys", "vllm/attention/backends.py", "(heads, slots // x, size, x)",
        "(heads, size // x, slots, x)", Tests("test_decode_attention.py::test_aiters_shuffled_cache_is_read")),
)
# fmt: on
