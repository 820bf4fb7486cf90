// A block's split of a request's keys, in steps of kStepKeys, and their addresses. With `num_kv_splits` splits, a split has
// every parts-th step, from step block_id_y on: its first key does not depend on the length, so its pages are looked up
// while the length is loaded. A wave processes 32 keys at a time, whose addresses its lanes compute, one lane per key.
// Loads past the last key repeat a key of the split, so no page id and no slot past it is used.
#pragma once
#include "attention/operands.h"
#include "attention/output.h"

// Converts 8 elements to T.
template <class T>
DEVICE u32x4 as_operand(u32x4 elements) {
  return elements;
}
template <class T>
DEVICE u32x4 as_operand(u32x2 elements) {
  using numerics::from_e4m3x2;
  const f32x2 a = from_e4m3x2<false>(elements.x), b = from_e4m3x2<true>(elements.x);
  const f32x2 c = from_e4m3x2<false>(elements.y), d = from_e4m3x2<true>(elements.y);
  using attention::pack_exact;
  return {pack_exact<T>(a.x, a.y), pack_exact<T>(b.x, b.y), pack_exact<T>(c.x, c.y), pack_exact<T>(d.x, d.y)};
}

// A vector of this many bytes.
template <int kBytes>
struct Words;
template <>
struct Words<16> {
  using Type = u32x4;
};
template <>
struct Words<8> {
  using Type = u32x2;
};
template <>
struct Words<4> {
  using Type = u32;
};
DEVICE u32 word(u32 vec, int) { return vec; }
DEVICE u32 word(u32x2 vec, int i) { return vec[i]; }
DEVICE u32 word(u32x4 vec, int i) { return vec[i]; }
// Element `dim` of two keys' vectors, as T.
template <class T, bool kFp8, class Vec>
DEVICE u32 pair(const Vec& first, const Vec& second, int dim) {
  if constexpr (kFp8) {
    const u32 a = word(first, dim / 4), b = word(second, dim / 4);
    const f32x2 low = dim / 2 % 2 ? numerics::from_e4m3x2<true>(a) : numerics::from_e4m3x2<false>(a);
    const f32x2 high = dim / 2 % 2 ? numerics::from_e4m3x2<true>(b) : numerics::from_e4m3x2<false>(b);
    return attention::pack_exact<T>(low[dim % 2], high[dim % 2]);
  } else return attention::pair_of(word(first, dim / 2), word(second, dim / 2), dim % 2);
}

// Loads 8 elements of a query. e4m3 is the low half, until `as_operand` converts it.
DEVICE u32x4 load_query(const u16* from) { return mem::load<u32x4>(from); }
DEVICE u32x4 load_query(const u8* from) {
  const u32x2 bytes = mem::load<u32x2>(from);
  return {bytes.x, bytes.y, 0, 0};
}

// `min_steps` counts steps of kMinKeys. kParts consecutive waves have the same keys, and every wave has all of the block's
// steps, so that they meet at its barriers: without keys of its own it repeats one of the block's.
template <class Output, int kStepKeys_, int kWaveKeys_ = 32, int kMinKeys = kStepKeys_, int kParts = 1>
struct DecodeSplit : Output {
  using Output::head, Output::p, Output::splits, Output::request;

  static constexpr int kStepKeys = kStepKeys_, kWaveKeys = kWaveKeys_;

  const int lane = wave::lane();
  const int* const table = p.block_table + request * p.table_stride;
  int begin, end;     // keys that some row of the query sees
  int base;           // key of step 0
  int first_row_end;  // end of the keys that row 0 sees
  int own;            // a key of this split, if it has any
  int early_pages;    // of the first keys, without a window; arbitrary past the last key

