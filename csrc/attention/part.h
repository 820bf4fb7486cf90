// The keys of a request that a block has: one part of them, in steps of kStepKeys, and where they lie. A wave has 32 keys at a time,
// whose pages its lanes look up, a lane per key. Loads behind the last key load that key again, so that no page id behind it is
// read and no slot behind it is multiplied.
#pragma once
#include "attention/operands.h"
#include "attention/output.h"

// 8 elements as T.
template <class T>
DEVICE u32x4 as_operand(u32x4 elements) {
  return elements;
}
template <class T>
DEVICE u32x4 as_operand(u32x2 elements) {
  using numerics::from_e4m3x2;
  const f32x2 a = from_e4m3x2<false>(elements.x), b = from_e4m3x2<true>(elements.x);
  const f32x2 c = from_e4m3x2<false>(elements.y), d = from_e4m3x2<true>(elements.y);
  using attention::pack_exact;
  return {pack_exact<T>(a.x, a.y), pack_exact<T>(b.x, b.y), pack_exact<T>(c.x, c.y), pack_exact<T>(d.x, d.y)};
}

template <class Output, int kStepKeys>
struct DecodePart : Output {
  using Output::head, Output::p, Output::parts, Output::request;

  static constexpr int kWaveKeys = 32;

  const int lane = wave::lane();
  int begin, end;         // keys of the request that a row sees
  int first_step, steps;  // of this part
  int base;               // key of step 0
  int first_row_end;      // the keys that row 0 sees end here

  DEVICE explicit DecodePart(const DecodeProblem& problem) : Output(problem) {
    const int length = wave::uniform(mem::load<int>(p.seq_lens + request));
    end = length > 0 ? length : 0;
    first_row_end = end - p.query_len + 1;
    begin = p.window > 0 && first_row_end > p.window ? first_row_end - p.window : 0;
    base = begin / kWaveKeys * kWaveKeys;
    const int all = (end - base + kStepKeys - 1) / kStepKeys;
    const int even = u32(all + p.parts - 1) / p.parts_divisor;
    const int steps_per_part = even > p.least_steps ? even : p.least_steps;
    parts = all > steps_per_part ? u32(all + steps_per_part - 1) / u32(steps_per_part) : 1;
    first_step = wave::block_id_y() * steps_per_part;
    steps = all - first_step < steps_per_part ? all - first_step : steps_per_part;
  }
  DEVICE bool has_work() const { return wave::block_id_y() < parts; }

  DEVICE int clamped(int key) const {
    const int low = key > begin ? key : begin;
    return low < end ? low : end - 1;
  }
  // Lane l looks up the page of key `first` + l % 32.
  DEVICE int load_pages(int first) const {
    const int page = u32(clamped(first + lane % kWaveKeys)) / p.page_divisor;
    return mem::load<int>(p.block_table + request * p.table_stride + page);
  }
  // Where the elements of a key in this page begin.
  template <class Cache>
  DEVICE auto at(const CacheView& cache, int page, int key) const {
    const int held = clamped(key), slot = held - u32(held) / p.page_divisor * p.page_size;
    return (const typename CacheType<Cache>::Element*)slot_of<Cache>(cache, page, slot, head);
  }
};
