// One step of Gated DeltaNet per row of a request, in one launch: convolution, gates, recurrence, gated norm, quantization.
//
//     q, k, v = silu(sum over 4 rows of weight * row), per channel; the last 3 rows are the convolution's state
//     q, k    = q * rsqrt(sum(q^2) + 1e-6) / sqrt(128), k * rsqrt(sum(k^2) + 1e-6)
//     decay   = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
//     S       = decay * S;  S += beta * (v - S k) k^T;  o = S q             S [128 of V, 128 of K] per V head
//     y       = o * rsqrt(mean(o^2) + epsilon) * weight * silu(z), stored as bf16 or e4m3
//
// A block has a request's V head: S stays in registers from its only load to its store, 16 lanes a row of it. Splitting
// a head over blocks would not pay: a compute unit loads and stores the 64 KB of an fp32 head in about a microsecond,
// and blocks that share the norm's sum would exchange it in no less. Both products with S come from one pass over it,
// before the update: S_new q = decay * S q + beta * (v - decay * S k) (k q).
//
// V heads of a K head read the same channels of q and k, whose state the last of their blocks to arrive writes: a block
// counts after it has read them, and looks at the count at its end, so that no block waits for another.
//
// Some kernels project b and a of a head from the request's token: loads from a cache, in flight before the loads of S, and
// sums that waves exchange at the barrier after the convolution.
#include "device/divisor.h"
#include "device/float8.h"
#include "device/reduce.h"
#include "device/sigmoid.h"

constexpr int kSize = 128;                 // of K and of V
constexpr int kRowLanes = 16;              // per row of S
constexpr int kOutLanes = kSize / kChunk;  // that store a row of a head
constexpr int kWidth = 4;                  // rows of the convolution
constexpr int kPast = kWidth - 1;          // of them in its state
constexpr int kMaxTokenColumns = 4096;
constexpr float kLog2E = 1.4426950408889634f, kNormEpsilon = 1e-6f, kQueryScale = 0.08838834764831845f;

struct GatedDeltaNetProblem {
  const void *qkvz, *ba;                // [rows, ...] bf16
  i64 qkvz_stride, ba_stride;           // elements, as all strides here
  int key_start, value_start, z_start;  // of q's row: the first elements of k, v and z
  int key_step, value_step;             // from a K head to the next one, for q and k, and for v and z
  int a_start, gate_step;               // the same for ba
  void* conv_state;                     // [slots, channels, positions] bf16
  i64 conv_slot_stride, conv_channel_stride, conv_position_stride;
  const void* conv_weight;  // [channels, kWidth] bf16
  void* state;              // [slots, V heads, kSize, kSize], slots state_stride apart
  i64 state_stride;
  const float* a_log;  // [V heads]
  const void *dt_bias, *norm_weight;
  int dt_bias_type, norm_weight_type;  // 0 bf16, 2 fp32
  float epsilon;
  const int* indices;  // [requests, columns]: slots, of which 0 and less are padding
  i64 indices_stride, indices_step;
  int columns, requests, rows;
  const int *accepted, *row_starts;  // [requests] and [requests + 1], for drafts
  int key_heads, value_heads;        // value_heads: per K head
  Divisor value_divisor;
  void* out;  // [rows, V heads * kSize]
  i64 out_stride;
  const float* out_scale;  // [1]: out is e4m3
  float* out_scales;       // one per row and V head: out is e4m3
  i64 out_scales_stride, out_scales_head_stride;
  u32* counters;  // [requests, key_heads], if value_heads > 1
};

// With the projection of b and a, of one row per request: `ba` has the tokens [rows, token_columns].
struct ProjectingProblem : GatedDeltaNetProblem {
  const void* ba_weight;  // [2 * V heads, token_columns] bf16, in the order of b and a in a row of ba
  i64 ba_weight_stride;
  int token_columns;  // a multiple of 8, at most kMaxTokenColumns
};

