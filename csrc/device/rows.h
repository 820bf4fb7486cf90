// The kinds of output of kernels on rows (norms and activations), and where the output of a row goes.
#pragma once
#include "float8.h"

enum class Output { kPlain, kStatic, kPerToken, kPerBlock };

// The static kind's scale, or a dynamic kind's bound.
template <Output kOutput>
DEVICE float load_scale(const float* scale) {
  if constexpr (kOutput == Output::kPlain) return 0.0f;
  else if constexpr (kOutput == Output::kStatic) return mem::load<float>(scale);
  else return scale ? mem::load<float>(scale) : __builtin_inff();
}

// The output of a row; before find() that of the first row.
struct RowOutput {
  const float* scale_at;
  float scale;       // of the static kind; of the dynamic kinds scale_ub
  void* out;         // [hidden] T or e4m3
  float* scale_out;  // per token: [1]; per block: [hidden / group_size], scale_stride apart
  i64 scale_row_stride, scale_stride;
  int group_size;

  // Called after the loads of the row, so that none of them waits for these.
  template <Output kOutput>
  DEVICE void find(int hidden) {
    if constexpr (!mem::kScalarsFirst && kOutput != Output::kPerToken) scale = load_scale<kOutput>(scale_at);
    mem::wait_for_scalars(out, scale);
    const i64 row = u32(wave::block_id_x());
    out = (u8*)out + row * hidden * (kOutput == Output::kPlain ? 2 : 1);
    if constexpr (kOutput == Output::kPerToken || kOutput == Output::kPerBlock) {
      mem::wait_for_scalars(scale_out, scale_row_stride);
      scale_out += row * scale_row_stride;
    }
    if constexpr (kOutput == Output::kPerBlock) mem::wait_for_scalars(scale_stride, group_size);
  }
  // A token's largest value, at most scale_ub. Where scalars are not loaded first, scale_ub is loaded here, at its only use.
  DEVICE float bounded(float absmax) const {
    if (mem::kScalarsFirst) return __builtin_fminf(absmax, scale);
    return scale_at ? __builtin_fminf(absmax, mem::load<float>(scale_at)) : absmax;
  }
};
