// Integer division by a divisor that the host knows. The host passes the inverse: a division takes three scalar
// instructions. By a divisor known at run time only, it takes twenty, through the vector unit.
#pragma once
#include "gpu.h"

struct Divisor {
  u32 inverse;  // 2^(31 + shift) / divisor, rounded up
  int shift;    // log2 of the divisor, rounded up
};

// Exact for every value below 2^31: inverse * divisor is less than 2^shift above 2^(31 + shift), so the error stays below
// 1 / divisor.
DEVICE int operator/(u32 value, const Divisor& by) { return int(u64(value * 2) * by.inverse >> 32) >> by.shift; }
