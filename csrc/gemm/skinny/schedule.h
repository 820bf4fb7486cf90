// Stream-K schedule: maps a block to its tiles and steps.
#pragma once
#include "gemm/skinny/problem.h"

// A tile's steps [step, end). After a block's last tile, `end` is at most 0.
struct TileWork {
  int tile, step, end;
};

// This block's steps, kGroupSteps at a time. If kGroupSteps is 1, a unit has one step.
template <int kGroupSteps>
struct StreamKSchedule {
  const SkinnyProblem& p;
  const int block = wave::block_id_x(), first = first_step(block), last = first_step(block + 1);

  DEVICE int first_step(int b) const { return p.steps_per_unit * first_unit(b); }
  DEVICE int first_unit(int b) const { return b * p.units_per_block + (b < p.remainder ? b : p.remainder); }
  DEVICE int block_of(u32 unit) const {
    const bool longer = unit < u32(p.remainder_units);
    const Divisor by{longer ? p.longer_block_divisor.inverse : p.units_per_block_divisor.inverse,
                     longer ? p.longer_block_divisor.shift : p.units_per_block_divisor.shift};
    return (unit - (longer ? 0 : p.remainder_units)) / by + (longer ? 0 : p.remainder);
  }
  DEVICE TileWork begin() const {
    const int tile = u32(first_unit(block)) / p.units_per_tile_divisor, step = first - tile * p.steps_per_tile,
              end = last - tile * p.steps_per_tile;
    return {tile, step, end < p.steps_per_tile ? end : p.steps_per_tile};
  }
  DEVICE TileWork after(const TileWork& current) const {
    const bool same = current.step + kGroupSteps < current.end;
    if (__builtin_expect_with_probability(same, true, wave::kLikely))
      return {current.tile, current.step + kGroupSteps, current.end};
    const int tile = current.tile + 1, end = last - tile * p.steps_per_tile;
    return {tile, 0, end < p.steps_per_tile ? end : p.steps_per_tile};
  }
  // The block's bytes of a row, from `step` on.
  DEVICE int bytes_left(const TileWork& work, int step) const {
    const int end = work.end * mma::kDepth;
    return (end < p.k ? end : p.k) - step * mma::kDepth;
  }
  DEVICE int first_block(int tile) const { return block_of(tile * p.units_per_tile); }
  DEVICE int last_block(int tile) const { return block_of(tile * p.units_per_tile + p.units_per_tile - 1); }
};
