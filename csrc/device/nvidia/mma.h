// MMA: weight rows streamed through registers times tokens in registers, by one wave: 16 rows, fp32 accumulation.
// mma.sync (PTX ISA, section 9.7.14.5); this arch unpacks its fp8 operands to fp16 for every instruction.
#pragma once
#include "../panel.h"
#include "lds_async.h"

namespace mma {

constexpr int kRows = 16;   // weight rows per wave
constexpr int kWaves = 4;   // waves per block, each with its own rows: a warpgroup
constexpr int kDepth = 64;  // K bytes per step: 16 per row and lane
constexpr int kLoads = 2;   // 16-byte weight loads per lane and step
constexpr int kStages = 3;  // K slices that a WaveSplitK wave holds in registers

// Lane l holds rows l / 4 and l / 4 + 8, bytes 16 * (l % 4) on. An instruction reads 8 bytes per lane and row, words 0
// and 1, or 2 and 3. Any K permutation is correct if weights and tokens share it.
DEVICE int row(int lane, int load) { return lane / 4 + 8 * load; }
DEVICE int depth(int lane) { return lane % 4 * 16; }

struct Weights {
  u32x4 load[kLoads];
};

// One wave with tokens in registers: lane l holds token l / 4 of a tile, bytes 16 * (l % 4) on.
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
// The product is exact; the addition rounds.
template <>
DEVICE f32x4 mma_sync<I8>(f32x4 sum, u32 w0, u32 w1, u32 w2, u32 w3, u32 t0, u32 t1) {
  int a = 0, b = 0, c = 0, d = 0;
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
      : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(t0), "r"(t1));
  return sum + __builtin_convertvector(i32x4{a, b, c, d}, f32x4);
}
template <class Type>
DEVICE f32x4 multiply_tile(f32x4 sum, const Weights& weights, u32x4 tokens) {
  const u32x4 low = weights.load[0], high = weights.load[1];
  sum = mma_sync<Type>(sum, low.x, high.x, low.y, high.y, tokens.x, tokens.y);
  return mma_sync<Type>(sum, low.z, high.z, low.w, high.w, tokens.z, tokens.w);
}
// Token and row of a lane's value i in the tile.
DEVICE int value_token(int lane, int i) { return lane % 4 * 2 + i % 2; }
DEVICE int value_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
constexpr int kValueTokens = 2;  // tokens per lane; value i belongs to token i % kValueTokens
// A lane's values 0 and 1 are in rows of one half of a tile, values 2 and 3 at the same position in the other half.
DEVICE int half(int row) { return row / 8; }
DEVICE int half_row(int row) { return row % 8; }

// Warpgroup MMA: four waves multiply panels in LDS, fp32 accumulation: wgmma.mma_async.m64nN (PTX ISA, section 9.7.15
// "Asynchronous warpgroup level matrix instructions").

// The matrix descriptor for a panel's rows from `row` on (PTX ISA, section 9.7.15.5.1.2 "Matrix descriptor"). Its lower
// half holds the address in units of 16 bytes, and the core matrix stride along K, which is ignored with swizzle. Its
// upper half holds the 8-row stride and the swizzle mode.
struct Panel {
  u32 low, high;
  int step;  // lower-half increment per 32 K bytes
  DEVICE Panel(int row, bool fragment_order) {
    constexpr u32 kEightRows = 8 * tile::kDepth / 16, kSwizzle = 1u << 30, kCoreMatrix = 8 * tile::kVecBytes / 16;
    low = row * tile::kDepth / 16 + (fragment_order ? kCoreMatrix << 16 : 0),
    high = kEightRows + (fragment_order ? 0 : kSwizzle);
    step = fragment_order ? 2 * kCoreMatrix : 2;
  }
  // The transposed operand: panel columns are operand rows. `at` advances by 16 panel rows, 64 columns each. The 8-row
  // stride fills both descriptor fields, whichever applies.
  struct Transposed {};
  DEVICE explicit Panel(Transposed) : Panel(0, false) {
    low = high % (1u << 16) << 16;
    step = 16 * tile::kDepth / 16;
  }
  // The descriptor of the panel at this address, advanced by 32 * i K bytes.
  DEVICE i64 at(const lds::Local<u8>* panel, int i) const {
    return i64(high) << 32 | (low + (lds::address(panel) >> 4) + i * step);
  }
};

template <class Type>
struct SumOf {
  using Value = float;
};
template <>
struct SumOf<I8> {
  using Value = int;
};
template <class Type>
using Sum = typename SumOf<Type>::Value;
template <class Type>
using SumVec = Sum<Type> __attribute__((ext_vector_type(4)));

