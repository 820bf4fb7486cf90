// Fused RoPE and KV cache write in one launch, with or without QK norm. RoPE rotates queries and keys; QK norm is
// RMSNorm of each query and key head, or of all query heads and of all key heads.
//
//     x, y = x * cos - y * sin, y * cos + x * sin      (fp32, rounded once to T), for a head's pairs
//     neox:         pair i is elements i and i + rotary_dim / 2;  cos, sin = row `position` of cos_sin_cache, halves
//     interleaved:  pair i is elements 2 * i and 2 * i + 1
//     cache[slot] = T(key), value   or   e4m3(key / k_scale), e4m3(value / v_scale)
//     with the norm, x and y are T(x * rsqrt(mean(x^2) + epsilon) * weight) of their head, or of all heads
//
// Kernels with an offset multiply by weight_offset + weight, 1 + weight in vLLM's GemmaRMSNorm. They also support three
// positions per token, as vLLM's MRotaryEmbedding with interleaved sections:
//
//     pair i of a head rotates by the position of height if i % 3 == 1 and i < 3 * height_pairs,
//     of width if i % 3 == 2 and i < 3 * width_pairs, else of time
//
// A thread rotates 8 pairs, or copies 8 elements that are not rotated. Slot -1 is not written. The strides define the
// cache layout, see shared/attention.py. Latency-bound: a token of 16 + 1 heads of 128 is 5 KB.
#pragma once
#include "cache.h"
#include "device/divisor.h"
#include "device/float8.h"
#include "device/reduce.h"
#include "operands.h"
#include "rotation.h"

struct Heads {  // for all tokens: groups of 8 elements are contiguous and aligned
  void* data;
  i64 token_stride, head_stride;  // elements, as all strides here
  DEVICE u32x4* at(int token, int head, int element) const {
    return (u32x4*)((u16*)data + token * token_stride + head * head_stride + element);
  }
};

struct RopeAndCacheProblem {
  Heads query, key, value;
  CacheView key_cache, value_cache;
  const i64* positions;
  const void* cos_sin;       // [positions, rotary_dim], cos_sin_type
  const i64* slots;          // [num_slots], for the first tokens
  int num_slots, page_size;  // slots per page
  int query_heads, kv_heads;
  int rotary_vecs;            // 16 elements each, per head
  int kept_vecs, value_vecs;  // 8 elements each: unrotated per key head, and per value head
  int first_copied;           // the first item that copies: no wave both rotates and copies
  int cos_sin_type;           // 0 bf16, 1 fp16, 2 fp32
  int is_neox;
  Divisor page_divisor, rotary_divisor, kept_divisor, value_divisor;
};

template <class T, class Cache>
struct RopeAndCache {
  const RopeAndCacheProblem& p;
  int token;
  i64 position, at;  // at: the token's slot

  using Element = typename CacheType<Cache>::Element;
  using Vec = typename CacheType<Cache>::Vec;
  static constexpr int kLog2Group = CacheType<Cache>::kLog2Group;

  // Branch-free, here and for scales: a value loaded in place of a missing one is not used.
  DEVICE explicit RopeAndCache(const RopeAndCacheProblem& p) : p(p), token(wave::block_id_x()) {
    const bool has_slot = token < p.num_slots;
    position = mem::load<i64>(p.positions + token);
    at = mem::load<i64>((has_slot ? p.slots : p.positions) + token);
    mem::wait_for_scalars(position, at);
    if (!has_slot) at = -1;
  }

  DEVICE float load_scale(const CacheView& cache) const {
    if constexpr (!__is_same(Cache, E4m3)) return 1.0f;
    const float loaded = mem::load<float>(cache.scale ? (const void*)cache.scale : p.positions);
    return cache.scale ? loaded : 1.0f;
  }

  // Writes 8 of the token's elements, from `element` on, a multiple of 8. Key elements are contiguous.
  template <bool kSideBySide = false>
  DEVICE void write(const CacheView& cache, int head, int element, u32x4 elements, float scale) const {
    if (at < 0) return;
    const u32 page = u32(at) / p.page_divisor, slot = u32(at) - page * u32(p.page_size);
    Element* to = slot_of<Cache>(cache, page, slot, head) + (element >> kLog2Group) * cache.chunk_stride +
                  (element & ((1 << kLog2Group) - 1)) * cache.element_stride;
    Vec vec;
    if constexpr (__is_same(Cache, E4m3)) vec = quantize(unpack<T>(elements), Scale(scale));
    else vec = elements;
    if (kSideBySide || cache.element_stride == 1) mem::store(to, vec);
    else {
      constexpr int kBits = 8 * sizeof(Element), kOfWord = 32 / kBits;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        mem::store(to + i * cache.element_stride, Element(vec[i / kOfWord] >> i % kOfWord * kBits));
    }
  }

