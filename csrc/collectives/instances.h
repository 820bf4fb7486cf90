// Collective kernels: arguments and names. Names end in the element type, the maximum number of ranks (2, 4 or 8) and
// the chunks per thread.
#pragma once
#include "all_reduce.h"

template <class T>
using Plain = RowOutput<T, Output::kPlain>;
template <class T>
using Static = RowOutput<T, Output::kStatic>;
template <class T>
using PerToken = RowOutput<T, Output::kPerToken>;
template <class T>
using PerBlock = RowOutput<T, Output::kPerBlock>;
template <class T>
using Mx = RowOutput<T, Output::kMx>;

// clang-format off
#define GROUP_ARGUMENTS                                                                                                \
  u64* inbox0, u64* inbox1, u64* inbox2, u64* inbox3, u64* inbox4, u64* inbox5, u64* inbox6, u64* inbox7, u64* mine,   \
  u32* counters, u64* report, u32 capacity, u32 rank, u32 ranks, u32 limit_us
#define GROUP                                                                                                          \
  const Group group{{inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7},                                  \
                    mine, counters, report, capacity, rank, ranks, limit_us}

#define SUM_INSTANCE(type, T, most, chunks)                                                                            \
  KERNEL(512) all_reduce_##type##_##most##_x##chunks(                                                                  \
      GROUP_ARGUMENTS,                                                                                                 \
      const void* input,      /* [rows, hidden] T, rows input_stride elements apart */                                 \
      i64 input_stride, u32 rows, u32 row_chunks, u32 parts, u32 row_threads,                                          \
      void* out) {            /* [rows, hidden] T */                                                                   \
    GROUP;                                                                                                             \
    all_reduce<OneShot, T, most, chunks>(group, {input, input_stride, row_chunks, parts, row_threads}, rows, out);     \
  }
#define NORM_INSTANCE(name, type, T, RowOut, most, chunks)                                                             \
  KERNEL(512) all_reduce_##name##_##type##_##most##_x##chunks(                                                         \
      GROUP_ARGUMENTS, const void* input, i64 input_stride, u32 rows, u32 row_chunks, u32 parts, u32 row_threads,      \
      void* residual,         /* [rows, hidden] T, rows residual_stride elements apart, or null */                     \
      i64 residual_stride,                                                                                             \
      const void* weight,     /* [hidden] T, or null */                                                                \
      int hidden, float inverse_hidden, float epsilon, int one_plus_weight,                                            \
      void* normed,           /* [rows, hidden] T: the norm before quantization, or null */                            \
      const void* addend,     /* as input, or null */                                                                  \
      float addend_factor,                                                                                             \
      const float* scale, void* out, float* scale_out, /* from here on as in rms_norm.hip */                           \
      i64 scale_row_stride, i64 scale_stride, int group_size) {                                                        \
    GROUP;                                                                                                             \
    const RowOut output(scale, out, scale_out, scale_row_stride, scale_stride, group_size, row_threads);               \
    all_reduce_norm<OneShot, T, most, chunks>(                                                                         \
        group, {input, input_stride, row_chunks, parts, row_threads, addend, addend_factor}, rows,                     \
        {nullptr, residual, weight, hidden, inverse_hidden, epsilon, one_plus_weight != 0}, residual_stride, normed,   \
        output);                                                                                                       \
  }
// clang-format on
#define SIZES(instance, ...) instance(__VA_ARGS__, 1) instance(__VA_ARGS__, 2)
#define GROUPS(instance, ...) \
  SIZES(instance, __VA_ARGS__, 2) SIZES(instance, __VA_ARGS__, 4) SIZES(instance, __VA_ARGS__, 8)
#define NORMS(name, Output)                             \
  GROUPS(NORM_INSTANCE, name, bf16, Bf16, Output<Bf16>) \
  GROUPS(NORM_INSTANCE, name, fp16, F16, Output<F16>)
