// The sums of MLA's splits in HBM, and the launch that combines them.
#pragma once
#include "attention/split.h"

constexpr int kLatent = 512, kMlaWaves = 8;
constexpr int kMlaFanIn = 8;  // the most splits that a block combines: DecodeCosts.counted_splits of core/arch.py

template <class T, int kPackedRowTiles>
using MlaSplit = DecodeSplit<DecodeOutput<T, kLatent, 16 * kPackedRowTiles, kMlaWaves, kMlaFanIn>, 32>;

// A split's sums are 16-byte vectors of a column's elements: [columns][elements / 4] or, where they are stored from the
// registers of a matrix instruction, [columns / 16][elements / 4][16 columns].
template <int kPackedRowTiles>
constexpr bool kColumnsLast = attention::kSumsInRegisters && kPackedRowTiles <= 2;

// Combines a request's splits after the launch that stored them: a lane has four elements, and each wave every eighth
// split.
template <class T, int kPackedRowTiles>
struct MlaCombine : MlaSplit<T, kPackedRowTiles> {
  using Split = MlaSplit<T, kPackedRowTiles>;
  using Split::kPackedRowVecs, Split::kLowest, Split::kMaxima, Split::kSums, Split::kWaves, Split::splits;

  // A column's elements, divided by exp2(maximum), and its weight sum, equally divided.
  struct Sums {
    f32x4 total;
    float maximum, sum;
    DEVICE void add(const Sums& other) {
      const float largest = __builtin_fmaxf(maximum, other.maximum);
      const float factor = numerics::exp2_approx(maximum - largest);
      const float of_other = numerics::exp2_approx(other.maximum - largest);
      total = total * factor + other.total * of_other;
      sum = sum * factor + other.sum * of_other;
      maximum = largest;
    }
  };
  struct Buffer {
    Sums sums[kWaves][wave::kLanes];
  };

  int first_slot = 0, combine_blocks;

  DEVICE explicit MlaCombine(const MlaProblem& problem)
      : Split(problem.decode), combine_blocks(problem.combine_blocks) {
    this->load_early_scale();
  }

  // The column of a slot's vector, and its place among the column's.
  DEVICE static int column(int vec) {
    return kColumnsLast<kPackedRowTiles> ? vec / (16 * kPackedRowVecs) * 16 + vec % 16 : vec / kPackedRowVecs;
  }
  DEVICE static int of_packed_row(int vec) {
    return kColumnsLast<kPackedRowTiles> ? vec / 16 % kPackedRowVecs : vec % kPackedRowVecs;
  }

  // Loads one split's sums; empty past the last split.
  DEVICE Sums load(int split, int vec) const {
    const mem::Buffer from = this->slot(first_slot + split);
    const int c = column(vec);
    const bool is_split = split < splits;
    const float maximum = mem::load_device_or_zero<float>(from, kMaxima + c * 4, 0, is_split);
    return {mem::load_device_or_zero<f32x4>(from, vec * 16, 0, is_split), is_split ? maximum : kLowest,
            mem::load_device_or_zero<float>(from, kSums + c * 4, 0, is_split)};
  }
  DEVICE void finish(const Sums& sums, int vec) const {
    const int c = column(vec), place = of_packed_row(vec);
    this->store(c, place * 4, sums.total * this->finish_packed_row(c, sums.maximum, sums.sum, place == 0));
  }
  DEVICE void run(Buffer& buffer) const {
    constexpr int kVecs = Split::kPackedRows * kPackedRowVecs;
    if (attention::kCombinesInWaves ? combine_blocks * Split::kThreads == kVecs : this->p.num_kv_splits <= kWaves)
      add_few((wave::block_id_y() * kWaves + wave::index()) * wave::kLanes + wave::lane());
    else add(buffer, wave::block_id_y());
  }
  // With few splits, or where the waves fill the GPU, a wave adds all.
  DEVICE void add_few(int vec) const {
    if (column(vec) >= this->packed_rows()) return;
    Sums of_splits[kWaves];
#pragma unroll
    for (int split = 0; split < kWaves; ++split) of_splits[split] = load(split, vec);
#pragma unroll
    for (int split = 1; split < kWaves; ++split) of_splits[0].add(of_splits[split]);
    if constexpr (attention::kCombinesInWaves)
#pragma unroll 1
      for (int first = kWaves; first < splits; first += kWaves) {
        Sums more[kWaves];
#pragma unroll
        for (int split = 0; split < kWaves; ++split) more[split] = load(first + split, vec);
#pragma unroll
        for (int split = 0; split < kWaves; ++split) of_splits[0].add(more[split]);
      }
    finish(of_splits[0], vec);
  }
  // Combines the elements of lane group `lanes`.
  DEVICE void add(Buffer& buffer, int lanes) const {
    const int vec = lanes * wave::kLanes + wave::lane(), c = column(vec);
    if (c >= this->packed_rows()) return;  // the same lanes of all waves
    Sums sums = {{}, kLowest, 0.0f};
#pragma unroll attention::kCombinedAtOnce
    for (int split = wave::index(); split < splits; split += kWaves) sums.add(load(split, vec));
    buffer.sums[wave::index()][wave::lane()] = sums;
    block_barrier();  // hazard: the waves' sums are read before they are written
    if (wave::index() > 0) return;
#pragma unroll
    for (int w = 1; w < kWaves; ++w) sums.add(buffer.sums[w][wave::lane()]);
    finish(sums, vec);
  }
};
