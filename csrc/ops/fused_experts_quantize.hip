// e4m3 quantisation of rows of bf16 or fp16 between the products of fused_experts.
//
//     static:    out = e4m3(x * (1 / static_scale))
//     per token: scale[row] = max(absmax(x) / 448, min_scale);  out = e4m3(x / scale[row])
//     per block: the same for each run of 128 columns, the last of which may be shorter
//     mx:        out = e4m3(x * 2^(127 - s)), s = scale[row, run] for each run of 32 columns the least for which absmax(x) comes to
//                at most 448, up to 254
//
// Bytes per element: 2 + 1. A thread owns chunks of 8 neighbouring elements: one, with as many blocks to a row as it has
// chunks for; or per token, whose maximum a block finds alone, thread t the chunks t, t + threads, ... of a row.
#include "device/float8.h"
#include "device/reduce.h"

enum class Kind { kStatic, kToken, kBlock, kMx };

struct Rows {
  const void* x;  // [rows, columns] T, rows `stride` elements apart; 16-byte aligned
  u8* out;        // [rows, columns] e4m3; columns are a multiple of 8
  void* scale;    // per token: [rows]; per block: [rows, ceil(columns / 128)]; mx: u8 [rows, columns / 32]; else null
  const float* static_scale;  // [1], or null
  const int* count;           // [1]: rows that there are, of those that the grid is for; or null
  i64 stride;
  int columns, threads;
};

// The exponent of absmax / 448, rounded up, as an e8m0 scale has it: 448 is 1.75 * 2^8.
DEVICE u32 absmax_to_e8m0(float absmax) {
  constexpr u32 kMantissa = 23, kOver = (1 << kMantissa) / 4 - 1;  // to be added to a mantissa above 0.75 to overflow
  const u32 exponent = (__builtin_bit_cast(u32, absmax) + kOver) >> kMantissa;
  return exponent > 8 ? exponent - 8 : 0;
}

template <class T, Kind kKind, int kChunks>
DEVICE void quantize_row(const Rows& p) {
  const int row = wave::block_id_x();
  if (p.count && row >= mem::load<int>(p.count)) return;
  const u16* x = (const u16*)p.x + row * p.stride;
  u8* out = p.out + i64(row) * p.columns;
  const int first = wave::block_id_y() * p.threads * kChunks + wave::thread_id();
  auto in_bounds = [&](int i) __attribute__((always_inline)) { return (first + i * p.threads) * kChunk < p.columns; };
  Chunk chunk[kChunks];
  float absmax = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunk[i] = {};
    if (in_bounds(i)) chunk[i] = unpack<T>(mem::load<u32x4>((const u32x4*)x + first + i * p.threads));
    absmax = max_abs(absmax, chunk[i]);
  }
  auto store = [&](int i, auto scale) __attribute__((always_inline)) {
    if (in_bounds(i)) mem::store((u32x2*)out + first + i * p.threads, quantize(chunk[i], scale));
  };
  if constexpr (kKind == Kind::kStatic) {
    static_assert(kChunks == 1);
    store(0, 1.0f / mem::load<float>(p.static_scale));
  } else if constexpr (kKind == Kind::kMx) {
    static_assert(kChunks == 1 && numerics::kE4m3Max == 448.0f);
    constexpr int kLanes = 32 / kChunk;  // of a run of columns
    const u32 scale = absmax_to_e8m0(wave::reduce_group<kLanes>(absmax, 0.0f, Max{}));
    store(0, __builtin_bit_cast(float, (254 - scale) << 23));
    const int runs = p.columns / 32;
    if (in_bounds(0) && first % kLanes == 0) mem::store((u8*)p.scale + i64(row) * runs + first / kLanes, u8(scale));
  } else if constexpr (kKind == Kind::kBlock) {
    static_assert(kChunks == 1);
    constexpr int kLanes = 128 / kChunk;  // of a run of columns
    const float scale = absmax_to_scale(wave::reduce_group<kLanes>(absmax, 0.0f, Max{}));
    store(0, Scale(scale));
    const int runs = (p.columns + 127) / 128;
    if (in_bounds(0) && first % kLanes == 0) mem::store((float*)p.scale + i64(row) * runs + first / kLanes, scale);
  } else {
    LDS static float maxima[kMaxWaves];
    const float scale = absmax_to_scale(reduce_block(absmax, 0.0f, maxima, p.threads / wave::kLanes, Max{}));
    if (wave::thread_id() == 0) mem::store((float*)p.scale + row, scale);
    const Scale divisor(scale);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) store(i, divisor);
  }
}

// clang-format off
#define INSTANCE(threads, symbol, T, kind, chunks) \
  KERNEL(threads) symbol(Rows rows) { quantize_row<T, Kind::kind, chunks>(rows); }

INSTANCE( 256, fused_experts_quantize_static_bf16, Bf16, kStatic, 1)
INSTANCE( 256, fused_experts_quantize_static_fp16, F16,  kStatic, 1)
INSTANCE( 256, fused_experts_quantize_block_bf16,  Bf16, kBlock,  1)
INSTANCE( 256, fused_experts_quantize_block_fp16,  F16,  kBlock,  1)
INSTANCE(1024, fused_experts_quantize_token_bf16,  Bf16, kToken,  4)
INSTANCE(1024, fused_experts_quantize_token_fp16,  F16,  kToken,  4)
#ifdef HAS_BLOCK_SCALED_MMA
INSTANCE( 256, fused_experts_quantize_mx_bf16,     Bf16, kMx,     1)
INSTANCE( 256, fused_experts_quantize_mx_fp16,     F16,  kMx,     1)
#endif
// clang-format on
