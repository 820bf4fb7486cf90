// Dequantizes 4-bit values, with a scale and a shift per group of a row, to 16 bits.
//
//     out[r, g, d] = T(q[r, g, d] * scale[r, g] + shift[r, g])
//
// A row is the groups' fp16 pairs (scale, shift), followed by eight values per word, the first in the lowest bits. A
// thread converts one word: it loads 8 bytes and stores 16.
#include "device/divisor.h"
#include "device/vec.h"

struct Int4Problem {
  const u32* quantized;  // [rows, groups + words], rows `stride` words apart
  void* out;             // [rows, 8 * words]
  i64 stride;
  int words, groups, count;  // words and groups per row; words in all rows
  Divisor words_divisor, group_divisor;
};

template <class T>
DEVICE void dequantize(const Int4Problem& p) {
  const u32 index = u32(wave::block_id_x()) * 256 + wave::thread_id();
  if (index >= u32(p.count)) return;
  const int row = index / p.words_divisor, word = index - row * p.words, group = u32(word) / p.group_divisor;
  const u32* from = p.quantized + row * p.stride;
  const f32x2 pair = F16::unpack(mem::load<u32>(from + group));  // scale and shift
  const u32 values = mem::load<u32>(from + p.groups + word);
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float low = values >> 8 * i & 15, high = values >> (8 * i + 4) & 15;
    chunk.pair[i] = {__builtin_fmaf(low, pair.x, pair.y), __builtin_fmaf(high, pair.x, pair.y)};
  }
  mem::store((u32x4*)p.out + index, pack<T>(chunk));
}

#define INSTANCE(symbol, T) \
  KERNEL(256) symbol(const Int4Problem problem) { dequantize<T>(problem); }

INSTANCE(dequantize_int4_bf16, Bf16)
INSTANCE(dequantize_int4_fp16, F16)
