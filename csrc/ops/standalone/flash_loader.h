// Copies keys and values from HBM to LDS for FlashAttention, kKeys at a time. In LDS both are operands of the 16-bit
// type T: keys by key, in the instructions' row order, and values by element, so that the eight keys that a lane
// multiplies are contiguous. A copy stays in registers until the previous keys have been multiplied.
#pragma once
#include "attention/split.h"
#include "ops/standalone/flash_tile.h"

// Reloads arguments where they are used below: registers cannot hold all of them across loops.
template <class Arguments>
DEVICE const Arguments& reloaded(const Arguments& arguments) {
  int zero = 0;
  attention::compute_now(zero);
  return (&arguments)[wave::uniform(zero)];
}

// kD: elements per key, kDv: per value.
template <int kD, int kDv, int kKeys_, int kThreads_>
struct FlashLayout {
  static constexpr int kKeys = kKeys_, kThreads = kThreads_, kElements = kD, kValueElements = kDv;
  static constexpr int kKeyChunks = kD / 8,
                       kRowChunks = kKeys / 8;  // 16-byte chunks: per key, and per value element
  static constexpr int kQuarter = kDv / 4;
  static constexpr int kKeyCopies = kKeys * kKeyChunks / kThreads;
  static constexpr int kUnits = kRowChunks * kQuarter;  // 8 keys x 4 value elements each
  static constexpr int kValueCopies = kRowChunks * kDv / kThreads;
  static_assert(kUnits <= kThreads && kKeyCopies * kThreads == kKeys * kKeyChunks);

  struct Buffer {
    u32x4 key[kKeys * kKeyChunks], value[kDv * kRowChunks];
  };
  // A thread copies key chunks that are kRound apart, then those 8 chunks further on, and a unit of values, if any.
  static constexpr int kRound = kThreads / 8, kRounds = kKeys / kRound;
  static_assert(kRound == 32);
  DEVICE static int copy_row(int copy) { return copy % kRounds * kRound + wave::thread_id() / 8; }
  DEVICE static int copy_chunk(int copy) { return copy / kRounds * 8 + wave::thread_id() % 8; }
  DEVICE static bool has_unit() { return kUnits == kThreads || wave::uniform(wave::thread_id() < kUnits); }
  DEVICE static int unit_chunk() { return wave::thread_id() / kQuarter; }
  DEVICE static int unit_row() { return wave::thread_id() % kQuarter; }
  // Writes a unit: words with two elements for each key.
  DEVICE static void write_unit(Buffer& to, const u32x2 (&keys)[8]) {
#pragma unroll
    for (int element = 0; element < 4; ++element) {
      u32x4 eight;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const u32 a = keys[2 * w][element / 2], b = keys[2 * w + 1][element / 2];
        eight[w] = element % 2 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffff) | b << 16;
      }
      to.value[value_at(element * kQuarter + unit_row(), unit_chunk())] = eight;
    }
  }
  // The buffer index of a key's chunk. Row: see key_of.
  DEVICE static int key_at(int row, int chunk) {
    return (chunk / 8 * kKeys + row) * 8 + (chunk % 8 ^ attention::swizzle(row));
  }
  // The key, within a step, in this row of this tile.
  DEVICE static int key_of(int tile, int row) { return tile / 2 * 32 + attention::key(tile % 2, row); }
  DEVICE static int key_of(int row) { return key_of(row / 16, row % 16); }
  // The buffer index of an element's eight keys. Row: see row_of.
  DEVICE static int value_at(int row, int chunk) {
    const int at = row * kRowChunks + chunk;
    return at / 8 * 8 + (at % 8 ^ attention::swizzle(at / 8));
  }
  // Element 4 * i + j is row i of quarter j: adjacent threads write adjacent rows, and a lane's sums are for four
  // consecutive elements.
  DEVICE static int row_of(int element) { return element % 4 * kQuarter + element / 4; }
};

// Keys and values of type T, complete, contiguous and aligned to 16 bytes.
template <class T, class Layout>
struct FlashLoader {
  static constexpr int kThreads = Layout::kThreads;
  const u8 *keys, *values;  // of the step
  int left;                 // keys, from this step on
  i64 key_bytes, value_bytes;
  u32 key_offset, value_offset;
  u32x4 key[Layout::kKeyCopies];
  u32x2 value[8];

  template <class Tile>
  DEVICE FlashLoader(const FlashProblem& p, const Tile& tile, int begin) : left(tile.keys - begin) {
    auto first = [&](const CacheView& of) __attribute__((always_inline)) {
      return of.data + 2 * (tile.sequence * of.block_stride + tile.kv_head * of.head_stride +
                            i64(tile.first_key + begin) * of.slot_stride);
    };
    keys = first(p.key);
    values = first(p.value);
    key_bytes = 2 * p.key.slot_stride;
    value_bytes = 2 * p.value.slot_stride;
    key_offset = u32(Layout::key_of(wave::thread_id() / 8)) * u32(key_bytes) + wave::thread_id() % 8 * 16;
    value_offset = u32(Layout::unit_chunk() * 8) * u32(value_bytes) + Layout::unit_row() * 8;
  }
  DEVICE static u32 held(int key, int count) { return key < count ? key : count - 1; }

  // Starts loading the next keys. Keys past the last repeat it.
  DEVICE void start() {
    if (left >= Layout::kKeys) {
#pragma unroll
      for (int j = 0; j < Layout::kKeyCopies; ++j)
        key[j] = mem::load<u32x4>(keys + j % Layout::kRounds * Layout::kRound * key_bytes +
                                  (key_offset + j / Layout::kRounds * 128));
      if (Layout::has_unit())
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = mem::load<u32x2>(values + k * value_bytes + value_offset);
    } else {
#pragma unroll
      for (int j = 0; j < Layout::kKeyCopies; ++j)
        key[j] = mem::load<u32x4>(keys + held(Layout::key_of(Layout::copy_row(j)), left) * key_bytes +
                                  Layout::copy_chunk(j) * 16);
      if (Layout::has_unit())
#pragma unroll
        for (int k = 0; k < 8; ++k)
          value[k] = mem::load<u32x2>(values + held(Layout::unit_chunk() * 8 + k, left) * value_bytes +
                                      Layout::unit_row() * 8);
    }
    keys += key_bytes * Layout::kKeys;
    values += value_bytes * Layout::kKeys;
    left -= Layout::kKeys;
  }
  DEVICE void finish(typename Layout::Buffer& to) const {
#pragma unroll
    for (int j = 0; j < Layout::kKeyCopies; ++j)
      to.key[Layout::key_at(Layout::copy_row(j), Layout::copy_chunk(j))] = key[j];
    if (Layout::has_unit()) Layout::write_unit(to, value);
  }
};
