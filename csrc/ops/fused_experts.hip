// Fused MoE experts for few tokens: weights are streamed from HBM once, as in gemm/skinny.h.
//
//     gate_up:  act[pair] = silu(gate) * up,  gate, up = w1[expert of pair] @ hidden[token of pair]
//     down:     out[token] = sum over the token's pairs of weight * (w2[expert of pair] @ act[pair])
//
// Kernels named "clamped" and "biased" add biases to both products, and have the other activations of gemm/swiglu.h.
// Kernels of INT4, MXFP4 and, named "mxfp8", MX-FP8 weights multiply these as bf16 (gemm/expert_operands.h).
//
// A pair is a token and an expert it is routed to. Bytes: the weights of the activated experts dominate.
//
// No launch sorts the pairs first: every gate_up block groups them by expert in its own LDS (gemm/group_pairs.h), which
// takes less time than a launch, and one block stores the order for down. An item is an expert with up to kTileTokens
// of its tokens. An expert without tokens has no item and costs nothing. A tile is 16 weight rows. A block's waves
// split K (WaveSplitK): each lane holds the weights and tokens of kStages K slices of 128 bytes in registers.
//
// gate_up: a tile has 8 gate rows and their 8 up rows, so a lane has both. Blocks take the tiles of all items
// round-robin. The waves' sums are reduced in LDS at the end of each tile.
//
// down: a block owns one output tile and iterates over all items. Each wave accumulates into its own sums in LDS, in
// item order. If tiles are too few to fill the GPU, split_k blocks divide each tile's units among them, and the last
// one to arrive adds their partial sums in block order. No block waits for another and nothing is added atomically, so
// every run gives the same bits.
//
// A previous launch quantizes the tokens, or each block of down quantizes act into its LDS (QuantizedRows) while its first
// weights are in flight. Measured on H100, one token of DeepSeek-V3 at TP8: 28.3 us with the launch, 27.0 us without.
// Rejected: blocks of gate_up that quantize hidden, 28.9 us.
#include "device/arrive.h"
#include "gemm/expert_main_loop.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];

template <class T, ScaleGranularity kScales, bool kClamped = false>
DEVICE void gate_up(const Experts& p, const SwiGlu& swiglu = {}) {
  using S = ExpertMainLoop<T, kScales, true, mma::kStages, false, kClamped>;
  // Double-buffered: a slow wave may still read the previous tile's sums.
  LDS static float sums[2][mma::kWaves][4][wave::kLanes];
  mem::wait_for_scalars(p.weights, p.expert_bytes, p.tokens, p.scale_b, p.expert_scales);  // before ids are there
  const PairLists lists(dynamic_lds, p.pairs);
  const TokenRouting first_token(p);  // in flight while rows are computed
  const S main_loop{p, lists, nullptr, nullptr, swiglu};
  const TileWalk of_block{p, 0, wave::block_id_x()};
  const typename S::TileRows rows = main_loop.tile_rows(of_block.tile());
  const Grouped grouped = group_pairs(p, lists, first_token, of_block.item());
  auto ready = [&]() __attribute__((always_inline)) {
    block_barrier();  // hazard: lists are read before they are sorted
    if (wave::block_id_x() != 0 || wave::index() != mma::kWaves - 1) return;
#pragma unroll 1
    for (int i = wave::lane(); i < lists.kept_vectors(); i += wave::kLanes)
      mem::store(p.lists + i, ((const u32x4*)dynamic_lds)[i]);
    if (p.num_rows && wave::lane() == 0) mem::store<int>(p.num_rows, lists.items[grouped.items] & 0xffff);
  };
  int parity = 0;
  auto end_tile = [&](const TileWalk& walk, const f32x4& sum,
                      const typename S::KSlice& last) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (S::kPacked)
        S::Operands::at(sums[parity][wave::index()], i, main_loop.lane) = main_loop.result(sum, last, i);
      else sums[parity][wave::index()][i][main_loop.lane] = main_loop.result(sum, last, i);
    block_barrier();  // hazard: the waves' sums are read before they are written
    // Each of the first two waves handles one gate value and one up value per lane.
    const int i = wave::index();
    const Item item(lists, walk.item());
    const int place = item.first + mma::value_token(main_loop.lane, i);
    if (i < 2 && place < item.end) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) {
        gate += sums[parity][w][i][main_loop.lane];
        up += sums[parity][w][i + 2][main_loop.lane];
      }
      const float weight = p.apply_weights ? lists.router[lists.pairs[place]] : 1.0f;
      const int column = walk.tile() * S::kTileOut + mma::half_row(mma::value_row(main_loop.lane, i));
      if constexpr (kClamped) {
        const float gate_bias = main_loop.bias(last, 0), up_bias = main_loop.bias(last, 1);
        store_output(p.out, i64(place) * (p.n / 2) + column,
                     swiglu.activation(gate * weight + gate_bias, up * weight + up_bias), p.out_type);
      } else store_output(p.out, i64(place) * (p.n / 2) + column, silu(gate * weight) * (up * weight), p.out_type);
    }
    parity ^= 1;
    if (walk.is_last()) wave::may_end();  // without the loads past the end
  };
  main_loop.multiply_all(
      TileWalk{p, grouped.items * p.work_per_item, wave::block_id_x()}, grouped.first, rows, ready, [] {}, end_tile);
}

