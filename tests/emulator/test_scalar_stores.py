"""Test scalar stores and atomics, with which kernels signal other blocks."""

from __future__ import annotations

import pytest
import torch
from assembly import LOAD_POINTERS, Kernel, assemble

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Emulator

BODY = f"""
{LOAD_POINTERS}
  s_mov_b32 s8, 4
  s_mov_b32 s10, 7
  s_store_dword s10, s[4:5], s8 glc
  s_mov_b32 s12, 5
  s_atomic_add s12, s[4:5], 0x4 glc
  s_waitcnt lgkmcnt(0)
  s_mov_b32 s13, 20
  s_atomic_dec s13, s[4:5], 0x4
  s_store_dwordx2 s[12:13], s[4:5], 0x8 glc
  s_mov_b32 s14, 9
  s_atomic_dec s14, s[4:5], 0x0 glc
  s_waitcnt lgkmcnt(0)
  s_store_dword s14, s[6:7], 0x0 glc
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[list[int], list[int]]:
    """Return what one wave leaves in two tensors of ones."""
    path = assemble([Kernel("scalar_stores", BODY)], "gfx942", tmp_path_factory.mktemp("scalar"))
    first, second = torch.tensor([10, 1, 1, 1], dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    Emulator("gfx942").run(path, Launch("", "scalar_stores", (1, 1, 1), (64, 1, 1), (first, second)))
    return first.tolist(), second.tolist()


def test_stores_and_atomics_change_memory_in_order(stored):
    first, second = stored
    assert first == [9, 11, 7, 20]  # dec of 10 beyond its limit 9; 7 + 5 - 1; the value before the add, and 20
    assert second == [10, 1, 1, 1]
