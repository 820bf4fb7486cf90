// Kernels for test_runtime.py.
#include "device/gpu.h"

// out[i] = in[i] * factor + offset + blockIdx.y
KERNEL(256) scale(const float* in, float* out, int count, float factor, i64 offset) {
  int i = wave::block_id_x() * 256 + wave::thread_id();
  if (i < count) mem::store(out + i, mem::load<float>(in + i) * factor + float(offset) + float(wave::block_id_y()));
}

// Sends each element of in [256] through dynamic LDS, at the start and at the end of `bytes` bytes.
KERNEL(256) through_lds(const float* in, float* out, int bytes) {
  extern LDS float dynamic[];
  int i = wave::thread_id(), last = bytes / 4 - 1;
  dynamic[i] = mem::load<float>(in + i);
  dynamic[last - i] = dynamic[i];
  mem::store(out + i, dynamic[last - i]);
}