// Act is the type of act if the block quantizes it, else void.
template <class T, ScaleGranularity kScales, class Act = void, bool kBiased = false>
DEVICE void down(const Experts& p, const void* bias = nullptr) {
  constexpr bool kQuantizes = !__is_same(Act, void);
  // On AMD, registers that tokens in LDS leave free hold another stage.
  constexpr int kStages = kQuantizes && !mem::kPredicates ? mma::kStages : mma::kStages - 1;
  using S = ExpertMainLoop<T, kScales, false, kStages, kQuantizes, kBiased>;
  const int of_wave = p.m * mma::kRows;
  u8* behind = dynamic_lds + mma::kWaves * of_wave * 4;
  const PairLists lists(behind, p.pairs);
  // The first item is loaded by itself, so that its weights do not wait for the lists to be in LDS.
  const UnitWalk of_wave_units{p, 0, wave::block_id_y() * mma::kWaves + wave::index()};
  const int index = of_wave_units.item() < p.pairs ? of_wave_units.item() : 0;
  const PairLists stored((u8*)p.lists, p.pairs);
  const int count = mem::load<int>(stored.count);
  const u32 item = mem::load<u32>(stored.items + index), next = mem::load<u32>(stored.items + index + 1);
  const int vectors = lists.kept_vectors();
  const u32x4 first_vector = mem::load_vector_or_zero(p.lists, wave::thread_id(), wave::thread_id() < vectors);
  QuantizedRows<Act, kScales> quantized(p, behind + vectors * 16);
  if constexpr (kQuantizes) quantized.load();
  const S main_loop{p, lists, quantized.rows, quantized.scales, SwiGlu{bias}};
  const typename S::TileRows rows = main_loop.tile_rows(wave::block_id_x());
  float* sums = (float*)dynamic_lds;  // [waves, tokens, rows]
  float* wave_sums = sums + wave::index() * of_wave;
  auto ready = [&]() __attribute__((always_inline)) {
    for (int i = wave::lane(); i < of_wave; i += wave::kLanes) wave_sums[i] = 0.0f;
    if (wave::thread_id() < vectors) ((u32x4*)behind)[wave::thread_id()] = first_vector;
#pragma unroll 1
    for (int i = wave::thread_id() + kThreads; i < vectors; i += kThreads)
      ((u32x4*)behind)[i] = mem::load<u32x4>(p.lists + i);
    block_barrier();  // hazard: lists are read before they are copied
  };
  auto end_unit = [&](const UnitWalk& walk, const f32x4& sum,
                      const typename S::KSlice& last) __attribute__((always_inline)) {
    const Item item(lists, walk.item());
#pragma unroll
    for (int v = 0; v < S::kValueTokens; ++v) {
      const int place = item.first + S::Operands::value_token(main_loop.lane, v);
      if (place >= item.end) continue;
      const int pair = lists.pairs[place];
      const float weight = p.apply_weights ? lists.router[pair] : 1.0f;
      float* of_token = wave_sums + (pair * p.per_slot >> 20) * mma::kRows;
#pragma unroll
      for (int i = v; i < 4; i += S::kValueTokens)
        of_token[S::Operands::value_row(main_loop.lane, i)] += weight * main_loop.result(sum, last, i);
    }
  };
  const int units = wave::uniform(count) * p.work_per_item;
  main_loop.multiply_all(
      UnitWalk{p, units, of_wave_units.unit}, Item(item, next), rows, ready,
      [&]() __attribute__((always_inline)) { quantized.finish(); }, end_unit);
  block_barrier();  // hazard: the waves' sums are read before they are written
  const mem::Buffer partials = mem::buffer(p.partials + i64(wave::block_id_x()) * p.split_k * of_wave);
  auto store = [&](int i, float total) {
    const int token = i / mma::kRows, row = wave::block_id_x() * mma::kRows + i % mma::kRows;
    if (row < p.n) store_output(p.out, i64(token) * p.n + row, total, p.out_type);
  };
#pragma unroll 1
  for (int i = wave::thread_id(); i < of_wave; i += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < mma::kWaves; ++w) total += sums[w * of_wave + i];
    if (p.split_k == 1) store(i, total);
    else mem::store_device(partials, i * 4, wave::block_id_y() * of_wave * 4, total);
  }
  if (p.split_k == 1 || !is_last_block(p.counters + wave::block_id_x(), p.split_k, *(u32*)dynamic_lds)) return;
