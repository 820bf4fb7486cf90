// Skinny GEMM: few tokens times a weight that is streamed from HBM once.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: b dominates; flops: 2 * M * N * K. Up to 128 tokens the bound is reading b at HBM bandwidth, so every compute
// unit needs enough loads in flight from the first cycle to the last.
//
// A tile is 64 rows of b over all of K (StreamedTile), or 16 rows (WaveSplitK). A step is 64 K bytes of a tile, 256
// with kMx. A stream-K schedule divides the steps of all tiles evenly over the blocks, regardless of tile boundaries
// (schedule.h). A unit can instead be a whole tile or an equal share of one; no block splits a unit. A block multiplies
// a 64-row tile with all tokens: AMD keeps the loads in flight in registers (amd/streamed_tile.h), NVIDIA in LDS
// (nvidia/streamed_tile.h). From 64 tokens on, groups of tokens can have blocks of their own, which read b again from
// a cache: that fills the GPU with small weights, and serves up to 256 tokens.
//
// A step on gfx942 for 64, 96 and 128 tokens: 128, 192 and 256 matrix cycles per SIMD, 160, 240 and 320 LDS cycles;
// its bytes take 623 cycles at 4.2 TB/s.
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
// Kernels symbol_<tokens> for every number of tokens.
#define STREAMED_TILES(symbol, type, ...)           \
  STREAMED_TILE(symbol##_16, type, 16, __VA_ARGS__) \
  STREAMED_TILE(symbol##_32, type, 32, __VA_ARGS__) \
  STREAMED_TILE(symbol##_64, type, 64, __VA_ARGS__) \
  STREAMED_TILE(symbol##_96, type, 96, __VA_ARGS__) \
  STREAMED_TILE(symbol##_128, type, 128, __VA_ARGS__)
#define WAVE_SPLIT_K(symbol, type, tokens, ...)                                                                 \
  KERNEL((WaveSplitK<type, tokens, __VA_ARGS__>::kThreads), (WaveSplitK<type, tokens, __VA_ARGS__>::kResident)) \
  symbol(WaveSplitK<type, tokens, __VA_ARGS__>::Problem problem) {                                              \
    LDS static WaveSplitK<type, tokens, __VA_ARGS__>::Buffer buffer;                                            \
    const WaveSplitK<type, tokens, __VA_ARGS__> kernel{problem, buffer};                                        \
    kernel.multiply();                                                                                          \
  }
