// MLA split-KV decode through LDS, 64 columns per block. Keys are converted on the way to LDS, once for both products.
//
//     scores^T = K q^T,   out^T = latent^T p^T
//
// Four waves compute the scores, 16 columns each. The other four accumulate the outputs, 128 latent elements each for
// all columns, and load the keys. A SIMD runs one wave of each kind. An iteration has one barrier and processes one
// unit, 16 keys. Iteration i computes the scores of unit i while reading the keys of unit i + 1, multiplies the values
// of unit i - 1 by p while reading unit i's, and stores unit i + 2 to LDS, which holds three units. The next two
// units are in flight in registers. Where queries are e4m3, so are keys in LDS, which has room for four units: p is
// computed beside the next unit's scores, and all that follows is one iteration later.
//
// On gfx942 a unit takes 1088 cycles of a SIMD's matrix unit, 800 with e4m3 queries. The model of timing/ predicts 1460
// cycles with a cache of 16 bits, 1410 with one of e4m3 that is converted on the way to LDS, and 1200 with e4m3 queries.
#pragma once
#include "attention/mla.h"
#include "device/panel.h"

template <class T, class Cache, class Query = T>
struct MlaDecodeInLds : MlaSplit<T, 4> {
  using Split = MlaSplit<T, 4>;
  using Split::clamped, Split::packed_rows, Split::end, Split::finish_packed_row, Split::first_row_end,
      Split::kPackedRows;
  using Split::kLowest, Split::kStepKeys, Split::kThreads, Split::kWaves, Split::lane, Split::p, Split::splits;
  using Split::request;

  using Element = typename CacheType<Cache>::Element;
  static constexpr bool kFp8 = __is_same(Cache, E4m3), kFp8Products = __is_same(Query, E4m3);
  // Keys are converted on the way to LDS. That occupies the vector ALU: what else runs beside the products elsewhere is
  // predicted to take 5 % longer here.
  static constexpr bool kConverts = kFp8 && !kFp8Products;
  static constexpr int kKeys = 16, kStepUnits = kStepKeys / kKeys;  // keys per unit, and units per step
  static constexpr int kLag = kFp8Products;                         // of weights, in units
  static constexpr int kSlots = 3 + kLag, kStages = 2;              // units in LDS, and in flight
  static constexpr int kGroupWaves = kWaves / 2, kPackedRowTiles = kPackedRows / 16;
  static constexpr int kLdsBytes = kFp8Products ? 1 : 2;  // per element
  static constexpr int kLatentPanels = kLatent * kLdsBytes / tile::kDepth, kPanels = kLatentPanels + 1;
  // Padding: a row of two adjacent panels covers all banks of gfx950, where two rows cover them.
  static constexpr int kPanelBytes = (kKeys + 1) * tile::kDepth;
  static constexpr int kReads = (kLatent + 64) * kLdsBytes / 64;  // of a lane, per key
  static constexpr int kDims = kLatent / kGroupWaves;             // per wave
  static constexpr int kLaneDims = kDims / 16;                    // contiguous

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
  DEVICE static int offset(int panel, int row, int vec) {
    return panel * kPanelBytes + row * tile::kDepth + (vec ^ lds::swizzle(row)) * 16;
  }
  DEVICE u8* at(int slot, int panel, int row, int vec) const {
    return buffer.units.keys[slot] + offset(panel, row, vec);
  }
  DEVICE static int next_slot(int slot) { return slot + 1 < kSlots ? slot + 1 : 0; }

  // The scores of a wave's 16 columns. The running maximum is raised only if a score exceeds it by kSlack, so the sums
  // are rarely rescaled. The largest weight is then rounded, too. Dividing by the sum of rounded weights cancels the
  // rounding error of a dominant weight.
  struct Scores {
    static constexpr float kSlack = 8.0f;
    const MlaDecodeInLds& of;
    u32x4 query[kReads], keys[kReads];
    f32x4 score;  // of a unit whose weights are still to be computed
    int first_of_score = 1 << 30;
    float maximum = kLowest, sum = 0.0f, rounded_sum = 0.0f;
    int row_end;
    float scale;

    DEVICE explicit Scores(const MlaDecodeInLds& of) : of(of) {
      const auto& p = of.p;
      const auto c = of.packed_row(of.group_wave * 16 + of.lane % 16);
      const i64 row = i64(of.request) * p.query_len + c.row;
      const auto* latent = (const u8*)p.query + (row * p.query_stride + c.head * p.query_head_stride) * kLdsBytes;
      const i64 of_rope = row * of.mla.query_pe_stride + c.head * of.mla.query_pe_head_stride;
      const auto* rope = (const u8*)of.mla.query_pe + (of_rope - kLatent) * kLdsBytes;
#pragma unroll
      for (int i = 0; i < kReads; ++i)
        query[i] = mem::load<u32x4>((i * 64 < kLatent * kLdsBytes ? latent : rope) + i * 64 + of.lane / 16 * 16);
      row_end = of.first_row_end + c.row;
      scale = of.template score_scale<Cache>();
    }

