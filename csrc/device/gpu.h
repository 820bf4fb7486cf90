// Includes the vendor headers. amd/ and nvidia/ define the same names with the same meanings. Kernels include this file
// or headers built on it (vec.h, reduce.h, float8.h), never a vendor header.
#pragma once
#include "mem.h"
#include "types.h"

// KERNEL(threads[, blocks]): a kernel entry point with at most `threads` threads per block. On NVIDIA the compiler
// limits registers for `blocks` blocks per SM.
#if defined(__AMDGCN__)
#define KERNEL(threads, ...) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void
#include "amd/buffer.h"
#include "amd/lds_async.h"
#include "amd/mma.h"
#include "amd/mx.h"
#include "amd/numerics.h"
#include "amd/sync.h"
#include "amd/system.h"
#include "amd/wave.h"
#elif defined(__NVPTX__)
#define KERNEL(threads, ...) extern "C" __attribute__((global, launch_bounds(threads __VA_OPT__(, ) __VA_ARGS__))) void
#include "nvidia/buffer.h"
#include "nvidia/lds_async.h"
#include "nvidia/mma.h"
#include "nvidia/mx.h"
#include "nvidia/numerics.h"
#include "nvidia/sync.h"
#include "nvidia/system.h"
#include "nvidia/wave.h"
#endif
