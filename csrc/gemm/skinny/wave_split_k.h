// Split-K across a block's waves, for few tokens and small weights. A tile has 16 rows of b, so fewer blocks share it.
// Each wave multiplies every fourth K slice of kSliceSteps steps, and holds the weights and tokens of kStages slices in
// registers. The waves' sums are reduced in LDS at the end of a tile.
//
// Rejected: for up to 8 tokens, the sparse instruction (v_smfmac_f32_16x16x64_fp8_fp8, a token over two rows, each with
// two of every four bytes) does the work of two dense ones. Built and emulated on gfx942, 8 x 64 x 2048, it halves
// matrix cycles per weight byte from 0.031 to 0.016 and adds 0.7 % issue cycles, 0.304 to 0.306. Full HBM bandwidth
// allows 0.48 cycles per byte, so the saving shortens no kernel, and the dense instruction stays.
#pragma once
#include "gemm/skinny/epilogue.h"
#include "gemm/skinny/tile_operands.h"
#include "gemm/skinny/weights.h"

// Another type, or if void, the default.
template <class Other, class Default>
struct TypeOr {
  using Type = Other;
};
template <class Default>
struct TypeOr<void, Default> {
  using Type = Default;
};

template <class Type, int kTokens, ScaleGranularity kScales, class Scale = Fp32Scale, bool kGated = false,
          class OtherEpilogue = void>
struct WaveSplitK {
  using Operands = TileOperands<Type>;
  using Problem = typename TypeOr<typename Operands::Problem, typename ProblemOf<kGated>::Type>::Type;
  using Sums = typename Operands::Sums;
  static constexpr int kTiles = (kTokens + mma::kTileTokens - 1) / mma::kTileTokens,
                       kSliceSteps = Operands::template kSliceSteps<kTiles>,
                       kStages = Operands::template kStages<kTiles>;
  static constexpr int kResident = Operands::template kResident<kTiles>;
  static constexpr int kThreads = mma::kWaves * wave::kLanes, kUnitSteps = kSliceSteps * mma::kWaves;
  // Steps of a slice for which a lane's bytes of a token are adjacent, and bytes from one step's to the next.
  static constexpr int kLaneSteps = Operands::kAdjacentSteps ? kSliceSteps : 1,
                       kTokenBytes = Operands::kAdjacentSteps ? int(sizeof(u32x4)) : mma::kDepth;
  static constexpr bool kScaled = kScales == ScaleGranularity::kBlock;
  static_assert(!kScaled || kSliceSteps * mma::kDepth == kScaleBlock);
  // A thread ends with kVec consecutive rows, kVecs times.
  static constexpr int kVec = Operands::kVec, kVecs = Operands::kRows / (mma::kRows * kVec);
  using Epilogue =
      typename TypeOr<OtherEpilogue, TileEpilogue<kScales, kTiles, kVecs, kVec, kUnitSteps, kThreads, 8, kGated>>::Type;
  struct Buffer {
    // Double-buffered: a slow wave may still read the previous tile's sums. Sums of many rows have one buffer, for kVec
    // rows of a tile's tokens at a time.
    float sum[Operands::kGrouped ? 1 : 2][mma::kWaves][Operands::kGrouped ? kVec : kTiles][4][wave::kLanes];
  };

  const SkinnyProblem& p;
  Buffer& buffer;  // in LDS
  const StreamKSchedule<kUnitSteps> schedule{p};
  const int lane = wave::lane();

  using WeightTile = typename TypeOr<typename Operands::Tile, ScaledTileWeights<Scale>>::Type;
  DEVICE WeightTile weight_tile(int tile) const {
    if constexpr (Operands::kGrouped) return Operands::tile(p, tile);
    else return scaled_tile_weights<Scale, kGated>(p, tile * mma::kRows, 0);
  }

