// W8A16 and W4A16 of MX weights: out = sum over groups of 32 K of scale * (a @ b^T), where a is bf16, b is [N, K] of
// e4m3 or e2m1, and scales are [N, K / 32] of e8m0. A step is 32 K, 64 bytes of a token. Includes the vendor's half.
#pragma once
#include "device/mx_values.h"
#include "gemm/skinny/grouped_operands.h"

// kSteps: steps of a slice, 2 or 4.
template <class Value, int kSteps>
struct Bf16Mx;

struct MxOperands : GroupedOperands<4> {
  template <int kTiles>
  static constexpr int kStages = 2;

  // A lane's first bytes in a row of weights and of scales are `weights_at` and `scales_at`. Lanes past the last rows
  // read the last ones; their sums are not stored.
  DEVICE static Tile tile_from(const SkinnyProblem& p, int index, int weights_at, int scales_at) {
    const int lane = wave::lane(), first = index * mma::kRows, lanes = p.n / kLaneRows - first;
    const u64 first_row = u32(first) * kLaneRows;
    Tile tile;
    tile.scales = mem::buffer((const u8*)p.scale_b + first_row * u32(p.scale_b_row));
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const int inside = mma::row(lane, l), row = (inside < lanes ? inside : lanes - 1) * kLaneRows;
      tile.weights[l] = mem::cursor(p.b + first_row * u32(p.b_row), row * p.b_row + weights_at);
      tile.scales_at[l] = row * p.scale_b_row + scales_at;
    }
    return tile;
  }
};

#if defined(__AMDGCN__)
#include "gemm/skinny/amd/mx_weights.h"
#elif defined(__NVPTX__)
#include "gemm/skinny/nvidia/mx_weights.h"
#endif
