// Chooses the vendor's operands of attention, as device/gpu.h chooses the rest.
#pragma once
#include "device/gpu.h"
#if defined(__AMDGCN__)
#include "amd/operands.h"
#elif defined(__NVPTX__)
#include "nvidia/operands.h"
#endif
