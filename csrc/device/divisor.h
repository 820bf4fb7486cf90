// Integer division by a divisor known to the host. The host passes the inverse: a division takes three scalar
// instructions. With a divisor known only at run time it takes twenty, on the vector unit.
#pragma once
#include "gpu.h"

struct Divisor {
  u32 inverse;  // 2^(31 + shift) / divisor, rounded up
  int shift;    // log2 of the divisor, rounded up
};

// Exact for every value below 2^31: inverse * divisor exceeds 2^(31 + shift) by less than 2^shift, so the error stays
// below 1 / divisor.
DEVICE int operator/(u32 value, const Divisor& by) { return int(u64(value * 2) * by.inverse >> 32) >> by.shift; }
