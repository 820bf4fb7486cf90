// Dequantizes MX weights to bf16.
//
//     out[n, k] = bf16(weight[n, k] * scale[n, k / 32])
//
// A thread converts eight values: it loads 8 bytes of e4m3 or 4 of e2m1, and stores 16.
#include "device/divisor.h"
#include "device/mx_values.h"
#include "device/vec.h"

struct MxProblem {
  const u8* weight;  // [N, K] values, rows weight_row bytes apart
  const u8* scale;   // [N, K / 32], rows scale_row bytes apart
  void* out;         // [N, K]
  i64 weight_row, scale_row;
  int chunks, count;  // chunks of eight values per row, and of all rows
  Divisor chunks_divisor;
};

template <class Value>
DEVICE void dequantize(const MxProblem& p) {
  const u32 index = u32(wave::block_id_x()) * 256 + wave::thread_id();
  if (index >= u32(p.count)) return;
  const int row = index / p.chunks_divisor, chunk = index - row * p.chunks;
  constexpr int kWords = Value::kWords;
  u32 words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    words[i] = mem::load<u32>((const u32*)(p.weight + row * p.weight_row) + chunk * kWords + i);
  const float scale = E8m0Scale::value(mem::load<u8>(p.scale + row * p.scale_row + chunk / 4));
  Chunk x = unpack<Bf16>(Value::to_bf16(words));
#pragma unroll
  for (f32x2& pair : x.pair) pair = pair * (1.0f / Value::kUnit) * scale;
  mem::store((u32x4*)p.out + index, pack<Bf16>(x));
}

#define INSTANCE(symbol, Value) \
  KERNEL(256) symbol(const MxProblem problem) { dequantize<Value>(problem); }

INSTANCE(mx_dequantize_fp8, MxE4m3)
INSTANCE(mx_dequantize_fp4, MxE2m1)
