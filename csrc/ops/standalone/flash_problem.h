// FlashAttention arguments.
#pragma once
#include "attention/cache.h"
#include "device/divisor.h"

struct FlashProblem {
  const u8* query;        // strides in elements; a head's row is contiguous
  u16* out;               // in the query's order, contiguous
  float* lse;             // or null
  CacheView key, value;   // sequence s is page s, or all are in page 0
  const int* row_begins;  // [sequences + 1], or null if all sequences have `rows` rows and `keys` keys
  const int* key_begins;  // [sequences + 1], or null
  const int* seq_lens;    // each sequence's keys in a cache, or null
  u32* counter;           // tile counter, or null
  i64 query_batch_stride, query_row_stride, query_head_stride;
  i64 out_batch_stride, out_row_stride, out_head_stride, lse_batch_stride, lse_head_stride;
  float scale;
  int rows, keys;
  int sequences, heads, kv_heads, group;  // group: heads per KV head
  int tiles, row_tiles, blocks;           // row_tiles: per sequence
  int causal, window;                     // window: keys that a row sees, or 0 for all
  Divisor heads_divisor, kv_heads_divisor, sequences_divisor;
};

// Additional arguments of the general kernels.
struct FlashExtras {
  const int* block_table;     // [sequences, pages] into a cache, or null
  const float* slopes;        // [sequences, heads], or null
  const float* query_scale;   // both per query head, the views' scales per KV head, or one for all
  const float* weight_scale;  // weights are multiplied by it and rounded to integers, or null
  const u8* bias;             // or null
  i64 query_element_stride, table_stride, slopes_stride, slopes_head_stride;
  i64 bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride;
  float softcap, factor;  // softcap: 0 is none; factor: of the results, for dropout
  int size, value_size, page_size;
  int query_type, key_type;                 // FlashType: queries, and keys and values
  int query_order, key_order, value_order;  // FlashOrder
  int bias_type;                            // as in with_output_type
  int query_scale_stride, key_scale_stride, value_scale_stride, weight_scale_stride;
  u32 threshold, seed_low, seed_high;  // dropout, or 0
  Divisor page_divisor;
};
// Element types: the product's, or an 8-bit one that converts to it exactly.
enum FlashType { kOfProduct = 0, kOfE4m3 = 1, kOfInt8 = 2 };
// Contiguous and aligned data: 8 elements per row (4 for values), 8 keys per element, or nothing.
enum FlashOrder { kByElement = 0, kByKey = 1, kAnyOrder = 2 };
