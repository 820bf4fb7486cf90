// Collective kernels with payload and flag apart: arguments and names, as in instances.h.
#pragma once
#include "flagged.h"
#include "instances.h"

// clang-format off
#define FLAGGED_ARGUMENTS                                                                                              \
  GROUP_ARGUMENTS,                                                                                                     \
  const void* input,          /* [rows, hidden] T, rows input_stride elements apart */                                 \
  i64 input_stride, u32 rows, u32 row_chunks, u32 parts, u32 row_threads, u32 row_blocks, u32 stages, u32 slot,        \
  u32 first, u32 buffer, u32 inverse, int shift
#define FLAGGED_SUM_INSTANCE(Protocol, wire, type, T, most, chunks)                                                    \
  KERNEL(512) all_reduce_flagged_##wire##type##_##most##_x##chunks(                                                    \
      FLAGGED_ARGUMENTS,                                                                                               \
      void* out) {            /* [rows, hidden] T */                                                                   \
    GROUP;                                                                                                             \
    flagged_all_reduce<Protocol, T, most, chunks>(                                                                     \
        group,                                                                                                         \
        {{input, input_stride, row_chunks, parts, row_threads},                                                        \
         rows, row_blocks, stages, slot, first, buffer, {inverse, shift}},                                             \
        out);                                                                                                          \
  }
#define FLAGGED_NORM_INSTANCE(Protocol, wire, name, type, T, RowOut, is_16_bit, most, chunks)                          \
  KERNEL(512) all_reduce_flagged_##wire##name##_##type##_##most##_x##chunks(                                           \
      FLAGGED_ARGUMENTS, void* residual, /* from here on as in instances.h */                                          \
      i64 residual_stride, const void* weight, int hidden, float inverse_hidden, float epsilon, int one_plus_weight,   \
      void* normed, const void* addend, float addend_factor, const float* scale, void* out, float* scale_out,          \
      i64 scale_row_stride, i64 scale_stride, int group_size) {                                                        \
    GROUP;                                                                                                             \
    const RowOut output(scale, out, scale_out, scale_row_stride, scale_stride, group_size, row_threads);               \
    flagged_all_reduce_norm<Protocol, T, most, chunks, is_16_bit>(                                                     \
        group,                                                                                                         \
        {{input, input_stride, row_chunks, parts, row_threads, addend, addend_factor},                                 \
         rows, row_blocks, stages, slot, first, buffer, {inverse, shift}},                                             \
        {nullptr, residual, weight, hidden, inverse_hidden, epsilon, one_plus_weight != 0}, residual_stride, normed,   \
        output);                                                                                                       \
  }
// clang-format on
#define FLAGGED_SIZES(instance, ...) instance(__VA_ARGS__, 1) instance(__VA_ARGS__, 2) instance(__VA_ARGS__, 4)
// Kernels of 8 ranks serve any number of them in two stages.
#define FLAGGED_GROUPS(instance, ...)                \
  FLAGGED_SIZES(instance, Flagged, , __VA_ARGS__, 2) \
  FLAGGED_SIZES(instance, Flagged, , __VA_ARGS__, 4) \
  FLAGGED_SIZES(instance, Flagged, , __VA_ARGS__, 8) \
  instance(FlaggedE4m3, fp8_, __VA_ARGS__, 2, 4) instance(FlaggedE4m3, fp8_, __VA_ARGS__, 8, 4)
#define FLAGGED_NORMS(name, Output, is_16_bit) \
  FLAGGED_GROUPS(FLAGGED_NORM_INSTANCE, name, bf16, Bf16, Output<Bf16>, is_16_bit)
