"""Test the emulator as a device, a sanitizer and a counter: every check fires on a planted fault, and only there."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest
import torch
from assembly import LOAD_POINTERS, PRELOAD_PROLOGUE, Kernel, assemble
from marks import full

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.launch import I64, Launch
from vllm_rocm_ops.emulator import CodeObject, Emulator, errors
from vllm_rocm_ops.emulator import device as device_module
from vllm_rocm_ops.emulator.memory import MAX_BYTES, Space

GLOBAL_THREAD = LOAD_POINTERS + "  s_lshl_b32 s3, s2, 6\n  v_add_u32 v1, s3, v0\n  v_lshlrev_b32 v1, 2, v1\n"
MAP_NORESERVE = 0x4000  # Linux's value; memory is allocated at the first access
LDS_SLOT = "  v_lshlrev_b32 v3, 2, v0\n"
COPY_PRELOADED = """
  v_lshlrev_b32 v1, 2, v0
  global_load_dword v2, v1, s[2:3]
  s_waitcnt vmcnt(0)
  global_store_dword v1, v2, s[4:5]"""
BARRIER = "  s_waitcnt vmcnt(0) lgkmcnt(0)\n  s_barrier\n"

KERNELS = [
    Kernel(
        "copy",
        GLOBAL_THREAD + "global_load_dword v2, v1, s[4:5]\n s_waitcnt vmcnt(0)\n global_store_dword v1, v2, s[6:7]",
    ),
    Kernel(
        "copy_x4",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 4, v0\n global_load_dwordx4 v[4:7], v1, s[4:5]\n s_waitcnt vmcnt(0)\n global_store_dwordx4 v1, v[4:7], s[6:7]",
    ),
    Kernel(
        "bytes",
        LOAD_POINTERS + "global_load_ubyte v2, v0, s[4:5]\n s_waitcnt vmcnt(0)\n global_store_byte v0, v2, s[6:7]",
    ),
    Kernel(
        "misaligned",
        LOAD_POINTERS + "v_lshlrev_b32 v1, 2, v0\n global_load_dword v2, v1, s[4:5] offset:2\n s_waitcnt vmcnt(0)",
    ),
    Kernel("store_code", "s_getpc_b64 s[4:5]\n v_mov_b32 v1, 0\n global_store_dword v1, v0, s[4:5]"),
    Kernel("no_vmcnt", GLOBAL_THREAD + "global_load_dword v2, v1, s[4:5]\n v_add_u32 v2, v2, v2\n s_waitcnt vmcnt(0)"),
    Kernel(
        "vmcnt_too_high",
        GLOBAL_THREAD
        + "global_load_dword v2, v1, s[4:5]\n global_load_dword v3, v1, s[4:5]\n s_waitcnt vmcnt(1)\n v_mov_b32 v4, v2\n v_mov_b32 v4, v3\n s_waitcnt vmcnt(0)",
    ),
    Kernel(
        "no_lgkmcnt",
        "s_load_dwordx2 s[4:5], s[0:1], 0x0\n s_load_dword s6, s[0:1], 0x8\n s_waitcnt lgkmcnt(1)\n s_mov_b32 s8, s4\n s_waitcnt lgkmcnt(0)",
    ),
    Kernel(
        "overwritten_load", GLOBAL_THREAD + "global_load_dword v2, v1, s[4:5]\n v_mov_b32 v2, 0\n s_waitcnt vmcnt(0)"
    ),
    Kernel(
        "lds_no_wait",
        LDS_SLOT + "ds_write_b32 v3, v0\n ds_read_b32 v4, v3\n v_mov_b32 v5, v4\n s_waitcnt lgkmcnt(0)",
        lds=256,
    ),
    Kernel(
        "unwritten_vgpr",
        LOAD_POINTERS + "v_mov_b32 v1, 0\n v_add_u32 v3, v2, v0\n v_mov_b32 v4, v3\n global_store_dword v1, v4, s[6:7]",
    ),
    Kernel(
        "unwritten_unused",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n v_add_u32 v3, v2, v0\n v_cmp_gt_u32 vcc, 64, v0\n v_cndmask_b32 v4, v3, v0, vcc\n global_store_dword v1, v4, s[6:7]",
    ),
    Kernel(
        "unwritten_lanes",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n s_mov_b32 exec_lo, 0xff\n v_mov_b32 v2, 0\n s_mov_b32 exec_lo, -1\n global_store_dword v1, v2, s[6:7]",
    ),
    Kernel("unwritten_sgpr", "s_add_u32 s8, s20, 1"),
    Kernel(
        "spilled_sgpr",
        "s_mov_b32 s8, 1\n v_writelane_b32 v4, s8, 0\n v_writelane_b32 v4, s20, 1\n v_readlane_b32 s9, v4, 0\n s_add_u32 s8, s9, 1",
    ),
    Kernel(
        "unwritten_spill",
        "s_mov_b32 s8, 1\n v_writelane_b32 v4, s8, 0\n v_writelane_b32 v4, s20, 1\n v_readlane_b32 s9, v4, 1\n s_add_u32 s8, s9, 1",
    ),
    Kernel(
        "unwritten_lds",
        LDS_SLOT
        + "v_cmp_gt_u32 vcc, 17, v0\n s_and_saveexec_b64 s[8:9], vcc\n ds_write_b32 v3, v0\n s_mov_b64 exec, s[8:9]\n ds_read_b32 v4, v3\n s_waitcnt lgkmcnt(0)",
        lds=256,
    ),
    Kernel("unwritten_scratch", "scratch_load_dword v1, off, off offset:4\n s_waitcnt vmcnt(0)", scratch=16),
    Kernel(
        "scratch",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n v_and_b32 v3, 12, v1\n scratch_store_dword v3, v0, off\n scratch_load_dword v2, v3, off\n s_waitcnt vmcnt(0)\n global_store_dword v1, v2, s[6:7]",
        scratch=16,
    ),
    Kernel("scratch_beyond", "scratch_store_dword off, v0, off offset:16", scratch=16),
    Kernel("lds_beyond", LDS_SLOT + "ds_write_b32 v3, v0 offset:4\n s_waitcnt lgkmcnt(0)", lds=256),
    Kernel(
        "lds_misaligned",
        LDS_SLOT + "v_mov_b64 v[4:5], 0\n ds_write_b64 v3, v[4:5]\n s_waitcnt lgkmcnt(0)",
        lds=1024,
    ),
    # every wave writes its thread's slot, then reads the slot 64 threads further
    *(
        Kernel(
            f"exchange{suffix}",
            LOAD_POINTERS
            + LDS_SLOT
            + f"""
  ds_write_b32 v3, v0
  {wait}
  v_xor_b32 v4, 0x100, v3
  ds_read_b32 v5, v4
  s_waitcnt lgkmcnt(0)
  global_store_dword v3, v5, s[6:7]""",
            lds=1024,
        )
        for suffix, wait in (("", BARRIER), ("_no_barrier", "s_waitcnt lgkmcnt(0)"), ("_no_wait", "s_barrier"))
    ),
    Kernel(
        "write_after_read",
        LDS_SLOT
        + "ds_write_b32 v3, v0\n"
        + BARRIER
        + "ds_read_b32 v4, v3\n v_xor_b32 v5, 0x100, v3\n s_waitcnt lgkmcnt(0)\n ds_write_b32 v5, v0\n s_waitcnt lgkmcnt(0)",
        lds=1024,
    ),
    Kernel("same_slot", "v_mov_b32 v3, 0\n ds_write_b32 v3, v0\n s_waitcnt lgkmcnt(0)", lds=4),
    Kernel(
        "lds_atomic",
        LOAD_POINTERS
        + "v_mov_b32 v3, 0\n v_cmp_eq_u32 vcc, 0, v0\n s_and_saveexec_b64 s[8:9], vcc\n ds_write_b32 v3, v3\n s_mov_b64 exec, s[8:9]\n"
        + BARRIER
        + "ds_add_u32 v3, v0\n"
        + BARRIER
        + "ds_read_b32 v4, v3\n s_waitcnt lgkmcnt(0)\n global_store_dword v3, v4, s[6:7]",
        lds=4,
    ),
    Kernel(
        "load_to_lds",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n s_mov_b32 m0, 256\n s_nop 0\n global_load_lds_dword v1, s[4:5]\n s_waitcnt vmcnt(0)\n ds_read_b32 v2, v1 offset:256\n s_waitcnt lgkmcnt(0)\n global_store_dword v1, v2, s[6:7]",
        lds=512,
    ),
    Kernel(
        "load_to_lds_no_wait",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n s_mov_b32 m0, 0\n s_nop 0\n global_load_lds_dword v1, s[4:5]\n ds_read_b32 v2, v1\n s_waitcnt vmcnt(0) lgkmcnt(0)",
        lds=512,
    ),
    Kernel(
        "load_to_lds_too_early",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n s_mov_b32 m0, 0\n global_load_lds_dword v1, s[4:5]\n s_waitcnt vmcnt(0)",
        lds=512,
    ),
    Kernel("store_race", LOAD_POINTERS + "v_mov_b32 v1, 0\n v_mov_b32 v2, s2\n global_store_dword v1, v2, s[6:7]"),
    Kernel(
        "wave_race",
        LOAD_POINTERS + "v_and_b32 v1, 63, v0\n v_lshlrev_b32 v1, 2, v1\n global_store_dword v1, v0, s[6:7]",
    ),
    Kernel(
        "read_race",
        GLOBAL_THREAD
        + "global_store_dword v1, v0, s[6:7]\n v_mov_b32 v2, 0\n s_waitcnt vmcnt(0)\n global_load_dword v3, v2, s[6:7]\n s_waitcnt vmcnt(0)",
    ),
    Kernel(
        "read_after_atomic_race",
        LOAD_POINTERS
        + "v_mov_b32 v1, 0\n v_mov_b32 v2, 1\n s_cmp_eq_u32 s2, 0\n s_cbranch_scc0 .Lread_it\n global_atomic_add v1, v2, s[6:7]\n s_branch .Latomic_done\n"
        + ".Lread_it:\n global_load_dword v3, v1, s[6:7]\n.Latomic_done:\n s_waitcnt vmcnt(0)",
    ),
    Kernel(
        "write_after_read_race",  # every block reads its neighbor's word, then writes its own
        LOAD_POINTERS
        + "s_xor_b32 s8, s2, 1\n s_lshl_b32 s8, s8, 2\n s_lshl_b32 s9, s2, 2\n v_mov_b32 v1, s8\n v_mov_b32 v2, s9\n global_load_dword v3, v1, s[4:5]\n s_waitcnt vmcnt(0)\n v_add_u32 v3, 1, v3\n global_store_dword v2, v3, s[4:5]",
    ),
    Kernel(
        "global_through_barrier",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n global_store_dword v1, v0, s[6:7]\n"
        + BARRIER
        + "v_xor_b32 v2, 0x100, v1\n global_load_dword v3, v2, s[6:7]\n s_waitcnt vmcnt(0)\n s_barrier\n global_store_dword v1, v3, s[4:5]",
    ),
    Kernel("divergent_barrier", "v_cmp_gt_u32 vcc, 64, v0\n s_cbranch_vccz .Ldone\n s_barrier\n.Ldone:"),
    # block 1 waits for block 0's flag, then doubles block 0's values
    Kernel(
        "hand_over",
        LOAD_POINTERS
        + """
  v_mov_b32 v1, 0
  v_mov_b32 v2, 1
  s_cmp_eq_u32 s2, 0
  s_cbranch_scc1 .Lspin
  v_mov_b32 v3, 21
  global_store_dword v1, v3, s[6:7] sc1
  s_waitcnt vmcnt(0)
  global_atomic_add v1, v2, s[4:5]
  s_endpgm
