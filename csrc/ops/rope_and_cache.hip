// Rotary position embedding of queries and keys in place, and the write of keys and values to a paged cache, in one launch.
//
//     x, y = x * cos - y * sin, y * cos + x * sin      (fp32, rounded once to T), of the pairs of a head
//     neox:         pair i is elements i and i + rotary_dim / 2;  cos, sin = row `position` of cos_sin_cache, halves
//     interleaved:  pair i is elements 2 * i and 2 * i + 1
//     cache[slot] = T(key), value   or   e4m3(key / k_scale), e4m3(value / v_scale)
//
// A thread rotates 8 pairs, or copies 8 elements of what is not rotated. Slot -1 is not written. The strides say which layout
// the cache has, see families/attention.py. All is latency: a token of 16 + 1 heads of 128 is 5 KB.
#include "attention/cache.h"
#include "attention/operands.h"
#include "device/divisor.h"
#include "device/float8.h"

struct Heads {  // of all tokens: 8 elements lie together and are aligned
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
  const void* cos_sin;       // [positions, rotary_dim] of cos_sin_type
  const i64* slots;          // [num_slots], of the first tokens
  int num_slots, page_size;  // slots of a page
  int query_heads, kv_heads;
  int rotary_vecs;            // 16 elements each, of a head
  int kept_vecs, value_vecs;  // 8 elements each, of a key's head that are not rotated, and of a value's head
  int cos_sin_type;           // 0 bf16, 1 fp16, 2 fp32
  int is_neox;
  Divisor page_divisor, rotary_divisor, kept_divisor, value_divisor;
};

DEVICE Chunk load_8(const void* row, i64 column, int type) {
  if (type == 0) return unpack<Bf16>(mem::load<u32x4>((const u16*)row + column));
  if (type == 1) return unpack<F16>(mem::load<u32x4>((const u16*)row + column));
  const f32x4 low = mem::load<f32x4>((const float*)row + column),
              high = mem::load<f32x4>((const float*)row + column + 4);
  return {low.lo, low.hi, high.lo, high.hi};
}

// One pair.
DEVICE f32x2 rotate(float x, float y, float cos, float sin) {
  using numerics::rounded_product;
  return {rounded_product(x, cos) - rounded_product(y, sin), rounded_product(y, cos) + rounded_product(x, sin)};
}

template <class T, class Cache>
struct RopeAndCache {
  const RopeAndCacheProblem& p;
  int token;
  i64 page, slot;  // where the token goes in the cache
  bool is_cached;

  using Element = typename CacheType<Cache>::Element;
  using Vec = typename CacheType<Cache>::Vec;
  static constexpr int kLog2Group = CacheType<Cache>::kLog2Group;

  DEVICE RopeAndCache(const RopeAndCacheProblem& p) : p(p), token(wave::block_id_x()) {
    const i64 at = token < p.num_slots ? mem::load<i64>(p.slots + token) : -1;
    is_cached = at >= 0;
    page = u32(is_cached ? at : 0) / p.page_divisor;
    slot = u32(is_cached ? at : 0) - u32(page) * u32(p.page_size);
  }

  // Stores 8 elements of the token, from `element` on, a multiple of 8.
  DEVICE void store(const CacheView& cache, int head, int element, u32x4 elements) const {
    if (!is_cached) return;
    Element* at = slot_of<Cache>(cache, page, slot, head) + (element >> kLog2Group) * cache.chunk_stride +
                  (element & ((1 << kLog2Group) - 1)) * cache.element_stride;
    Vec vec;
    if constexpr (__is_same(Cache, E4m3))
      vec = quantize(unpack<T>(elements), Scale(cache.scale ? mem::load<float>(cache.scale) : 1.0f));
    else vec = elements;
    if (cache.element_stride == 1) mem::store(at, vec);
    else {
      constexpr int kBits = 8 * sizeof(Element), kOfWord = 32 / kBits;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        mem::store(at + i * cache.element_stride, Element(vec[i / kOfWord] >> i % kOfWord * kBits));
    }
  }

