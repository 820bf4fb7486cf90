// Ids of experts, int32 or int64 in HBM.
#pragma once
#include "gpu.h"

// ids[at], where an id has `words` words of 32 bits. An id out of int's range is -1, which is no expert.
DEVICE int load_expert_id(const u32* ids, int words, i64 at) {
  const int id = mem::load<int>(ids + at * words);
  return words == 1 || mem::load<int>(ids + at * words + 1) == id >> 31 ? id : -1;
}
