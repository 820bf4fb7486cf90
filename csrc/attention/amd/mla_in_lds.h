// MLA split-KV decode through LDS, 64 columns per block. Keys are converted on the way to LDS, once for both products.
//
//     scores^T = K q^T,   out^T = latent^T p^T
//
// Four waves compute the scores, 16 columns each. The other four accumulate the outputs, 128 latent elements each for
// all columns, and load the keys. A SIMD runs one wave of each kind. An iteration has one barrier and processes one
// unit, 16 keys. Iteration i computes the scores of unit i while reading the keys of unit i + 1, multiplies the values
// of unit i - 1 by p while reading unit i's, and stores unit i + 2 to LDS, which holds three units. The next two
// units are in flight in registers.
//
// On gfx942 a unit takes 1088 cycles of a SIMD's matrix unit, and its vector ALU is busy for some 1040 with a cache of
// e4m3, LDS for 850. The model of timing/ predicts 1460 cycles, 1630 with a cache of 16 bits: 1.34 and 1.50 times the
// matrix unit's, as both waves wait for LDS after each barrier. Units of 32 keys need more LDS than gfx942 has, unless
// keys stay e4m3 there, which products of e4m3 allow.
#pragma once
#include "attention/mla.h"
#include "device/panel.h"

template <class T, class Cache>
struct MlaDecodeInLds : MlaSplit<T, 4> {
  using Split = MlaSplit<T, 4>;
  using Split::clamped, Split::packed_rows, Split::end, Split::finish_packed_row, Split::first_row_end,
      Split::kPackedRows;
  using Split::kLowest, Split::kStepKeys, Split::kThreads, Split::kWaves, Split::lane, Split::p, Split::splits;
  using Split::request;

  using Element = typename CacheType<Cache>::Element;
  static constexpr bool kFp8 = __is_same(Cache, E4m3);
  static constexpr int kKeys = 16, kStepUnits = kStepKeys / kKeys;  // keys per unit, and units per step
  static constexpr int kSlots = 3, kStages = 2;                     // units in LDS, and in flight
  static_assert(kStages <= kStepUnits, "the first pages belong to one step");
  static constexpr int kGroupWaves = kWaves / 2, kPackedRowTiles = kPackedRows / 16;
  static constexpr int kPanels = (kLatent + 64) / 64;  // 64 elements each
  // Padding: a row of two adjacent panels covers all banks of gfx950, where two rows cover them.
  static constexpr int kPanelBytes = (kKeys + 1) * tile::kDepth;
  static constexpr int kProducts = kPanels * 2;        // 32 elements of a key each
  static constexpr int kDims = kLatent / kGroupWaves;  // per wave
  static constexpr int kLaneDims = kDims / 16;         // contiguous

  struct Units {
    u8 keys[kSlots][kPanels * kPanelBytes];  // panel-major
    u32x2 weights[2][kPackedRowTiles][wave::kLanes];
    float factor[2][kPackedRows];
  };
  struct Ends {
    f32x4 out[16][kLatent / 4 + 1];
    float factor[kPackedRows];
  };
  union Buffer {
    Units units;
    Ends ends;
  };

  const MlaProblem& mla;
  Buffer& buffer;
  const int group_wave = wave::index() % kGroupWaves;

  DEVICE MlaDecodeInLds(const MlaProblem& problem, Buffer& buffer)
      : Split(problem.decode, block_of(problem)), mla(problem), buffer(buffer) {}

  // Blocks with the same keys are `requests` blocks apart: with a multiple of eight requests, on one XCD.
  DEVICE static int block_of(const MlaProblem& problem) {
    const int index = wave::block_id_x(), tile = u32(index) / u32(problem.requests);
    return (index - tile * problem.requests) * problem.decode.packed_row_tiles + tile;
  }
  // The first key of this split's unit `unit`.
  DEVICE int unit_key(int unit) const {
    return (wave::block_id_y() + unit / kStepUnits * splits) * kStepKeys + unit % kStepUnits * kKeys;
  }
  // A 16-byte vector of a panel row.
  DEVICE u8* at(int slot, int panel, int row, int vec) const {
    return buffer.units.keys[slot] + panel * kPanelBytes + row * tile::kDepth + (vec ^ lds::swizzle(row)) * 16;
  }
  DEVICE static int next_slot(int slot) { return slot + 1 < kSlots ? slot + 1 : 0; }