  // Rotates 8 pairs of a head of query or, behind these, of key.
  DEVICE void rotate_pairs(int item) const {
    const int any_head = u32(item) / p.rotary_divisor, vec = item - any_head * p.rotary_vecs;
    const bool is_key = any_head >= p.query_heads;
    const int head = is_key ? any_head - p.query_heads : any_head, half = p.rotary_vecs * kChunk;
    const int first = p.is_neox ? vec * kChunk : 2 * vec * kChunk, second = first + (p.is_neox ? half : kChunk);
    const Heads& heads = is_key ? p.key : p.query;
    u32x4* const at_first = heads.at(token, head, first);
    u32x4* const at_second = heads.at(token, head, second);
    const Chunk x = unpack<T>(mem::load<u32x4>(at_first)), y = unpack<T>(mem::load<u32x4>(at_second));
    const i64 row = mem::load<i64>(p.positions + token) * 2 * half;
    const Chunk cos = load_8(p.cos_sin, row + vec * kChunk, p.cos_sin_type);
    const Chunk sin = load_8(p.cos_sin, row + half + vec * kChunk, p.cos_sin_type);
    Chunk rotated[2];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float c = cos.pair[i / 2][i % 2], s = sin.pair[i / 2][i % 2];
      if (p.is_neox) {
        const f32x2 pair = rotate(x.pair[i / 2][i % 2], y.pair[i / 2][i % 2], c, s);
        rotated[0].pair[i / 2][i % 2] = pair.x;
        rotated[1].pair[i / 2][i % 2] = pair.y;
      } else {
        const f32x2 pair = (i < kChunk / 2 ? x : y).pair[i % (kChunk / 2)];
        rotated[i / (kChunk / 2)].pair[i % (kChunk / 2)] = rotate(pair.x, pair.y, c, s);
      }
    }
    const u32x4 vecs[2] = {pack<T>(rotated[0]), pack<T>(rotated[1])};
    mem::store(at_first, vecs[0]);
    mem::store(at_second, vecs[1]);
    if (is_key) {
      store(p.key_cache, head, first, vecs[0]);
      store(p.key_cache, head, second, vecs[1]);
    }
  }

  // Copies 8 elements to the cache: of a key's head behind the rotated ones, or of a value's head.
  DEVICE void copy(int item) const {
    const int kept = p.kv_heads * p.kept_vecs;
    const bool is_key = item < kept;
    const int of_all = is_key ? item : item - kept;
    const int head = u32(of_all) / (is_key ? p.kept_divisor : p.value_divisor);
    const int vec = of_all - head * (is_key ? p.kept_vecs : p.value_vecs) + (is_key ? 2 * p.rotary_vecs : 0);
    const u32x4 elements = mem::load<u32x4>((is_key ? p.key : p.value).at(token, head, vec * kChunk));
    store(is_key ? p.key_cache : p.value_cache, head, vec * kChunk, elements);
  }

  DEVICE void run(int item) const {
    const int rotated = (p.query_heads + p.kv_heads) * p.rotary_vecs;
    if (item < rotated) rotate_pairs(item);
    else if (item - rotated < p.kv_heads * (p.kept_vecs + p.value_vecs)) copy(item - rotated);
  }
};

#define INSTANCE(symbol, T, Cache)                                                         \
  KERNEL(256) symbol(const RopeAndCacheProblem problem, int threads) {                     \
    RopeAndCache<T, Cache>(problem).run(wave::block_id_y() * threads + wave::thread_id()); \
  }

INSTANCE(rope_and_cache_bf16, Bf16, Bf16)
INSTANCE(rope_and_cache_bf16_fp8, Bf16, E4m3)
INSTANCE(rope_and_cache_fp16, F16, F16)
INSTANCE(rope_and_cache_fp16_fp8, F16, E4m3)
