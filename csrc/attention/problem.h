// The arguments of flash decoding.
#pragma once
#include "attention/cache.h"
#include "device/divisor.h"

struct DecodeProblem {
  const u16* query;        // [requests * query_len, query_heads, D]
  void* out;               // the same, of 16 bits, or e4m3 with a scale
  const float* out_scale;  // [1], or null
  float* lse;              // [requests * query_len, query_heads], or null
  CacheView key_cache, value_cache;
  const int* block_table;  // [requests, pages of a request]
  const int* seq_lens;     // [requests], with the rows of the query
  const float* sinks;      // [query_heads], or null
  float* partials;         // [blocks of a part, slots, columns * (D + 2)], or null for one part
  u32* counters;           // [blocks of a part, groups], or null where no block adds parts
  i64 query_stride, query_head_stride, out_stride, out_head_stride, table_stride;
  float scale;                                  // of scores, times log2(e)
  int query_len, query_heads, kv_heads, group;  // group: query heads of a key head
  int column_tiles;                             // of 16
  int page_size, table_pages;                   // table_pages: of a request
  int parts, least_steps;
  int slots, groups;  // output.h: sums of parts and of groups of them, and groups, of a request
  int window;         // keys that a row sees, or 0 for all
  Divisor page_divisor, least_divisor, group_divisor, tiles_divisor, heads_divisor;
};

// The same, where out is e4m3 with a scale for each row and head of 128 elements.
struct GroupedProblem : DecodeProblem {
  float* out_scales;  // [requests * query_len, query_heads]
  i64 out_scales_stride, out_scales_head_stride;
};

// Those of MLA: one key head, whose keys are a latent and a rotated part, and whose values are the latent. `query` is that of
// the latent.
struct MlaProblem {
  DecodeProblem decode;
  const u16* query_pe;  // [requests * query_len, query_heads, 64]
  i64 query_pe_stride, query_pe_head_stride;
  int requests;
  int blocks;  // that steps of all requests are divided over evenly, where a request does not have parts of its own
  int combine_blocks;  // that then add a request's parts
};