.Lspin:
  s_sleep 1
  global_load_dword v3, v1, s[4:5] sc1
  s_waitcnt vmcnt(0)
  v_readfirstlane_b32 s8, v3
  s_cmp_lg_u32 s8, 64
  s_cbranch_scc1 .Lspin
  global_load_dword v3, v1, s[6:7] sc1
  s_waitcnt vmcnt(0)
  v_add_u32 v3, v3, v3
  global_store_dword v1, v3, s[6:7] offset:4""",
    ),
    Kernel(
        "spin",
        LOAD_POINTERS
        + "v_mov_b32 v1, 0\n.Lforever:\n global_load_dword v3, v1, s[4:5] sc1\n s_waitcnt vmcnt(0)\n v_readfirstlane_b32 s8, v3\n s_cmp_eq_u32 s8, 0\n s_cbranch_scc1 .Lforever",
    ),
    # lane l loops l % 4 + 1 times; wave w's waves leave at different times
    Kernel(
        "loops",
        LOAD_POINTERS
        + """
  v_lshlrev_b32 v1, 2, v0
  v_lshrrev_b32 v2, 6, v0
  v_and_b32 v3, 3, v0
  v_add_u32 v2, v2, v3
  v_mov_b32 v4, 0
  s_mov_b64 s[8:9], exec
