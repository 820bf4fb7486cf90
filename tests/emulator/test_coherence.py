"""Test that data passed between blocks must get past the caches of their dies: the emulator rejects each wrong way."""

from __future__ import annotations

import pytest
import torch
from assembly import Kernel, assemble
from marks import AMD

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Emulator, errors

BLOCKS, WAVES = 3, 2
WAIT, BARRIER, WRITE_BACK, INVALIDATE = "s_waitcnt vmcnt(0)", "s_barrier", "buffer_wbl2 sc1", "buffer_inv sc1"
NEXT = "\n  "


def last_adds_up(name: str, store: str = "", release: tuple = (), acquire: tuple = (), load: str = "") -> Kernel:
    """Return a kernel in which the last block sums what all blocks stored.

    Each thread stores its block, and one thread counts blocks after a barrier. `release` is the code between the store
    and this barrier, `acquire` the code between the second barrier and the loads.
    """
    count = f"""
  s_and_saveexec_b64 s[8:9], vcc
  s_cbranch_execz .L{name}_counted
  v_mov_b32 v2, 0
  v_mov_b32 v3, {BLOCKS - 1}
  global_atomic_inc v4, v2, v3, s[4:5] sc0
  s_waitcnt vmcnt(0)
  ds_write_b32 v2, v4
  s_waitcnt lgkmcnt(0)
.L{name}_counted:
  s_mov_b64 exec, s[8:9]"""
    loads = "".join(
        f"\n  global_load_dword v{8 + block}, v1, s[6:7] offset:{512 * block} {load}" for block in range(BLOCKS)
    )
    body = f"""
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
  v_lshlrev_b32 v1, 2, v0
  v_mov_b32 v5, s2
  s_lshl_b32 s10, s2, 9
  v_add_u32 v6, s10, v1
  global_store_dword v6, v5, s[6:7] {store}
  {NEXT.join(release)}
  s_barrier
  v_cmp_eq_u32 vcc, 0, v0{count}
  s_barrier
  v_mov_b32 v2, 0
  ds_read_b32 v7, v2
  s_waitcnt lgkmcnt(0)
  v_readfirstlane_b32 s11, v7
  s_cmp_lg_u32 s11, {BLOCKS - 1}
  s_cbranch_scc1 .L{name}_done
  {NEXT.join(acquire)}{loads}
  s_waitcnt vmcnt(0)
  v_add3_u32 v8, v8, v9, v10
  global_store_dword v1, v8, s[6:7] offset:{512 * BLOCKS}
.L{name}_done:"""
    return Kernel(name, body, lds=16, max_block=64 * WAVES)


RIGHT = [
    last_adds_up("through_memory", "sc1", (WAIT,), load="sc1"),
    last_adds_up("system_scope", "sc0 sc1", (WAIT,), load="sc0 sc1"),
    last_adds_up("by_fences", "", (WRITE_BACK, WAIT), acquire=(INVALIDATE,)),
    last_adds_up("written_back_and_loaded", "", (WRITE_BACK, WAIT), load="sc1"),
    last_adds_up("stored_and_invalidated", "sc1", (WAIT,), acquire=(INVALIDATE,)),
    last_adds_up("written_back_behind_a_barrier", "", (WAIT, BARRIER, WRITE_BACK, WAIT), acquire=(INVALIDATE,)),
]
NOT_COMPLETE, NOT_WRITTEN_BACK = "no s_waitcnt completed it", "it has no sc1, and no buffer_wbl2 sc1"
NOT_INVALIDATED = "this access has no sc1, and no buffer_inv sc1"
WRONG = {
    last_adds_up("stored_without_sc1", "", (WAIT,), load="sc1"): NOT_WRITTEN_BACK,
    last_adds_up("loaded_without_sc1", "sc1", (WAIT,)): NOT_INVALIDATED,
    last_adds_up("not_waited_for", "sc1", load="sc1"): NOT_COMPLETE,
    last_adds_up("waited_for_too_little", "sc1", ("s_waitcnt vmcnt(1)",), load="sc1"): NOT_COMPLETE,
    last_adds_up("no_release", "", (WAIT,), acquire=(INVALIDATE,)): NOT_WRITTEN_BACK,
    last_adds_up("release_of_the_block", "", ("buffer_wbl2 sc0", WAIT), acquire=(INVALIDATE,)): NOT_WRITTEN_BACK,
    last_adds_up("release_not_waited_for", "", (WAIT, WRITE_BACK), acquire=(INVALIDATE,)): NOT_WRITTEN_BACK,
    last_adds_up("no_acquire", "", (WRITE_BACK, WAIT)): NOT_INVALIDATED,
    last_adds_up("acquire_of_the_block", "", (WRITE_BACK, WAIT), acquire=("buffer_inv sc0",)): NOT_INVALIDATED,
    last_adds_up("acquired_too_early", "", (WRITE_BACK, WAIT, INVALIDATE)): NOT_INVALIDATED,
}


@pytest.fixture(scope="module", params=AMD)
def run(request, tmp_path_factory):
    path = assemble([*RIGHT, *WRONG], request.param, tmp_path_factory.mktemp("coherence"))

    def run(name: str, seed: int | None):
        counter, output = torch.zeros(1, dtype=torch.int32), torch.zeros(BLOCKS + 1, 64 * WAVES, dtype=torch.int32)
        what = Launch("", name, (BLOCKS, 1, 1), (64 * WAVES, 1, 1), (counter, output))
        Emulator(request.param, seed=seed).run(path, what, (output,))
        assert int(counter) == 0
        return output[BLOCKS]

    return run


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_right_ways(run, seed):
    for kernel in RIGHT:
        assert torch.equal(run(kernel.name, seed), torch.full((64 * WAVES,), sum(range(BLOCKS)), dtype=torch.int32))


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.name)
def test_stale_reads_name_kernel_load_and_store(run, kernel, seed):
    with pytest.raises(errors.StaleRead, match=WRONG[kernel]) as caught:
        run(kernel.name, seed)
    assert str(caught.value).startswith(f"{kernel.name}+0x")
    assert "`global_load_dword" in str(caught.value) and "`global_store_dword" in str(caught.value)
