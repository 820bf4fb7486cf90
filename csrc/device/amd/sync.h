#pragma once

// All threads of the block meet here, and what each wrote to LDS before is seen by all after. Only LDS is ordered, so
// global loads in flight stay in flight (LLVM AMDGPU usage, "Memory Model gfx942": fence with "local").
DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// What this thread wrote is seen by all of the device that acquire after.
DEVICE void device_release() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
DEVICE void device_acquire() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
