// The matrix instruction of skinny products: 16 weight rows x 16 tokens, fp8, fp32 accumulation
// (v_mfma_f32_16x16x32_fp8_fp8; CDNA3 ISA, section 7.4 "Dense matrix fused-multiply-add").
#pragma once

namespace mma {

constexpr int kRows = 16;        // weight rows of a tile
constexpr int kTokens = 16;      // tokens of a tile
constexpr int kDepth = 64;       // bytes of K that one 16-byte load per lane covers: two instructions' worth
constexpr int kWeightLoads = 1;  // 16-byte loads of weights per lane, tile and kDepth

// Lane l holds row (or token) l % 16, bytes 16 * (l / 16) on. An instruction takes 8 bytes per lane; which K they are does not
// matter as long as weights and tokens agree.
DEVICE int weight_row(int lane, int /*load*/) { return lane % 16; }
DEVICE int token(int lane) { return lane % 16; }
DEVICE int depth(int lane) { return lane / 16 * 16; }

struct Weights {
  u32x4 load[kWeightLoads];
};

struct Accumulator {
  f32x4 sum;  // lane l: token l % 16, weight rows 4 * (l / 16) + i
  DEVICE static int row(int lane, int i) { return lane / 16 * 4 + i; }
  DEVICE static int token(int lane, int /*i*/) { return lane % 16; }
};

DEVICE void multiply_add(Accumulator& accumulator, const Weights& weights, u32x4 tokens) {
  using Halves = i64 __attribute__((ext_vector_type(2)));
  Halves w = __builtin_bit_cast(Halves, weights.load[0]), t = __builtin_bit_cast(Halves, tokens);
  i64 w0 = w.x, w1 = w.y, t0 = t.x, t1 = t.y;
  accumulator.sum = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w0, t0, accumulator.sum, 0, 0, 0);
  accumulator.sum = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w1, t1, accumulator.sum, 0, 0, 0);
}

}  // namespace mma
