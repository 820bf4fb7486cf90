"""Create a block's waves with the registers that the hardware initializes, and mark the others undefined."""

from __future__ import annotations

import numpy as np

from .decode import AGPR, EXEC, M0, VCC, VGPR
from .waves import LANES, SGPRS, Waves

_POISON = 0xFFA5A5A5  # a NaN in every float format


def new_waves(scheduler, blocks: np.ndarray) -> Waves:
    """Return the waves of these blocks, before their first instruction."""
    kernel, per_block = scheduler.kernel, scheduler.waves_per_block
    block = np.repeat(blocks, per_block)
    wave = np.tile(np.arange(per_block), len(blocks))
    count = len(block)
    poison = 0 if scheduler.program.trusted else _POISON
    vgpr = np.full((kernel.vgprs + kernel.agprs, count, LANES), poison, np.uint32)
    thread = wave[:, None] * LANES + np.arange(LANES)
    x, y, _ = scheduler.block_size
    axes = kernel.rsrc2 >> 11 & 3  # ENABLE_VGPR_WORKITEM_ID: x, xy or xyz, packed
    vgpr[0] = thread % x | (thread // x % y << 10 if axes else 0) | (thread // x // y << 20 if axes > 1 else 0)
    sgpr = np.full((count, SGPRS), poison, np.uint32)
    known = _set_sgprs(scheduler, sgpr, block)
    sgpr.view(np.uint64)[:, EXEC // 2] = Waves.bits(thread < scheduler.threads)[:, 0]
    scratch = np.zeros((count, LANES, 2 * kernel.scratch), np.uint8) if kernel.scratch else None
    start = kernel.preloaded_entry if scheduler.options.preloads_arguments else kernel.entry
    w = Waves(
        scheduler,
        vgpr=vgpr,
        sgpr=sgpr,
        scc=np.zeros((count, 1), bool),
        block=block,
        wave=wave,
        id=scheduler.first_wave + block * per_block + wave,
        scratch=scratch,
    )
    vectors = *range(VGPR + 1, VGPR + kernel.vgprs), *range(AGPR, AGPR + kernel.agprs)
    registers = {*vectors, *range(102), VCC, VCC + 1, M0}
    w.pc = scheduler.program.index[start]
    w.undefined = set() if scheduler.program.trusted else registers - known
    w.alert = set(w.undefined)
    return w


def _set_sgprs(scheduler, sgpr: np.ndarray, block: np.ndarray) -> set[int]:
    """Set the initial SGPRs, in the order of AMDGPUUsage "Initial Kernel Execution State", and return which are set."""
    properties, rsrc2 = scheduler.kernel.properties, scheduler.kernel.rsrc2
    kernarg = np.full(len(block), scheduler.kernarg)
    next_sgpr = 0
    known: set[int] = set()

    def put(count: int, values=None) -> None:
        nonlocal next_sgpr
        for n in range(count):
            sgpr[:, next_sgpr + n] = 0 if values is None else values[n]
        known.update(range(next_sgpr, next_sgpr + count))
        next_sgpr += count

    # private buffer, dispatch, queue, kernarg, dispatch id, scratch, size
    for bit, count in enumerate((4, 2, 2, 2, 2, 2, 1)):
        if properties >> bit & 1:
            put(count, (kernarg & 0xFFFFFFFF, kernarg >> 32) if bit == 3 else None)
    preloaded, first = scheduler.kernel.kernarg_preload, scheduler.kernel.kernarg_preload_offset
    if scheduler.options.preloads_arguments and preloaded:
        put(preloaded, scheduler.space.regions[scheduler.kernarg >> 36].views[4][first:][:preloaded])
    else:
        next_sgpr += preloaded
    assert next_sgpr == scheduler.kernel.user_sgprs
    gx, gy, _ = scheduler.grid
    coordinates = (block % gx, block // gx % gy, block // gx // gy)
    for axis, bit in enumerate((7, 8, 9)):
        if rsrc2 >> bit & 1:
            put(1, (coordinates[axis],))
    for bit in (10, 0):
        put(rsrc2 >> bit & 1)
    return known