#pragma unroll 1
  for (int i = wave::thread_id(); i < of_wave; i += kThreads) {
    float total = 0.0f;
#pragma unroll 8
    for (int y = 0; y < p.split_k; ++y)
      total += mem::load_device_or_zero<float>(partials, i * 4, y * of_wave * 4, true);
    store(i, total);
  }
}

// Blocks of gate_up per SM on NVIDIA.
template <class T, ScaleGranularity>
constexpr int kGateUpResident = 3;
template <class Value, class Scale, int kGroup, ScaleGranularity kScales>
constexpr int kGateUpResident<Packed<Value, Scale, kGroup>, kScales> =
    kGroup == 32 && __is_same(Scale, Bf16Scale) ? 3 : 4;  // otherwise registers spill

// clang-format off
#define INSTANCES(kind, ...)                                                                                   \
  KERNEL((kThreads), (kGateUpResident<__VA_ARGS__>))                                                           \
  fused_experts_gate_up_##kind(Experts experts) { gate_up<__VA_ARGS__>(experts); }                             \
  KERNEL((kThreads), 4) fused_experts_down_##kind(Experts experts) { down<__VA_ARGS__>(experts); }             \
  KERNEL((kThreads), (kGateUpResident<__VA_ARGS__>))                                                           \
  fused_experts_gate_up_clamped_##kind(Experts experts, SwiGlu swiglu) {                                       \
    gate_up<__VA_ARGS__, true>(experts, swiglu);                                                               \
  }                                                                                                            \
  KERNEL((kThreads), 4) fused_experts_down_biased_##kind(Experts experts, const void* bias) {                  \
    down<__VA_ARGS__, void, true>(experts, bias);                                                              \
  }
#define PACKED(...) Packed<__VA_ARGS__>
#define QUANTIZING(kind, scales)                                                                               \
  KERNEL((kThreads), 4) fused_experts_down_quant_##kind##_bf16(Experts experts) { down<E4m3, scales, Bf16>(experts); } \
  KERNEL((kThreads), 4) fused_experts_down_quant_##kind##_fp16(Experts experts) { down<E4m3, scales, F16>(experts); }

INSTANCES(block, E4m3, ScaleGranularity::kBlock)
INSTANCES(row,   E4m3, ScaleGranularity::kRow)
INSTANCES(bf16,  Bf16, ScaleGranularity::kNone)
INSTANCES(fp16,  F16,  ScaleGranularity::kNone)
INSTANCES(int4_32,  PACKED(four_bit::Int4Sixteenths, Bf16Scale, 32),  ScaleGranularity::kNone)
INSTANCES(int4_128, PACKED(four_bit::Int4Sixteenths, Bf16Scale, 128), ScaleGranularity::kNone)
INSTANCES(mxfp4,    PACKED(four_bit::E2m1, E8m0Scale, 32),  ScaleGranularity::kNone)
INSTANCES(mxfp8,    Bf16Mx8, ScaleGranularity::kNone)
QUANTIZING(block,  ScaleGranularity::kBlock)
QUANTIZING(static, ScaleGranularity::kRow)
#ifdef HAS_BLOCK_SCALED_MMA
INSTANCES(mx,    E4m3, ScaleGranularity::kMx)
QUANTIZING(mx,     ScaleGranularity::kMx)
#endif
// clang-format on
