// Softmax of rows.
//
//     m = max(input);  out = T(exp(input - m) / sum(exp(input - m)))
//
// Everything is fp32 up to the single rounding to T. A row with NaN or +inf, or with only -inf, is NaN, as in PyTorch.
//
// Bytes per element: 2 or 4 (input) + the same (out); a row too long for a block's registers is read twice, the second
// time from a cache if it fits. One or two exponentials per element. A block owns a row. In the vector kernels thread t
// processes the 8-element chunks t, t + threads, ..., and either keeps them in registers or, online, iterates over the
// row with its own running maximum and sum, rescaled when the maximum grows; the block combines them.
#include "device/reduce.h"

constexpr float kLog2E = 1.4426950408889634f;

// The neutral element.
constexpr float kNothing = -__builtin_inff();

// 2^x, including subnormal results, which exp2_approx flushes to 0.
DEVICE float power_of_two(float x) {
  const bool is_tiny = x < -126.0f;
  return numerics::exp2_approx(is_tiny ? x + 64.0f : x) * (is_tiny ? 0x1p-64f : 1.0f);
}

// exp(x) for x <= 0. If T is fp32, the error is within 2 ulp, where a rounded x * log2(e) would be off by up to 60.
// Below x = -104 it is 0.
template <class T>
DEVICE float exponential(float x) {
  if constexpr (__is_same(T, F16)) return numerics::exp2_approx(x * kLog2E);
  if constexpr (__is_same(T, Bf16)) return power_of_two(x * kLog2E);
  x = x < -104.0f ? -104.0f : x;  // NaN stays
  const float power = x * kLog2E;
  const float rest = __builtin_fmaf(x, kLog2E, -power) + x * 1.925963033500e-8f;  // log2(e) - kLog2E
  const float scale = power_of_two(power);
  return __builtin_fmaf(scale, rest * 0.6931471805599453f, scale);
}

// The value subtracted from elements with maximum m: -inf - -inf would be NaN.
DEVICE float subtracted(float m) { return m == kNothing ? 0.0f : m; }

// A chunk in HBM, in 16-byte accesses.
template <class T>
constexpr int kAccesses = __is_same(T, float) ? 2 : 1;
template <class T>
struct Loaded {
  u32x4 part[kAccesses<T>];
};

// Zeros if not in bounds.
template <class T>
DEVICE Loaded<T> load_chunk(const void* row, int index, bool in_bounds) {
  Loaded<T> loaded;
  for (int i = 0; i < kAccesses<T>; ++i)
    loaded.part[i] = mem::load_vector_or_zero(row, index * kAccesses<T> + i, in_bounds);
  return loaded;
}

// Converts to fp32; -inf if not in bounds.
template <class T>
DEVICE Chunk values(const Loaded<T>& loaded, bool in_bounds) {
  Chunk chunk;
  if constexpr (__is_same(T, float)) {
    for (int i = 0; i < 2; ++i) {
      const f32x4 four = __builtin_bit_cast(f32x4, loaded.part[i]);
      chunk.pair[2 * i] = four.xy;
      chunk.pair[2 * i + 1] = four.zw;
    }
  } else chunk = unpack<T>(loaded.part[0]);
  for (f32x2& pair : chunk.pair)
    if (!in_bounds) pair = f32x2{kNothing, kNothing};
  return chunk;
}

template <class T>
DEVICE void store_chunk(void* row, int index, const Chunk& y) {
  if constexpr (__is_same(T, float)) {
    for (int i = 0; i < 2; ++i) {
      const f32x4 four = {y.pair[2 * i].x, y.pair[2 * i].y, y.pair[2 * i + 1].x, y.pair[2 * i + 1].y};
      mem::store((f32x4*)row + 2 * index + i, four);
    }
  } else mem::store((u32x4*)row + index, pack<T>(y));
}

DEVICE float largest(float bound, const Chunk& x) {
  for (f32x2 pair : x.pair) bound = __builtin_fmaxf(bound, __builtin_fmaxf(pair.x, pair.y));
  return bound;
}

// Replaces a chunk by its exponentials and returns their sum.
template <class T>
DEVICE float exponentials(Chunk& x, float maximum) {
  float sum = 0.0f;
  for (f32x2& pair : x.pair) {
    pair = {exponential<T>(pair.x - maximum), exponential<T>(pair.y - maximum)};
    sum += pair.x + pair.y;
  }
  return sum;
}

DEVICE void scale(Chunk& x, float factor) {
  for (f32x2& pair : x.pair) pair *= factor;
}

struct SoftmaxRow {
  const void* input;  // [hidden] T
  void* out;          // [hidden] T
  int hidden, threads, waves;
};

