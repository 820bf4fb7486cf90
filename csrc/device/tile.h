// Which tile of a product a block takes.
#pragma once
#include "gpu.h"

namespace tile {

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
};

}  // namespace tile