  // The scores of a wave's 16 columns. The running maximum is raised only if a score exceeds it by kSlack, so the sums
  // are rarely rescaled. The largest weight is then rounded, too. Dividing by the sum of rounded weights cancels the
  // rounding error of a dominant weight.
  struct Scores {
    static constexpr float kSlack = 8.0f;
    const MlaDecodeInLds& of;
    u32x4 query[kProducts], keys[kProducts];
    float maximum = kLowest, sum = 0.0f, rounded_sum = 0.0f;
    int row_end;
    float scale;

    DEVICE explicit Scores(const MlaDecodeInLds& of) : of(of) {
      const auto& p = of.p;
      const auto c = of.packed_row(of.group_wave * 16 + of.lane % 16);
      const i64 row = i64(of.request) * p.query_len + c.row;
      const u16* latent = p.query + row * p.query_stride + c.head * p.query_head_stride;
      const u16* rope = of.mla.query_pe + row * of.mla.query_pe_stride + c.head * of.mla.query_pe_head_stride;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        const int element = i * 32 + of.lane / 16 * 8;
        query[i] = mem::load<u32x4>(i < kLatent / 32 ? latent + element : rope + (element - kLatent));
      }
      row_end = of.first_row_end + c.row;
      scale = p.scale * (p.key_cache.scale ? mem::load<float>(p.key_cache.scale) : 1.0f);
    }

    DEVICE void run() {
#pragma unroll
      for (int i = 0; i < kProducts; ++i) attention::compute_now(query[i]);  // the loop waits for no loads
      block_barrier();  // hazard: keys are read before they are written
#pragma unroll
      for (int i = 0; i < kProducts; ++i) read(i, 0);
      int slot = 0;
#pragma unroll 1
      for (int unit = 0; unit % kStages > 0 || of.unit_key(unit) < of.end; ++unit) {  // the iterations of Sums
        slot = next_slot(slot);
        add(unit % 2, of.unit_key(unit), slot);
        block_barrier();  // hazard: weights are read before they are written, or keys are overwritten before they are read
      }
      block_barrier();  // hazard: sums overwrite weights before they are read
    }
    DEVICE void read(int i, int slot) {
      keys[i] = *(const u32x4*)of.at(slot, i / 2, of.lane % 16, i % 2 * 4 + of.lane / 16);
    }

