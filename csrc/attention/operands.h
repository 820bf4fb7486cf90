// Includes the vendor's attention operands, as device/gpu.h includes the rest.
#pragma once
#include "device/gpu.h"
#if defined(__AMDGCN__)
#include "amd/operands.h"
#elif defined(__NVPTX__)
#include "nvidia/operands.h"
#endif