.Lloop:
  v_add_u32 v4, 10, v4
  v_sub_u32 v2, v2, 1
  v_cmp_le_i32 vcc, 0, v2
  s_and_b64 exec, exec, vcc
  s_cbranch_execnz .Lloop
  s_mov_b64 exec, s[8:9]
  global_store_dword v1, v4, s[6:7]""",
    ),
    Kernel("beyond_registers", "v_mov_b32 v40, 0"),
    Kernel("beyond_agprs", "v_accvgpr_write_b32 a16, v0"),
    Kernel("unsupported", LOAD_POINTERS + "s_cmp_eq_u64 s[4:5], 0\n s_cbranch_scc0 .Lover\n s_rfe_b64 s[4:5]\n.Lover:"),
    Kernel("unsupported_reached", "s_rfe_b64 s[4:5]"),
    Kernel(
        "conflicts", "v_lshlrev_b32 v3, 7, v0\n v_mov_b32 v2, 0\n ds_write_b32 v3, v2\n s_waitcnt lgkmcnt(0)", lds=8192
    ),
    Kernel("no_conflicts", LDS_SLOT + "v_mov_b32 v2, 0\n ds_write_b32 v3, v2\n s_waitcnt lgkmcnt(0)", lds=8192),
    Kernel(
        "two_way", "v_lshlrev_b32 v3, 3, v0\n v_mov_b32 v2, 0\n ds_write_b32 v3, v2\n s_waitcnt lgkmcnt(0)", lds=8192
    ),
    Kernel(
        "wide_lds",
        "v_lshlrev_b32 v3, 4, v0\n v_mov_b64 v[4:5], 0\n v_mov_b64 v[6:7], 0\n ds_write_b128 v3, v[4:7]\n s_waitcnt lgkmcnt(0)",
        lds=8192,
    ),
    Kernel(
        "strided_load",
        LOAD_POINTERS + "v_lshlrev_b32 v1, 7, v0\n global_load_dword v2, v1, s[4:5]\n s_waitcnt vmcnt(0)",
    ),
    Kernel(
        "in_flight",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 4, v0\n global_load_dwordx4 v[4:7], v1, s[4:5]\n global_load_dwordx4 v[8:11], v1, s[4:5]\n global_load_dwordx2 v[12:13], v1, s[4:5]\n s_waitcnt vmcnt(0)",
    ),
    Kernel(
        "wide_lds_read",  # lane l reads 16 bytes at 16 * l, quads 4 to 7 of each half swapped in pairs
        "v_lshlrev_b32 v3, 4, v0\n v_mov_b64 v[4:5], 0\n v_mov_b64 v[6:7], 0\n ds_write_b128 v3, v[4:7]\n s_waitcnt lgkmcnt(0)\n v_lshrrev_b32 v2, 4, v0\n v_and_b32 v2, 1, v2\n v_lshlrev_b32 v2, 6, v2\n v_xor_b32 v3, v3, v2\n ds_read_b128 v[8:11], v3\n s_waitcnt lgkmcnt(0)",
        lds=8192,
    ),
    Kernel(
        "matrix",
        "v_mov_b64 v[4:5], 0\n v_mov_b64 v[6:7], 0\n v_mov_b64 v[8:9], 0\n v_mfma_f32_16x16x16_f16 v[4:7], v[8:9], v[8:9], v[4:7]\n s_nop 15",
    ),
    # 256 bytes through a buffer resource of 100 bytes: out-of-bounds loads return 0, and stores do nothing
    Kernel(
        "buffer",
        LOAD_POINTERS
        + """
  s_mov_b64 s[8:9], s[4:5]
  s_movk_i32 s10, 100
  s_mov_b32 s11, 0x27000
  s_mov_b64 s[12:13], s[6:7]
  s_movk_i32 s14, 204
  s_mov_b32 s15, 0x27000
  v_lshlrev_b32 v1, 2, v0
  buffer_load_dword v2, v1, s[8:11], 0 offen
  s_waitcnt vmcnt(0)
  buffer_store_dword v2, v1, s[12:15], 0 offen""",
    ),
    Kernel(
        "subdword",
        LOAD_POINTERS
        + """
  v_lshlrev_b32 v1, 2, v0
  v_mov_b32 v2, -1
  global_load_sbyte v3, v1, s[4:5] offset:1
  global_load_short_d16_hi v2, v1, s[4:5]
  s_waitcnt vmcnt(0)
  global_store_short v1, v3, s[6:7]
  global_store_short_d16_hi v1, v2, s[6:7] offset:2""",
    ),
    Kernel(
        "flat",
        LOAD_POINTERS
        + "v_lshlrev_b32 v1, 2, v0\n v_mov_b32 v2, 0\n v_lshl_add_u64 v[4:5], s[4:5], 0, v[1:2]\n v_lshl_add_u64 v[6:7], s[6:7], 0, v[1:2]\n flat_load_dword v8, v[4:5]\n s_waitcnt vmcnt(0) lgkmcnt(0)\n flat_store_dword v[6:7], v8".replace(
            "v[1:2]", "v[10:11]"
        ).replace("v_mov_b32 v2, 0", "v_mov_b32 v10, v1\n v_mov_b32 v11, 0"),
    ),
    Kernel(
        "atomics",
        LOAD_POINTERS
        + "v_mov_b32 v1, 0\n v_mov_b32 v2, 1\n v_lshlrev_b32 v3, 2, v0\n global_atomic_add v4, v1, v2, s[4:5] sc0\n s_waitcnt vmcnt(0)\n global_store_dword v3, v4, s[6:7]",
    ),
    Kernel("preloaded", PRELOAD_PROLOGUE + COPY_PRELOADED, preload=4),
    Kernel("preloaded_or_nothing", "  .fill 64, 4, 0xbf800000\n" + COPY_PRELOADED, preload=4),
    Kernel("preloaded_in_part", "  .fill 64, 4, 0xbf800000\n" + COPY_PRELOADED, preload=2),
]


@pytest.fixture(scope="module", params=("gfx942", "gfx950"))
def device(request, tmp_path_factory):
    return Device(request.param, assemble(KERNELS, request.param, tmp_path_factory.mktemp("emulator")))


class Device:
    """An emulator and the code object of this file."""

    def __init__(self, arch, path):
        self.arch, self.path, self.emulator = arch, path, Emulator(arch)

    def run(self, kernel, source=None, output=None, grid=1, block=64, emulator=None, lds=0, uninitialized=True):
        source = torch.zeros(64, dtype=torch.int32) if source is None else source
        output = torch.zeros(1024, dtype=torch.int32) if output is None else output
        what = Launch("", kernel, (grid, 1, 1), (block, 1, 1), (source, output), lds)
        fresh = (output,) if uninitialized else ()
        return (emulator or self.emulator).run(self.path, what, fresh)

    def fails(self, kind, kernel, *words, **options):
        with pytest.raises(kind) as caught:
            self.run(kernel, **options)
        assert type(caught.value) is kind
        for word in (kernel + "+0x", *words):
            assert word in str(caught.value)


def arange(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


# Execution


def test_copies(device):
    output = torch.full((128,), -1, dtype=torch.int32)
    device.run("copy", arange(128), output, grid=2)
    assert torch.equal(output, arange(128))
    output = torch.full((64, 4), -1, dtype=torch.int32)
    device.run("copy_x4", arange(256), output)
    assert torch.equal(output.flatten(), arange(256))
    output = torch.zeros(64, dtype=torch.uint8)
    device.run("bytes", torch.arange(64, dtype=torch.uint8), output)
    assert torch.equal(output, torch.arange(64, dtype=torch.uint8))


def test_preloaded_arguments(device):
    """Firmware that preloads starts after the prologue; other firmware runs it, with the registers not set."""
    for preloads, before in ((True, 0), (False, 1)):
        emulator, output = Emulator(device.arch, preloads_arguments=preloads), torch.zeros(64, dtype=torch.int32)
        device.run("preloaded", arange(64), output, emulator=emulator)
        assert torch.equal(output, arange(64))
        assert emulator.last.mnemonics["s_load_dwordx4"] == before
    output = torch.zeros(64, dtype=torch.int32)
    device.run("preloaded_or_nothing", arange(64), output)
    assert torch.equal(output, arange(64))
    other = Emulator(device.arch, preloads_arguments=False)
    device.fails(errors.Uninitialized, "preloaded_or_nothing", "s2 was never written", emulator=other)
    device.fails(errors.Uninitialized, "preloaded_in_part", "was never written")


def test_part_of_a_wave(device):
    output = torch.full((128,), -1, dtype=torch.int32)
    device.run("copy", arange(128), output, block=70)
    assert torch.equal(output, torch.where(arange(128) < 70, arange(128), -1))


def test_loops_of_different_lengths_join(device):
    output = torch.zeros(1024, dtype=torch.int32)
    device.run("loops", output=output, block=1024)
    thread = arange(1024)
    assert torch.equal(output, 10 * (thread // 64 + thread % 4 + 1))
    assert device.emulator.last.mnemonics["global_store_dword"] == 16


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_blocks_wait_for_each_other_in_any_order(device, seed):
    flags, output = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    device.run("hand_over", flags, output, grid=2, emulator=Emulator(device.arch, seed=seed))
    assert output.tolist() == [21, 42] and flags.item() == 64


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_lds_exchange(device, seed):
    output = torch.zeros(256, dtype=torch.int32)
    device.run("exchange", output=output, block=256, emulator=Emulator(device.arch, seed=seed))
    assert torch.equal(output, arange(256) ^ 64)


def test_lds_atomics_meet(device):
    output = torch.zeros(1, dtype=torch.int32)
    device.run("lds_atomic", output=output, block=256)
    assert output.item() == sum(range(256))


def test_global_atomics_return_every_value_once(device):
    counter, output = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    device.run("atomics", counter, output)
    assert counter.item() == 64 and sorted(output.tolist()) == list(range(64))


def test_load_to_lds(device):
    output = torch.zeros(64, dtype=torch.int32)
    device.run("load_to_lds", arange(64), output)
    assert torch.equal(output, arange(64))


def test_m0_needs_a_wait_state(device):
    device.fails(errors.MissingWait, "load_to_lds_too_early", "M0 is written just before", source=arange(64))


def test_scratch_is_private(device):
    output = torch.zeros(64, dtype=torch.int32)
    device.run("scratch", output=output)
    assert torch.equal(output, arange(64))


def test_buffer_resources_have_bounds(device):
    output = torch.full((64,), -1, dtype=torch.int32)
    counters = device.run("buffer", 1 + arange(64), output)
    assert (counters.bytes_loaded, counters.bytes_stored) == (100, 204)  # out-of-bounds accesses move nothing
    thread = arange(64)
    assert torch.equal(output, torch.where(thread < 25, thread + 1, torch.where(thread < 51, 0, -1)))


def test_subdword_accesses(device):
    source, output = torch.arange(256, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.int16)
    device.run("subdword", source, output)
    expected = source.view(torch.int8)[1::4].short()
    assert torch.equal(output[:, 0], expected)
    assert torch.equal(output[:, 1], source.view(torch.int16)[::2])


def test_flat_reaches_global_memory(device):
    output = torch.zeros(64, dtype=torch.int32)
    device.run("flat", arange(64), output)
    assert torch.equal(output, arange(64))


def test_unsupported_instructions_fail_only_when_reached(device):
    device.run("unsupported")
    device.fails(errors.UnsupportedInstruction, "unsupported_reached", "s_rfe_b64")


def test_runs_what_a_launch_packs(device, monkeypatch):
    """The executor maps modules to files and arguments to kernarg."""
    monkeypatch.setattr(launch, "code_object", lambda module, arch: device.path)
    output = torch.zeros(64, dtype=torch.int32)
    device.emulator.launch(Launch("any", "copy", (1, 1, 1), (64, 1, 1), (arange(64), output)), (output,))
    assert torch.equal(output, arange(64)) and device.emulator.arch.name == device.arch
    assert device.emulator.history[-1][0] == "copy"


def test_an_emulator_keeps_no_kernel_that_the_process_lets_go(device):
    """Bound kernels take megabytes each: the kernels of 10,000 random calls took 16 GB."""
    device.run("copy", arange(64))
    program = device.emulator.program(device.path, "copy")
    kernel, bound = weakref.ref(program), program.bound
    assert any(bound)
    del program
    device_module.forget_programs()
    assert not any(bound)  # without a garbage collection
    gc.collect()
    assert kernel() is None


def test_a_tensor_must_fit_its_slot(device):
    """This holds wherever in a page the tensor starts."""
    for start in (0, 4094, 4095):
        memory = mmap.mmap(-1, MAX_BYTES + (1 << 13), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        memory = torch.frombuffer(memory, dtype=torch.uint8)[start:]
        space = Space(4, races=True)
        space.add_tensors([("the largest", memory[:MAX_BYTES])], ())
        first = space.address(memory)
        assert first & 0xFFF == start and space.name_at(first + MAX_BYTES - 1) == "the largest"
    output = torch.zeros(64, dtype=torch.int32)
    most = f"copy: argument 0 must be at most {MAX_BYTES} bytes, got {MAX_BYTES + 1}"
    with pytest.raises(errors.LaunchError, match=most):
        device.run("copy", memory[: MAX_BYTES + 1], output)


def test_launch_must_fit_the_kernel(device):
    with pytest.raises(errors.LaunchError, match="block must be at most 1024"):
        device.run("copy", block=1088)
    with pytest.raises(errors.LaunchError, match="lds must be at most"):
        device.run("copy", lds=1 << 20)
    for grid in ((2**26, 1, 1), (1, 65536, 1), (1, 1, 65536)):
        with pytest.raises(
            errors.LaunchError, match="copy has fewer than 2.32 threads along each axis and at most 65535"
        ):
            device.emulator.run(device.path, Launch("", "copy", grid, (64, 1, 1), ()))
    with pytest.raises(errors.LaunchError, match="grid must be positive"):
        device.run("copy", grid=0)
    with pytest.raises(errors.LaunchError, match="args must be 16 bytes, got 24"):
        device.emulator.run(device.path, Launch("", "copy", (1, 1, 1), (64, 1, 1), (arange(64), arange(64), I64(1))))
    with pytest.raises(errors.LaunchError, match="must hold nothing"):
        device.emulator.run(device.path, Launch("", "nothing", (1, 1, 1), (64, 1, 1), ()))
    with pytest.raises(errors.LaunchError, match="must be compiled for"):
        Emulator({"gfx942": "gfx950", "gfx950": "gfx942"}[device.arch]).run(
            device.path, Launch("", "copy", (1, 1, 1), (64, 1, 1), ())
        )


# The sanitizer


def test_errors_name_the_place(device):
    with pytest.raises(errors.OutOfBounds) as caught:
        device.run("copy", arange(1000), torch.zeros(1000, dtype=torch.int32), grid=16)
    message = str(caught.value)
    assert message.startswith("copy+0x")
    for words in (
        "`global_load_dword v2, v1, s[4:5]`",
        "block (15, 0, 0), wave 0, lane 40",
        "argument 0, which has 4000",
    ):
        assert words in message


def test_global_bounds(device):
    device.fails(errors.OutOfBounds, "copy", "4 bytes at byte 252 of argument 0", source=arange(63))
    device.fails(errors.OutOfBounds, "copy", "argument 1", source=arange(64), output=torch.zeros(32, dtype=torch.int32))
    device.fails(errors.OutOfBounds, "copy", "in no tensor", source=torch.zeros(0, dtype=torch.int32))
    device.fails(errors.OutOfBounds, "store_code", "the code object is read-only")
    device.fails(errors.Misaligned, "misaligned", "must be a multiple of 4", source=arange(65))


def test_gaps_between_rows_are_out_of_bounds(device):
    storage = arange(128)
    device.run("copy", storage.as_strided((2, 32), (32, 1)), torch.zeros(64, dtype=torch.int32))
    message = "4 bytes at byte 128 of argument 0 lie between its rows"
    device.fails(errors.OutOfBounds, "copy", message, "lane 32", source=storage.as_strided((2, 32), (40, 1)))


def test_slices_of_one_tensor_share_a_region(device):
    storage = torch.cat([arange(64), torch.zeros(64, dtype=torch.int32)])
    device.run("copy", storage[:64], storage[64:])
    assert torch.equal(storage[64:], arange(64))


def test_missing_waits(device):
    device.fails(errors.MissingWait, "no_vmcnt", "v_add_u32 v2, v2, v2", "v2 is used before")
    device.fails(errors.MissingWait, "vmcnt_too_high", "v_mov_b32 v4, v3")
    device.fails(errors.MissingWait, "no_lgkmcnt", "s_mov_b32 s8, s4")
    device.fails(errors.MissingWait, "overwritten_load", "v_mov_b32 v2, 0")
    device.fails(errors.MissingWait, "lds_no_wait", "v_mov_b32 v5, v4")
    device.fails(errors.MissingWait, "load_to_lds_no_wait", "a load to LDS address 0", source=arange(64))


def test_unwritten_values(device):
    device.fails(errors.Uninitialized, "unwritten_vgpr", "global_store_dword", "v4 was never written")
    device.run("unwritten_unused")
    device.fails(errors.Uninitialized, "unwritten_lanes", "lane 8", "v2 was never written")
    device.fails(errors.Uninitialized, "unwritten_sgpr", "s20 was never written")
    device.run("spilled_sgpr")  # beside a lane of another scalar, which has no value
    device.fails(errors.Uninitialized, "unwritten_spill", "s9 was never written")
    device.fails(errors.Uninitialized, "unwritten_lds", "LDS address 68", "lane 17")
    device.fails(errors.Uninitialized, "unwritten_scratch", "scratch offset 4")
    fresh = arange(64)
    what = Launch("", "copy", (1, 1, 1), (64, 1, 1), (fresh, torch.zeros(64, dtype=torch.int32)))
    with pytest.raises(errors.Uninitialized, match="4 bytes at byte 0 of argument 0 were never written"):
        device.emulator.run(device.path, what, (fresh,))
    with pytest.raises(errors.Uninitialized):  # also if the launch got another view of it
        device.emulator.run(device.path, what, (fresh.view(8, 8)[1:],))


def test_bounds_of_lds_scratch_and_registers(device):
    device.fails(errors.LdsOutOfBounds, "lds_beyond", "LDS address 256, the block has 256", "lane 63")
    device.run("lds_beyond", lds=4)
    device.fails(errors.Misaligned, "lds_misaligned", "LDS address 4 must be a multiple of 8", "lane 1")
    device.fails(errors.ScratchOutOfBounds, "scratch_beyond", "scratch offset 16, the lane has 16")
    device.fails(errors.RegisterOutOfRange, "beyond_registers", "v40 is beyond the 32 VGPRs and 16 AGPRs")
    device.fails(errors.RegisterOutOfRange, "beyond_agprs", "a16 is beyond")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_lds_races(device, seed):
    emulator = Emulator(device.arch, seed=seed)
    kinds = (errors.LdsRace, errors.Uninitialized)  # a wave may read before the other one has written
    with pytest.raises(kinds, match="LDS address"):
        device.run("exchange_no_barrier", block=256, emulator=emulator)
    with pytest.raises(kinds, match="LDS address"):
        device.run("exchange_no_wait", block=256, emulator=emulator)
    with pytest.raises(errors.LdsRace, match="since the last barrier"):
        device.run("write_after_read", block=256, emulator=emulator)
    with pytest.raises(errors.LdsRace, match="LDS address 0"):
        device.run("same_slot", block=128, emulator=emulator)
    device.run("same_slot", block=128, emulator=Emulator(device.arch, races=False, seed=seed))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_global_races(device, seed):
    emulator = Emulator(device.arch, seed=seed)
    with pytest.raises(errors.GlobalRace, match=r"block \(\d, 0, 0\), wave 0"):
        device.run("store_race", grid=4, emulator=emulator)
    device.run("store_race", grid=1, emulator=emulator)
    with pytest.raises(errors.GlobalRace, match="wave [01]"):
        device.run("wave_race", block=128, emulator=emulator)
    with pytest.raises((errors.GlobalRace, errors.Uninitialized), match="byte 0 of argument 1"):
        device.run("read_race", grid=4, emulator=emulator)
    with pytest.raises(errors.GlobalRace, match="argument 0"):
        device.run("write_after_read_race", grid=4, emulator=emulator)
    if seed is None:  # in other orders the read may come first
        with pytest.raises(errors.GlobalRace, match=r"argument 1, read here, was written by block \(0, 0, 0\)"):
            device.run("read_after_atomic_race", grid=2, emulator=emulator, uninitialized=False)
    source = torch.zeros(256, dtype=torch.int32)
    device.run("global_through_barrier", source, block=256, emulator=emulator)
    assert torch.equal(source, arange(256) ^ 64)


def test_emulators_share_kernels_but_not_what_launches_teach(device, monkeypatch):
    """Each emulator learns which arguments a kernel stores to: another one's first launch watches all again."""
    known = []
    watch = Space.watch
    monkeypatch.setattr(Space, "watch", lambda space, stored: (known.append(stored), watch(space, stored))[0])
    one, other = Emulator(device.arch), Emulator(device.arch)
    for emulator in (one, one, other, one, other):
        device.run("copy", emulator=emulator)
    taught = {"argument 1"}
    assert known == [None, taught, None, taught, taught]
    assert one.program(device.path, "copy") is other.program(device.path, "copy")


