// act that a block quantizes into its LDS: e4m3 [pairs, K], then scales: block fp32 [pairs, K / 128], mx u8
// [pairs, K / 32]. K is a multiple of 128. Rows without a pair are not defined.
#pragma once
#include "device/float8.h"
#include "device/reduce.h"
#include "gemm/experts.h"

// T is the type of the rows in HBM. With kRow they share a static scale.
template <class T, ScaleGranularity kScales>
struct QuantizedRows {
  static constexpr bool kMx = kScales == ScaleGranularity::kMx;
  static constexpr int kLanes = (kMx ? kMxBlock : kScaleBlock) / kChunk;  // per scale
  static constexpr int kAtOnce = 1024 / kThreads;                         // chunks per lane

  const void* from;
  u8 *rows, *scales;
  int chunks;
  float inverse = 0.0f;  // of the static scale
  u32x4 first[kAtOnce];  // a lane's first chunks

  DEVICE QuantizedRows(const Experts& p, u8* lds)
      : from(p.tokens), rows(lds), scales(lds + p.pairs * p.k), chunks(p.pairs * p.k / kChunk) {
    if constexpr (kScales == ScaleGranularity::kRow) inverse = 1.0f / mem::load<float>((const float*)p.scale_a);
  }

  // Issues the loads of a lane's first chunks, and stores all further ones.
  DEVICE void load() {
#pragma unroll 1
    for (int base = kAtOnce * kThreads; base < chunks; base += kAtOnce * kThreads) {
      load_from(base);
      store_to(base);
    }
    load_from(0);
  }
  DEVICE void finish() const {
    store_to(0);
    block_barrier();  // hazard: rows are read before they are quantized
  }

 private:
  DEVICE void load_from(int base) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = base + i * kThreads + wave::thread_id();
      first[i] = mem::load_vector_or_zero(from, index, index < chunks);
    }
  }
  // Quantizes with the bits of fused_experts_quantize.
  DEVICE void store_to(int base) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i * kThreads >= chunks) break;
      const int index = base + i * kThreads + wave::thread_id();
      const Chunk chunk = unpack<T>(first[i]);
      const bool inside = index < chunks, begins_group = inside && index % kLanes == 0;
      u32x2 quantized;
      if constexpr (kScales == ScaleGranularity::kRow) quantized = quantize(chunk, inverse);
      else {
        const float absmax = wave::reduce_group<kLanes>(max_abs(0.0f, chunk), 0.0f, Max{});
        if constexpr (kMx) {
          const u32 scale = absmax_to_e8m0(absmax);
          quantized = quantize_mx(chunk, scale);
          if (begins_group) scales[index / kLanes] = u8(scale);
        } else {
          const float scale = absmax_to_scale(absmax);
          quantized = quantize(chunk, Scale(scale));
          if (begins_group) ((float*)scales)[index / kLanes] = scale;
        }
      }
      if (inside) ((u32x2*)rows)[index] = quantized;
    }
  }
};

// Of a kernel that quantizes none.
template <ScaleGranularity kScales>
struct QuantizedRows<void, kScales> {
  u8 *rows = nullptr, *scales = nullptr;
  DEVICE QuantizedRows(const Experts&, u8*) {}
  DEVICE void finish() const {}
};