    DEVICE void run() {
#pragma unroll
      for (int i = 0; i < kReads; ++i) attention::compute_now(query[i]);  // the loop waits for no loads
      block_barrier();  // hazard: keys are read before they are written
#pragma unroll
      for (int i = 0; i < kReads; ++i) read(i, 0);
      int slot = 0;
#pragma unroll 1
      for (int unit = 0; of.unit_key(unit) < of.end; unit += kStages)
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
          slot = next_slot(slot);
          const f32x4 next = multiply(slot);
          if constexpr (kLag > 0) {
            attention::schedule_fence();  // the products come first, while the SIMD's other wave waits for LDS
            weigh(s ^ 1);
          }
          score = next;
          first_of_score = of.unit_key(unit + s);
          if constexpr (kLag == 0) weigh(s);
          block_barrier();  // hazard: weights are read before they are written, or keys are overwritten before they are read
        }
      if constexpr (kLag > 0) {
        weigh(kStages - 1);
        block_barrier();  // hazard: weights are read before they are written
      }
      block_barrier();  // hazard: sums overwrite weights before they are read
    }
    DEVICE void read(int i, int slot) {
      keys[i] = *(const u32x4*)of.at(slot, i / 2, of.lane % 16, i % 2 * 4 + of.lane / 16);
    }

