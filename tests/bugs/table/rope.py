"""Bugs in rotary embedding and cache writes."""

from vllm_rocm_ops import ops

from ..bug import WRONG, Bug, Cases, Tests

BUGS = (
    Bug(
        "pairs rotated the wrong way",
        "attention/rotation.h",
        "rounded_product(x, cos) - rounded_product(y, sin), rounded_product(y, cos) + rounded_product(x, sin)",
        "rounded_product(x, cos) + rounded_product(y, sin), rounded_product(y, cos) - rounded_product(x, sin)",
        Cases(ops.rope_and_cache, "gptj", said="leaves another query"),
    ),
    Bug(
        "NeoX halves rotated as adjacent pairs",
        "ops/rope_and_cache.hip",
        "p.is_neox ? vec * kChunk : 2 * vec * kChunk",
        "2 * vec * kChunk",
        Cases(ops.rope_and_cache_mla, "neox", on="gfx950", said="leaves another q_pe|argument"),
    ),
    Bug(
        "keys unrotated in the cache",
        "ops/rope_and_cache.hip",
        "store(p.key_cache, head, first, vecs[0]);",
        "store(p.key_cache, head, first, pack<T>(x));",
        Cases(ops.rope_and_cache, "bf16-native", said="leaves another key_cache"),
    ),
    Bug(
        "slot off by one",
        "ops/rope_and_cache.hip",
        "mem::load<i64>(p.slots + token) : -1",
        "mem::load<i64>(p.slots + token) + 1 : -1",
        Cases(ops.rope_and_cache, "fp16-packed", on="gfx950", said="leaves another key_cache"),
    ),
    Bug(
        "slot -1 written",
        "ops/rope_and_cache.hip",
        "is_cached = at >= 0;",
        "is_cached = token < p.num_slots;",
        Cases(ops.rope_and_cache_mla, "bf16-fp8", said="is in no tensor"),
    ),
    Bug(
        "slots read beyond the last",
        "ops/rope_and_cache.hip",
        "token < p.num_slots ? mem::load",
        "token >= 0 ? mem::load",
        Cases(ops.rope_and_cache, "unmapped", said="argument"),
    ),
    Bug(
        "scale of K used for V",
        "ops/rope_and_cache.hip",
        "cache.scale ? mem::load<float>(cache.scale) : 1.0f;",
        "mem::load<float>(p.key_cache.scale);",
        Cases(ops.rope_and_cache, "bf16-fp8-interleaved", on="gfx950", said="leaves another value_cache"),
    ),
    Bug(
        "keys not normalized",
        "ops/rope_and_cache.hip",
        "const float inverse_rms = numerics::rsqrt_approx(mean + p.epsilon);",
        "const float inverse_rms = is_key ? 1.0f : numerics::rsqrt_approx(mean + p.epsilon);",
        Cases(ops.qk_norm_rope_and_cache, "bf16-fp8-packed", on="gfx950", said="output key_out: error|NaNs differ"),
    ),
    Bug(
        "keys multiplied by the queries' weight",
        "ops/rope_and_cache.hip",
        "is_key ? p.key_weight : p.query_weight",
        "p.query_weight",
        Cases(ops.qk_norm_rope_and_cache, "bf16-packed"),
    ),
    Bug(
        "squares over half of a head",
        "ops/rope_and_cache.hip",
        "squares = __builtin_elementwise_fma(of_y.pair[i], of_y.pair[i], squares);",
        "",
        Cases(ops.qk_norm_rope_and_cache, "bf16-packed"),
    ),
    Bug(
        "a head of 256 summed over 8 lanes",
        "ops/rope_and_cache.hip",
        "reduce_group<kLanes>(squares",
        "reduce_group<8>(squares",
        Cases(ops.qk_norm_rope_and_cache, "bf16-256"),
    ),
    Bug(
        "mean over all lanes' elements",
        "ops/rope_and_cache.hip",
        "float(2 * kChunk * p.head_vecs)",
        "float(2 * kChunk * kLanes)",
        Cases(ops.qk_norm_rope_and_cache, "part"),
    ),
    Bug(
        "no epsilon",
        "ops/rope_and_cache.hip",
        "rsqrt_approx(mean + p.epsilon)",
        "rsqrt_approx(mean)",
        Cases(ops.qk_norm_rope_and_cache, "epsilon"),
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
        "elements after the rotary pairs treated as halves",
        "ops/rope_and_cache.hip",
        "p.is_neox && is_rotated;",
        "p.is_neox;",
        Cases(ops.qk_norm_rope_and_cache, "glm-4.5"),
    ),
    Bug(
        "lanes beyond a head read and write",
        "ops/rope_and_cache.hip",
        "p.kv_heads && vec < p.head_vecs",
        "p.kv_heads",
        Cases(ops.qk_norm_rope_and_cache, "odd-lanes"),
    ),
    Bug(
        "keys at the queries' stride",
        "ops/rope_and_cache.hip",
        "(is_key ? p.kv_heads : p.query_heads) + head",
        "p.query_heads + head",
        Cases(ops.qk_norm_rope_and_cache, "qwen3"),
    ),
    Bug(
        "the cache gets keys before their rotation",
        "ops/rope_and_cache.hip",
        "<true>(p.key_cache, head, first, vecs[0],",
        "<true>(p.key_cache, head, first, pack<T>(normalize<T>(x, x_weight, inverse_rms)),",
        Cases(ops.qk_norm_rope_and_cache, "bf16-fp8-native"),
    ),
    Bug(
        "values of a token's last head left out",
        "ops/rope_and_cache.hip",
        "of_all < p.kv_heads * p.value_vecs)",
        "of_all < p.kv_heads * p.value_vecs - 1)",
        Cases(ops.qk_norm_rope_and_cache, "bf16-interleaved"),
    ),
    Bug(
        "values quantized by the keys' scale",
        "ops/rope_and_cache.hip",
        "element, elements, value_scale)",
        "element, elements, key_scale)",
        Cases(ops.qk_norm_rope_and_cache, "bf16-fp8-256"),
    ),
    Bug(
        "a key without a slot written",
        "ops/rope_and_cache.hip",
        "if (is_key && cache.is_cached)",
        "if (is_key)",
        Cases(ops.qk_norm_rope_and_cache, "bf16-packed"),
    ),
    Bug(
        "values at the keys' rotated indices",
        "ops/rope_and_cache.hip",
        "(is_key ? 2 * p.rotary_vecs : 0);",
        "(is_key ? p.rotary_vecs : 0);",
        Tests(),
    ),
    Bug(
        "positions of 16 bits",
        "attention/rotation.h",
        "const i64 row = position * 2 * half;",
        "const i64 row = int(position) % 65536 * 2 * half;",
        Tests(),
    ),
    Bug(
        "key latent multiplied by the queries' weight",
        "ops/latent_norm_rope_and_cache.hip",
        "kv_weight, kv_size, inverse_kv_size",
        "q_weight, kv_size, inverse_kv_size",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "key mean over the queries' element count",
        "ops/latent_norm_rope_and_cache.hip",
        "kv_size, inverse_kv_size, epsilon",
        "kv_size, inverse_q_size, epsilon",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "keys from the start of a row",
        "ops/latent_norm_rope_and_cache.hip",
        "({row + q_size, nullptr",
        "({row, nullptr",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "the last pairs left out",
        "ops/latent_norm_rope_and_cache.hip",
        "is_here(vec < r.rotary_vecs)",
        "is_here(vec < r.rotary_vecs - 1)",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "part of a wave left out of the sum",
        "ops/latent_norm_rope_and_cache.hip",
        "u32(kv_size + kOfWave - 1) / u32(kOfWave)",
        "u32(kv_size) / u32(kOfWave)",
        Tests(
            "test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-one-wave]", module="latent_norm_rope_and_cache"
        ),
    ),
    Bug(
        "halves taken for adjacent pairs",
        "ops/latent_norm_rope_and_cache.hip",
        "first = r.is_neox ? vec * kChunk : 2 * vec * kChunk;",
        "first = 2 * vec * kChunk;",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-neox]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "the cache gets k_pe before its rotation",
        "ops/latent_norm_rope_and_cache.hip",
        "cache.write(kv_size + first, vecs[0])",
        "cache.write(kv_size + first, x)",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "half of k_pe over the latent",
        "ops/latent_norm_rope_and_cache.hip",
        "cache.write(kv_size + second,",
        "cache.write(second,",
        Tests(
            "test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16-fp8]", module="latent_norm_rope_and_cache"
        ),
    ),
    Bug(
        "a token without a slot written",
        "ops/latent_norm_rope_and_cache.hip",
        "if (!is_cached) return;",
        "",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "slots read for tokens that have none",
        "ops/latent_norm_rope_and_cache.hip",
        "token < cache.num_slots ?",
        "true ?",
        Tests(
            "test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-one-wave]", module="latent_norm_rope_and_cache"
        ),
    ),
    Bug(
        "pages of 16 slots",
        "ops/latent_norm_rope_and_cache.hip",
        "u32(page) * u32(cache.page_size)",
        "u32(page) * 16u",
        Tests(
            "test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-one-wave]", module="latent_norm_rope_and_cache"
        ),
    ),
    Bug(
        "the cache's scale ignored",
        "ops/latent_norm_rope_and_cache.hip",
        "E4m3) && cache.scale ?",
        "E4m3) && false ?",
        Tests(
            "test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16-fp8]", module="latent_norm_rope_and_cache"
        ),
    ),
    Bug(
        "latents of all tokens stored at one address",
        "ops/latent_norm_rope_and_cache.hip",
        "(u16*)kv_out + token * kv_size",
        "(u16*)kv_out",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "rotated parts of all tokens stored at one address",
        "ops/latent_norm_rope_and_cache.hip",
        "(u16*)k_pe_out + token * k_pe_size",
        "(u16*)k_pe_out",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "rows assumed contiguous",
        "ops/latent_norm_rope_and_cache.hip",
        "u32(wave::block_id_x()) * row_stride",
        "u32(wave::block_id_x()) * (q_size + kv_size + 16 * rotation.rotary_vecs)",
        Tests(
            "test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-longer-keys]", module="latent_norm_rope_and_cache"
        ),
    ),
    Bug(
        "the position of the first token",
        "ops/latent_norm_rope_and_cache.hip",
        "r.positions + u32(wave::block_id_x())",
        "r.positions",
        Tests("test_ops.py::test_case[gfx942-latent_norm_rope_and_cache-bf16]", module="latent_norm_rope_and_cache"),
    ),
    Bug(
        "the last bit of a latent",
        "ops/latent_norm_rope_and_cache.hip",
        "mem::store((u32x4*)out + index, y);",
        "mem::store((u32x4*)out + index, y + 1u);",
        Tests(
            "test_same_bits.py::test_one_launch_gives_the_bits_of_a_latents_three[gfx942-dtype0-False]",
            module="latent_norm_rope_and_cache",
        ),
    ),
    Bug(
        "keys' latent with another epsilon",
        "ops/latent_norm_rope_and_cache.hip",
        "kv_size, inverse_kv_size, epsilon}",
        "kv_size, inverse_kv_size, 1.0f}",
        Cases(ops.latent_norm_rope_and_cache, "bf16-block", on="gfx950", said="output kv_out: " + WRONG),
    ),
)
