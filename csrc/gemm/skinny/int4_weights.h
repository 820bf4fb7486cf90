// bf16 tokens times int4 weights with a bf16 scale per group of K: out = sum over groups of scale * (a @ b), where b is
// [K, N / 8] words of eight rows, as vLLM's Triton kernel has it, and scales are [groups, N]. A step is 32 K, 64 bytes of
// a token. A lane's words give each of eight tiles of 16 rows, 8 rows apart, its operand; the tokens serve all of them.
#pragma once
#include "device/four_bit.h"
#include "gemm/skinny/tile_operands.h"

// kGroupSteps: 1 for groups of 32 K; 2 for larger ones, each a power of two.
template <int kGroupSteps>
struct Bf16Int4Columns;

struct GroupedProblem : SkinnyProblem {  // b_row: bytes between K; scale_b_row: elements between groups
  int group_shift;                       // a step's group is step >> group_shift
};
DEVICE void wait_for_arguments(const GroupedProblem& p) {
  wait_for_arguments(static_cast<const SkinnyProblem&>(p), p.group_shift);
}

template <int kGroupSteps>
struct TileOperands<Bf16Int4Columns<kGroupSteps>> : TileOperandsBase {
  static constexpr bool kGrouped = true;
  static constexpr int kWordRows = 8, kStepK = mma::kDepth / 2, kLaneK = 8;
  static constexpr int kRows = kWordRows * mma::kRows, kVec = mem::kPredicates ? 2 : 4;
  // Four tiles of tokens take so many registers that slices are short, and so much code.
  template <int kTiles>
  static constexpr int kSliceSteps = kTiles == 4 || mem::kPredicates ? kGroupSteps : 2;
  template <int kTiles>
  static constexpr int kStages = mem::kPredicates                  ? 4 / kGroupSteps + 1
                                 : kTiles == 4                     ? 6
                                 : kTiles == 1 && kGroupSteps == 2 ? 4
                                                                   : 3;
  using Problem = GroupedProblem;

  struct Tile {
    mem::Cursor weights[mma::kLoads];
    mem::Buffer scales;
    int scales_at[mma::kLoads];  // bytes
  };
  struct Weights {
    u32 word[mma::kLoads][kLaneK];
    u32x4 scale[mma::kLoads];  // of the rows of a word, in the first step of a group or slice
  };
  struct Sums {
    f32x4 value[kWordRows];
  };

  DEVICE static void assume(const SkinnyProblem& p) {
    __builtin_assume(p.out_type == 0);
    __builtin_assume(p.n % kWordRows == 0);
  }
  DEVICE static int value_token(int lane, int i) { return four_bit::value_token(lane, i); }
  DEVICE static int value_row(int lane, int i) { return mma::row(lane, four_bit::value_load(i)); }

  // Lanes past the last word read the last word; their sums are not stored.
  DEVICE static Tile tile(const SkinnyProblem& p, int index) {
    const int lane = wave::lane(), first = index * mma::kRows, words = p.n / kWordRows - first;
    Tile tile;
    tile.scales = mem::buffer((const u16*)p.scale_b + first * kWordRows);
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const int inside = mma::row(lane, l), word = inside < words ? inside : words - 1;
      tile.weights[l] = mem::cursor(p.b + first * 4, word * 4 + mma::depth(lane) / 2 * p.b_row);
      tile.scales_at[l] = word * int(sizeof(u32x4));
    }
    return tile;
  }
  DEVICE static void refill(Weights& weights, const Tile& tile, const SkinnyProblem& p, int step, int in_slice,
                            bool inside) {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
      for (int k = 0; k < kLaneK; ++k)
        four_bit::refill(weights.word[l][k], tile.weights[l], (step * kStepK + k) * p.b_row, inside);
    if (in_slice % kGroupSteps) return;
    const int group = step >> static_cast<const GroupedProblem&>(p).group_shift;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
      weights.scale[l] =
          mem::load_or_zero(tile.scales, tile.scales_at[l], group * p.scale_b_row * Bf16Scale::kBytes, inside);
  }

  // Adds a slice's products times their groups' scales.
  template <int kTiles, int kSteps>
  DEVICE static void add(Sums (&sum)[kTiles], const Weights (&weights)[kSteps], const u32x4 (&tokens)[kSteps][kTiles]) {
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroupSteps) add_group(sum, &weights[first], &tokens[first]);
  }
  template <int kTiles>
  DEVICE static void add_group(Sums (&sum)[kTiles], const Weights* weights, const u32x4 (*tokens)[kTiles]) {
    in_order<kWordRows>([&]<int kRow>() __attribute__((always_inline)) { add_rows<kRow>(sum, weights, tokens); });
  }

  // The same for row kRow of each word.
  template <int kRow, int kTiles>
  DEVICE static void add_rows(Sums (&sum)[kTiles], const Weights* weights, const u32x4 (*tokens)[kTiles]) {
    mma::Weights row[kGroupSteps];
    float scale[mma::kLoads];
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
#pragma unroll
      for (int s = 0; s < kGroupSteps; ++s)
        row[s].load[l] = four_bit::Int4Columns(weights[s].word[l]).template column<kRow>();
      const u32 pair = weights->scale[l][kRow / 2];
      scale[l] = Bf16Scale::value(kRow % 2 ? pair >> 16 : pair);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      f32x4 product = {};
#pragma unroll
      for (int s = 0; s < kGroupSteps; ++s) product = four_bit::multiply_tile(product, row[s], tokens[s][t]);
      const f32x4 factor = {scale[four_bit::value_load(0)], scale[four_bit::value_load(1)],
                            scale[four_bit::value_load(2)], scale[four_bit::value_load(3)]};
      sum[t].value[kRow] += product * factor;
    }
  }
};
