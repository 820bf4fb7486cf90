// The GEMMs of ops/fused_experts.hip: their arguments, a block's tiles of gate_up and a wave's units of down.
#pragma once
#include "device/scale.h"
#include "gemm/group_pairs.h"

constexpr int kSliceSteps = 2, kSliceBytes = kSliceSteps * mma::kDepth, kMxBlock = 32;  // kMxBlock: K per kMx scale
static_assert(kSliceBytes == kScaleBlock);

struct Experts {
  const u8* tokens;     // [rows, K]; gate_up: hidden, a row per token; down: act, a row per pair, in pair order, which
                        // kernels that quantize it read as bf16 or fp16
  const u8* weights;    // [E, N, K], or each expert's in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;            // gate_up: [pairs, N / 2]; down: [tokens, N]; out_type
  float* partials;      // down with split_k > 1: [tiles, split_k, tokens, 16 rows]
  u32* counters;        // down with split_k > 1: [tiles], zeros
  const u8* scale_a;    // block: [rows, ceil(K / 128)]; row: [rows] or [1]; mx: [rows, K / 32]; or null
  const u8* scale_b;    // block: [E, ceil(N / 128), ceil(K / 128)]; row: [E, N] or [E]; mx: [E, N, K / 32]; E experts
  const u32* ids;       // [tokens, topk], id_words words each
  const float* router;  // [tokens, topk]: pair weights
  u32x4* lists;         // [kept_vectors() of PairLists]: written by gate_up, read by down
  int* num_rows;        // gate_up: [1], receives the row count of act; or null
  const int* expert_map;            // [mapped], or null
  i64 expert_bytes, expert_scales;  // byte strides between experts: of weights and of scale_b
  int token_bytes, row_bytes;       // byte strides between rows; for weights within 16 rows
  int tile_bytes, spread;        // byte strides of weights: between groups of 16 rows, and per byte of K in steps of 16
  int m, n, k, pairs;            // tokens, rows of an expert's weight, bytes of K; token-slot pairs
  int scale_a_row, scale_b_row;  // bytes between scales
  int topk, shared, routed, mapped, id_words;
  int per_slot;       // 2^20 / slots, rounded up
  int out_type;       // 0 bf16, 1 fp16
  int apply_weights;  // 1 if results are multiplied by their pair's weight
  int step;           // gate_up: blocks; down: K slices per unit, which one wave processes
  int split_k;        // down: blocks that share a tile's units
  int work_per_item;  // gate_up: tiles per item; down: units
  u32 work_per_item_inverse;
};

// Returns value / divisor, for values up to 2^31 / divisor, given the inverse: 2^31 / divisor + 1.
DEVICE int divide_by(u32 inverse, int value) { return int(i64(value) * inverse >> 31); }

// A block's tiles, and a wave's K slices in each. All waves have the same number of slices, some without bytes.
struct TileWalk {
  const Experts& p;
  int tiles, work, slice = 0;  // tiles in all items
  DEVICE bool more() const { return work < tiles; }
  DEVICE bool is_last() const { return work + p.step >= tiles; }
  DEVICE int item() const { return divide_by(p.work_per_item_inverse, work); }
  DEVICE int tile() const { return work - item() * p.work_per_item; }
  DEVICE int k() const { return (slice * mma::kWaves + wave::index()) * kSliceBytes; }
  DEVICE bool next() {  // true if that begins a tile
    if (++slice * mma::kWaves * kSliceBytes < p.k) return false;
    slice = 0, work += p.step;
    return true;
  }
};

// A wave's units. All waves in a tile's blocks take the units of all items round-robin.
struct UnitWalk {
  const Experts& p;
  int units, unit, slice = 0;  // units in all items
  DEVICE bool more() const { return unit < units; }
  DEVICE int item() const { return divide_by(p.work_per_item_inverse, unit); }
  DEVICE int tile() const { return wave::block_id_x(); }
  DEVICE int k() const { return ((unit - item() * p.work_per_item) * p.step + slice) * kSliceBytes; }
  DEVICE bool next() {  // true if that begins a tile
    if (++slice < p.step && k() < p.k) return false;
    slice = 0, unit += mma::kWaves * p.split_k;
    return true;
  }
};
