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
  const int* seq_lens;    // keys of each sequence in a cache, or null
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

// What the general kernels take beside.
struct FlashExtras {
  const int* block_table;     // [sequences, pages] of a cache, or null
  const float* slopes;        // [sequences, heads], or null
  const float* query_scale;   // these two by query head, those of the views by key head, or one for all
  const float* weight_scale;  // weights are rounded to whole numbers after a product with it, or null
  const u8* bias;             // or null
  i64 query_element_stride, table_stride, slopes_stride, slopes_head_stride;
  i64 bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride;
  float softcap, factor;  // 0 is none; of results, for dropout
  int size, value_size, page_size;
  int query_type, key_type;                 // FlashType, of queries and of keys and values
  int query_order, key_order, value_order;  // FlashOrder
  int bias_type;                            // as with_output_type has them
  int query_scale_stride, key_scale_stride, value_scale_stride, weight_scale_stride;
  u32 threshold, seed_low, seed_high;  // of dropout, or 0
  Divisor page_divisor;
};
// Of elements: the product's, or one of 8 bits that is exact in it.
enum FlashType { kOfProduct = 0, kOfE4m3 = 1, kOfInt8 = 2 };
// What lies side by side and aligned: 8 elements of a row (4 of a value), 8 keys of an element, or nothing.
enum FlashOrder { kByElement = 0, kByKey = 1, kAnyOrder = 2 };