  DEVICE explicit DecodeSplit(const typename Output::Problem& problem, int block = wave::block_id_x(),
                              int first_step = wave::block_id_y())
      : Output(problem, block) {
    const int of_request = mem::load<int>(p.seq_lens + request);
    if (p.window == 0) early_pages = load_any_pages(split_key(first_step));
    const int length = wave::uniform(of_request);
    end = length > 0 ? length : 0;
    first_row_end = end - p.query_len + 1;
    begin = p.window > 0 && first_row_end > p.window ? first_row_end - p.window : 0;
    base = begin / kWaveKeys * kWaveKeys;
    own = own_key(first_step) > begin ? own_key(first_step) : begin;
    const int steps = (end - base + kMinKeys - 1) / kMinKeys;
    const int most = u32(steps + p.min_steps - 1) / p.min_divisor;  // splits, none shorter than min_steps
    splits = most > p.num_kv_splits ? p.num_kv_splits : most > 0 ? most : 1;
  }
  DEVICE bool has_work() const { return wave::block_id_y() < splits; }

  // The wave's first key in a step, relative to `base`.
  DEVICE static int split_key(int step) { return step * kStepKeys + wave::index() / kParts * kWaveKeys % kStepKeys; }
  DEVICE int step_key(int step) const { return base + split_key(step); }
  // The key that decides whether a wave has a step.
  DEVICE int first_key(int step) const { return kParts > 1 ? base + step * kStepKeys : step_key(step); }
  DEVICE int own_key(int step) const {
    if constexpr (kParts > 1)
      if (step_key(step) >= end) return first_key(step);
    return step_key(step);
  }

  DEVICE int clamped(int key) const {
    const int low = key > begin ? key : begin;
    return low < end ? low : own;
  }
  // True if queries are e4m3: for caches of it.
  template <class Cache>
  DEVICE bool has_fp8_query() const {
    return __is_same(Cache, E4m3) && p.query_scale;
  }
  // The factor of scores.
  template <class Cache>
  DEVICE float score_scale() const {
    const float scale = p.scale * (p.key_cache.scale ? mem::load<float>(p.key_cache.scale) : 1.0f);
    return has_fp8_query<Cache>() ? scale * mem::load<float>(p.query_scale) : scale;
  }
  // Loads pages: lane l gets the page of key `first` + l % 32.
  DEVICE int load_pages(int first) const {
    return mem::load<int>(table + u32(clamped(first + lane % kWaveKeys)) / p.page_divisor);
  }
  // The same, with an arbitrary page for a key past the last.
  DEVICE int load_any_pages(int first) const {
    const int page = u32(first + lane % kWaveKeys) / p.page_divisor;
    return mem::load<int>(table + (page < p.table_pages ? page : p.table_pages - 1));
  }
  // The same for the split's first keys, of which there is at least one.
  DEVICE int first_pages() const {
    const int first = step_key(wave::block_id_y());
    const bool is_late = p.window > 0 || (kParts > 1 && first >= end);
    return is_late ? load_pages(first) : wave::from_lane(early_pages, clamped(first + lane % kWaveKeys) - first);
  }
  // The offset in a cache, in units of kUnit elements, of the lane's key: one of 32 from `first` on in these pages. For
  // V with contiguous slots: the offset of its eight slots.
  template <class Cache, int kUnit, bool kSideBySide = false>
  DEVICE u32 place(const CacheView& cache, int page, int first) const {
    return place_of<Cache, kUnit, kSideBySide>(cache, page, clamped(first + lane % kWaveKeys));
  }
  // The same for a given key.
  template <class Cache, int kUnit, bool kSideBySide = false>
  DEVICE u32 place_of(const CacheView& cache, int page, int key) const {
    constexpr int kLog2Group = CacheType<Cache>::kLog2Group, kMask = (1 << kLog2Group) - 1;
    const int slot = key - u32(key) / p.page_divisor * p.page_size;
    const u32 of_slot = kSideBySide ? u32(slot & kMask) / kUnit : u32(slot & kMask) * u32(cache.slot_stride / kUnit);
    const u32 of_head = u32((cache.offset + head * cache.head_stride) / kUnit);
    return u32(page) * u32(cache.block_stride / kUnit) + u32(slot >> kLog2Group) * u32(cache.group_stride / kUnit) +
           of_slot + of_head;
  }
  // The elements at lane `index`'s offset.
  template <class Cache, int kUnit>
  DEVICE auto at(const CacheView& cache, u32 place, int index) const {
    return (const typename CacheType<Cache>::Element*)cache.data + u64(wave::from_lane(place, index)) * kUnit;
  }
};
