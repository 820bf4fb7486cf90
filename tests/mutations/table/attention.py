"""Bugs in attention, rotations and caches."""

from vllm_rocm_ops import ops

from ..bug import WRONG, Bug, Call, Cases, Code, Tests

BUGS = (
    Bug(
        "MLA of 64 columns: one key masked wrongly",
        "attention/amd/mla_in_lds.h",
        "first + mma::value_row(of.lane, i) < row_end",
        "first + mma::value_row(of.lane, i) != 7 && first + mma::value_row(of.lane, i) < row_end",
        Cases(ops.mla_decode, "heads-128", said=WRONG),
    ),
    Bug(
        "MLA of 64 columns: rows of a request of one",
        "attention/amd/mla_in_lds.h",
        "const i64 row = i64(of.request) * p.query_len + c.row;",
        "const i64 row = i64(of.request) + c.row;",
        Tests(),
    ),
    Bug(
        "two keys of the scores swapped",
        "attention/amd/operands.h",
        "row / 4 * 8 + tile * 4 + row % 4",
        "row / 4 * 8 + tile * 4 + (row ^ 1) % 4",
        Cases(ops.paged_attention_decode, "fp16-64-native", said=WRONG),
    ),
    Bug(
        "rescale skipped",
        "attention/decode.h",
        "if (wave::count(grows) > 0) {",
        "if (false) {",
        Cases(ops.paged_attention_decode, "long", on="gfx950", said=WRONG),
    ),
    Bug(
        "a wait for all keys",
        "attention/decode.h",
        "attention::compute_now(score[t][tile]);",
        """attention::compute_now(score[t][tile]);
__builtin_amdgcn_s_waitcnt(0x0f70);""",
        Code("paged_attention_decode", "paged_attention_decode_bf16_64_native", "test_attention.keys_and_values_wait"),
    ),
    Bug(
        "a wave's sums missing",
        "attention/decode_sums.h",
        """for (int w = 0; w < kWaves; ++w)
          total[i] +=""",
        """for (int w = 1; w < kWaves; ++w)
          total[i] +=""",
        Cases(ops.paged_attention_decode, "llama", said=WRONG),
    ),
    Bug(
        "factors of a packed-GQA row read before they are stored",
        "attention/decode_sums.h",
        """if (c < kPackedRows) buffer.factor[c] = finish_packed_row(c, block_maximum(c), block_sum(c), true);
          block_barrier();""",
        """if (c < kPackedRows) buffer.factor[c] = finish_packed_row(c, block_maximum(c), block_sum(c), true);
          if (c == 0) block_barrier();""",
        Tests(),
    ),
    Bug(
        "another random word",
        "attention/flash.h",
        "w ? words.y : words.x",
        "w ? words.x : words.y",
        Cases(ops.flash_attention, "dropout", on="gfx950", said=WRONG),
    ),
    Bug(
        "a wait for the next keys",
        "attention/flash.h",
        "attention::issue_now();",
        """attention::issue_now();
__builtin_amdgcn_s_waitcnt(0x0f70);""",
        Code("flash_attention", "flash_attention_bf16_64", "test_waits.early"),
    ),
    Bug(
        "a wave's first row for its last",
        "attention/flash.h",
        "step >= tile.begin(p, last_row());",
        "step >= tile.begin(p, wave_row);",
        Tests(),
    ),
    Bug(
        "one bias for all",
        "attention/flash_general.h",
        "sequence * e.bias_batch_stride",
        "0",
        Cases(ops.flash_attention, "bias", said=WRONG),
    ),
    Bug(
        "slopes of the first sequence for all",
        "attention/flash_general.h",
        "e.slopes + sequence * e.slopes_stride + head",
        "e.slopes + head",
        Tests(),
    ),
    Bug(
        "keys loaded out of order",
        "attention/flash_loader.h",
        "attention::key(tile % 2, row)",
        "attention::key(0, row)",
        Cases(ops.flash_attention, "full", said=WRONG),
    ),
    Bug(
        "a causal row sees the next key",
        "attention/flash_tile.h",
        "keys - rows + 1;",
        "keys - rows + 2;",
        Cases(ops.flash_attention, "tiles", said=WRONG),
    ),
    Bug(
        "sequences beyond a wave's lanes left out",
        "attention/flash_tile.h",
        "s < p.sequences; s += wave::kLanes",
        "s < p.sequences && s < wave::kLanes; s += wave::kLanes",
        Tests(),
    ),
    Bug(
        "MLA: rescale skipped",
        "attention/mla.h",
        "if (wave::count(grows) > 0) {",
        "if (false) {",
        Cases(ops.mla_decode, "page-64-padded", said=WRONG),
    ),
    Bug(
        "MLA: FP8 keys loaded on some paths only",
        "attention/mla.h",
        "if constexpr (kFp8) load(keys, next);",
        "if constexpr (kFp8) if (step_key(step) < end) load(keys, next);",
        Code("mla_decode", "mla_decode_fp16_fp8_1", "test_waits.unsteady"),
    ),
    Bug(
        "MLA: sums not scaled where the maximum grows",
        "attention/mla.h",
        "sum[owned] = sum[owned] * factor + (weight.x + weight.y);",
        "sum[owned] = sum[owned] + (weight.x + weight.y);",
        Tests(),
    ),
    Bug(
        "values not rescaled to a sink",
        "attention/output.h",
        "return sum != 0.0f ? before * (value_scale / sum) : 0.0f;",
        "return sum != 0.0f ? value_scale / sum : 0.0f;",
        Cases(ops.paged_attention_decode, "sinks-far", said=WRONG),
    ),
    Bug(
        "a sum not rescaled to a sink",
        "attention/output.h",
        "sum = sum * before + numerics::exp2_approx(sink - largest);",
        "sum = sum + numerics::exp2_approx(sink - largest);",
        Call("test_softmax_terms.require_any_largest", "paged_attention_decode", as_executor=False),
    ),
    Bug(
        "counters of groups assumed contiguous",
        "attention/output.h",
        "counters += slots;",
        "counters += (slots + kFanIn - 1) / kFanIn;",
        Tests(),
    ),
    Bug(
        "scale from an unrounded result",
        "attention/output.h",
        "x.lo = round_to<T>(x.lo);",
        "",
        Call("test_attention_output.require_same_bits", "groups", as_executor=False),
    ),
    Bug(
        "pairs rotated the wrong way",
        "attention/rotation.h",
        "rounded_product(x, cos) - rounded_product(y, sin), rounded_product(y, cos) + rounded_product(x, sin)",
        "rounded_product(x, cos) + rounded_product(y, sin), rounded_product(y, cos) - rounded_product(x, sin)",
        Cases(ops.rope_and_cache, "gptj", said="leaves another query"),
    ),
    Bug(
        "positions of 16 bits",
        "attention/rotation.h",
        "at = position * 2 * half +",
        "at = int(position) % 65536 * 2 * half +",
        Tests(),
    ),
    Bug(
        "a page read past the end",
        "attention/split.h",
        "return low < end ? low : own;",
        "return low;",
        Cases(ops.paged_attention_decode, "bf16-64-packed", on="gfx950", said="argument|is in no tensor|NaNs differ"),
    ),
    Bug(
        "a split's first keys not at a wave's first",
        "attention/split.h",
        "base = begin / kWaveKeys * kWaveKeys;",
        "base = begin;",
        Tests(),
    ),
    Bug(
        "q_pe of another head",
        "ops/batched_gemm.hip",
        "+ wave::block_id_x() * head_stride;",
        ";",
        Cases(ops.batched_gemm_rope, "deepseek", said="leaves another q_pe|written here|also written"),
    ),
    Bug(
        "slots read for tokens that have none",
        "ops/mla_norm_rope_and_cache.hip",
        "token < cache.num_slots ?",
        "true ?",
        Tests("test_ops.py::test_case[gfx942-mla_norm_rope_and_cache-one-wave]", module="mla_norm_rope_and_cache"),
    ),
    Bug(
        "the last bit of a latent",
        "ops/mla_norm_rope_and_cache.hip",
        "mem::store((u32x4*)out + index, y);",
        "mem::store((u32x4*)out + index, y + 1u);",
        Tests(
            "test_same_bits.py::test_one_launch_gives_the_bits_of_a_latents_three[gfx942-dtype0-False]",
            module="mla_norm_rope_and_cache",
        ),
    ),
    Bug(
        "keys' latent with another epsilon",
        "ops/mla_norm_rope_and_cache.hip",
        "kv_size, inverse_kv_size, epsilon}",
        "kv_size, inverse_kv_size, 1.0f}",
        Cases(ops.mla_norm_rope_and_cache, "bf16-block", on="gfx950", said="output kv_out: error|NaNs differ"),
    ),
    Bug(
        "MLA: cache pages beyond 2^31 elements",
        "ops/mla_norm_rope_and_cache.hip",
        "page * cache.block_stride",
        "page * int(cache.block_stride)",
        Tests("test_far_apart.py::test_every_dimension_that_may_be_long[mla_norm_rope_and_cache-gfx950:3]"),
    ),
    Bug(
        "slot -1 written",
        "ops/rope_and_cache.hip",
        "if (at < 0) return;",
        "if (token >= p.num_slots) return;",
        Cases(ops.rope_and_cache_mla, "bf16-fp8", said="is in no tensor"),
    ),
    Bug(
        "keys not normalized",
        "ops/rope_and_cache.hip",
        "const float inverse_rms = numerics::rsqrt_approx(mean + p.epsilon);",
        "const float inverse_rms = is_key ? 1.0f : numerics::rsqrt_approx(mean + p.epsilon);",
        Cases(ops.qk_norm_rope_and_cache, "bf16-fp8-packed", on="gfx950", said="output key_out: error|NaNs differ"),
    ),
    Bug(
        "norm not rounded before the rotation",
        "ops/rope_and_cache.hip",
        "round_to<T>(x.pair[i] * inverse_rms * w.pair[i])",
        "x.pair[i] * inverse_rms * w.pair[i]",
        Tests(
            "test_same_bits.py::test_one_launch_gives_the_bits_of_three[gfx942-dtype0-False]", module="rope_and_cache"
        ),
    ),
    Bug(
        "values at the keys' rotated indices",
        "ops/rope_and_cache.hip",
        "(is_key ? 2 * p.rotary_vecs : 0);",
        "(is_key ? p.rotary_vecs : 0);",
        Tests(),
    ),
)
