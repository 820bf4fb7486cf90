// Even split of all requests' keys over blocks, independent of lengths (varlen).
#pragma once
#include "attention/mla.h"

// Divides the steps of all work tiles in a launch evenly over `blocks`. A work tile is a request's column tile; its
// steps have kKeys keys each, and a request without keys has one step. Each block processes consecutive steps, in one
// tile or in several. The partial sums that block b stores for tile i, if other blocks share it, are in slot b + i.
struct EvenSteps {
  static constexpr int kKeys = 128;
  const DecodeProblem& p;
  const int requests;
  int blocks;         // with steps
  int steps, before;  // in total, and for the requests before the lane's first
  int lane_requests;

  DEVICE explicit EvenSteps(const MlaProblem& problem) : p(problem.decode), requests(problem.requests) {
    lane_requests = (requests + wave::kLanes - 1) / wave::kLanes;
    const int first = wave::lane() * lane_requests;
    int own = 0;
#pragma unroll 4
    for (int i = 0; i < lane_requests; ++i) own += first + i < requests ? steps_of(first + i) : 0;
    own *= p.packed_row_tiles;
    int sum = own;
#pragma unroll
    for (int below = 1; below < wave::kLanes; below *= 2) {
      const int other = wave::from_lane(sum, wave::lane() - below);
      sum += wave::lane() >= below ? other : 0;
    }
    steps = wave::read(sum, wave::kLanes - 1);
    before = sum - own;
    blocks = problem.blocks < steps ? problem.blocks : steps;
  }
  DEVICE int steps_of(int request) const {
    const int keys = mem::load<int>(p.seq_lens + request);
    return keys > kKeys ? (keys + kKeys - 1) / kKeys : 1;
  }
  // The first step of a block, and the block that processes a step.
  DEVICE int first_of(int block) const { return u64(block) * u32(steps) / u32(blocks); }
  DEVICE int block_of(int step) const { return (u64(step + 1) * u32(blocks) - 1) / u32(steps); }
  // The work tile that contains a step, its first step and its step count.
  struct Place {
    int block, first, steps;
  };
  DEVICE Place place_of(int step) const {
    const int lane = wave::count(before <= step) - 1;
    Place place = {lane * lane_requests * p.packed_row_tiles, wave::from_lane(before, lane), 0};
    while (true) {
      place.steps = steps_of(u32(place.block) / p.tiles_divisor);
      if (step < place.first + place.steps) return place;
      place.first += place.steps;
      ++place.block;
    }
  }
  // The same for a given work tile.
  DEVICE Place place(int block) const {
    const int request = u32(block) / p.tiles_divisor, lane = request / lane_requests;
    Place place = {block, wave::from_lane(before, lane), steps_of(request)};
    for (int r = lane * lane_requests; r < request; ++r) place.first += steps_of(r) * p.packed_row_tiles;
    place.first += (block - request * p.packed_row_tiles) * place.steps;
    return place;
  }
};

// Runs `combine_blocks` blocks per work tile: every block must recompute the division of steps.
template <class T, int kPackedRowTiles>
struct MlaCombineEven : MlaCombine<T, kPackedRowTiles> {
  using Combine = MlaCombine<T, kPackedRowTiles>;
  const int blocks;

  DEVICE explicit MlaCombineEven(const MlaProblem& problem) : Combine(problem), blocks(problem.combine_blocks) {
    const EvenSteps even(problem);
    const auto place = even.place(this->block);
    this->first_slot = even.block_of(place.first);
    this->splits = even.block_of(place.first + place.steps - 1) - this->first_slot + 1;
  }
  DEVICE void run(typename Combine::Buffer& buffer) const {
#pragma unroll 1
    for (int lanes = wave::block_id_y(); lanes < Combine::kPackedRows * Combine::kPackedRowVecs / wave::kLanes;
         lanes += blocks) {
      this->add(buffer, lanes);
      block_barrier();  // hazard: sums are overwritten before they are read
    }
  }
};
