// Products of weight rows, streamed through registers, with tokens in registers, by one wave alone: 16 rows, fp32 accumulation.
// mma.sync (PTX ISA, section 9.7.14.5), whose fp8 form this arch unpacks to fp16 again for every instruction.
#pragma once
#include "sync.h"
#include "wave.h"

namespace mma {

constexpr int kRows = 16;   // weight rows of a wave
constexpr int kWaves = 4;   // of a block, each with rows of its own: a warpgroup
constexpr int kDepth = 64;  // bytes of K of a step: 16 of each row per lane
constexpr int kLoads = 2;   // 16-byte loads of weights per lane and step
constexpr int kRing = 3;    // groups of steps of a wave in registers where each wave has its own

// Lane l holds rows l / 4 and l / 4 + 8, bytes 16 * (l % 4) on. An instruction takes 8 bytes per lane and row, words 0 and 1, or
// 2 and 3; which K they are does not matter as long as weights and tokens agree.
DEVICE int row(int lane, int load) { return lane / 4 + 8 * load; }
DEVICE int depth(int lane) { return lane % 4 * 16; }

struct Weights {
  u32x4 load[kLoads];
};

// One wave alone with the tokens in registers: lane l holds token l / 4 of a tile, bytes 16 * (l % 4) on.
constexpr int kTileTokens = 8;
DEVICE int tile_token(int lane) { return lane / 4; }
template <class Type>
DEVICE f32x4 mma_sync(f32x4 sum, u32 w0, u32 w1, u32 w2, u32 w3, u32 t0, u32 t1);
// clang-format off
#define INSTRUCTION(Type, types)                                                                                       \
  template <> DEVICE f32x4 mma_sync<Type>(f32x4 sum, u32 w0, u32 w1, u32 w2, u32 w3, u32 t0, u32 t1) {                 \
    float a = sum.x, b = sum.y, c = sum.z, d = sum.w;                                                                  \
    asm volatile("mma.sync.aligned.m16n8" types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"      \
                 : "+f"(a), "+f"(b), "+f"(c), "+f"(d) : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(t0), "r"(t1));          \
    return {a, b, c, d};                                                                                               \
  }
INSTRUCTION(E4m3, "k32.row.col.f32.e4m3.e4m3.f32")
INSTRUCTION(Bf16, "k16.row.col.f32.bf16.bf16.f32")
INSTRUCTION(F16, "k16.row.col.f32.f16.f16.f32")
#undef INSTRUCTION
// clang-format on
template <class Type>
DEVICE f32x4 multiply_tile(f32x4 sum, const Weights& weights, u32x4 tokens) {
  const u32x4 low = weights.load[0], high = weights.load[1];
  sum = mma_sync<Type>(sum, low.x, high.x, low.y, high.y, tokens.x, tokens.y);
  return mma_sync<Type>(sum, low.z, high.z, low.w, high.w, tokens.z, tokens.w);
}
// Of which token of the tile and which row value i of a lane is.
DEVICE int value_token(int lane, int i) { return lane % 4 * 2 + i % 2; }
DEVICE int value_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
constexpr int kValueTokens = 2;  // of a lane: that of value i is number i % kValueTokens
// Of a tile, the rows of a lane's values 0 and 1 are in one half, those of values 2 and 3 in the other, with equal places there.
DEVICE int half(int row) { return row / 8; }
DEVICE int half_row(int row) { return row % 8; }

}  // namespace mma
