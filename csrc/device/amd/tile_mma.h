// The matrix instruction of tiled products on a patch of 16 tokens x 32 weight rows, 128 bytes of K at a time: fp8, fp32
// accumulation (v_mfma_f32_16x16x32_fp8_fp8, CDNA3 ISA, section 7; v_mfma_f32_16x16x128_f8f6f4 with unit scales, CDNA4 ISA,
// section 7: twice the rate of the former).
#pragma once

namespace tile {

constexpr int kDies = 8;  // XCDs, among which the hardware deals a launch's blocks in turn

constexpr int kLoadRows = 16;   // rows that one 16-byte load per lane covers, 64 bytes of each
constexpr int kLaneTokens = 1;  // tokens of a patch that a lane has sums of

// Lane l reads row l % 16 at chunk l / 16 of each half of K. Which K the hardware takes these bytes for does not matter as
// long as tokens and weights agree.
DEVICE int load_row(int lane) { return lane % 16; }
DEVICE int load_chunk(int lane) { return lane / 16; }

// The swizzle of LDS rows of 8 chunks: chunk c of row r lies at c ^ swizzle(r).
#if defined(__gfx942__)
// 32 banks are one row. The 8 lanes served together by ds_write_b128 are one row, by ds_read_b128 eight rows, half of them a
// chunk on (composable_kernel, "Understanding AMD GPU LDS and Bank Conflicts").
DEVICE int swizzle(int row) { return row % 8; }
#else
// 64 banks are two rows. The 16 lanes served together are 16 rows at one chunk, or as HipKittens found (analysis/
// paper_experiments/phases) rows 0-3 and 12-15 at one and 4-11 at its neighbour: no conflict either way.
DEVICE int swizzle(int row) { return row / 2 % 8; }
#endif

struct Tokens {
  u32x4 chunk[1][2];  // [rows / kLoadRows][half of K]
};
struct Weights {
  u32x4 chunk[2][2];
};
// Lane l has the sums of token l % 16 and the 8 weight rows from 8 * (l / 16) on.
struct Patch {
  f32x4 sum[2];
  DEVICE float get(int /*token*/, int row) const { return sum[row / 4][row % 4]; }
};
DEVICE int patch_token(int lane, int /*token*/) { return lane % 16; }
DEVICE int patch_row(int lane) { return lane / 16 * 8; }

// So that these 8 are neighbours, LDS row r of each 32 holds this weight row: the instruction gives lane l rows 4 * (l / 16) on
// of each half.
DEVICE int weight_row(int row) { return row % 16 / 4 * 8 + row / 16 * 4 + row % 4; }

DEVICE void multiply_add(Patch& patch, const Tokens& tokens, const Weights& weights) {
#if defined(__gfx942__)
  using Halves = i64 __attribute__((ext_vector_type(2)));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Halves t = __builtin_bit_cast(Halves, tokens.chunk[0][half]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Halves w = __builtin_bit_cast(Halves, weights.chunk[row][half]);
        patch.sum[row] = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w[i], t[i], patch.sum[row], 0, 0, 0);
      }
    }
  }
#else
  using Operand = int __attribute__((ext_vector_type(8)));
  const auto operand = [](const u32x4(&chunk)[2]) __attribute__((always_inline)) {
    return __builtin_bit_cast(Operand, __builtin_shufflevector(chunk[0], chunk[1], 0, 1, 2, 3, 4, 5, 6, 7));
  };
#pragma unroll
  for (int row = 0; row < 2; ++row)
    patch.sum[row] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
        operand(weights.chunk[row]), operand(tokens.chunk[0]), patch.sum[row], /*e4m3*/ 0, /*e4m3*/ 0, 0, 0, 0, 0);
#endif
}
DEVICE void add_scaled(Patch& patch, const Patch& other, const float (&scale)[kLaneTokens]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) patch.sum[row] += other.sum[row] * scale[0];
}

}  // namespace tile
