// W4A16: bf16 tokens times int4 weights with a bf16 scale per group of K: out = sum over groups of scale * (a @ b).
// b is [K, N / 8] words, each with eight rows (output channels) of one K, and scales are [groups, N], both as vLLM's
// Triton kernel reads them. A step is 32 K, 64 bytes of a token. The four bits at place i of a lane's words are its
// operand for tile i of 16 rows; the tokens are the same for all tiles.
#pragma once
#include "device/four_bit.h"
#include "gemm/skinny/grouped_operands.h"

// A lane has kWords adjacent words for each of its rows in a product. Groups are powers of two, or all of K.
template <int kWords>
struct Bf16Int4Columns;

struct GroupedProblem : SkinnyProblem {  // b_row: bytes between K; scale_b_row: elements between groups
  int group_shift;                       // a step's group is step >> group_shift
};
DEVICE void wait_for_arguments(const GroupedProblem& p) {
  wait_for_arguments(static_cast<const SkinnyProblem&>(p), p.group_shift);
}

template <int kWords>
struct TileOperands<Bf16Int4Columns<kWords>> : GroupedOperands<8 * kWords> {
  using typename GroupedOperands<8 * kWords>::Sums;
  using GroupedOperands<8 * kWords>::kLaneRows;
  static constexpr int kWordRows = 8, kStepK = mma::kDepth / 2, kLaneK = 8, kLaneWords = mma::kLoads * kWords;
  template <int kTiles>
  static constexpr int kSliceSteps = 1;
  // Registers hold these beside the sums. With more, loaded values are moved, and the moves wait for the loads. Where there
  // are more sums, two stages leave half of the registers to another wave, which issues while this one waits.
  template <int kTiles>
  static constexpr int kStages = mem::kPredicates || kTiles > 1 ? 2 : 3;
  static constexpr float kUnit = four_bit::Int4Sixteenths::kUnit;
  using Problem = GroupedProblem;

  struct Tile {
    mem::Cursor weights;
    mem::Buffer scales;
    int scales_at;  // bytes
  };
  struct Weights {  // of adjacent words
    u32 word[kLaneWords][kLaneK];
    u32x4 scale[kLaneWords];  // of a word's rows
  };

  // The words of a lane's loads are adjacent, too, unlike the rows of a 16-row matrix.
  DEVICE static int value_row(int lane, int i) { return mma::row(lane, 0) * mma::kLoads + four_bit::value_load(i); }
  // Lanes past the last words read the last ones; their sums are not stored.
  DEVICE static Tile tile(const SkinnyProblem& p, int index) {
    const int lane = wave::lane(), first = index * mma::kRows, rows = p.n / kLaneRows - first;
    const int inside = mma::row(lane, 0) * mma::kLoads, place = (inside < rows ? inside : rows - mma::kLoads) * kWords;
    return {mem::cursor(p.b + first * kWords * 4, place * 4 + mma::depth(lane) / 2 * p.b_row),
            mem::buffer((const u16*)p.scale_b + first * kLaneRows), place * kWordRows * Bf16Scale::kBytes};
  }
  // inside: this lane's K are inside; step_inside: some lane's are. The latter for scales, as they also multiply sums
  // over other lanes' K.
  DEVICE static void refill(Weights& weights, const Tile& tile, const SkinnyProblem& p, int step, int /*in_slice*/,
                            bool inside, bool step_inside) {
    const int group = (step >> static_cast<const GroupedProblem&>(p).group_shift) * p.scale_b_row * Bf16Scale::kBytes;
#pragma unroll
    for (int k = 0; k < kLaneK; ++k) {
      const int at = (step * kStepK + k) * p.b_row;
      if constexpr (kLaneWords == 1) four_bit::refill(weights.word[0][k], tile.weights, at, inside);
      else four_bit::refill(weights.word[0][k], weights.word[1][k], tile.weights, at, inside);
    }
#pragma unroll
    for (int w = 0; w < kLaneWords; ++w)
      weights.scale[w] = mem::load_or_zero(tile.scales, tile.scales_at + w * int(sizeof(u32x4)), group, step_inside);
  }

  // Adds a slice's products, scaled by group. Three things are issued in turn, so that none waits for another: a product,
  // part of the next row's values, and the addition of the product before the last.
  template <int kTiles>
  DEVICE static void add(Sums (&sum)[kTiles], const Weights (&weights)[1], const u32x4 (&tokens)[1][kTiles]) {
    constexpr int kProducts = kLaneRows * kTiles, kAhead = 2, kPairs = kLaneK / 2, kAtOnce = kPairs / kTiles;
    mma::Weights row[2];
    f32x4 product[kAhead + 1];
    in_order<kPairs>([&]<int i>() __attribute__((always_inline)) { convert<0, i>(row[0], weights[0]); });
    in_order<kProducts + kAhead>([&]<int i>() __attribute__((always_inline)) {
      constexpr int kRow = i / kTiles, kTile = i % kTiles, kAdded = i - kAhead;
      if constexpr (i < kProducts) {
        f32x4& next = product[i % (kAhead + 1)];
        next = four_bit::multiply_tile(f32x4{}, row[kRow % 2], tokens[0][kTile]);
        if constexpr (kRow + 1 < kLaneRows)
          in_order<kAtOnce>([&]<int j>() __attribute__((always_inline)) {
            convert<kRow + 1, kTile * kAtOnce + j>(row[(kRow + 1) % 2], weights[0]);
          });
        four_bit::issue(next);
      }
      if constexpr (kAdded >= 0) {
        const f32x4& last = product[kAdded % (kAhead + 1)];
        four_bit::add_scaled(sum[kAdded % kTiles].value[kAdded / kTiles], last, scales<kAdded / kTiles>(weights[0]));
        four_bit::issue(last);
      }
    });
  }
  // A pair of the values that a lane has of row kRow.
  template <int kRow, int kPair>
  DEVICE static void convert(mma::Weights& row, const Weights& weights) {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const four_bit::Int4Columns columns(weights.word[l * kWords + kRow / kWordRows]);
      row.load[l][kPair] = columns.template pair<kRow % kWordRows>(kPair * 2);
    }
  }
  // The scales of a lane's products of row kRow.
  template <int kRow>
  DEVICE static f32x4 scales(const Weights& weights) {
    f32x4 scales;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 pair = weights.scale[four_bit::value_load(i) * kWords + kRow / kWordRows][kRow % kWordRows / 2];
      scales[i] = Bf16Scale::value(kRow % 2 ? pair >> 16 : pair);
    }
    return scales;
  }
};
