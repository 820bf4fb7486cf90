// Includes the vendor's panel MMA headers, as gpu.h includes the others.
#pragma once
#if defined(__AMDGCN__)
#include "amd/tile_mma.h"
#include "amd/tile_mma_bytes.h"
#elif defined(__NVPTX__)
#include "nvidia/tile_mma.h"
#include "nvidia/tile_mma_bytes.h"
#endif
