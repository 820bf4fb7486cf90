// General FlashAttention: any strides and head sizes, 8-bit types, paged caches; soft caps, ALiBi, bias, integer
// weights, dropout.
#pragma once
#include "ops/standalone/flash_loader.h"
#include "ops/standalone/philox.h"

DEVICE float from_int8(u32 word, int i) { return float(int(word << (3 - i) * 8) >> 24); }

// Loads an element as T.
template <class T>
DEVICE u16 flash_element(const u8* base, i64 at, int type) {
  if (type == kOfProduct) return mem::load<u16>((const u16*)base + at);
  const u32 byte = mem::load<u8>(base + at);
  const float x = type == kOfE4m3 ? numerics::from_e4m3x2<false>(byte).x : from_int8(byte, 0);
  return u16(attention::pack_exact<T>(x, x));
}
// Loads eight contiguous, aligned elements unconverted; 8-bit elements fill the lower half.
DEVICE u32x4 flash_eight(const u8* base, i64 at, int type) {
  if (type == kOfProduct) return mem::load<u32x4>((const u16*)base + at);
  const u32x2 bytes = mem::load<u32x2>(base + at);
  return {bytes.x, bytes.y, 0, 0};
}
// Converts such elements to T.
template <class T, int kCount>
DEVICE void flash_operands(u32x4 (&eights)[kCount], int type) {
  if (type == kOfE4m3)
#pragma unroll
    for (int i = 0; i < kCount; ++i) eights[i] = as_operand<T>(u32x2{eights[i].x, eights[i].y});
  else if (type == kOfInt8)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32x4 raw = eights[i];
#pragma unroll
      for (int w = 0; w < 4; ++w)
        eights[i][w] = attention::pack_exact<T>(from_int8(raw[w / 2], w % 2 * 2), from_int8(raw[w / 2], w % 2 * 2 + 1));
    }
}

// Loads keys and values of any type and strides. Contiguous data goes through registers as in the plain kernels; the
// rest is copied element by element when needed.
template <class T, class Layout>
struct GeneralFlashLoader {
  static constexpr int kPages = (Layout::kKeys + wave::kLanes - 1) / wave::kLanes;
  const FlashProblem& problem;
  const FlashExtras& extras;
  int sequence, head, first_key, step, keys;
  int pages[kPages], next_pages[kPages];  // for the step's keys, and the next step's
  u32x4 key[Layout::kKeyCopies];
  u32x2 value[8];  // a unit, or eight keys for several elements
  static_assert(2 * Layout::kValueCopies <= 8);