  // Rotates 8 pairs of a query head or, after these, a key head.
  DEVICE void rotate_pairs(int item) const {
    const int any_head = u32(item) / p.rotary_divisor, vec = item - any_head * p.rotary_vecs;
    const bool is_key = any_head >= p.query_heads;
    const int head = is_key ? any_head - p.query_heads : any_head, half = p.rotary_vecs * kChunk;
    const int first = p.is_neox ? vec * kChunk : 2 * vec * kChunk, second = first + (p.is_neox ? half : kChunk);
    const Heads& heads = is_key ? p.key : p.query;
    const float scale = load_scale(p.key_cache);
    u32x4* const at_first = heads.at(token, head, first);
    u32x4* const at_second = heads.at(token, head, second);
    const u32x4 x = mem::load<u32x4>(at_first), y = mem::load<u32x4>(at_second);
    Chunk rotated[2];
    rotate(unpack<T>(x), unpack<T>(y), angles<T>(p, position, vec), p.is_neox, rotated);
    const u32x4 vecs[2] = {pack<T>(rotated[0]), pack<T>(rotated[1])};
    mem::store(at_first, vecs[0]);
    mem::store(at_second, vecs[1]);
    if (is_key) {
      write(p.key_cache, head, first, vecs[0], scale);
      write(p.key_cache, head, second, vecs[1], scale);
    }
  }

  // Copies 8 elements to the cache: from a key head's unrotated part, or from a value head.
  DEVICE void copy(int item) const {
    const int kept = p.kv_heads * p.kept_vecs;
    const bool is_key = item < kept;
    const int of_all = is_key ? item : item - kept;
    const int head = u32(of_all) / (is_key ? p.kept_divisor : p.value_divisor);
    const int vec = of_all - head * (is_key ? p.kept_vecs : p.value_vecs) + (is_key ? 2 * p.rotary_vecs : 0);
    const float key_scale = load_scale(p.key_cache), value_scale = load_scale(p.value_cache);
    const u32x4 elements = mem::load<u32x4>((is_key ? p.key : p.value).at(token, head, vec * kChunk));
    write(is_key ? p.key_cache : p.value_cache, head, vec * kChunk, elements, is_key ? key_scale : value_scale);
  }

  DEVICE void run(int item) const {
    const int rotated = (p.query_heads + p.kv_heads) * p.rotary_vecs;
    const int copied = item - p.first_copied;
    if (item < rotated) rotate_pairs(item);
    else if (copied >= 0 && copied < p.kv_heads * (p.kept_vecs + p.value_vecs)) copy(copied);
  }
};

// With QK norm.

struct QkNormRopeAndCacheProblem : RopeAndCacheProblem {  // kept_vecs is unused
  void *query_out, *key_out;                              // [tokens, heads, 16 * head_vecs] T
  const void *query_weight, *key_weight;                  // [16 * head_vecs] T
  int head_vecs;                                          // 16 elements each, per query or key head
  float inverse_size, epsilon;
};

struct OffsetQkNormRopeAndCacheProblem : QkNormRopeAndCacheProblem {
  float weight_offset;
  int height_pairs, width_pairs;  // both 0: one position per token
  i64 position_stride;            // between the positions of time, height and width
};
template <class Problem>
constexpr bool kHasOffset = __is_same(Problem, OffsetQkNormRopeAndCacheProblem);

// Norms over all heads: each weight has all its heads here, and inverse_size is for the queries of all ranks.
struct AllHeadsQkNormRopeAndCacheProblem : QkNormRopeAndCacheProblem {
  float inverse_keys_size;
};

// Normalizes 8 elements, rounded to T.
template <class T, class Problem>
DEVICE Chunk normalize(const Problem& p, u32x4 elements, u32x4 weight, float inverse_rms) {
  Chunk x = unpack<T>(elements), w = unpack<T>(weight);
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    if constexpr (kHasOffset<Problem>) w.pair[i] += p.weight_offset;
    x.pair[i] = round_to<T>(x.pair[i] * inverse_rms * w.pair[i]);
  }
  return x;
}

// Returns the angles of 8 pairs, each by its section's position.
template <class T>
DEVICE Angles angles_by_sections(const OffsetQkNormRopeAndCacheProblem& p, int token, i64 time, int vec) {
  Angles by = angles<T>(p, time, vec);
  if (p.height_pairs + p.width_pairs == 0) return by;
  const i64* const others = p.positions + p.position_stride + token;
  const Angles by_height = angles<T>(p, mem::load<i64>(others), vec);
  const Angles by_width = angles<T>(p, mem::load<i64>(others + p.position_stride), vec);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int pair = vec * kChunk + i, section = pair % 3;
    const bool is_height = section == 1 && pair < 3 * p.height_pairs;
    const bool is_width = section == 2 && pair < 3 * p.width_pairs;
    auto choose = [&](Chunk& time, const Chunk& height, const Chunk& width) {
      if (is_height) time.pair[i / 2][i % 2] = height.pair[i / 2][i % 2];
      if (is_width) time.pair[i / 2][i % 2] = width.pair[i / 2][i % 2];
    };
    choose(by.cos, by_height.cos, by_width.cos);
    choose(by.sin, by_height.sin, by_width.sin);
  }
  return by;
}

