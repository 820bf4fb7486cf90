// Includes the vendor's header for payload and flags between devices, as gpu.h includes the others.
#pragma once
#if defined(__AMDGCN__)
#include "amd/flags.h"
#elif defined(__NVPTX__)
#include "nvidia/flags.h"
#endif