// clang-format off
#define SUMS_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define SUMS_16(c, i) SUMS_8(c, i), SUMS_8(c, i + 8)
#define SUMS_32(c, i) SUMS_16(c, i), SUMS_16(c, i + 16)
#define SUMS_48(c, i) SUMS_32(c, i), SUMS_16(c, i + 32)
#define SUMS_64(c, i) SUMS_32(c, i), SUMS_32(c, i + 32)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d += a * b^T, or d = a * b^T if not `add`, for 32 K bytes, 64 a rows and kValues * 2 b rows. Lane l of wave w holds
// a's rows 16 * w + l / 4 and 8 more, d[i] and d[i + 2], for b's rows 8 * (i / 4) + 2 * (l % 4) + i % 2.
template <class Type, int kValues>
DEVICE void wgmma(Sum<Type> (&d)[kValues], i64 a, i64 b, int add);
// The same for 64 columns and 16 rows of panel a, 16-bit elements.
template <class Type, int kValues>
DEVICE void wgmma_of_transposed(Sum<Type> (&d)[kValues], i64 a, i64 b, int add);
// Waits until the sums are valid.
template <int kValues>
DEVICE void wait_for_sums(float (&d)[kValues]);
template <int kValues>
DEVICE void wait_for_sums(int (&d)[kValues]);
#define INSTRUCTION_(name, Type, types, more, c, values, n, a, b, add_)                                                      \
  template <> DEVICE void name<Type, values>(Sum<Type> (&d)[values], i64 of_a, i64 of_b, int add) {                              \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #add_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n types " {" NAMES_##values \
                 "}, %" #a ", %" #b ", p" more ";}"                                                               \
                 : SUMS_##values(c, 0) : "l"(of_a), "l"(of_b), "n"(add));                                                       \
  }
#define INSTRUCTION(Type, types, more, ...) INSTRUCTION_(wgmma, Type, types, more, __VA_ARGS__)
#define OF_TRANSPOSED(Type, types)                                                                 \
  INSTRUCTION_(wgmma_of_transposed, Type, types, ", 1, 1, 1, 0", "+f", 8, 16, 8, 9, 10)            \
  INSTRUCTION_(wgmma_of_transposed, Type, types, ", 1, 1, 1, 0", "+f", 16, 32, 16, 17, 18)         \
  INSTRUCTION_(wgmma_of_transposed, Type, types, ", 1, 1, 1, 0", "+f", 32, 64, 32, 33, 34)
#define INSTRUCTIONS(Type, types, more)                      \
  INSTRUCTION(Type, types, more, "+f", 8, 16, 8, 9, 10)    \
  INSTRUCTION(Type, types, more, "+f", 16, 32, 16, 17, 18) \
  INSTRUCTION(Type, types, more, "+f", 32, 64, 32, 33, 34) \
  INSTRUCTION(Type, types, more, "+f", 48, 96, 48, 49, 50) \
  INSTRUCTION(Type, types, more, "+f", 64, 128, 64, 65, 66)
INSTRUCTIONS(E4m3, "k32.f32.e4m3.e4m3", ", 1, 1")
INSTRUCTIONS(E5m2, "k32.f32.e5m2.e5m2", ", 1, 1")
INSTRUCTIONS(E4m3E5m2, "k32.f32.e4m3.e5m2", ", 1, 1")
INSTRUCTIONS(E5m2E4m3, "k32.f32.e5m2.e4m3", ", 1, 1")
INSTRUCTIONS(Bf16, "k16.f32.bf16.bf16", ", 1, 1, 0, 0")
INSTRUCTIONS(F16, "k16.f32.f16.f16", ", 1, 1, 0, 0")
OF_TRANSPOSED(Bf16, "k16.f32.bf16.bf16")
OF_TRANSPOSED(F16, "k16.f32.f16.f16")
INSTRUCTION(I8, "k32.s32.s8.s8", "", "+r", 32, 64, 32, 33, 34)
INSTRUCTION(I8, "k32.s32.s8.s8", "", "+r", 64, 128, 64, 65, 66)
#define WAIT(values, type, c)                                                                                                  \
  template <> DEVICE void wait_for_sums<values>(type (&d)[values]) {                                                           \
    asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS_##values(c, 0) :: "memory");                                        \
  }
WAIT(8, float, "+f")
WAIT(16, float, "+f")
WAIT(32, float, "+f")
WAIT(48, float, "+f")
WAIT(64, float, "+f")
WAIT(32, int, "+r")
WAIT(64, int, "+r")
#undef WAIT
#undef INSTRUCTIONS
#undef OF_TRANSPOSED
#undef INSTRUCTION
#undef INSTRUCTION_
#undef NAMES_64
#undef NAMES_48
#undef NAMES_32
#undef NAMES_16
#undef NAMES_8
#undef SUMS_64
#undef SUMS_48
#undef SUMS_32
#undef SUMS_16
#undef SUMS_8
// clang-format on

// Starts product = 64 rows of panel a times kValues * 2 rows of panel b; wait_for_sums waits for it.
template <class Type, int kValues>
DEVICE void start_product(Sum<Type> (&product)[kValues], const Panel& a_at, const lds::Local<u8>* a, const Panel& b_at,
                          const lds::Local<u8>* b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < tile::kDepth / 32; ++i) wgmma<Type>(product, a_at.at(a, i), b_at.at(b, i), i > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <class Type, int kValues>
DEVICE void multiply_panels(Sum<Type> (&product)[kValues], const Panel& a_at, const lds::Local<u8>* a,
                            const Panel& b_at, const lds::Local<u8>* b) {
  start_product<Type>(product, a_at, a, b_at, b);
  wait_for_sums(product);
}

}  // namespace mma
