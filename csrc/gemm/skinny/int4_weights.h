// W4A16: bf16 tokens times int4 weights with a bf16 scale per group of K: out = sum over groups of scale * (a @ b).
// b is [K, N / 8] words, each with eight rows (output channels) of one K, and scales are [groups, N], both as vLLM's
// Triton kernel reads them. A step is 32 K, 64 bytes of a token. The four bits at place i of a lane's words are its
// operand for tile i of 16 rows; the tokens are the same for all tiles.
#pragma once
#include "device/four_bit.h"
#include "gemm/skinny/grouped_operands.h"

// A lane has kWords adjacent words. A scale is loaded every kGroupSteps steps: 1 for any group, 2 for groups of at least
// 64 K. Groups are powers of two, or all of K.
template <int kGroupSteps, int kWords>
struct Bf16Int4Columns;

struct GroupedProblem : SkinnyProblem {  // b_row: bytes between K; scale_b_row: elements between groups
  int group_shift;                       // a step's group is step >> group_shift
};
DEVICE void wait_for_arguments(const GroupedProblem& p) {
  wait_for_arguments(static_cast<const SkinnyProblem&>(p), p.group_shift);
}

template <int kGroupSteps, int kWords>
struct TileOperands<Bf16Int4Columns<kGroupSteps, kWords>> : GroupedOperands<8 * kWords> {
  using typename GroupedOperands<8 * kWords>::Tile, typename GroupedOperands<8 * kWords>::Sums;
  using GroupedOperands<8 * kWords>::kLaneRows;
  static constexpr int kWordRows = 8, kStepK = mma::kDepth / 2, kLaneK = 8;
  template <int kTiles>
  static constexpr int kSliceSteps = kGroupSteps;
  // Registers hold these beside the sums. With more, loaded values are moved, and the moves wait for the loads.
  template <int kTiles>
  static constexpr int kStages = mem::kPredicates ? 4 / kGroupSteps + 1 : 3;
  using Problem = GroupedProblem;

  struct Weights {
    u32 word[mma::kLoads][kWords][kLaneK];
    u32x4 scale[mma::kLoads][kWords];  // of a word's rows, in the first step of a group's
  };

  // Lanes past the last words read the last ones; their sums are not stored.
  DEVICE static Tile tile(const SkinnyProblem& p, int index) {
    const int lane = wave::lane(), first = index * mma::kRows, lanes = p.n / kLaneRows - first;
    Tile tile;
    tile.scales = mem::buffer((const u16*)p.scale_b + first * kLaneRows);
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const int inside = mma::row(lane, l), place = inside < lanes ? inside : lanes - 1;
      tile.weights[l] = mem::cursor(p.b + first * kWords * 4, place * kWords * 4 + mma::depth(lane) / 2 * p.b_row);
      tile.scales_at[l] = place * kLaneRows * Bf16Scale::kBytes;
    }
    return tile;
  }
  // inside: this lane's K are inside; step_inside: some lane's are. The latter for scales, as they also multiply sums
  // over other lanes' K.
  DEVICE static void refill(Weights& weights, const Tile& tile, const SkinnyProblem& p, int step, int in_slice,
                            bool inside, bool step_inside) {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
      for (int k = 0; k < kLaneK; ++k) {
        const int at = (step * kStepK + k) * p.b_row;
        if constexpr (kWords == 1) four_bit::refill(weights.word[l][0][k], tile.weights[l], at, inside);
        else four_bit::refill(weights.word[l][0][k], weights.word[l][1][k], tile.weights[l], at, inside);
      }
    if (in_slice % kGroupSteps) return;
    const int group = (step >> static_cast<const GroupedProblem&>(p).group_shift) * p.scale_b_row;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        weights.scale[l][w] = mem::load_or_zero(tile.scales, tile.scales_at[l] + w * int(sizeof(u32x4)),
                                                group * Bf16Scale::kBytes, step_inside);
  }

  // Adds a slice's products, scaled by group.
  template <int kTiles, int kSteps>
  DEVICE static void add(Sums (&sum)[kTiles], const Weights (&weights)[kSteps], const u32x4 (&tokens)[kSteps][kTiles]) {
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroupSteps) add_group(sum, &weights[first], &tokens[first]);
  }
  template <int kTiles>
  DEVICE static void add_group(Sums (&sum)[kTiles], const Weights* weights, const u32x4 (*tokens)[kTiles]) {
    in_order<kLaneRows>([&]<int kRow>() __attribute__((always_inline)) { add_rows<kRow>(sum, weights, tokens); });
  }

  // add_group for row kRow of each lane.
  template <int kRow, int kTiles>
  DEVICE static void add_rows(Sums (&sum)[kTiles], const Weights* weights, const u32x4 (*tokens)[kTiles]) {
    mma::Weights row[kGroupSteps];
    float scale[mma::kLoads];
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
#pragma unroll
      for (int s = 0; s < kGroupSteps; ++s)
        row[s].load[l] =
            four_bit::Int4Columns(weights[s].word[l][kRow / kWordRows]).template column<kRow % kWordRows>();
      const u32 pair = weights->scale[l][kRow / kWordRows][kRow % kWordRows / 2];
      scale[l] = Bf16Scale::value(kRow % 2 ? pair >> 16 : pair);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      f32x4 product = {};
#pragma unroll
      for (int s = 0; s < kGroupSteps; ++s) product = four_bit::multiply_tile(product, row[s], tokens[s][t]);
      const f32x4 factor = {scale[four_bit::value_load(0)], scale[four_bit::value_load(1)],
                            scale[four_bit::value_load(2)], scale[four_bit::value_load(3)]};
      four_bit::add_scaled(sum[t].value[kRow], product, factor);
    }
  }
};