def test_waves_that_never_reach_a_barrier(device):
    device.fails(errors.DivergentBarrier, "divergent_barrier", "s_barrier", "1 waves of the block ended", block=128)
    device.run("divergent_barrier", block=64)


def test_deadlock(device):
    device.fails(errors.Deadlock, "spin", "nothing has changed for 2000", emulator=Emulator(device.arch, patience=2000))
    device.run("spin", source=1 + arange(64))


# Counters


def test_instruction_counters(device):
    counters = device.run("exchange", block=256)
    assert counters.instructions["barrier"] == 4 and counters.barriers == 1
    assert (
        counters.instructions["lds"] == 8
        and counters.instructions["global"] == 4
        and counters.instructions["smem"] == 4
    )
    assert counters.mnemonics["v_xor_b32"] == 4
    assert counters.issue_cycles == 4 * sum(counters.instructions.values())


def test_memory_counters(device):
    counters = device.run("copy_x4", arange(256), torch.zeros(256, dtype=torch.int32))
    assert counters.bytes_loaded == counters.bytes_stored == 1024
    # tensors start at multiples of 64 bytes, not always of 128
    assert counters.lines_64 == 32 and 16 <= counters.lines_128 <= 18
    counters = device.run("strided_load", arange(64 * 32))
    assert counters.lines_64 == counters.lines_128 == 64 and counters.bytes_loaded == 256