// A vector of 16 bytes of S.
template <class S>
struct StateVector {
  static constexpr int kPairs = 4;
  DEVICE static void unpack(u32x4 from, f32x2* to) {
    const Chunk chunk = ::unpack<S>(from);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) to[i] = chunk.pair[i];
  }
  DEVICE static u32x4 pack(const f32x2* from) { return ::pack<S>(Chunk{from[0], from[1], from[2], from[3]}); }
};
template <>
struct StateVector<float> {
  static constexpr int kPairs = 2;
  DEVICE static void unpack(u32x4 from, f32x2* to) {
    const f32x4 four = __builtin_bit_cast(f32x4, from);
    to[0] = {four.x, four.y};
    to[1] = {four.z, four.w};
  }
  DEVICE static u32x4 pack(const f32x2* from) {
    return __builtin_bit_cast(u32x4, f32x4{from[0].x, from[0].y, from[1].x, from[1].y});
  }
};

// Both sums over a row's lanes, in all of them. Each half of the lanes adds up one, which takes fewer exchanges than both:
// in the first, a lane gets the value of any lane of the other half, and each value reaches one lane.
DEVICE f32x2 sums_of(f32x2 x) {
  const bool is_second = wave::lane() & kRowLanes / 2;
  const float mine = (is_second ? x.y : x.x) + wave::other_half<kRowLanes / 2>(is_second ? x.x : x.y);
  const float sum = wave::reduce_group<kRowLanes / 2>(mine, 0.0f, Add{});
  const float other = wave::other_half<kRowLanes / 2>(sum);
  return {is_second ? other : sum, is_second ? sum : other};
}
DEVICE float exp_approx(float x) { return numerics::exp2_approx(x * kLog2E); }

template <class S, bool kDrafts, int kThreads, class Problem>
struct GatedDeltaNet {
  static constexpr bool kProjects = __is_same(Problem, ProjectingProblem);
  static constexpr int kTokenVectors = kMaxTokenColumns / (kChunk * kThreads);  // per thread
  static constexpr int kPairs = StateVector<S>::kPairs;
  static constexpr int kVectors = kSize / (kRowLanes * 2 * kPairs);  // of S, per lane and row
  static constexpr int kLanePairs = kVectors * kPairs;
  static constexpr int kRows = kSize * kRowLanes / kThreads;  // of S, per thread
  static constexpr int kParts = 4 * kSize / kThreads;         // columns of a row per thread: of q, k, v, z

  const Problem& p;
  const int head, request, thread, key_head, of_key_head;

  DEVICE explicit GatedDeltaNet(const Problem& p)
      : p(p),
        head(wave::block_id_x()),
        request(wave::block_id_y()),
        thread(wave::thread_id()),
        key_head(u32(head) / p.value_divisor),
        of_key_head(head - key_head * p.value_heads) {}

  // Part 0 is q, 1 k, 2 v, 3 z, uniform in a wave.
  DEVICE int part(int i) const { return wave::index() / (kSize / wave::kLanes) + i * (kThreads / kSize); }
  DEVICE int channel_of_head() const { return thread % kSize; }
  DEVICE const u16* at(int row, int part) const {
    const int of_value = (part == 2 ? p.value_start : p.z_start) + key_head * p.value_step + of_key_head * kSize;
    return (const u16*)p.qkvz + i64(row) * p.qkvz_stride + channel_of_head() +
           (part >= 2 ? of_value : part * p.key_start + key_head * p.key_step);
  }
  DEVICE i64 channel(int part) const {
    return (part == 2 ? 2 * p.key_heads + head : part * p.key_heads + key_head) * kSize + channel_of_head();
  }
  DEVICE u16* conv_state(int slot, int part) const {
    return (u16*)p.conv_state + slot * p.conv_slot_stride + channel(part) * p.conv_channel_stride;
  }
  DEVICE u32x4* state(int slot) const {
    char* const first = (char*)p.state + i64(slot) * p.state_stride * i64(16 / (2 * kPairs));
    return (u32x4*)first + (i64(head) * kSize + thread / kRowLanes) * (kVectors * kRowLanes) + thread % kRowLanes;
  }
  static constexpr int kRowStep = kThreads / kRowLanes * kVectors * kRowLanes;  // vectors, between a thread's rows

  DEVICE float load_gate(int row, int start) const {
    const u16* const of_row = (const u16*)p.ba + i64(row) * p.ba_stride;
    return load_element<Bf16>(of_row, start + key_head * p.gate_step + of_key_head);
  }

