// Split-KV decode arguments.
#pragma once
#include "attention/cache.h"
#include "device/divisor.h"

struct DecodeProblem {
  const void* query;         // [requests * query_len, query_heads, D], 16-bit, or e4m3 with a scale
  const float* query_scale;  // [1], or null
  void* out;                 // same shape, 16-bit, or e4m3 with a scale
  const float* out_scale;    // [1], or null
  float* lse;                // [requests * query_len, query_heads], or null
  CacheView key_cache, value_cache;
  const int* block_table;  // [requests, pages per request]
  const int* seq_lens;     // [requests], including the query rows
  const float* sinks;      // [query_heads], or null
  float* partials;         // [work tiles, slots, columns * (D + 2)], or null for one split
  u32* counters;           // [work tiles, groups], or null if no block combines splits
  i64 query_stride, query_head_stride, out_stride, out_head_stride, table_stride;
  float scale;                                  // of the scores, times log2(e)
  int query_len, query_heads, kv_heads, group;  // group: query heads per KV head
  int packed_row_tiles;                         // of 16 columns
  int page_size, table_pages;                   // table_pages: per request
  int num_kv_splits, min_steps;
  int slots, groups;  // output.h: slots for splits and their groups, and groups, per request
  int window;         // keys that a row sees, or 0 for all
  Divisor page_divisor, min_divisor, group_divisor, tiles_divisor, heads_divisor;
};

// The same, where out is e4m3 with one scale per row and 128-element head.
struct GroupedProblem : DecodeProblem {
  float* out_scales;  // [requests * query_len, query_heads]
  i64 out_scales_stride, out_scales_head_stride;
};

// MLA: one KV head, whose keys are a latent and a rotary part, and whose values are the latent. `query` is the latent
// part of the query.
struct MlaProblem {
  DecodeProblem decode;
  const void* query_pe;  // [requests * query_len, query_heads, 64]
  i64 query_pe_stride, query_pe_head_stride;
  int requests;
  int blocks;          // that share all requests' steps evenly, if requests have no splits of their own
  int combine_blocks;  // that then combine a request's splits
};
