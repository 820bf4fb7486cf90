// The matrix instruction of skinny products: 16 weight rows x 8 tokens, fp8, fp32 accumulation
// (mma.sync.m16n8k32; PTX ISA, section 9.7.14.5 "Matrix fragments for mma.m16n8k32").
#pragma once

namespace mma {

constexpr int kRows = 16;        // weight rows of a tile
constexpr int kTokens = 8;       // tokens of a tile
constexpr int kDepth = 64;       // bytes of K that one 16-byte load per lane covers: two instructions' worth
constexpr int kWeightLoads = 2;  // 16-byte loads of weights per lane, tile and kDepth

// Lane l holds rows l / 4 and l / 4 + 8 (or token l / 4), bytes 16 * (l % 4) on. An instruction takes 8 bytes per lane and
// row; which K they are does not matter as long as weights and tokens agree.
DEVICE int weight_row(int lane, int load) { return lane / 4 + 8 * load; }
DEVICE int token(int lane) { return lane / 4; }
DEVICE int depth(int lane) { return lane % 4 * 16; }

struct Weights {
  u32x4 load[kWeightLoads];
};

struct Accumulator {
  f32x4 sum;  // lane l: weight rows l / 4 and l / 4 + 8, tokens 2 * (l % 4) and the next
  DEVICE static int row(int lane, int i) { return lane / 4 + i / 2 * 8; }
  DEVICE static int token(int lane, int i) { return lane % 4 * 2 + i % 2; }
};

DEVICE void multiply_add_half(f32x4& sum, u32 w0, u32 w1, u32 w2, u32 w3, u32 t0, u32 t1) {
  float a = sum.x, b = sum.y, c = sum.z, d = sum.w;
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(a), "+f"(b), "+f"(c), "+f"(d)
      : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(t0), "r"(t1));
  sum = f32x4{a, b, c, d};
}
DEVICE void multiply_add(Accumulator& accumulator, const Weights& weights, u32x4 tokens) {
  u32x4 low = weights.load[0], high = weights.load[1];
  multiply_add_half(accumulator.sum, low.x, high.x, low.y, high.y, tokens.x, tokens.y);
  multiply_add_half(accumulator.sum, low.z, high.z, low.w, high.w, tokens.z, tokens.w);
}

}  // namespace mma
