// Maps blocks to output tiles.
#pragma once
#include "device/divisor.h"
#include "device/tile_mma.h"

namespace tile {

constexpr int kGroupM = 8;  // tiles along M in a group whose blocks run next to each other

// The hardware assigns blocks to XCDs round-robin. Returns a remapped index, so that each XCD has consecutive indices,
// whose tiles share operands in its L2 cache.
DEVICE int remap_to_xcd(int block, int blocks) {
  const int xcd = block % kXcds, per_xcd = blocks / kXcds, remainder = blocks % kXcds;
  return xcd * per_xcd + (xcd < remainder ? xcd : remainder) + block / kXcds;
}

struct TileCoord {
  int m, n;
};

// Returns the tile for an index. A group is group_m tiles along M and all tiles along N; indices run along M first.
// With 8, the about 64 consecutive tiles that an XCD computes at a time read 8 token panels and 8 weight panels.
DEVICE TileCoord rasterize(int index, int tiles_m, int tiles_n, int group_m) {
  const int first = index / (group_m * tiles_n) * group_m, in_group = index % (group_m * tiles_n);
  const int rows = tiles_m - first < group_m ? tiles_m - first : group_m;
  return {first + in_group % rows, in_group / rows};
}
// The same with kGroupM, given the divisors for a group's tile count, and for the tiles along M of a smaller last
// group.
DEVICE TileCoord rasterize(int index, int tiles_m, int tiles_n, const Divisor& group_divisor,
                           const Divisor& last_group_divisor) {
  const int group = u32(index) / group_divisor, first = group * kGroupM, in_group = index - first * tiles_n;
  const bool whole = tiles_m - first >= kGroupM;
  const int n = whole ? in_group / kGroupM : u32(in_group) / last_group_divisor;
  return {first + in_group - n * (whole ? kGroupM : tiles_m - first), n};
}

}  // namespace tile