  // Stores 8 of a row's elements, with wave 0.
  DEVICE void store(int row, const Chunk& y) const {
    const bool mine = thread < kOutLanes;
    const i64 element = i64(row) * p.out_stride + head * kSize + thread * kChunk;
    if (p.out_scales) {
      const float scale = absmax_to_scale(wave::reduce_group<kOutLanes>(max_abs(0.0f, y), 0.0f, Max{}));
      if (mine) mem::store((u8*)p.out + element, quantize(y, Scale(scale)));
      if (thread == 0) mem::store(p.out_scales + row * p.out_scales_stride + head * p.out_scales_head_stride, scale);
    } else if (p.out_scale) {
      if (mine) mem::store((u8*)p.out + element, quantize(y, 1.0f / mem::load<float>(p.out_scale)));
    } else if (mine) mem::store((u16*)p.out + element, pack<Bf16>(y));
  }

  DEVICE void run() const {
    LDS static float mixed[5][kSize];  // q, k, v of a row, and the factors by z of even and odd rows
    LDS static float products[kSize];  // S q
    int first = request, rows = 1, accepted = 1;
    if constexpr (kDrafts) {
      first = mem::load<int>(p.row_starts + request);
      rows = mem::load<int>(p.row_starts + request + 1) - first;
      accepted = mem::load<int>(p.accepted + request);
    }
    const int* const slots = p.indices + request * p.indices_stride;
    const int slot = mem::load<int>(slots);
    int from = slot;
    if constexpr (kDrafts) {
      const bool is_one = accepted >= 1 && accepted <= p.columns;
      from = is_one ? mem::load<int>(slots + (accepted - 1) * p.indices_step) : 0;
    }
    const int end = request == p.requests - 1 ? p.rows - first : rows;  // the last request has the rows of none, too
    rows = rows < p.columns ? rows : p.columns;
    if (slot <= 0 || from <= 0) rows = 0;
    if (rows > 0) steps(first, rows, slots, slot, from, accepted, mixed, products);
    if (wave::index() == 0)
      for (int row = rows > 0 ? rows : 0; row < end; ++row) store(first + row, Chunk{});
  }

  DEVICE void steps(int first, int rows, const int* slots, int slot, int from, int accepted, float (*mixed)[kSize],
                    float* products) const {
    LDS static f32x2 gates[kThreads / wave::kLanes];  // b and a, by wave
    // The operands of q, k, v and z before S, as loads return in order.
    f32x2 weight[kParts][2] = {};  // of z, the norm's
    u16 past[kParts][kPast] = {}, now[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      now[i] = mem::load<u16>(at(first, part(i)));
      if (part(i) == 3) weight[i][0].x = load_output(p.norm_weight, channel_of_head(), p.norm_weight_type);
      else {
        const u32x2 packed = mem::load<u32x2>((const u16*)p.conv_weight + channel(part(i)) * kWidth);
        weight[i][0] = Bf16::unpack(packed.x);
        weight[i][1] = Bf16::unpack(packed.y);
        const u16* const of_slot = conv_state(slot, part(i)) + (accepted - 1) * p.conv_position_stride;
#pragma unroll
        for (int j = 0; j < kPast; ++j) past[i][j] = mem::load<u16>(of_slot + j * p.conv_position_stride);
      }
    }
    float a = 0.0f, b = 0.0f;
    u32x4 token[kTokenVectors], of_b[kTokenVectors], of_a[kTokenVectors];
    if constexpr (kProjects) {
      const int row_of_b = key_head * p.gate_step + of_key_head;
      const u16* const of_token = (const u16*)p.ba + i64(first) * p.ba_stride;
      const u16* const weights = (const u16*)p.ba_weight + i64(row_of_b) * p.ba_weight_stride;
#pragma unroll
      for (int i = 0; i < kTokenVectors; ++i) {
        const int index = thread + i * kThreads;
        const bool in_bounds = index * kChunk < p.token_columns;
        token[i] = mem::load_vector_or_zero(of_token, index, in_bounds);
        of_b[i] = mem::load_vector_or_zero(weights, index, in_bounds);
        of_a[i] = mem::load_vector_or_zero(weights + p.a_start * p.ba_weight_stride, index, in_bounds);
      }
    } else {
      a = load_gate(first, p.a_start);
      b = load_gate(first, 0);
    }
    const float a_log = mem::load<float>(p.a_log + head), dt_bias = load_output(p.dt_bias, head, p.dt_bias_type);
    u32x4 loaded[kRows][kVectors];
    const u32x4* const of_slot = state(from);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) loaded[i][j] = mem::load_once<u32x4>(of_slot + i * kRowStep + j * kRowLanes);
    mem::issue_loads();