def test_loads_in_flight(device):
    counters = device.run("in_flight", arange(256))
    assert counters.loads_in_flight == 3 and counters.bytes_in_flight == {"argument 0": 64 * 40}


def test_some_blocks_of_a_launch(device):
    """Other blocks do not run, and the traffic of the chosen ones is counted by tensor and block."""
    emulator = Emulator(device.arch, traffic=True)
    source, output = arange(8 * 64), torch.full((8 * 64,), -1, dtype=torch.int32)
    what = Launch("", "copy", (8, 1, 1), (64, 1, 1), (source, output))
    counters = emulator.run(device.path, what, (), range(2, 5))
    assert torch.equal(output[128:320], source[128:320]) and (output[:128] == -1).all() and (output[320:] == -1).all()
    assert counters.bytes_loaded == counters.bytes_stored == 3 * 256
    traffic = counters.traffic
    assert traffic.bytes_stored == {"argument 1": 3 * 256} and traffic.lines_loaded("argument 1") == 0
    assert traffic.bytes_in_flight("argument 0") == 3 * 256 / 2 and traffic.bytes_in_flight("argument 1") == 0
    assert 6 <= traffic.lines_loaded("argument 0") <= 9  # tensors start at multiples of 64 bytes


def test_bank_conflicts(device):
    """There are 32 banks on gfx942, 64 on gfx950."""
    groups = {"gfx942": 2, "gfx950": 1}[device.arch]
    assert device.run("no_conflicts").lds_cycles == groups
    assert device.emulator.last.lds_conflict_cycles == 0
    assert device.run("conflicts").lds_conflict_cycles == {"gfx942": 62, "gfx950": 31}[device.arch]
    assert device.run("two_way").lds_conflict_cycles == groups
    assert device.run("wide_lds").lds_cycles == 4 * groups and device.emulator.last.lds_conflict_cycles == 0
    # 16-byte reads on gfx942 pair quads 0 and 5, 1 and 4, ...: here these share banks
    assert device.run("wide_lds_read").lds_conflict_cycles == {"gfx942": 8, "gfx950": 0}[device.arch]


