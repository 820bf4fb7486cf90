// Which tile of a product a block takes.
#pragma once
#include "device/divisor.h"
#include "device/tile_mma.h"

namespace tile {

constexpr int kGroup = 8;  // tiles along M of a column of Position's

// Piece of work of a block, so that each die works on neighbouring pieces, which share operands in its L2 cache: the hardware
// deals blocks to the dies in turn.
DEVICE int work_of(int block, int blocks) {
  const int die = block % kDies, per_die = blocks / kDies, longer = blocks % kDies;
  return die * per_die + (die < longer ? die : longer) + block / kDies;
}

// The tile of a piece of work. Neighbouring pieces form columns of `group` tiles along M: with 8, some 64 of them, what a die
// works on at a time, read 8 panels of tokens and 8 of weights.
struct Position {
  int m, n;
  DEVICE Position(int piece, int tiles_m, int tiles_n, int group) {
    const int first = piece / (group * tiles_n) * group, in_group = piece % (group * tiles_n);
    const int rows = tiles_m - first < group ? tiles_m - first : group;
    m = first + in_group % rows, n = in_group / rows;
  }
  // The same by divisors: the pieces of a group, and the tiles along M of the last group, if it has fewer.
  DEVICE static Position of(int piece, int tiles_m, int tiles_n, const Divisor& by_group, const Divisor& by_last) {
    const int group = u32(piece) / by_group, first = group * kGroup, in_group = piece - first * tiles_n;
    const bool whole = tiles_m - first >= kGroup;
    const int n = whole ? in_group / kGroup : u32(in_group) / by_last;
    return {first + in_group - n * (whole ? kGroup : tiles_m - first), n};
  }

 private:
  DEVICE Position(int m_, int n_) : m(m_), n(n_) {}
};

}  // namespace tile