    float history[kParts][kPast];
    u16 kept[kParts][2];  // the older rows of the next state
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int j = 0; j < kPast; ++j) history[i][j] = Bf16::unpack(past[i][j]).x;
      kept[i][0] = past[i][1];
      kept[i][1] = past[i][2];
    }
    const float rate = exp_approx(a_log);
    const auto convolve = [&](int row) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float newest = Bf16::unpack(now[i]).x;
        float& to = mixed[part(i) == 3 ? 3 + row % 2 : part(i)][channel_of_head()];
        if (part(i) == 3) to = silu(newest) * weight[i][0].x;
        else {
          float sum = history[i][0] * weight[i][0].x;
          sum = __builtin_fmaf(history[i][1], weight[i][0].y, sum);
          sum = __builtin_fmaf(history[i][2], weight[i][1].x, sum);
          sum = __builtin_fmaf(newest, weight[i][1].y, sum);
          to = silu(sum);
          history[i][0] = history[i][1];
          history[i][1] = history[i][2];
          history[i][2] = newest;
        }
      }
      block_barrier();  // hazard: channels are read that others write
    };
    if constexpr (kProjects) {
      f32x2 sum_b = {}, sum_a = {};
#pragma unroll
      for (int i = 0; i < kTokenVectors; ++i) {
        const Chunk x = unpack<Bf16>(token[i]), wb = unpack<Bf16>(of_b[i]), wa = unpack<Bf16>(of_a[i]);
#pragma unroll
        for (int j = 0; j < kChunk / 2; ++j) {
          sum_b = __builtin_elementwise_fma(x.pair[j], wb.pair[j], sum_b);
          sum_a = __builtin_elementwise_fma(x.pair[j], wa.pair[j], sum_a);
        }
      }
      const float of_wave_b = wave::reduce(sum_b.x + sum_b.y, 0.0f, Add{});
      const float of_wave_a = wave::reduce(sum_a.x + sum_a.y, 0.0f, Add{});
      if (wave::lane() == 0) gates[wave::index()] = {of_wave_b, of_wave_a};
    }
    convolve(0);
    if constexpr (kProjects)
      for (int i = 0; i < kThreads / wave::kLanes; ++i) {
        b += gates[i].x;
        a += gates[i].y;
      }
    u32 arrived = 0;
    if (p.value_heads > 1 && thread == 0)
      arrived = block_count(p.counters + request * p.key_heads + key_head, p.value_heads);
    f32x2 s[kRows][kLanePairs];
    const auto unpack_row = [&](int i) __attribute__((always_inline)) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) StateVector<S>::unpack(loaded[i][j], s[i] + j * kPairs);
    };
    if constexpr (kDrafts)
#pragma unroll
      for (int i = 0; i < kRows; ++i) unpack_row(i);

    for (int row = 0;; ++row) {
      const float x = a + dt_bias;
      const float softplus = x <= 20.0f ? numerics::log2_approx(1.0f + exp_approx(x)) : x * kLog2E;
      const float decay = numerics::exp2_approx(-rate * softplus), beta = sigmoid(b);
      const bool is_last = !kDrafts || row + 1 == rows;
      if (!is_last) {
        a = load_gate(first + row + 1, p.a_start);
        b = load_gate(first + row + 1, 0);
#pragma unroll
        for (int i = 0; i < kParts; ++i) now[i] = mem::load<u16>(at(first + row + 1, part(i)));
      }

      f32x2 q[kLanePairs], k[kLanePairs], qq = {}, kk = {}, qk = {};
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        const int pair = i / kPairs * kRowLanes * kPairs + thread % kRowLanes * kPairs + i % kPairs;
        q[i] = ((const f32x2*)mixed[0])[pair];
        k[i] = ((const f32x2*)mixed[1])[pair];
        qq = __builtin_elementwise_fma(q[i], q[i], qq);
        kk = __builtin_elementwise_fma(k[i], k[i], kk);
        qk = __builtin_elementwise_fma(q[i], k[i], qk);
      }
      const auto sum_of = [](f32x2 x) __attribute__((always_inline)) {
        return wave::reduce_group<kRowLanes>(x.x + x.y, 0.0f, Add{});
      };
      const float of_q = numerics::rsqrt_approx(sum_of(qq) + kNormEpsilon) * kQueryScale;
      const float of_k = numerics::rsqrt_approx(sum_of(kk) + kNormEpsilon), product = sum_of(qk) * of_q * of_k;

      const int to = kDrafts ? mem::load<int>(slots + row * p.indices_step) : slot;
      u32x4* const of_next = state(to);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if constexpr (!kDrafts) unpack_row(i);
        f32x2 with_k = {}, with_q = {};
