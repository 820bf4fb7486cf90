// SwiGLU of a shared expert whose result its gate multiplies (Qwen2-MoE, Qwen3-Next, Qwen3.5), with optional fused
// quantization.
//
//     y[m] = silu(gate[m]) * up[m] * sigmoid(tokens[m] . expert_gate), which device/row_output.h stores or quantizes
//
// vLLM multiplies the result of the down projection, which has no bias: scaling its input is the same product. So the
// gate needs neither a GEMM nor a launch after the projection. Each block computes it, from loads that are in flight
// together with its row's. Everything is fp32 up to a single rounding to T; dynamic outputs do not round.
//
// Bytes: per element 4 (gate and up) + 1 or 2 (out), and per block 4 * token_columns, the weight's half from a cache.
#include "device/gated_row.h"
#include "device/sigmoid.h"

template <class T, Output kOutput>
struct GatedByToken {
  static constexpr int kAtOnce = 4;  // loads in flight, of both operands
  const void* token;                 // [columns] T
  const void* weight;                // [columns] T
  int columns;                       // a multiple of 8
  float factor = 0.0f;

  DEVICE void load(int threads) {
    LDS static float partials[kMaxWaves];
    f32x2 sum = {};
#pragma unroll 1
    for (int first = wave::thread_id(); first * kChunk < columns; first += kAtOnce * threads) {
      u32x4 x[kAtOnce], w[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = first + i * threads;
        const bool in_bounds = index * kChunk < columns;
        x[i] = mem::load_vector_or_zero(token, index, in_bounds);
        w[i] = mem::load_vector_or_zero(weight, index, in_bounds);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Chunk a = unpack<T>(x[i]), b = unpack<T>(w[i]);
        for (int j = 0; j < kChunk / 2; ++j) sum += a.pair[j] * b.pair[j];
      }
    }
    factor = sigmoid(reduce_block(sum.x + sum.y, 0.0f, partials, threads / wave::kLanes, Add{}));
  }
  DEVICE float operator()(float gate, float up) const {
    const float y = silu(gate) * up * factor;
    return kOutput == Output::kStatic ? round_to<T>(y) : y;
  }
  DEVICE f32x2 operator()(f32x2 gate, f32x2 up) const { return {(*this)(gate.x, up.x), (*this)(gate.y, up.y)}; }
};

// clang-format off
#define TOKENS , const void* tokens, i64 tokens_stride, const void* expert_gate, int token_columns
#define INSTANCE(threads, symbol, T, output, chunks)                                                        \
  GATED_ROWS(threads, symbol, T, output, chunks, TOKENS,                                                    \
             GatedByToken<T, Output::output>{(const u16*)tokens + i64(u32(wave::block_id_x())) * tokens_stride, \
                                             expert_gate, token_columns})
// clang-format on

GATED_INSTANCES(INSTANCE, silu_and_mul_with_expert_gate, bf16, Bf16)
GATED_INSTANCES(INSTANCE, silu_and_mul_with_expert_gate, fp16, F16)
