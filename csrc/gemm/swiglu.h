// Between an expert's GEMMs, in kernels whose layer has more than silu(gate) * up: biases, clamped inputs, and gate rows
// that alternate with up rows.
#pragma once
#include "device/clamped_silu.h"
#include "device/vec.h"

struct SwiGlu {
  const void* bias = nullptr;  // [E, N], out_type, as the rows of the weights; or null
  ClampedSilu activation = {};
  int interleaved = 0;  // 1 if each gate row precedes its up row, 0 if all up rows follow the gate rows

  // The row of a gate (half 0) or of its up (half 1), of n.
  DEVICE int row(int gate, int half, int n) const { return interleaved ? 2 * gate + half : half * (n / 2) + gate; }
};

// An element of bf16 or fp16, by its bits.
DEVICE float widened(u32 bits, int type) { return type == 0 ? Bf16::unpack(bits).x : F16::unpack(bits).x; }