#pragma unroll
        for (int j = 0; j < kLanePairs; ++j) {
          with_k = __builtin_elementwise_fma(s[i][j], k[j], with_k);
          with_q = __builtin_elementwise_fma(s[i][j], q[j], with_q);
        }
        const int of_v = thread / kRowLanes + i * (kThreads / kRowLanes);
        const f32x2 sums = sums_of(f32x2{with_k.x + with_k.y, with_q.x + with_q.y});
        const float delta = beta * (mixed[2][of_v] - decay * of_k * sums.x);
        const float y = __builtin_fmaf(decay * of_q, sums.y, delta * product);
        if (thread % kRowLanes == 0) products[of_v] = y;
        const f32x2 step = {delta * of_k, delta * of_k};
#pragma unroll
        for (int j = 0; j < kLanePairs; ++j)
          s[i][j] = __builtin_elementwise_fma(step, k[j], s[i][j] * f32x2{decay, decay});
        if (to > 0)
#pragma unroll
          for (int j = 0; j < kVectors; ++j)
            mem::store(of_next + i * kRowStep + j * kRowLanes, StateVector<S>::pack(s[i] + j * kPairs));
      }
      block_barrier();  // hazard: products are read that others write, and channels written that others read
      if (wave::index() == 0) {
        Chunk y;
        f32x2 squares = {};
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i) {
          y.pair[i] = ((const f32x2*)products)[thread % kOutLanes * (kChunk / 2) + i];
          squares = __builtin_elementwise_fma(y.pair[i], y.pair[i], squares);
        }
        const float sum = wave::reduce_group<kOutLanes>(squares.x + squares.y, 0.0f, Add{});
        const float inverse_rms = numerics::rsqrt_approx(sum * (1.0f / kSize) + p.epsilon);
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i)
          y.pair[i] *= inverse_rms * ((const f32x2*)mixed[3 + row % 2])[thread % kOutLanes * (kChunk / 2) + i];
        store(first + row, y);
      }
      if (is_last) break;
      convolve(row + 1);
    }

    bool is_last_block = true;
    if (p.value_heads > 1) {
      LDS static u32 before;
      if (thread == 0) before = arrived;
      block_barrier();  // hazard: the count is read before it is written
      is_last_block = wave::uniform(before) == p.value_heads - 1;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      if (part(i) == 2 || (part(i) < 2 && is_last_block)) {
        u16* const to = conv_state(slot, part(i));
        mem::store(to, kept[i][0]);
        mem::store(to + p.conv_position_stride, kept[i][1]);
        for (int row = 0; row < rows; ++row)
          mem::store(to + (row + 2) * p.conv_position_stride,
                     kDrafts ? mem::load<u16>(at(first + row, part(i))) : now[i]);
      }
  }
};

#define INSTANCE(symbol, S, drafts, threads, blocks, Problem) \
  KERNEL(threads, blocks) symbol(const Problem problem) { GatedDeltaNet<S, drafts, threads, Problem>(problem).run(); }
// The symbols end in the type of S, whether a request may have several rows or b and a are projected, and the threads.
#define INSTANCES(type, S, more)                                                                \
  INSTANCE(gated_delta_net_decode_##type##_x256, S, false, 256, 2 + more, GatedDeltaNetProblem) \
  INSTANCE(gated_delta_net_decode_##type##_x512, S, false, 512, 1 + more, GatedDeltaNetProblem) \
  INSTANCE(gated_delta_net_decode_##type##_drafts_x256, S, true, 256, 2, GatedDeltaNetProblem)  \
  INSTANCE(gated_delta_net_decode_##type##_drafts_x512, S, true, 512, 1, GatedDeltaNetProblem)  \
  INSTANCE(gated_delta_net_decode_##type##_ba_x256, S, false, 256, 2 + more, ProjectingProblem) \
  INSTANCE(gated_delta_net_decode_##type##_ba_x512, S, false, 512, 1 + more, ProjectingProblem)
INSTANCES(bf16, Bf16, 1)
INSTANCES(fp32, float, 0)
