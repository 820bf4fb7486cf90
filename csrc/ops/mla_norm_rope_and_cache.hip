// Fused MLA preprocessing between the first projection and the scores, in one launch. It applies RMSNorm to the query
// latent, with optional fused e4m3 quantization, RMSNorm to the KV latent and RoPE to k_pe, and writes the KV latent and
// k_pe to a paged cache.
//
//     qkv row = [q | kv | k_pe]
//     q_out = y(q), kv_out = y(kv) as ops/rms_norm.hip defines y, q_out as device/row_output.h stores or quantizes it
//     k_pe_out = k_pe rotated as in ops/rope_and_cache.hip, all of it
//     cache[slot] = [kv_out | k_pe_out]   or   e4m3([kv_out | k_pe_out] / scale)
//
// A token has two blocks: one for kv and k_pe, one for q, so a token takes as long as the slower of the two. Models
// without a query latent launch only the first. Pairs are rotated by the last threads, which have no kv element when q
// is three waves long and kv one. Slot -1 is not written. Latency-bound: a token of DeepSeek-V3 is 4 KB.
#include "attention/cache.h"
#include "attention/operands.h"
#include "attention/rotation.h"
#include "device/divisor.h"
#include "device/norm_row.h"

struct LatentCache {
  u8* data;
  const float* scale;             // [1], for e4m3; null is 1
  i64 block_stride, slot_stride;  // elements; a slot is contiguous
  const i64* slots;               // [num_slots], for the first tokens
  int num_slots, page_size;       // slots per page
  Divisor page_divisor;
};

// A token's row in the cache.
template <class T, class Cache>
struct CacheRow {
  using Element = typename CacheType<Cache>::Element;
  using Vec = typename CacheType<Cache>::Vec;
  Element* at;
  bool is_cached;
  float scale;

  DEVICE explicit CacheRow(const LatentCache& cache) {
    const int token = wave::block_id_x();
    const i64 slot = token < cache.num_slots ? mem::load<i64>(cache.slots + token) : -1;
    scale = __is_same(Cache, E4m3) && cache.scale ? mem::load<float>(cache.scale) : 1.0f;
    is_cached = slot >= 0;
    const int page = u32(is_cached ? slot : 0) / cache.page_divisor;
    const int of_page = u32(is_cached ? slot : 0) - u32(page) * u32(cache.page_size);
    at = (Element*)cache.data + page * cache.block_stride + of_page * cache.slot_stride;
  }

  // Writes 8 elements.
  DEVICE void write(int element, u32x4 elements) const {
    if (!is_cached) return;
    if constexpr (__is_same(Cache, E4m3)) mem::store(at + element, Vec(quantize(unpack<T>(elements), Scale(scale))));
    else mem::store(at + element, Vec(elements));
  }
};

// The output of kv, in place of a RowOutput: stored as T and written to the cache.
template <class T, class Cache>
struct LatentRow {
  CacheRow<T, Cache> cache;
  void* out;  // the token's row
  int threads, waves;

  DEVICE void locate(i64) {}
  DEVICE void store(int index, bool in_bounds, u32x4 y) const {
    if (!in_bounds) return;
    mem::store((u32x4*)out + index, y);
    cache.write(index * kChunk, y);
  }
  template <int kChunks>
  DEVICE void finish(RowChunks<kChunks, u32x4>, FromMemory) const {}
};

// A thread's 8 pairs of k_pe, loaded before the norm and rotated after it.
template <class T>
struct Pairs {
  bool is_here;
  int first, second;
  u32x4 x = {}, y = {};
  Angles by = {};

  DEVICE Pairs(const u16* k_pe, const Rotation& r, int vec) : is_here(vec < r.rotary_vecs) {
    first = r.is_neox ? vec * kChunk : 2 * vec * kChunk;
    second = first + (r.is_neox ? r.rotary_vecs * kChunk : kChunk);
    const i64 position = mem::load<i64>(r.positions + u32(wave::block_id_x()));
    if (!is_here) return;
    x = mem::load<u32x4>(k_pe + first);
    y = mem::load<u32x4>(k_pe + second);
    by = angles<T>(r, position, vec);
  }

