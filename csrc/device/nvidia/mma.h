// Products of weight rows, streamed through registers, with tokens that lie in LDS: 16 rows per wave, fp32 accumulation.
// wgmma.mma_async of the four warps of a block with A in registers (PTX ISA, section 9.7.15 "Asynchronous warpgroup level
// matrix instructions"); and of one warp alone with both in registers, mma.sync (section 9.7.14.5), whose fp8 form this arch
// unpacks to fp16 again for every instruction.
#pragma once
#include "sync.h"
#include "wave.h"

namespace mma {

constexpr int kRows = 16;               // weight rows of a wave
constexpr int kWaves = 4;               // of a block, each with rows of its own: a warpgroup
constexpr int kDepth = 64;              // bytes of K of a step: 16 of each row per lane
constexpr int kLoads = 2;               // 16-byte loads of weights per lane and step
constexpr int kChunkBytes = 16 * 1024;  // the most that LDS gives a chunk of tokens
constexpr int kMaxPieces = 8;           // of a chunk that a lane brings
constexpr int kRing = 3;                // groups of steps of a wave in registers where each wave has its own

// Lane l holds rows l / 4 and l / 4 + 8, bytes 16 * (l % 4) on. An instruction takes 8 bytes per lane and row, words 0 and 1, or
// 2 and 3; which K they are does not matter as long as weights and tokens agree.
DEVICE int row(int lane, int load) { return lane / 4 + 8 * load; }
DEVICE int depth(int lane) { return lane % 4 * 16; }

struct Weights {
  u32x4 load[kLoads];
};

// Tokens of a step in LDS: [4 words of a lane's 16 bytes][kTokens][4 lanes][4], K-major core matrices of 8 tokens x 16 bytes
// without swizzle, so that word w of a lane meets word w of its weights.
struct Piece {  // 16 bytes of one token
  int token, depth;
};
DEVICE Piece piece(int index) { return {index / 4, index % 4 * 16}; }
template <int kTokens>
DEVICE void store_piece(u8* step, int index, u32x4 bytes) {
  u32* word = (u32*)step + index;
  word[0] = bytes.x, word[kTokens * 4] = bytes.y, word[kTokens * 8] = bytes.z, word[kTokens * 12] = bytes.w;
}
// To the matrix units, which read LDS by another path, before the barrier. Not by waves that stream: it waits for their loads.
DEVICE void show_pieces() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kTokens>
struct Accumulator {
  static constexpr int kLaneTokens = kTokens / 4, kLaneRows = 2;
  f32x4 sum[kTokens / 8];  // [kTokens / 8][kLaneRows][2 tokens]
  DEVICE float at(int token, int row) const { return sum[token / 2][row * 2 + token % 2]; }
  // Adds sums times the scale of their token, out of LDS, and of the weight.
  DEVICE void add_scaled(const Accumulator& unit, const float* scales, float scale) {
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      f32x2 of = *(const f32x2*)(scales + token(wave::lane(), i * 2)) * scale;
      sum[i] += unit.sum[i] * f32x4{of.x, of.y, of.x, of.y};
    }
  }
  DEVICE static int token(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  DEVICE static int row(int lane, int i) { return lane / 4 + i * 8; }
};

template <class Type, int kValues>
DEVICE void wgmma(float (&sum)[kValues], u32 w0, u32 w1, u32 w2, u32 w3, i64 descriptor);

// clang-format off
#define SUMS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA(n, sums, a0, a1, a2, a3, tokens, types, transpose, ...)                                                  \
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n types " {" sums "}, {%" #a0 \
               ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #tokens ", p, 1, 1" transpose ";}"                                 \
               : __VA_ARGS__ : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "l"(descriptor))
#define SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_32 SUMS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_64 SUMS_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define INSTRUCTIONS(Type, types, transpose)                                                                          \
  template <> DEVICE void wgmma<Type, 8>(float (&d)[8], u32 w0, u32 w1, u32 w2, u32 w3, i64 descriptor) { \
    WGMMA(16, SUMS_16, 8, 9, 10, 11, 12, types, transpose, SUMS_8(0));                                                \
  }                                                                                                                   \
  template <> DEVICE void wgmma<Type, 16>(float (&d)[16], u32 w0, u32 w1, u32 w2, u32 w3, i64 descriptor) { \
    WGMMA(32, SUMS_32, 16, 17, 18, 19, 20, types, transpose, SUMS_8(0), SUMS_8(8));                                   \
  }                                                                                                                   \
  template <> DEVICE void wgmma<Type, 32>(float (&d)[32], u32 w0, u32 w1, u32 w2, u32 w3, i64 descriptor) { \
    WGMMA(64, SUMS_64, 32, 33, 34, 35, 36, types, transpose, SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24));           \
  }
INSTRUCTIONS(E4m3, "k32.f32.e4m3.e4m3", "")
INSTRUCTIONS(Bf16, "k16.f32.bf16.bf16", ", 0")
INSTRUCTIONS(F16, "k16.f32.f16.f16", ", 0")
#undef INSTRUCTIONS
#undef SUMS_64
#undef SUMS_32
#undef SUMS_16
#undef WGMMA
#undef SUMS_8
// clang-format on

// Where the matrix units find 32 bytes of each token: address, then the distances between core matrices along K and along
// the tokens, all in 16 bytes (PTX ISA, section 9.7.15.5.1 "Matrix descriptor").
template <int kTokens>
DEVICE i64 descriptor(const u8* tokens) {
  using Address = const __attribute__((address_space(3))) u8*;
  const u32 address = u32(i64((Address)tokens));
  return i64(address >> 4) | i64(kTokens) << 16 | i64(8) << 32;
}

// Weights as an instruction wants them, in registers in a row. Without an operation that the assembler cannot see through, it
// copies them there as soon as they are loaded, which waits for the load: the ring would have nothing in flight.
DEVICE u32 settle(u32 word) {
  u32 settled;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(settled) : "r"(word), "r"(__nvvm_read_ptx_sreg_ctaid_z()));  // 0
  return settled;
}

// Adds the product of the wave's rows and a step's tokens. All waves that multiply call it together.
template <class Type, int kTokens>
DEVICE void multiply_add(Accumulator<kTokens>& sum, const Weights& weights, const u8* step) {
  const u32x4 low = weights.load[0], high = weights.load[1];
  float (&values)[kTokens / 2] = *(float (*)[kTokens / 2]) & sum;
  const u32 w0 = settle(low.x), w1 = settle(high.x), w2 = settle(low.y), w3 = settle(high.y);
  const u32 w4 = settle(low.z), w5 = settle(high.z), w6 = settle(low.w), w7 = settle(high.w);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  wgmma<Type>(values, w0, w1, w2, w3, descriptor<kTokens>(step));
  wgmma<Type>(values, w4, w5, w6, w7, descriptor<kTokens>(step + kTokens * 32));
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}

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
