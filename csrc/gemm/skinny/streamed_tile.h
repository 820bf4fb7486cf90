// Chooses the vendor's way to stream tiles of 64 rows.
#pragma once
#if defined(__AMDGCN__)
#include "gemm/skinny/amd/streamed_tile.h"
#elif defined(__NVPTX__)
#include "gemm/skinny/nvidia/streamed_tile.h"
#endif
