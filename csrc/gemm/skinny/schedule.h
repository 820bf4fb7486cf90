// Which steps of which tiles a block has.
#pragma once
#include "gemm/skinny/problem.h"

struct Group {  // steps of a tile; those past the end are of no tile
  int tile, step, end;
};

// Which steps this block has, and takes in groups of kGroup. With groups of one, units are of one.
template <int kGroup>
struct Share {
  const Product& p;
  const int block = wave::block_x(), first = first_step(block), last = first_step(block + 1);

  DEVICE int first_step(int b) const { return p.unit * first_unit(b); }
  DEVICE int first_unit(int b) const { return b * p.units + (b < p.longer ? b : p.longer); }
  DEVICE int block_of(u32 unit) const {
    const bool longer = unit < u32(p.in_longer);
    const Divisor by{longer ? p.by_longer_units.inverse : p.by_units.inverse,
                     longer ? p.by_longer_units.shift : p.by_units.shift};
    return (unit - (longer ? 0 : p.in_longer)) / by + (longer ? 0 : p.longer);
  }
  DEVICE Group begin() const {
    const int tile = u32(first_unit(block)) / p.by_tile_units, step = first - tile * p.steps,
              end = last - tile * p.steps;
    return {tile, step, end < p.steps ? end : p.steps};
  }
  // With end <= 0 past the last.
  DEVICE Group after(const Group& now) const {
    const bool same = now.step + kGroup < now.end;
    if (__builtin_expect_with_probability(same, true, wave::kLikely)) return {now.tile, now.step + kGroup, now.end};
    const int tile = now.tile + 1, end = last - tile * p.steps;
    return {tile, 0, end < p.steps ? end : p.steps};
  }
  // Bytes of a row of the group's tile that are the block's, from a step of it on.
  DEVICE int bytes_left(const Group& group, int step) const {
    const int end = group.end * mma::kDepth;
    return (end < p.k ? end : p.k) - step * mma::kDepth;
  }
  DEVICE int first_sharer(int tile) const { return block_of(tile * p.tile_units); }
  DEVICE int last_sharer(int tile) const { return block_of(tile * p.tile_units + p.tile_units - 1); }
};