  template <class Cache>
  DEVICE void finish(const Rotation& r, u16* out, int kv_size, const CacheRow<T, Cache>& cache) const {
    if (!is_here) return;
    Chunk rotated[2];
    rotate(unpack<T>(x), unpack<T>(y), by, r.is_neox, rotated);
    const u32x4 vecs[2] = {pack<T>(rotated[0]), pack<T>(rotated[1])};
    mem::store((u32x4*)(out + first), vecs[0]);
    mem::store((u32x4*)(out + second), vecs[1]);
    cache.write(kv_size + first, vecs[0]);
    cache.write(kv_size + second, vecs[1]);
  }
};

// A token's first block. Only kv's waves take part in the norm, so no other wave waits for it.
template <class T, class Cache>
DEVICE void kv_and_k_pe(const NormRow& kv, const Rotation& rotation, const LatentCache& to, void* kv_out,
                        void* k_pe_out, int threads) {
  constexpr int kOfWave = wave::kLanes * kChunk;
  const i64 token = u32(wave::block_id_x());
  const int kv_size = kv.hidden, k_pe_size = 2 * kChunk * rotation.rotary_vecs;
  const CacheRow<T, Cache> cache(to);
  const Pairs<T> pairs((const u16*)kv.input + kv_size, rotation, threads - 1 - wave::thread_id());
  const int waves = u32(kv_size + kOfWave - 1) / u32(kOfWave);
  rms_norm_vector<T, false, Factor::kWeight, 1>(
      kv, LatentRow<T, Cache>{cache, (u16*)kv_out + token * kv_size, threads, waves});
  pairs.finish(rotation, (u16*)k_pe_out + token * k_pe_size, kv_size, cache);
}

// clang-format off
#define INSTANCE(symbol, T, Cache, output_kind)                                                                       \
  KERNEL(1024) symbol(                                                                                                \
      const void* qkv,        /* [tokens, q_size + kv_size + 16 * rotary_vecs] T, rows row_stride elements apart */   \
      const void* q_weight, const void* kv_weight, /* [q_size], [kv_size] T */                                        \
      i64 row_stride, int q_size, int kv_size, int threads_per_block,                                                 \
      const float* scale,     /* as in ops/rms_norm.hip, here and below */                                            \
      void* out, float* scale_out, i64 scale_row_stride, i64 scale_stride, int group_size,                            \
      float inverse_q_size, float inverse_kv_size, float epsilon,                                                     \
      void* kv_out, void* k_pe_out, /* [tokens, kv_size], [tokens, 16 * rotary_vecs] T */                             \
      const Rotation rotation, const LatentCache cache) {                                                             \
    const u16* const row = (const u16*)qkv + u32(wave::block_id_x()) * row_stride;                                    \
    mem::issue_loads();                                                                                               \
    if (wave::block_id_y() == 0) {                                                                                    \
      kv_and_k_pe<T, Cache>({row + q_size, nullptr, kv_weight, kv_size, inverse_kv_size, epsilon}, rotation, cache,   \
                            kv_out, k_pe_out, threads_per_block);                                                     \
    } else {                                                                                                          \
      const RowOutput<T, Output::output_kind> output(                                                                 \
          scale, out, scale_out, scale_row_stride, scale_stride, group_size, threads_per_block);                      \
      rms_norm_vector<T, false, Factor::kWeight, 1>(                                                                  \
          {row, nullptr, q_weight, q_size, inverse_q_size, epsilon}, output);                                         \
    }                                                                                                                 \
  }
// clang-format on
#define INSTANCES(symbol, T, Cache)                       \
  INSTANCE(symbol, T, Cache, kPlain)                      \
  INSTANCE(symbol##_static_fp8_quant, T, Cache, kStatic)  \
  INSTANCE(symbol##_per_token_quant, T, Cache, kPerToken) \
  INSTANCE(symbol##_per_block_quant, T, Cache, kPerBlock)

INSTANCES(mla_norm_rope_and_cache_bf16, Bf16, Bf16)
INSTANCES(mla_norm_rope_and_cache_bf16_fp8, Bf16, E4m3)
INSTANCES(mla_norm_rope_and_cache_fp16, F16, F16)
INSTANCES(mla_norm_rope_and_cache_fp16_fp8, F16, E4m3)