  template <class Tile>
  DEVICE GeneralFlashLoader(const FlashProblem& problem, const FlashExtras& extras, const Tile& tile, int begin)
      : problem(problem),
        extras(extras),
        sequence(tile.sequence),
        head(tile.kv_head),
        first_key(tile.first_key),
        step(begin - Layout::kKeys),
        keys(tile.keys) {
    load_pages(extras);
  }
  DEVICE int held(int key) const { return key < keys ? key : keys - 1; }
  DEVICE void load_pages(const FlashExtras& e) {
    if (e.block_table && keys > 0)
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        const int key = held(step + Layout::kKeys + i * wave::kLanes + wave::lane());
        next_pages[i] = mem::load<int>(e.block_table + sequence * e.table_stride + u32(key) / e.page_divisor);
      }
  }
  // The offset of a key's element `element` in this step.
  DEVICE i64 at(const FlashExtras& e, const CacheView& of, int key, int element) const {
    const int log2_group = e.key_type == kOfProduct ? 3 : 4, last = (1 << log2_group) - 1;
    int slot = held(step + key), page = sequence;
    if (e.block_table) {
      const int of_step = slot - step;
      page = wave::from_lane(pages[0], of_step);
#pragma unroll
      for (int i = 1; i < kPages; ++i) {
        const int other = wave::from_lane(pages[i], of_step);
        if (of_step / wave::kLanes == i) page = other;
      }
      slot -= u32(slot) / e.page_divisor * e.page_size;
    } else slot += first_key;
    return page * of.block_stride + head * of.head_stride + (slot >> log2_group) * of.group_stride +
           (slot & last) * of.slot_stride + (element >> log2_group) * of.chunk_stride +
           (element & last) * of.element_stride;
  }
  DEVICE bool has_whole_keys(const FlashExtras& e) const {
    return e.value_order == kByKey && step + Layout::kKeys <= keys;
  }
  DEVICE void start() {
    step += Layout::kKeys;
#pragma unroll
    for (int i = 0; i < kPages; ++i) pages[i] = next_pages[i];
    start_keys();
    start_values();
    load_pages(reloaded(extras));
  }
  DEVICE void start_keys() {
    const FlashProblem& p = reloaded(problem);
    const FlashExtras& e = reloaded(extras);
    if (e.key_order == kByElement)
#pragma unroll
      for (int j = 0; j < Layout::kKeyCopies; ++j) {
        const int element = Layout::copy_chunk(j) * 8;
        const i64 from = at(e, p.key, Layout::key_of(Layout::copy_row(j)), element);
        key[j] = element < e.size ? flash_eight(p.key.data, from, e.key_type) : u32x4{};
      }
  }
  DEVICE void start_values() {
    const FlashProblem& p = reloaded(problem);
    const FlashExtras& e = reloaded(extras);
    if (e.value_order == kByElement) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int element = Layout::unit_row() * 4;
        const i64 from = at(e, p.value, Layout::unit_chunk() * 8 + k, element);
        value[k] = {};
        if (element < e.value_size) {
          if (e.key_type == kOfProduct) value[k] = mem::load<u32x2>((const u16*)p.value.data + from);
          else value[k].x = mem::load<u32>(p.value.data + from);
        }
      }
    } else if (has_whole_keys(e)) {
#pragma unroll
      for (int j = 0; j < Layout::kValueCopies; ++j) {
        const int copy = j * Layout::kThreads + wave::thread_id(), element = copy / Layout::kRowChunks;
        const i64 from = at(e, p.value, copy % Layout::kRowChunks * 8, element);
        const u32x4 eight = element < e.value_size ? flash_eight(p.value.data, from, e.key_type) : u32x4{};
        value[2 * j] = eight.lo;
        value[2 * j + 1] = eight.hi;
      }
    }
  }
  DEVICE void finish(typename Layout::Buffer& to) {
    finish_keys(to);
    finish_values(to);
  }
  DEVICE void finish_keys(typename Layout::Buffer& to) {
    const FlashExtras& e = reloaded(extras);
    if (e.key_order == kByElement) {
      flash_operands<T>(key, e.key_type);
#pragma unroll
      for (int j = 0; j < Layout::kKeyCopies; ++j)
        to.key[Layout::key_at(Layout::copy_row(j), Layout::copy_chunk(j))] = key[j];
    } else copy_keys(reloaded(problem), e, to);
  }
  DEVICE void finish_values(typename Layout::Buffer& to) {
    const FlashExtras& e = reloaded(extras);
    if (e.value_order == kByElement) {
      u32x4 eights[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) eights[k] = {value[k].x, value[k].y, 0, 0};
      flash_operands<T>(eights, e.key_type);
#pragma unroll
      for (int k = 0; k < 8; ++k) value[k] = eights[k].lo;
      if (Layout::has_unit()) Layout::write_unit(to, value);
    } else if (has_whole_keys(e)) {
      u32x4 eights[Layout::kValueCopies];
#pragma unroll
      for (int j = 0; j < Layout::kValueCopies; ++j)
        eights[j] = {value[2 * j].x, value[2 * j].y, value[2 * j + 1].x, value[2 * j + 1].y};
      flash_operands<T>(eights, e.key_type);
#pragma unroll
      for (int j = 0; j < Layout::kValueCopies; ++j) {
        const int copy = j * Layout::kThreads + wave::thread_id();
        to.value[Layout::value_at(Layout::row_of(copy / Layout::kRowChunks), copy % Layout::kRowChunks)] = eights[j];
      }
    } else copy_values(reloaded(problem), e, to);
  }
  DEVICE void copy_keys(const FlashProblem& p, const FlashExtras& e, typename Layout::Buffer& to) const {
#pragma unroll 1
    for (int i = wave::thread_id(); i < Layout::kKeys * Layout::kElements; i += Layout::kThreads) {
      const int row = i / Layout::kElements, element = i % Layout::kElements;
      const i64 from = at(e, p.key, Layout::key_of(row), element);
      const u16 x = element < e.size ? flash_element<T>(p.key.data, from, e.key_type) : 0;
      ((u16*)&to.key[Layout::key_at(row, element / 8)])[element % 8] = x;
    }
  }
  DEVICE void copy_values(const FlashProblem& p, const FlashExtras& e, typename Layout::Buffer& to) const {
#pragma unroll 1
    for (int i = wave::thread_id(); i < Layout::kKeys * Layout::kValueElements; i += Layout::kThreads) {
      const int key = i / Layout::kValueElements, element = i % Layout::kValueElements;
      const i64 from = at(e, p.value, key, element);
      const u16 x = element < e.value_size ? flash_element<T>(p.value.data, from, e.key_type) : 0;
      ((u16*)&to.value[Layout::value_at(Layout::row_of(element), key / 8)])[key % 8] = x;
    }
  }
};

