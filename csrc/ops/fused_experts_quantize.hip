// e4m3 quantisation of rows of bf16 or fp16 between the products of fused_experts, by device/row_output.h: static, per
// token, per block of 128 columns, of which the last of a row may be shorter, or MX.
//
// Bytes per element: 2 + 1. A chunk is 8 neighbouring elements. Per token a block owns a row, and thread t has the chunks t,
// t + threads, ... Otherwise a thread has one chunk, and as many blocks share a row as it has chunks for.
#include "device/row_output.h"

struct Rows {
  const void* x;  // [rows, columns] T, rows `stride` elements apart; 16-byte aligned
  u8* out;        // [rows, columns] e4m3; columns are a multiple of 8
  void* scale;    // per token: [rows]; per block: [rows, ceil(columns / 128)]; mx: u8 [rows, columns / 32]; else null
  const float* static_scale;  // [1], or null
  const int* count;           // [1]: the number of rows, at most that of the grid; or null for all
  i64 stride;
  int columns, threads;
};

template <class T, Output kOutput, int kChunks>
DEVICE void quantize_row(const Rows& p) {
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

// clang-format off
#define INSTANCE(threads, symbol, T, output, chunks) \
  KERNEL(threads) symbol(Rows rows) { quantize_row<T, Output::output, chunks>(rows); }

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
