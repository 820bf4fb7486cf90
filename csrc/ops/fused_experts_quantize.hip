// Quantizes bf16 or fp16 rows between the GEMMs of fused_experts. To e4m3 with device/row_output.h: static, per token,
// per 128-column block (a row's last block may be shorter), or MX. To int8, static or per token:
//
//     scale = max(absmax(x), 1e-10) / 127;  out = int8(x / scale), to nearest even, from -127 to 127; NaN becomes 127
//
// Bytes per element: 2 + 1. A chunk is 8 consecutive elements. Per token, a block owns a row, and thread t processes
// the chunks t, t + threads, ... Otherwise a thread processes one chunk, and several blocks share a row, as its chunk
// count requires.
#include "device/row_output.h"

struct QuantizeProblem {
  const void* x;  // [rows, columns] T, rows `stride` elements apart; 16-byte aligned
  u8* out;        // [rows, columns] e4m3; columns are a multiple of 8
  void* scale;    // per token: [rows]; per block: [rows, ceil(columns / 128)]; mx: u8 [rows, columns / 32]; else null
  const float* static_scale;  // [1], or null
  const int* count;           // [1]: the number of rows, at most the grid's; or null for all
  i64 stride;
  int columns, threads;
};

template <class T, Output kOutput, int kChunks>
DEVICE void quantize_row(const QuantizeProblem& p) {
  constexpr int kGroupSize = kOutput == Output::kMx ? kMxGroup : 128;
  const int row = wave::block_id_x();
  if (p.count && row >= mem::load<int>(p.count)) return;
  const u16* x = (const u16*)p.x + row * p.stride;
  const u32 groups = kOutput == Output::kPerToken ? 1 : (p.columns + kGroupSize - 1) / kGroupSize;
  RowOutput<T, kOutput, ScaleBound::kNone, kGroupSize> output(p.static_scale, p.out, (float*)p.scale, groups, 1,
                                                              kGroupSize, p.threads);
  const int first = wave::block_id_y() * p.threads * kChunks + wave::thread_id();
  RowChunks<kChunks, u32x4> chunks;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks.index[i] = first + i * p.threads;
    chunks.in_bounds[i] = chunks.index[i] * kChunk < p.columns;
    chunks.y[i] = mem::load_vector_or_zero(x, chunks.index[i], chunks.in_bounds[i]);
  }
  output.locate(u32(p.columns));
#pragma unroll
  for (int i = 0; i < kChunks; ++i) output.store(chunks.index[i], chunks.in_bounds[i], chunks.y[i]);
  output.finish(chunks);
}

// Converts four numbers to int8.
DEVICE u32 to_int8x4(f32x2 low, f32x2 high) {
  const float x[4] = {low.x, low.y, high.x, high.y};
  u32 packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float clamped = __builtin_fmaxf(__builtin_fminf(x[i], 127.0f), -127.0f);
    packed |= (u32(int(__builtin_rintf(clamped))) & 0xff) << i * 8;
  }
  return packed;
}

// A block owns a row, and computes its scale if kDynamic; thread t processes the chunks t, t + threads, ...
template <class T, bool kDynamic>
DEVICE void quantize_row_to_int8(const QuantizeProblem& p) {
  constexpr int kChunks = 4;
  const int row = wave::block_id_x();
  if (p.count && row >= mem::load<int>(p.count)) return;
  const u16* x = (const u16*)p.x + row * p.stride;
  u8* out = p.out + i64(row) * p.columns;
  Chunk chunks[kChunks];
  float absmax = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int index = wave::thread_id() + i * p.threads;
    chunks[i] = unpack<T>(mem::load_vector_or_zero(x, index, index * kChunk < p.columns));
    absmax = max_abs(absmax, chunks[i]);
  }
  float scale;
  if constexpr (kDynamic) {
    LDS static float maxima[kMaxWaves];
    absmax = reduce_block(absmax, 0.0f, maxima, p.threads / wave::kLanes, Max{});
    scale = divide(__builtin_fmaxf(absmax, 1e-10f), 127.0f, 1.0f / 127.0f);
    if (wave::thread_id() == 0) mem::store((float*)p.scale + row, scale);
  } else {
    scale = mem::load<float>(p.static_scale);
  }
  const Scale divisor(scale);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int index = wave::thread_id() + i * p.threads;
    f32x2 q[kChunk / 2];
    for (int j = 0; j < kChunk / 2; ++j) q[j] = divide(chunks[i].pair[j], divisor.value, divisor.inverse);
    if (index * kChunk < p.columns)
      mem::store((u32x2*)out + index, u32x2{to_int8x4(q[0], q[1]), to_int8x4(q[2], q[3])});
  }
}

// clang-format off
#define INT8_INSTANCE(symbol, T, dynamic) \
  KERNEL(1024) symbol(QuantizeProblem problem) { quantize_row_to_int8<T, dynamic>(problem); }

INT8_INSTANCE(fused_experts_quantize_int8_token_bf16,  Bf16, true)
INT8_INSTANCE(fused_experts_quantize_int8_token_fp16,  F16,  true)
INT8_INSTANCE(fused_experts_quantize_int8_static_bf16, Bf16, false)
INT8_INSTANCE(fused_experts_quantize_int8_static_fp16, F16,  false)

#define INSTANCE(threads, symbol, T, output, chunks) \
  KERNEL(threads) symbol(QuantizeProblem problem) { quantize_row<T, Output::output, chunks>(problem); }

INSTANCE( 256, fused_experts_quantize_static_bf16, Bf16, kStatic,   1)
INSTANCE( 256, fused_experts_quantize_static_fp16, F16,  kStatic,   1)
INSTANCE( 256, fused_experts_quantize_block_bf16,  Bf16, kPerBlock, 1)
INSTANCE( 256, fused_experts_quantize_block_fp16,  F16,  kPerBlock, 1)
INSTANCE(1024, fused_experts_quantize_token_bf16,  Bf16, kPerToken, 4)
INSTANCE(1024, fused_experts_quantize_token_fp16,  F16,  kPerToken, 4)
#ifdef HAS_BLOCK_SCALED_MMA
INSTANCE( 256, fused_experts_quantize_mx_bf16,     Bf16, kMx,       1)
INSTANCE( 256, fused_experts_quantize_mx_fp16,     F16,  kMx,       1)
#endif
// clang-format on