DEVICE float flash_scale(const float* scale, int stride, int head) {
  return scale ? mem::load<float>(scale + head * stride) : 1.0f;
}

// Score and weight transformations between the two products.
struct FlashScores {
  int sequence, head, rows, keys;
  float factor, slope, weight_scale;

  template <class Tile>
  DEVICE FlashScores(const FlashProblem& p, const FlashExtras& e, const Tile& tile)
      : sequence(tile.sequence), head(tile.head), rows(tile.rows), keys(tile.keys) {
    factor = p.scale * flash_scale(e.query_scale, e.query_scale_stride, head) *
             flash_scale(p.key.scale, e.key_scale_stride, tile.kv_head);
    slope = e.slopes ? mem::load<float>(e.slopes + sequence * e.slopes_stride + head * e.slopes_head_stride) : 0.0f;
    weight_scale = e.weight_scale ? mem::load<float>(e.weight_scale + head * e.weight_scale_stride) : 0.0f;
  }
  // Converts scores [tiles][4] to exponents of 2. row_of(i) and key_of(tile, i) give value i's row and key.
  template <int kTiles, class RowOf, class KeyOf>
  DEVICE void to_exponents(const FlashExtras& e, f32x4 (&score)[kTiles], RowOf row_of, KeyOf key_of) const {
    auto each = [&](auto change) __attribute__((always_inline)) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) score[k][i] = change(score[k][i], row_of(i), key_of(k, i));
    };
    each([&](float x, int, int) { return x * factor; });
    if (e.softcap > 0.0f) {
      const float by = -2.8853900817779268f / e.softcap;
      each([&](float x, int, int) __attribute__((always_inline)) {
        const float power = numerics::exp2_approx(__builtin_fabsf(x) * by);
        return e.softcap * __builtin_copysignf((1.0f - power) * numerics::rcp_approx(1.0f + power), x);
      });
    }
    if (e.slopes)
      each([&](float x, int row, int key) { return x - slope * __builtin_fabsf(float(row + keys - rows - key)); });
    if (e.bias) {
      const i64 of_head = sequence * e.bias_batch_stride + head * e.bias_head_stride;
      with_output_type(e.bias_type, [&]<class B>(B*) __attribute__((always_inline)) {
        each([&](float x, int row, int key) __attribute__((always_inline)) {
          const i64 at = (row < rows ? row : rows - 1) * e.bias_row_stride;
          return x + load_element<B>(e.bias, of_head + at + (key < keys ? key : keys - 1) * e.bias_key_stride);
        });
      });
    }
    each([&](float x, int, int) { return x * 1.4426950408889634f; });
  }
  // Random words for four keys, from a multiple of 4 on.
  DEVICE u32x4 words(const FlashExtras& e, int row, int key) const {
    return philox(u32x4{u32(key) / 4, u32(row), u32(head), u32(sequence)}, e.seed_low, e.seed_high);
  }
  DEVICE float weight(const FlashExtras& e, float weight, u32 word) const {
    if (e.threshold && word < e.threshold) weight = 0.0f;
    if (e.weight_scale) weight = __builtin_fminf(__builtin_rintf(weight * weight_scale), 127.0f);
    return weight;
  }
  // The factor of the results.
  DEVICE float out_factor(const FlashProblem& p, const FlashExtras& e, int kv_head) const {
    const float of_value = flash_scale(p.value.scale, e.value_scale_stride, kv_head) * e.factor;
    return e.weight_scale ? of_value / weight_scale : of_value;
  }
};

// The dropout mask: one block per row of a head.
struct FlashMask {
  u8* mask;  // [sequences, heads, rows, keys]
  int keys, heads, rows;
  u32 threshold, seed_low, seed_high;
  Divisor heads_divisor, rows_divisor;
};
DEVICE void flash_mask(const FlashMask& p) {
  const int block = wave::block_id_x(), of_heads = u32(block) / p.rows_divisor, row = block - of_heads * p.rows;
  const int sequence = u32(of_heads) / p.heads_divisor, head = of_heads - sequence * p.heads;
#pragma unroll 1
  for (int first = wave::thread_id() * 4; first < p.keys; first += 4 * 256) {
    const u32x4 words = philox(u32x4{u32(first) / 4, u32(row), u32(head), u32(sequence)}, p.seed_low, p.seed_high);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i < p.keys) mem::store<u8>(p.mask + i64(block) * p.keys + first + i, words[i] >= p.threshold);
  }
}
