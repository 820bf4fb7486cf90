// Includes the vendor's StreamedTile.
#pragma once
#if defined(__AMDGCN__)
#include "gemm/skinny/amd/streamed_tile.h"
#elif defined(__NVPTX__)
#include "gemm/skinny/nvidia/streamed_tile.h"
#endif
