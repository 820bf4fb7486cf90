// Expert ids, int32 or int64 in HBM.
#pragma once
#include "gpu.h"

// Loads ids[at]; an id has `words` 32-bit words. An id outside int's range becomes -1, an invalid expert.
DEVICE int load_expert_id(const u32* ids, int words, i64 at) {
  const int id = mem::load<int>(ids + at * words), last = mem::load<int>(ids + at * words + words - 1);
  return words == 1 || last == id >> 31 ? id : -1;
}
