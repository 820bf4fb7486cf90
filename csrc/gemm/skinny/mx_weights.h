// W8A16 and W4A16 of MX weights: out = sum over groups of 32 K of scale * (a @ b^T), where a is bf16, b is [N, K] of
// e4m3 or e2m1, and scales are [N, K / 32] of e8m0. A step is 32 K, 64 bytes of a token. Includes the vendor's half.
#pragma once

// kSteps: steps of a slice, 2 or 4.
template <class Value, int kSteps>
struct Bf16Mx;

#if defined(__AMDGCN__)
#include "gemm/skinny/amd/mx_weights.h"
#elif defined(__NVPTX__)
#include "gemm/skinny/nvidia/mx_weights.h"
#endif
