// Skinny GEMM: few tokens times a weight that is streamed from HBM once.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: b dominates; flops: 2 * M * N * K. Up to 64 tokens the bound is reading b at HBM bandwidth, so every compute
// unit needs enough loads in flight from the first cycle to the last.
//
// A tile is 64 rows of b over all of K (StreamedTile), or 16 rows (WaveSplitK). A step is 64 K bytes of a tile, 256
// with kMx. A stream-K schedule divides the steps of all tiles evenly over the blocks, regardless of tile boundaries
// (schedule.h). A unit can instead be a whole tile or an equal share of one; no block splits a unit. A block multiplies
// a 64-row tile with all tokens: AMD keeps the loads in flight in registers (amd/streamed_tile.h), NVIDIA in LDS
// (nvidia/streamed_tile.h).
//
// A block that owns a whole tile writes its output from registers. Otherwise each block stores its partial sums to HBM,
// and the last block to arrive adds them in K order (epilogue.h). Nothing is added atomically: every run gives the same
// bits.
#pragma once
#include "gemm/skinny/streamed_tile.h"
#include "gemm/skinny/wave_split_k.h"

// A kernel named `symbol`; `...` is its ScaleGranularity and, for kBlock, the scale type.
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
