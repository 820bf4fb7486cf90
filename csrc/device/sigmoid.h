// The logistic function, 1 / (1 + exp(-x)).
#pragma once
#include "gpu.h"

// exp(-x) as exp2(-x * log2(e)), as in silu(). 0 below x = -88.
DEVICE float sigmoid(float x) { return numerics::rcp_approx(1.0f + numerics::exp2_approx(x * -1.4426950408889634f)); }