  struct KSlice {
    typename Operands::Weights weights[kSliceSteps] = {};
    u32x4 tokens[kSliceSteps][kTiles];
    typename Scale::Loaded scale_a[kTiles][mma::kValueTokens] = {}, scale_b = 0;  // for kBlock
  };
  DEVICE void load(KSlice& k_slice, const WeightTile& tile, const TileWork& work) const {
    const int first = work.step + wave::index() * kSliceSteps, left = schedule.bytes_left(work, first),
              bytes = left - mma::depth(lane);
    if constexpr (kScaled) load_scales(k_slice, tile.scales, u32(first) / kSliceSteps, left > 0);
#pragma unroll
    for (int u = 0; u < kSliceSteps; ++u) {
      const int step = first + u;
      const bool inside = u * mma::kDepth < bytes;
      if constexpr (Operands::kGrouped)
        Operands::refill(k_slice.weights[u], tile, p, step, u, inside, u * mma::kDepth < left);
      else
#pragma unroll
        for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
          for (int v = 0; v < Operands::kVecs; ++v)
            mem::refill(k_slice.weights[u].load(l, v), tile.weights[l], step * p.b_step + v * 16, inside);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int token = t * mma::kTileTokens + mma::tile_token(lane);
        k_slice.tokens[u][t] =
            mem::load_or_zero(mem::buffer(p.a), token * p.a_stride + mma::depth(lane) * kLaneSteps + u * kTokenBytes,
                              first * mma::kDepth, inside && token < p.m);
      }
    }
  }

  DEVICE void load_scales(KSlice& k_slice, const typename Scale::Type* scales_b, int block, bool inside) const {
    k_slice.scale_b = Scale::load_or_zero(mem::buffer(scales_b), 0, block * Scale::kBytes, inside);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const int token = t * mma::kTileTokens + mma::value_token(lane, v);
        k_slice.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), token * p.scale_a_row * Scale::kBytes,
                                                    block * p.scale_a_k * Scale::kBytes, inside && token < p.m);
      }
  }

  // One slice is multiplied while the next kStages - 1 are in flight. Slices past the block's last load zeros: if a
  // path with fewer loads joined the others, the compiler would over-wait on all paths. Where loads are predicated,
  // hardware counts them, and slices past the last are skipped.
  DEVICE void multiply() const {
    Operands::assume(p);
    TileWork current = schedule.begin(), prefetch = current;
    WeightTile tile_weights = weight_tile(prefetch.tile);
    KSlice stages[kStages];
    auto load_next = [&](KSlice& k_slice) __attribute__((always_inline)) {
      load(k_slice, tile_weights, prefetch);
      const int tile = prefetch.tile;
      prefetch = schedule.after(prefetch);
      if (prefetch.tile != tile) tile_weights = weight_tile(prefetch.tile);
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next(stages[i]);
    Sums sum[kTiles] = {};
    int parity = 0;
    Epilogue epilogue{p, schedule};
    begin_tile(epilogue, current.tile);
    auto multiply_slice = [&](const KSlice& k_slice) __attribute__((always_inline)) {
      const float scale_b = kScaled ? Scale::value(k_slice.scale_b) : 1.0f;
      if constexpr (Operands::kGrouped) Operands::add(sum, k_slice.weights, k_slice.tokens);
      else
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          Sums product = kScaled ? Sums{} : sum[t];
#pragma unroll
          for (int u = 0; u < kSliceSteps; ++u)
            product = Operands::multiply(product, k_slice.weights[u], k_slice.tokens[u][t]);
          if constexpr (!kScaled) sum[t] = product;
          else
#pragma unroll
            for (int i = 0; i < 4; ++i)
              sum[t].value[i] += product.value[i] * (Scale::value(k_slice.scale_a[t][i % mma::kValueTokens]) * scale_b);
        }
      const TileWork next = schedule.after(current);
      if (next.tile != current.tile) {
        if constexpr (Operands::kGrouped) end_tile(epilogue, sum);
        else {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int value = 0; value < 4; ++value)
              buffer.sum[parity][wave::index()][t][value][lane] = sum[t].total(value);
            sum[t] = Sums{};
          }
          block_barrier();  // hazard: the waves' sums are read before they are written
          end_tile(epilogue, parity);
        }
        parity ^= 1;
        if (next.end > 0) begin_tile(epilogue, next.tile);
      }
      current = next;
      return next.end > 0;
    };
    if constexpr (Operands::kGrouped) {  // unrolled even where the compiler would find the code too long
      bool more = true;
      do
        in_order<kStages>([&]<int i>() __attribute__((always_inline)) {
          if (mem::kPredicates && !more) return;
          load_next(stages[(i + kStages - 1) % kStages]);
          if (more) more = multiply_slice(stages[i]);
        });
      while (more);
      return;
    }
    for (bool more = true; more;)
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        if (mem::kPredicates && !more) continue;
        load_next(stages[(i + kStages - 1) % kStages]);
        if (more) more = multiply_slice(stages[i]);
      }
  }

  // Wave w writes value w of each lane's four.
  DEVICE void begin_tile(Epilogue& epilogue, int index) const {
    const int value = wave::index();
    epilogue.begin(
        index,
        [&](int t) __attribute__((always_inline)) { return t * mma::kTileTokens + Operands::value_token(lane, value); },
        [&](int j) __attribute__((always_inline)) {
          return index * Operands::kRows + Operands::value_row(lane, value) * (kVec * kVecs) + j * kVec;
        });
  }
  DEVICE void end_tile(const Epilogue& epilogue, int parity) const {
    FloatVec<1> values[kTiles][1] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) values[t][0] += buffer.sum[parity][w][t][wave::index()][lane];
    epilogue.end(values);
  }
  // The same for the sums of many rows, which become zero.
  DEVICE void end_tile(const Epilogue& epilogue, Sums (&sum)[kTiles]) const {
    FloatVec<kVec> values[kTiles][kVecs];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        block_barrier();  // hazard: the last sums are overwritten while a slow wave reads them
#pragma unroll
        for (int i = 0; i < kVec; ++i)
#pragma unroll
          for (int value = 0; value < 4; ++value)
            buffer.sum[0][wave::index()][i][value][lane] = sum[t].value[j * kVec + i][value];
        block_barrier();  // hazard: the waves' sums are read before they are written
        values[t][j] = FloatVec<kVec>{};
#pragma unroll
        for (int w = 0; w < mma::kWaves; ++w)
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[t][j][i] += buffer.sum[0][w][i][wave::index()][lane];
        values[t][j] *= 1 / Operands::kUnit;
      }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) sum[t] = Sums{};
    epilogue.end(values);
  }
};
