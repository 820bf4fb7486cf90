// Skinny GEMM: few tokens times a weight that is streamed from HBM once.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: those of b, little else; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b. So every compute unit must
// have enough loads in flight from the first cycle to the last.
//
// A tile is 64 rows of b over all of K (StreamedTile), or 16 rows (WaveSplitK). A step is 64 bytes of K of a tile, with kMx 256.
// A stream-K schedule divides the steps of all tiles evenly over the blocks, wherever tiles begin or end (schedule.h). With units
// of a whole tile or an equal part of one, no block crosses the border of a unit. A block multiplies a tile of 64 rows with all
// tokens: AMD keeps the loads in flight in registers (amd/streamed_tile.h), NVIDIA in LDS (nvidia/streamed_tile.h).
//
// A block that has a whole tile writes its output from registers. Otherwise each block stores its partial sums to HBM, and the
// last block to arrive adds them up in the order of K (epilogue.h). No value is added atomically: every run gives the same bits.
#pragma once
#include "gemm/skinny/streamed_tile.h"
#include "gemm/skinny/wave_split_k.h"

// A kernel named `symbol`; `...` is its ScaleGranularity and, for kBlock, the type of the scales.
#define STREAMED_TILE(symbol, type, tokens, ...)                                                                    \
  KERNEL((StreamedTile<type, tokens, __VA_ARGS__>::kThreads), (StreamedTile<type, tokens, __VA_ARGS__>::kResident)) \
  symbol(StreamedTile<type, tokens, __VA_ARGS__>::Problem problem) {                                                \
    wait_for_arguments(problem);                                                                                    \
    StreamedTile<type, tokens, __VA_ARGS__>::run(problem);                                                          \
  }
#define WAVE_SPLIT_K(symbol, type, tokens, ...)                                  \
  KERNEL((WaveSplitK<type, tokens, __VA_ARGS__>::kThreads), tokens == 8 ? 4 : 3) \
  symbol(WaveSplitK<type, tokens, __VA_ARGS__>::Problem problem) {               \
    LDS static WaveSplitK<type, tokens, __VA_ARGS__>::Buffer buffer;             \
    const WaveSplitK<type, tokens, __VA_ARGS__> kernel{problem, buffer};         \
    kernel.multiply();                                                           \
  }
