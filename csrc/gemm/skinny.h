// Few tokens times a weight that is streamed from HBM once: what all skinny products share.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: those of b, little else; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b, so all that counts is to
// keep enough loads in flight on every compute unit, from the first cycle to the last.
//
// A step is 64 bytes of K, of kMx 256, a tile 64 rows of b over all of K, or 16 (Narrow). The steps of all tiles, one tile after
// the other, are divided evenly over the blocks, so that every compute unit streams as much as any other: wherever tiles begin or
// end, or, with units of a whole tile or an equal part of one, never across their borders. How a block streams tiles of 64 rows,
// with all tokens, is the vendor's: skinny/amd/streamed_tile.h keeps what is in flight in
// registers, skinny/nvidia/streamed_tile.h in LDS.
//
// A tile that one block has alone it finishes from its registers. Of a shared tile, each block leaves its sums in HBM, and the
// last to arrive adds them up in the order of K: no atomics on values, the same bits every run.
#pragma once
#include "gemm/skinny/streamed_tile.h"
#include "gemm/skinny/wave_split_k.h"

// A kernel of that name; `...` are its Scales and, of kBlock, their type.
#define SKINNY(symbol, type, tokens, ...)                                                           \
  KERNEL((Wide<type, tokens, __VA_ARGS__>::kThreads), (Wide<type, tokens, __VA_ARGS__>::kResident)) \
  symbol(Product product) {                                                                         \
    wait_for_arguments(product);                                                                    \
    Wide<type, tokens, __VA_ARGS__>::run(product);                                                  \
  }
#define NARROW(symbol, type, tokens, ...)                                                              \
  KERNEL((Narrow<type, tokens, __VA_ARGS__>::kThreads), tokens == 8 ? 4 : 3) symbol(Product product) { \
    LDS static Narrow<type, tokens, __VA_ARGS__>::Buffer buffer;                                       \
    const Narrow<type, tokens, __VA_ARGS__> kernel{product, buffer};                                   \
    kernel.multiply();                                                                                 \
  }