def test_matrix_cycles(device):
    counters = device.run("matrix")
    assert counters.instructions["matrix"] == 1 and counters.matrix_cycles == 16


# Code objects


def test_metadata(device):
    code = CodeObject(device.path)
    assert code.arch == device.arch and set(code.kernels) == {kernel.name for kernel in KERNELS}
    kernel = code.kernels["scratch"]
    assert (kernel.vgprs, kernel.agprs, kernel.scratch, kernel.lds, kernel.kernarg_size, kernel.max_block) == (
        32,
        16,
        16,
        0,
        16,
        1024,
    )
    assert kernel.statistics == {
        "vgprs": 48, "agprs": 16, "sgprs": 48, "vgpr_spills": 0, "sgpr_spills": 0, "lds": 0, "scratch": 16, "kernarg": 16,
        "max_block": 1024,
    }  # fmt: skip


@full
@pytest.mark.parametrize("arch_name", ["gfx942", "gfx950"])
def test_shipped_objects_bind_completely(arch_name):
    """The emulator has every instruction of the package's kernels."""
    paths = sorted((launch.CODE / arch_name).glob("*.co"))
    assert paths, "python csrc/build.py has not run"
    emulator, seen = Emulator(arch_name), set()
    for path in paths:
        for symbol in CodeObject(path).kernels:
            program = emulator.program(path, symbol)
            fresh = [ins for ins in program.instructions if ins.words not in seen]
            missing = [ins.text for ins in fresh if program.bind(ins).fault]
            assert not missing, f"{path.name} {symbol}: {missing}"
            seen.update(ins.words for ins in fresh)


def test_values_survive_random_schedules(device):
    """The results do not depend on the order in which waves run."""
    results = []
    for seed in (None, 3, 4):
        output = torch.zeros(1024, dtype=torch.int32)
        device.run("loops", output=output, block=1024, emulator=Emulator(device.arch, seed=seed))
        results.append(output.numpy())
    assert all(np.array_equal(results[0], other) for other in results[1:])