// hidden is a multiple of 8 and at most threads * kChunks * 8; rows are 16-byte aligned.
template <class T, int kChunks>
DEVICE void softmax_vector(SoftmaxRow row) {
  LDS static float maxima[kMaxWaves], sums[kMaxWaves];
  Loaded<T> loaded[kChunks];
  bool in_bounds[kChunks];
  Chunk x[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int index = wave::thread_id() + i * row.threads;
    in_bounds[i] = index * kChunk < row.hidden;
    loaded[i] = load_chunk<T>(row.input, index, in_bounds[i]);
  }
  float maximum = kNothing, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    x[i] = values<T>(loaded[i], in_bounds[i]);
    maximum = largest(maximum, x[i]);
  }
  maximum = subtracted(reduce_block(maximum, kNothing, maxima, row.waves, Max{}));
#pragma unroll
  for (int i = 0; i < kChunks; ++i) sum += exponentials<T>(x[i], maximum);
  const float factor = 1.0f / reduce_block(sum, 0.0f, sums, row.waves, Add{});
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    scale(x[i], factor);
    if (in_bounds[i]) store_chunk<T>(row.out, wave::thread_id() + i * row.threads, x[i]);
  }
}

// Rows of any length: hidden is a multiple of 8; rows are 16-byte aligned.
template <class T>
DEVICE void softmax_online(SoftmaxRow row) {
  constexpr int kAhead = 4;  // chunks that a thread loads at once
  LDS static float maxima[kMaxWaves], sums[kMaxWaves];
  const int chunks = row.hidden / kChunk, step = kAhead * row.threads;
  float maximum = kNothing, sum = 0.0f;
  for (int first = wave::thread_id(); first < chunks; first += step) {
    Loaded<T> loaded[kAhead];
    Chunk x[kAhead];
    float grown = maximum;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      loaded[i] = load_chunk<T>(row.input, first + i * row.threads, first + i * row.threads < chunks);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      x[i] = values<T>(loaded[i], first + i * row.threads < chunks);
      grown = largest(grown, x[i]);
    }
    sum *= exponential<T>(maximum - subtracted(grown));
#pragma unroll
    for (int i = 0; i < kAhead; ++i) sum += exponentials<T>(x[i], subtracted(grown));
    maximum = grown;
  }
  const float of_row = subtracted(reduce_block(maximum, kNothing, maxima, row.waves, Max{}));
  sum *= exponential<T>(maximum - of_row);
  const float factor = 1.0f / reduce_block(sum, 0.0f, sums, row.waves, Add{});
  for (int first = wave::thread_id(); first < chunks; first += step) {
    Loaded<T> loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      loaded[i] = load_chunk<T>(row.input, first + i * row.threads, first + i * row.threads < chunks);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool in_bounds = first + i * row.threads < chunks;
      Chunk y = values<T>(loaded[i], in_bounds);
      exponentials<T>(y, of_row);
      scale(y, factor);
      if (in_bounds) store_chunk<T>(row.out, first + i * row.threads, y);
    }
  }
}

// Any hidden size and alignment, one element per access; reads the row three times.
template <class T>
DEVICE void softmax_general(SoftmaxRow row) {
  LDS static float maxima[kMaxWaves], sums[kMaxWaves];
  float maximum = kNothing, sum = 0.0f;
  for (int column = wave::thread_id(); column < row.hidden; column += row.threads)
    maximum = __builtin_fmaxf(maximum, load_element<T>(row.input, column));
  maximum = subtracted(reduce_block(maximum, kNothing, maxima, row.waves, Max{}));
  for (int column = wave::thread_id(); column < row.hidden; column += row.threads)
    sum += exponential<T>(load_element<T>(row.input, column) - maximum);
  const float factor = 1.0f / reduce_block(sum, 0.0f, sums, row.waves, Add{});
  for (int column = wave::thread_id(); column < row.hidden; column += row.threads)
    store_element<T>(row.out, column, exponential<T>(load_element<T>(row.input, column) - maximum) * factor);
}

#define INSTANCE(threads, symbol, T, body)                                         \
  KERNEL(threads)                                                                  \
  symbol(const void* input, /* [rows, hidden] T, rows input_stride bytes apart */  \
         void* out,         /* [rows, hidden] T */                                 \
         i64 input_stride, int hidden, int threads_per_block) {                    \
    const i64 block = u32(wave::block_id_x());                                     \
    const i64 size = __is_same(T, float) ? 4 : 2;                                  \
    const void* from = (const u8*)input + block * input_stride;                    \
    void* to = (u8*)out + block * hidden * size;                                   \
    body({from, to, hidden, threads_per_block, threads_per_block / wave::kLanes}); \
  }
// Instances for one element type, in order of chunks per thread.
#define INSTANCES(name, T)                             \
  INSTANCE(1024, name##_x2, T, (softmax_vector<T, 2>)) \
  INSTANCE(512, name##_x4, T, (softmax_vector<T, 4>))  \
  INSTANCE(1024, name##_online, T, softmax_online<T>)  \
  INSTANCE(1024, name##_general, T, softmax_general<T>)

INSTANCES(softmax_bf16, Bf16)
INSTANCES(softmax_fp16, F16)
INSTANCES(softmax_fp32, float)
