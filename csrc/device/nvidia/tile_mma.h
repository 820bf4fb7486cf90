// Products of panels of tokens and of weight rows, 128 bytes of K, fp8, bf16 or fp16, fp32 accumulation, by four waves together,
// which read both out of LDS (wgmma.mma_async.m64nN; PTX ISA, section 9.7.15 "Asynchronous warpgroup level matrix instructions").
#pragma once
#include "../panel.h"

namespace tile {

constexpr int kDies = 1;          // among which the hardware deals a launch's blocks in turn
constexpr int kWaveTokens = 16;   // of the tile that a wave multiplies, next to those of three others
constexpr int kPatchTokens = 16;  // Patch
constexpr int kPatchRows = 32;
constexpr int kLaneTokens = 2;  // that a lane has sums of

// Lane l has the sums of tokens l / 4 and l / 4 + 8 and of 8 weight rows, from 8 * (l % 4) on.
struct Patch {
  f32x4 sum[4];
  DEVICE float get(int token, int row) const { return sum[row / 2][token * 2 + row % 2]; }
};
DEVICE int patch_token(int lane, int token) { return lane / 4 + token * 8; }
DEVICE int patch_row(int lane) { return lane % 4 * 8; }
// So that these 8 are neighbours, this weight row is row `row` of each 32 of a panel: an instruction gives lane l the sums of
// 2 rows of each 8, from 2 * (l % 4) on.
DEVICE int weight_row(int row) { return row % 8 / 2 * 8 + row / 8 * 2 + row % 2; }

// clang-format off
#define SUMS_16(i)                                                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),         \
  "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]), "+f"(d[i + 13]), \
  "+f"(d[i + 14]), "+f"(d[i + 15])
#define SUMS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "\
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "\
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// d += or, if not `add`, = a product of 32 bytes of K.
template <class Type, int kValues>
DEVICE void wgmma(float (&d)[kValues], i64 tokens, i64 weights, int add);
#define INSTRUCTIONS(Type, types, transpose)                                                                          \
  template <> DEVICE void wgmma<Type, 32>(float (&d)[32], i64 tokens, i64 weights, int add) {                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64" types " {" SUMS_32       \
                 "}, %32, %33, p, 1, 1" transpose ";}"                                                                \
                 : SUMS_16(0), SUMS_16(16) : "l"(tokens), "l"(weights), "n"(add));                                    \
  }                                                                                                                   \
  template <> DEVICE void wgmma<Type, 64>(float (&d)[64], i64 tokens, i64 weights, int add) {                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128" types " {" SUMS_64      \
                 "}, %64, %65, p, 1, 1" transpose ";}"                                                                \
                 : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48) : "l"(tokens), "l"(weights), "n"(add));          \
  }
INSTRUCTIONS(E4m3, "k32.f32.e4m3.e4m3", "")
INSTRUCTIONS(Bf16, "k16.f32.bf16.bf16", ", 0, 0")
INSTRUCTIONS(F16, "k16.f32.f16.f16", ", 0, 0")
#undef INSTRUCTIONS
// Sums are there after this, not before.
#define WAIT "wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;"
DEVICE void wait(float (&d)[32]) { asm volatile(WAIT : SUMS_16(0), SUMS_16(16) :: "memory"); }
DEVICE void wait(float (&d)[64]) { asm volatile(WAIT : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48) :: "memory"); }
#undef WAIT
#undef SUMS_64
#undef SUMS_32
#undef SUMS_16
// clang-format on

// A wave's share of a tile: kM x kN patches.
template <class Type, int kM, int kN, bool kTurns>
struct Multiplier {
  static_assert(kM == 1 && !kTurns);
  // Descriptors, in 16 bytes: from bit 16 on the distance of core matrices along K, of no meaning with swizzle, from bit 32 on
  // that of 8 rows, from bit 62 on the swizzle (PTX ISA, section 9.7.15.5.1.2 "Matrix descriptor").
  static constexpr i64 kEightRows = i64(8 * kDepth / 16) << 32, kSwizzle = i64(1) << 62, kCoreMatrix = 8 * kPiece / 16;
  i64 tokens_at, weights_at;  // in a panel
  int weights_step;           // along 32 bytes of K

  DEVICE Multiplier(int first_token, int first_row, bool weights_by_piece)
      : tokens_at((first_token / 64 * 64 * kDepth / 16) | kEightRows | kSwizzle),
        weights_at((first_row * kDepth / 16) | kEightRows | (weights_by_piece ? kCoreMatrix << 16 : kSwizzle)),
        weights_step(weights_by_piece ? 2 * kCoreMatrix : 2) {}
  DEVICE static void change_turns() {}
  // Adds the product of two panels, times factors if kScaled: those of a lane's first 4 weight rows of a patch, and of its last 4.
  // The matrix units sum up e4m3 with some 14 bits, so that their sums are of 128 of K only (DeepSeek-V3 Technical Report, section 3.3.2).
  template <bool kScaled>
  DEVICE void multiply_add(Patch (&sums)[kM][kN], const lds::Local<u8>* tokens, const lds::Local<u8>* weights,
                           const float (&factor)[kN][2][kM][kLaneTokens]) const {
    float product[kN * 16];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const i64 token = tokens_at + (u32(i64(tokens)) >> 4), weight = weights_at + (u32(i64(weights)) >> 4);
    wgmma<Type>(product, token, weight, 0);
#pragma unroll
    for (int step = 1; step < kDepth / 32; ++step)
      wgmma<Type>(product, token + step * 2, weight + step * weights_step, 1);
    wait(product);
#pragma unroll
    for (int i = 0; i < kN * 4; ++i) {
      const f32x4 p = {product[i * 4], product[i * 4 + 1], product[i * 4 + 2], product[i * 4 + 3]};
      const auto& of = factor[i / 4][i % 4 / 2][0];
      sums[0][i / 4].sum[i % 4] += kScaled ? p * f32x4{of[0], of[0], of[1], of[1]} : p;
    }
  }
};

}  // namespace tile
