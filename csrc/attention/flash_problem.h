// The arguments of flash attention.
#pragma once
#include "attention/cache.h"
#include "device/divisor.h"

struct FlashProblem {
  const u8* query;        // strides in elements; elements of a row of a head lie side by side
  u16* out;               // as query lies, contiguous
  float* lse;             // or null
  CacheView key, value;   // sequence s is page s, or all are of page 0
  const int* row_begins;  // [sequences + 1], or null where all sequences have `rows` rows and `keys` keys
  const int* key_begins;  // [sequences + 1], or null
  u32* counter;           // of tiles, or null
  i64 query_batch_stride, query_row_stride, query_head_stride;
  i64 out_batch_stride, out_row_stride, out_head_stride, lse_batch_stride, lse_head_stride;
  float scale;
  int rows, keys;
  int sequences, heads, kv_heads, group;  // group: heads of a key head
  int tiles, row_tiles, blocks;           // row_tiles: of a sequence
  int causal, window;                     // window: keys that a row sees, or 0 for all
  Divisor heads_divisor, kv_heads_divisor, sequences_divisor;
};