// The ranks whose heads norms over all heads are over.
struct OneRank {
  static constexpr int ranks() { return 1; }
  DEVICE static float sum(float squares, int, int) { return squares; }
};

// kLanes lanes normalize and rotate a head: 16 elements each, 8 pairs, or elements after the rotated ones. All loads are
// issued first, in two steps because the position determines the angles' address.
template <class T, class Cache, int kLanes, class Problem, class Ranks = OneRank>
DEVICE void qk_norm_rope_and_cache(const Problem& p, int item, int threads, const Ranks& ranks = {}) {
  using Write = RopeAndCache<T, Cache>;
  const Write cache(p);
  const int token = cache.token;
  constexpr bool kAllHeads = __is_same(Problem, AllHeadsQkNormRopeAndCacheProblem);
  const int part = kAllHeads ? wave::block_id_y() : 0;  // all queries, all keys, values
  const int any_head = u32(kAllHeads ? wave::thread_id() : item) / kLanes, vec = u32(item) % kLanes;
  const int heads = !kAllHeads ? p.query_heads + p.kv_heads : part == 0 ? p.query_heads : part == 1 ? p.kv_heads : 0;
  const bool is_of_head = any_head < heads && vec < p.head_vecs;
  const bool is_rotated = vec < p.rotary_vecs, in_halves = p.is_neox && is_rotated;
  const bool is_key = kAllHeads ? part == 1 : any_head >= p.query_heads;
  const int head = is_key && !kAllHeads ? any_head - p.query_heads : any_head;
  const int first = in_halves ? vec * kChunk : 2 * vec * kChunk;
  const int second = first + (in_halves ? p.rotary_vecs * kChunk : kChunk);
  float key_scale = 1.0f;
  u32x4 x = {}, y = {}, x_weight = {}, y_weight = {};
  Angles by = {};
  if (is_of_head) {
    const Heads& from = is_key ? p.key : p.query;
    const u16* const weight =
        (const u16*)(is_key ? p.key_weight : p.query_weight) + (kAllHeads ? head * 2 * kChunk * p.head_vecs : 0);
    x = mem::load<u32x4>(from.at(token, head, first));
    y = mem::load<u32x4>(from.at(token, head, second));
    x_weight = mem::load<u32x4>(weight + first);
    y_weight = mem::load<u32x4>(weight + second);
    if constexpr (kHasOffset<Problem>) {
      if (is_rotated) by = angles_by_sections<T>(p, token, cache.position, vec);
    } else if (is_rotated) by = angles<T>(p, cache.position, vec);
    key_scale = cache.load_scale(p.key_cache);
  }
  const Chunk of_x = unpack<T>(x), of_y = unpack<T>(y);
  f32x2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    squares = __builtin_elementwise_fma(of_x.pair[i], of_x.pair[i], squares);
    squares = __builtin_elementwise_fma(of_y.pair[i], of_y.pair[i], squares);
  }
  // All lanes of a wave take part, including those without elements.
  float sum;
  if constexpr (kAllHeads) {
    LDS static float sums[kMaxWaves];
    sum = reduce_block(squares.x + squares.y, 0.0f, sums, threads / wave::kLanes, Add{});
    if (part < 2) sum = ranks.sum(sum, token, part);
  } else sum = wave::reduce_group<kLanes>(squares.x + squares.y, 0.0f, Add{});
  if (is_of_head) {
    float size = float(2 * kChunk * p.head_vecs), inverse_size = p.inverse_size;
    if constexpr (kAllHeads) {
      size *= heads * ranks.ranks();
      if (is_key) inverse_size = p.inverse_keys_size;
    }
    const float mean = divide(sum, size, inverse_size);
    const float inverse_rms = numerics::rsqrt_approx(mean + p.epsilon);
    Chunk found[2] = {normalize<T>(p, x, x_weight, inverse_rms), normalize<T>(p, y, y_weight, inverse_rms)};
    if (is_rotated) rotate(Chunk(found[0]), Chunk(found[1]), by, p.is_neox, found);
    const u32x4 vecs[2] = {pack<T>(found[0]), pack<T>(found[1])};
    const i64 row = i64(token) * (is_key ? p.kv_heads : p.query_heads) + head;
    u16* const to = (u16*)(is_key ? p.key_out : p.query_out) + row * (2 * kChunk * p.head_vecs);
    mem::store((u32x4*)(to + first), vecs[0]);
    mem::store((u32x4*)(to + second), vecs[1]);
    if (is_key) {
      cache.template write<true>(p.key_cache, head, first, vecs[0], key_scale);
      cache.template write<true>(p.key_cache, head, second, vecs[1], key_scale);
    }
  } else if (const int of_all = item - p.first_copied; of_all >= 0 && of_all < p.kv_heads * p.value_vecs) {
    const int of = u32(of_all) / p.value_divisor, element = (of_all - of * p.value_vecs) * kChunk;
    const float value_scale = cache.load_scale(p.value_cache);
    const u32x4 elements = mem::load<u32x4>(p.value.at(token, of, element));
    cache.write(p.value_cache, of, element, elements, value_scale);
  }
}
