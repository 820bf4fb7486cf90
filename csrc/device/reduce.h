// Block reductions with one barrier each.
#pragma once
#include "vec.h"

struct Add {
  DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Max {
  DEVICE float operator()(float a, float b) const { return __builtin_fmaxf(a, b); }
};

constexpr int kMaxWaves = 1024 / wave::kLanes;

// Reduces one value per thread over the block; every thread gets the result. `partials` is LDS for this reduction only:
// reuse it only after another barrier. Each wave writes its partial result there. After the barrier, every wave
// combines all of them in the same order, so no second barrier is needed.
template <class Combine>
DEVICE float reduce_block(float value, float identity, float* partials, int waves, Combine combine) {
  value = wave::reduce(value, identity, combine);
  if (waves == 1) return value;
  if (wave::lane() == 0) partials[wave::index()] = value;
  block_barrier();  // hazard: a wave reads the partial results that the others write
  // Each group of kMaxWaves lanes combines all partial results, so every lane has the result.
  int slot = wave::lane() % kMaxWaves;
  return wave::reduce_group<kMaxWaves>(slot < waves ? partials[slot] : identity, identity, combine);
}

// The threads of a row that one block has: their numbers and reductions over them.
struct BlockOfRow {
  DEVICE static int thread() { return wave::thread_id(); }
  template <class Combine>
  DEVICE static float reduce(float value, float identity, float* partials, int waves, Combine combine) {
    return reduce_block(value, identity, partials, waves, combine);
  }
};
