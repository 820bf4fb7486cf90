// Gated activations on [gate | up] rows: y = activation(gate, up), which row_output.h stores or quantizes.
//
// Without a row-wide maximum, several blocks share a row, as its chunk count requires. The per-token output assigns one
// block per row, which keeps y in registers across its one barrier. Thread t processes the 8-element chunks t, t +
// threads, ... of its block's columns.
#pragma once
#include "divisor.h"
#include "row_output.h"

template <class T, Output kOutput>
using GatedOutput = RowOutput<T, kOutput,
                              kOutput == Output::kMx         ? ScaleBound::kNone
                              : kOutput == Output::kPerBlock ? ScaleBound::kScale
                                                             : ScaleBound::kAbsmax>;

struct GatedRow {
  const void* gate;  // [hidden] T
  const void* up;    // [hidden] T
  int hidden;

  DEVICE int at(int element) const { return element; }  // in gate
};

struct GatedHeads {
  const void* gate;  // [hidden / head_size, head_size] T, heads head_stride elements apart
  const void* up;    // [hidden] T
  int hidden, head_size, head_stride;
  Divisor head_divisor;  // by head_size

  DEVICE int at(int element) const {
    const int head = u32(element) / head_divisor;
    return element + head * (head_stride - head_size);
  }
};

// True if an activation loads something per row. The threads of the block call it once, after the row's own loads.
template <class Activation>
constexpr bool kLoadsMore = requires(Activation activation) { activation.load(0); };

// hidden is a multiple of 8; gate, up and out are 16-byte aligned. The block processes the chunks from `first` on,
// kChunks per thread.
template <class T, Output kOutput, int kChunks, class Row, class Activation>
DEVICE void gated_vector(Row row, int first, Activation activation, GatedOutput<T, kOutput> output) {
  RowChunks<kChunks, Chunk> chunks;
  u32x4 gate[kChunks], up[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks.index[i] = first + wave::thread_id() + i * output.threads;
    chunks.in_bounds[i] = chunks.index[i] * kChunk < row.hidden;
    gate[i] = mem::load_vector_or_zero(row.gate, row.at(chunks.index[i] * kChunk) / kChunk, chunks.in_bounds[i]);
    up[i] = mem::load_vector_or_zero(row.up, chunks.index[i], chunks.in_bounds[i]);
  }
  if constexpr (kLoadsMore<Activation>) activation.load(output.threads);
  output.locate(row.hidden);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const Chunk g = unpack<T>(gate[i]);
    chunks.y[i] = unpack<T>(up[i]);
    for (int j = 0; j < kChunk / 2; ++j) chunks.y[i].pair[j] = activation(g.pair[j], chunks.y[i].pair[j]);
    output.store(chunks.index[i], chunks.in_bounds[i], chunks.y[i]);
  }
  output.finish(chunks);
}

// Any hidden size and alignment: one block per row, one element per access.
template <class T, Output kOutput, class Row, class Activation>
DEVICE void gated_general(Row row, Activation activation, GatedOutput<T, kOutput> output) {
  if constexpr (kLoadsMore<Activation>) activation.load(output.threads);
  output.locate(row.hidden);
  output.store_elements(row.hidden, [&](int column) {
    return activation(load_element<T>(row.gate, row.at(column)), load_element<T>(row.up, column));
  });
}

// kChunks == 0 is the general kernel.
template <class T, Output kOutput, int kChunks, class Row, class Activation>
DEVICE void gated_row(Row row, int threads, void* out, const float* scale, float* scale_out, i64 scale_row_stride,
                      i64 scale_stride, int group_size, Activation activation) {
  const GatedOutput<T, kOutput> output(scale, out, scale_out, scale_row_stride, scale_stride, group_size, threads);
  mem::issue_loads();
  if constexpr (kChunks == 0) gated_general<T, kOutput>(row, activation, output);
  else gated_vector<T, kOutput, kChunks>(row, wave::block_id_y() * threads * kChunks, activation, output);
}

DEVICE GatedRow gated_row_of(const void* input, i64 input_stride, int hidden) {
  const u16* gate = (const u16*)input + i64(u32(wave::block_id_x())) * input_stride;
  return {gate, gate + hidden, hidden};
}

// clang-format off
// Defines a kernel. Additional parameters, if any, come last, followed by the activation.
#define GATED_ROWS(threads, symbol, T, output, chunks, more, ...)                                                     \
  KERNEL(threads) symbol(                                                                                             \
      const void* input,      /* [rows, 2 * hidden] T, rows input_stride elements apart */                            \
      i64 input_stride, int hidden, int threads_per_block,                                                            \
      void* out,              /* [rows, hidden] T or e4m3 */                                                          \
      const float* scale,     /* [1]: the static scale, or for dynamic outputs scale_ub or null */                    \
      float* scale_out,       /* [rows, 1] or [rows, hidden / group_size], strided; null if unused */                 \
      i64 scale_row_stride, i64 scale_stride, int group_size more) {                                                  \
    gated_row<T, Output::output, chunks>(gated_row_of(input, input_stride, hidden), threads_per_block, out, scale,    \
        scale_out, scale_row_stride, scale_stride, group_size, __VA_ARGS__);                                          \
  }
// Instances for one element type: INSTANCE(threads, symbol, T, output, chunks).
#define GATED_INSTANCES(INSTANCE, name, type, T)                             \
  INSTANCE(1024, name##_##type##_x1, T, kPlain, 1)                           \
  INSTANCE(1024, name##_##type##_general, T, kPlain, 0)                      \
  GATED_QUANT_INSTANCES(INSTANCE, name, type, T)
#define GATED_QUANT_INSTANCES(INSTANCE, name, type, T)                       \
  INSTANCE(1024, name##_quant_##type##_x1, T, kStatic, 1)                    \
  INSTANCE(1024, name##_quant_##type##_general, T, kStatic, 0)               \
  INSTANCE(1024, name##_per_token_quant_##type##_x1, T, kPerToken, 1)        \
  INSTANCE(1024, name##_per_token_quant_##type##_x2, T, kPerToken, 2)        \
  INSTANCE( 512, name##_per_token_quant_##type##_x4, T, kPerToken, 4)        \
  INSTANCE( 512, name##_per_token_quant_##type##_x8, T, kPerToken, 8)        \
  INSTANCE(1024, name##_per_token_quant_##type##_general, T, kPerToken, 0)   \
  INSTANCE(1024, name##_per_block_quant_##type##_x1, T, kPerBlock, 1)        \
  INSTANCE(1024, name##_per_block_quant_##type##_general, T, kPerBlock, 0)   \
  INSTANCE(1024, name##_mxfp8_quant_##type##_x1, T, kMx, 1)                  \
  INSTANCE(1024, name##_mxfp8_quant_##type##_general, T, kMx, 0)
// clang-format on
