// Reductions over a block with one barrier each.
#pragma once
#include "vec.h"

struct Add {
  DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Max {
  DEVICE float operator()(float a, float b) const { return __builtin_fmaxf(a, b); }
};

constexpr int kMaxWaves = 1024 / wave::kLanes;

// Combines one value per thread over the block; every thread gets the result. `partials` is LDS of this reduction alone:
// each wave leaves its part there, the barrier makes the parts visible, and every wave combines all of them, in the
// same order, by itself, so that no second barrier is needed. Not reusable before a further barrier.
template <class Combine>
DEVICE float reduce_block(float value, float identity, float* partials, int waves, Combine combine) {
  value = wave::reduce(value, identity, combine);
  if (waves == 1) return value;
  int lane = wave::lane();
  if (lane == 0) partials[wave::index()] = value;
  block_barrier();  // hazard: a wave reads the parts that the others write
  float part = lane < waves ? partials[lane] : identity;
  if constexpr (kMaxWaves == 16) return wave::reduce_group<16>(part, identity, combine);
  return wave::reduce(part, identity, combine);
}
