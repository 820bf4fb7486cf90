"""Bugs in norms over all heads before attention, and in AITER's shuffled cache."""

from vllm_rocm_ops import ops

from ..bug import Bug, Cases, Tests

HERE = Tests("test_rope_and_cache_seam.py")

# fmt: off
BUGS = (
    Bug("the first head's weight for all", "ops/rope_and_cache.hip", "(kAllHeads ? head * 2 * kChunk * p.head_vecs : 0)",
        "0", Cases(ops.qk_norm_rope_and_cache, "minimax-m2", on="gfx950", said="output query_out: error|NaNs differ")),
    Bug("keys' mean over the queries' elements", "ops/rope_and_cache.hip", "inverse_size = p.inverse_keys_size;", "(void)0;",
        Cases(ops.qk_norm_rope_and_cache, "minimax-m2", said="output key_out: error|NaNs differ")),
    Bug("squares of one wave in a norm over all heads", "ops/rope_and_cache.hip", "threads / wave::kLanes, Add{}", "1, Add{}",
        Tests("test_same_bits.py::test_one_launch_with_norms_over_all_heads_gives_the_bits_of_three[gfx942]", module="rope_and_cache")),
    Bug("norms summed over ranks as if by one", "vllm/attention/rope_pre_attention.py", "and norms[0].tp_world == 1", "", HERE),
    Bug("norms marked that stay vLLM's", "vllm/graph/markers.py", "if not getattr(q_norm, model_queries.MARKED, False) or",
        "if", HERE),
    Bug("norms over all heads not told from each head's", "vllm/attention/rope_pre_attention.py",
        "axes = (1, 2) if self.traits.over_all else 2", "axes = 2", HERE),
    Bug("shuffled values in the order of keys", "vllm/attention/backends.py", "(heads, slots // x, size, x)",
        "(heads, size // x, slots, x)", Tests("test_decode_attention.py::test_aiters_shuffled_cache_is_read")),
    Bug("a page of keys and values that overwrite each other", "vllm/attention/backends.py",
        "or not all(part[0].is_contiguous() for part in parts)", "",
        Tests("test_seam_guards.py::test_caches_in_another_order_are_left_alone")),
)
# fmt: on