    // Returns a unit's scores, without the scale; reads the next unit's keys.
    DEVICE f32x4 multiply(int next) {
      f32x4 sums[2] = {};  // two, so no product waits for the previous one
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        sums[i % 2] = mma::multiply_add<Query>(sums[i % 2], keys[i], query[i]);
        attention::schedule_fence();  // reuses the registers
        read(i, next);
      }
      return sums[0] + sums[1];
    }
    // Computes the weights of `score`.
    DEVICE void weigh(int buffer) {
      constexpr Max max{};
      float largest = maximum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[i] = first_of_score + mma::value_row(of.lane, i) < row_end ? score[i] * scale : -__builtin_inff();
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
    static constexpr int kKeyLanes = kGroupWaves * wave::kLanes / kKeys;  // per key
    using Rope = typename Words<64 * int(sizeof(Element)) / kKeyLanes>::Type;
    using Value = typename Words<kLaneDims * kLdsBytes>::Type;
    static constexpr int kElements = 16 / int(sizeof(Element)), kLoads = kLatent / kElements / kKeyLanes;
    struct Stage {  // a lane's share of a unit's keys
      u32x4 latent[kLoads];
      Rope rope;
      int page;  // of the key loaded here next
    };

    const MlaDecodeInLds& of;
    const int of_key = of.lane % kKeyLanes,
              row = (of.group_wave * wave::kLanes + of.lane) / kKeyLanes;  // the lane's part of a key, and the key
    f32x4 out[kPackedRowTiles][kLaneDims] = {};
    Value values[4];
    int values_at[4], keys_at, rope_at;  // offsets in a slot, each one register in the loop

    DEVICE explicit Sums(const MlaDecodeInLds& of) : of(of) {
      constexpr int kBytes = sizeof(Value), kOfPanel = tile::kDepth / kBytes, kOfVec = 16 / kBytes;
      const int at = eighth(of.lane % 16), panel = of.group_wave * (16 / kOfPanel) + at / kOfPanel;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        values_at[k] = offset(panel, of.lane / 16 * 4 + k, at % kOfPanel / kOfVec) + at % kOfVec * kBytes;
        attention::use_below(values_at[k]);
      }
      keys_at = offset(of_key / 8, row, of_key % 8);
      attention::use_below(keys_at);
      constexpr int kRopeBytes = kLdsBytes * 64 / kKeyLanes;
      rope_at = offset(kLatentPanels, row, of_key * kRopeBytes / 16) + of_key * kRopeBytes % 16;
      attention::use_below(rope_at);
    }

    DEVICE int key(int unit) const { return of.clamped(of.unit_key(unit) + row); }
    DEVICE const int* page_of(int unit) const { return of.table + u32(key(unit)) / of.p.page_divisor; }
    // Where a stage's next unit is, and the page of the one after it.
    struct Source {
      const Element* keys;
      const int* page;
    };
    DEVICE Source source(const Stage& stage, int unit, int next) const {
      constexpr int kUnit = 1 << CacheType<Cache>::kLog2Group;
      const u32 place = of.template place_of<Cache, kUnit>(of.p.key_cache, stage.page, key(unit));
      return {(const Element*)of.p.key_cache.data + u64(place) * kUnit, page_of(next)};
    }
    DEVICE void load(Stage& stage, const Source& from) const {
      const Element* latent = from.keys + of_key * kElements;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) stage.latent[i] = mem::load<u32x4>(latent + i * kKeyLanes * kElements);
      stage.rope = mem::load<Rope>(from.keys + of_key * (64 / kKeyLanes) + kLatent);
      stage.page = mem::load<int>(from.page);
      attention::issue_now();
    }
    // Stores part i of the latents, or the rotary part if i is kLoads.
    DEVICE void store_keys(const Stage& stage, int slot, int i) const {
      u8* const keys = of.buffer.units.keys[slot];
      if (i == kLoads) {
        if constexpr (kConverts) *(u32x2*)(keys + rope_at) = as_operand<T>(u32x2{stage.rope, 0}).lo;
        else *(Rope*)(keys + rope_at) = stage.rope;
      } else if constexpr (kConverts) {
        // Alternate groups of four lanes store the second vector first, since eight lanes share a row of two panels.
        const int vec = (i * kKeyLanes + of_key) * 2;
        const bool crossed = of_key / 4 % 2;
        const u32x4 bytes = stage.latent[i], low = as_operand<T>(bytes.lo), high = as_operand<T>(bytes.hi);
        *(u32x4*)of.at(slot, vec / 8, row, vec % 8 + crossed) = crossed ? high : low;
        *(u32x4*)of.at(slot, vec / 8, row, vec % 8 + !crossed) = crossed ? low : high;
      } else *(u32x4*)(keys + keys_at + i * (kKeyLanes / 8 * kPanelBytes)) = stage.latent[i];
    }
    DEVICE void store_keys(const Stage& stage, int slot) const {
#pragma unroll
      for (int i = 0; i <= kLoads; ++i) store_keys(stage, slot, i);
    }

    DEVICE void run() {
      if constexpr (kConverts)
        attention::go_first();  // the SIMD's other wave has its keys in registers and fills the gaps
      Stage stages[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        if (s < kStepUnits) stages[s].page = wave::from_lane(of.early_pages, key(s) - of.unit_key(0));
        else stages[s].page = mem::load<int>(page_of(s));
#pragma unroll
      for (int s = 0; s < kSlots; ++s) load(stages[s], source(stages[s], s, kSlots + s));
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (s > 1) block_barrier();  // hazard: keys are read before they are written
        if (s == 2) read_values(values, 0);
        store_keys(stages[s], s);
        if (s < kStages) load(stages[s], source(stages[s], kSlots + s, kSlots + kStages + s));
      }
      block_barrier();  // hazard: weights are read before they are written
      int slot = 0;
#pragma unroll 1
      for (int unit = 0; of.unit_key(unit) < of.end; unit += kStages)
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
          u32x2 weights[kPackedRowTiles];
          Value next[4];
          float factor[kPackedRowTiles];
          read_weights(weights, factor, s);
          const int later = unit + s + kSlots + kStages;
          Source from;
          if constexpr (!kConverts) from = source(stages[s], later, later + kStages);  // while LDS is read
          rescale(factor);
          read_values(next, next_slot(slot));
          u32x2 own = operand(0);
#pragma unroll
          for (int d = 0; d < kLaneDims; ++d) {  // the rest overlaps the products
            u32x2 ahead;
            if constexpr (!kConverts) ahead = operand(d + 1 < kLaneDims ? d + 1 : d);
#pragma unroll
            for (int t = 0; t < kPackedRowTiles; ++t)
              out[t][d] = attention::multiply_16_keys<T>(out[t][d], own, weights[t]);
            if (d <= kLoads) store_keys(stages[s], slot, d);
            if (d == kLoads) load(stages[s], kConverts ? source(stages[s], later, later + kStages) : from);
            if constexpr (!kConverts) attention::take_turns<kPackedRowTiles>();
            attention::schedule_fence();
            own = kConverts ? operand(d + 1 < kLaneDims ? d + 1 : d) : ahead;
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) values[k] = next[k];
          block_barrier();  // hazard: keys are read before they are written, or overwritten before they are read
          slot = next_slot(slot);
        }
    }

    // The eight elements in tile row r, of 16 times eight, chosen so that lanes reading together cover all banks: two
    // rows of keys of 16 bits.
    DEVICE static int eighth(int r) { return kFp8Products ? r : r / 4 % 2 * 8 + r / 8 * 4 + r % 4; }

    DEVICE void read_values(Value (&values)[4], int slot) const {
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = *(const Value*)(of.buffer.units.keys[slot] + values_at[k]);
      attention::schedule_fence();
    }
    DEVICE void read_weights(u32x2 (&weights)[kPackedRowTiles], float (&factor)[kPackedRowTiles], int buffer) const {
      const auto& units = of.buffer.units;
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t) {
        factor[t] = units.factor[buffer][t * 16 + of.lane % 16];
        weights[t] = units.weights[buffer][t][of.lane];
      }
      attention::schedule_fence();
    }
    // Rescales the previous sums by the factors for the new maxima.
    DEVICE void rescale(const float (&factor)[kPackedRowTiles]) {
      bool grows = false;
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t) grows |= factor[t] != 1.0f;
      if (wave::count(grows) == 0) return;
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t)
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) out[t][d] *= factor[t];
    }
    // Element d of the lane's keys.
    DEVICE u32x2 operand(int d) const {
      return {pair<T, kFp8Products>(values[0], values[1], d), pair<T, kFp8Products>(values[2], values[3], d)};
    }

    DEVICE void finish_packed_rows(mem::Buffer) const {}
    // Writes a column tile to LDS.
    DEVICE void write(int t) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = mma::value_row(of.lane, i);
        f32x4* packed_row = of.buffer.ends.out[of.lane % 16] + (of.group_wave * kDims + eighth(r) * kLaneDims) / 4;
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