    // Computes a unit's weights, from key `first` on; reads the next unit's keys.
    DEVICE void add(int buffer, int first, int next) {
      constexpr Max max{};
      f32x4 sums[2] = {};  // two, so no product waits for the previous one
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        sums[i % 2] = mma::multiply_add<T>(sums[i % 2], keys[i], query[i]);
        attention::schedule_fence();  // reuses the registers
        read(i, next);
      }
      f32x4 score = sums[0] + sums[1];
      float largest = maximum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[i] = first + mma::value_row(of.lane, i) < row_end ? score[i] * scale : -__builtin_inff();
        largest = max(largest, score[i]);
      }
      float factor = 1.0f;
      if (wave::count(largest > maximum + kSlack) > 0) {
        largest = attention::reduce_rows(largest, max);
        factor = numerics::exp2_approx(maximum - largest);
        maximum = largest;
        sum *= factor;
        rounded_sum *= factor;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[i] = numerics::exp2_approx(score[i] - maximum);
        sum += score[i];
      }
      const u32x2 weights = {T::pack(score.lo), T::pack(score.hi)};
      const f32x2 rounded = T::unpack(weights.x) + T::unpack(weights.y);
      rounded_sum += rounded.x + rounded.y;
      auto& units = of.buffer.units;
      units.weights[buffer][of.group_wave][of.lane] = weights;
      if (of.lane < 16) units.factor[buffer][of.group_wave * 16 + of.lane] = factor;
    }

    // Stores the columns' maxima and sums, and the factors of the output sums.
    DEVICE void finish_packed_rows(mem::Buffer to) const {
      const float total = attention::reduce_rows(sum, Add{}), rounded = attention::reduce_rows(rounded_sum, Add{});
      const int c = of.group_wave * 16 + of.lane;
      if (of.lane >= 16) return;
      float factor = rounded > 0.0f ? total / rounded : 0.0f;
      if (of.splits == 1) factor *= of.finish_packed_row(c, maximum, total, true);
      else Split::store_sums(to, c, maximum, total);
      of.buffer.ends.factor[c] = factor;
    }
    DEVICE void write(int) const {}
  };

  // Accumulates kDims output elements for all columns.
  struct Sums {
    static constexpr int kKeyLanes = 16;  // per key
    static constexpr int kElements = 16 / int(sizeof(Element)), kLoads = kLatent / kElements / kKeyLanes;
    struct Stage {  // a lane's share of a unit's keys
      u32x4 latent[kLoads];
      u32 rope[int(sizeof(Element))];
      int page;  // of the key loaded here next
    };

    const MlaDecodeInLds& of;
    const int of_key = of.lane % kKeyLanes,
              row = of.group_wave * 4 + of.lane / kKeyLanes;  // the lane's key and its part of the key
    f32x4 out[kPackedRowTiles][kLaneDims] = {};
    u32x4 values[4];

    DEVICE explicit Sums(const MlaDecodeInLds& of) : of(of) {}

    DEVICE int key(int unit) const { return of.clamped(of.unit_key(unit) + row); }
    DEVICE void load_page(Stage& stage, int unit) const {
      stage.page = mem::load<int>(of.table + u32(key(unit)) / of.p.page_divisor);
    }
    DEVICE void load(Stage& stage, int unit) const {
      constexpr int kUnit = 1 << CacheType<Cache>::kLog2Group;
      const u32 place = of.template place_of<Cache, kUnit>(of.p.key_cache, stage.page, key(unit));
      const Element* from = (const Element*)of.p.key_cache.data + u64(place) * kUnit;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) stage.latent[i] = mem::load<u32x4>(from + (i * kKeyLanes + of_key) * kElements);
      const Element* rope = from + kLatent + of_key * 4;
      if constexpr (kFp8) stage.rope[0] = mem::load<u32>(rope);
      else {
        const u32x2 words = mem::load<u32x2>(rope);
        stage.rope[0] = words.x, stage.rope[1] = words.y;
      }
      load_page(stage, unit + kStages);
      attention::issue_now();
    }
    // Stores part i of the latents, or the rotary part if i is kLoads.
    DEVICE void store_keys(const Stage& stage, int slot, int i) const {
      if (i == kLoads) {
        u32x2 rope;
        if constexpr (kFp8) rope = as_operand<T>(u32x2{stage.rope[0], 0}).lo;
        else rope = {stage.rope[0], stage.rope[1]};
        *(u32x2*)(of.at(slot, kPanels - 1, row, of_key / 2) + of_key % 2 * 8) = rope;
      } else if constexpr (kFp8) {
        // Alternate groups of four lanes store the second vector first, since eight lanes share a row of two panels.
        const int vec = (i * kKeyLanes + of_key) * 2;
        const bool crossed = of_key / 4 % 2;
        const u32x4 bytes = stage.latent[i], low = as_operand<T>(bytes.lo), high = as_operand<T>(bytes.hi);
        *(u32x4*)of.at(slot, vec / 8, row, vec % 8 + crossed) = crossed ? high : low;
        *(u32x4*)of.at(slot, vec / 8, row, vec % 8 + !crossed) = crossed ? low : high;
      } else {
        const int vec = i * kKeyLanes + of_key;
        *(u32x4*)of.at(slot, vec / 8, row, vec % 8) = stage.latent[i];
      }
    }
    // Stores a unit's keys to LDS, and loads the unit kStages later.
    DEVICE void replace(Stage& stage, int slot, int unit) const {
#pragma unroll
      for (int i = 0; i <= kLoads; ++i) store_keys(stage, slot, i);
      load(stage, unit + kStages);
    }

    DEVICE void run() {
      attention::go_first();  // the SIMD's other wave has its keys in registers and fills the gaps
      Stage stages[kStages];
#pragma unroll
      for (int s = 0; s < kStages; ++s) stages[s].page = wave::from_lane(of.early_pages, key(s) - of.unit_key(0));
#pragma unroll
      for (int s = 0; s < kStages; ++s) load(stages[s], s);
#pragma unroll
      for (int s = 0; s < kStages; ++s) replace(stages[s], s, s);
      block_barrier();  // hazard: keys are read before they are written
      read_values(values, 0);
      replace(stages[0], 2, 2);
      block_barrier();  // hazard: weights are read before they are written
      int slot = 0;
#pragma unroll 1
      for (int unit = 0; of.unit_key(unit) < of.end; unit += kStages)
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
          Stage& stage = stages[(s + 3) % kStages];
          u32x2 weights[kPackedRowTiles];
          u32x4 next[4];
          read_weights(weights, s);
          read_values(next, next_slot(slot));
#pragma unroll
          for (int d = 0; d < kLaneDims; ++d) {  // the rest overlaps the products
            add(weights, d);
            if (d <= kLoads) store_keys(stage, slot, d);
            if (d == kLoads) load(stage, unit + s + 3 + kStages);
            attention::schedule_fence();
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) values[k] = next[k];
          block_barrier();  // hazard: keys are read before they are written, or overwritten before they are read
          slot = next_slot(slot);
        }
    }

    // The eight elements in tile row r, chosen so that lanes reading two rows of keys together cover all banks.
    DEVICE static int panel(int r) { return r / 4 % 2; }
    DEVICE static int vec(int r) { return r / 8 * 4 + r % 4; }

    DEVICE void read_values(u32x4 (&values)[4], int slot) const {
      const int r = of.lane % 16;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        values[k] = *(const u32x4*)of.at(slot, of.group_wave * 2 + panel(r), of.lane / 16 * 4 + k, vec(r));
      attention::schedule_fence();
    }
    // Rescales the previous sums by the factors for the new maxima.
    DEVICE void read_weights(u32x2 (&weights)[kPackedRowTiles], int buffer) {
      const auto& units = of.buffer.units;
      float factor[kPackedRowTiles];
      bool grows = false;
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t) {
        factor[t] = units.factor[buffer][t * 16 + of.lane % 16];
        weights[t] = units.weights[buffer][t][of.lane];
        grows |= factor[t] != 1.0f;
      }
      if (wave::count(grows) == 0) return;
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t)
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) out[t][d] *= factor[t];
    }
    DEVICE void add(const u32x2 (&weights)[kPackedRowTiles], int d) {
      using attention::pair_of;
      const u32x2 operand = {pair_of(values[0][d / 2], values[1][d / 2], d % 2),
                             pair_of(values[2][d / 2], values[3][d / 2], d % 2)};
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t)
        out[t][d] = attention::multiply_16_keys<T>(out[t][d], operand, weights[t]);
    }

    DEVICE void finish_packed_rows(mem::Buffer) const {}
    // Writes a column tile to LDS.
    DEVICE void write(int t) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = mma::value_row(of.lane, i);
        f32x4* packed_row =
            of.buffer.ends.out[of.lane % 16] + (of.group_wave * kDims + (panel(r) * 8 + vec(r)) * kLaneDims) / 4;
