"""Devices with one shared tensor, and their kernels, in assembler text."""

from __future__ import annotations

import torch
from assembly import LOAD_POINTERS, Kernel
from one_shot import TURNS

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Devices

SEEDS = range(16)
SYSTEM, AGENT, NONE = "sc0 sc1", "sc1", ""
WAIT, WRITE_BACK, BARRIER = "s_waitcnt vmcnt(0)", f"buffer_wbl2 {SYSTEM}", "s_barrier"
VALUE = 7

# v1 and v2 are the thread's offsets with elements of 4 and 8 bytes, v3 is 0, v4 the value
START = f"""{LOAD_POINTERS}
  v_lshlrev_b32 v1, 2, v0
  v_lshlrev_b32 v2, 3, v0
  v_mov_b32 v3, 0
  v_mov_b32 v4, {VALUE}"""


def kernel(name: str, *lines: str, pointers: int = 2, threads: int = 64) -> Kernel:
    """Return a kernel of these lines, after START."""
    return Kernel(name, "\n  ".join((START, *lines)), pointers=pointers, max_block=threads)


def polls(name: str, load: str, register: str, value: int, *lines: str, pointers: int = 2) -> Kernel:
    """Return a kernel that loads until a register has a value in all lanes."""
    again = (
        f".L{name}:",
        "s_sleep 1",
        load,
        WAIT,
        f"v_cmp_ne_u32 vcc, {value}, {register}",
        f"s_cbranch_vccnz .L{name}",
    )
    return kernel(name, *again, *lines, pointers=pointers)


class Fabric:
    """Devices with one shared tensor, which belongs to the last device."""

    def __init__(self, code, count: int, seed: int, units: str = "", **options):
        self.devices, self.path = Devices(code[0] + units, count, seed, **({"turns": TURNS} | options)), code[1]
        self.shared = self.devices.share(count - 1, self.zeros(128), "shared")

    @staticmethod
    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def enqueue(self, device: int, kernel: Kernel, *tensors, blocks: int = 1, **options) -> torch.Tensor:
        """Add a launch, and return its last tensor.

        By default its tensors are the shared one and a new one.
        """
        tensors = tensors or (self.shared, self.zeros(64))
        launch = Launch("", kernel.name, (blocks, 1, 1), (kernel.max_block, 1, 1), tensors)
        self.devices.enqueue(device, self.path, launch, **options)
        return tensors[-1]

    def run(self) -> list:
        return self.devices.run()
