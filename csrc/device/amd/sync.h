#pragma once

// All threads of the block meet here, and what each wrote to LDS before is seen by all after. Only LDS is ordered, so
// global loads in flight stay in flight (LLVM AMDGPU usage, "Memory Model gfx942": fence with "local").
DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// What a block wrote, those blocks see that count after it: each thread releases, one counts after a barrier, and each acquires
// after another. The count is what it was before.
DEVICE void thread_release() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
DEVICE u32 block_count(u32* counter) {
  return __scoped_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}
DEVICE void thread_acquire() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