#pragma unroll
        for (int d = 0; d < kLaneDims; d += 4)
          packed_row[d / 4] = {out[t][d][i], out[t][d + 1][i], out[t][d + 2][i], out[t][d + 3][i]};
      }
    }
  };

  template <class Group>
  DEVICE void run_as() {
    Group group(*this);
    if (unit_key(0) < end) group.run();
    this->load_early_scale();
    const mem::Buffer to = Split::slot(wave::block_id_y());
    group.finish_packed_rows(to);
    const i64 offsets = offset_of_column();
#pragma unroll
    for (int t = 0; t < kPackedRowTiles; ++t) {
      constexpr int kPackedRowVecs = kLatent / 4;
      if (t > 0) block_barrier();  // hazard: the previous sums are overwritten before they are read
      group.write(t);
      block_barrier();  // hazard: sums and factors are read before they are written
      constexpr int kThreadVecs = 16 * kPackedRowVecs / kThreads;
      const int of_packed_row = wave::thread_id() % kPackedRowVecs;
      f32x4 totals[kThreadVecs];
#pragma unroll
      for (int i = 0; i < kThreadVecs; ++i)
        totals[i] = buffer.ends.out[row_of(i)][of_packed_row] * buffer.ends.factor[t * 16 + row_of(i)];
#pragma unroll
      for (int i = 0; i < kThreadVecs; ++i) attention::compute_now(totals[i]);  // one wait for LDS
      if (splits == 1) {
#pragma unroll
        for (int i = 0; i < kThreadVecs; ++i) store_result(offsets, t * 16 + row_of(i), of_packed_row * 4, totals[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kThreadVecs; ++i)
          if (const int c = t * 16 + row_of(i); c < packed_rows())
            mem::store_device(to, (c * kLatent + of_packed_row * 4) * 4, 0, totals[i]);
      }
    }
  }
  // The row of a column tile whose vector i is the wave's: one for all lanes, so that addresses are scalar.
  DEVICE static int row_of(int i) { return (i * kThreads + wave::index() * wave::kLanes) / (kLatent / 4); }
  // The offset of results of the lane's column.
  DEVICE i64 offset_of_column() const {
    const auto of = Split::packed_row(lane);
    return (i64(request) * p.query_len + of.row) * p.out_stride + of.head * p.out_head_stride;
  }
  DEVICE void store_result(i64 offsets, int c, int dim, f32x4 values) const {
    if (c >= packed_rows()) return;
    const u64 offset = u64(wave::read(u32(offsets >> 32), c)) << 32 | wave::read(u32(offsets), c);
    mem::store((u16*)p.out + offset + dim, u32x2{T::pack(values.lo), T::pack(values.hi)});
  }

  DEVICE void run() {
    if (wave::index() < kGroupWaves) run_as<Scores>();
    else run_as<Sums>();
  }
};
