"""Small kernels in assembler text, for the emulator's own tests."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from load_build import load_build

_CSRC = Path(__file__).resolve().parents[1] / "csrc"


@dataclass(frozen=True)
class Kernel:
    """A kernel's instructions.

    Pointers are s[4:5], s[6:7], ... after `LOAD_POINTERS`; s2 is the block, v0 the thread.
    """

    name: str
    body: str
    pointers: int = 2
    lds: int = 0
    scratch: int = 0
    max_block: int = 1024
    denormals: bool = True  # f32 denormals, as HIP kernels keep them
    preload: int = 0  # argument words that firmware preloads to s[2:]; it enters such a kernel 256 bytes into the body

    @property
    def source(self) -> str:
        """The function and its descriptor."""
        return f"""
.globl {self.name}
.p2align 8
.type {self.name},@function
{self.name}:
{self.body}
  s_endpgm
.L{self.name}_end:
.size {self.name}, .L{self.name}_end-{self.name}
.rodata
.amdhsa_kernel {self.name}
  .amdhsa_group_segment_fixed_size {self.lds}
  .amdhsa_private_segment_fixed_size {self.scratch}
  .amdhsa_enable_private_segment {int(self.scratch > 0)}
  .amdhsa_kernarg_size {8 * self.pointers}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_kernarg_preload_length {self.preload}
  .amdhsa_user_sgpr_kernarg_preload_offset 0
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_float_denorm_mode_32 {3 * self.denormals}
  .amdhsa_next_free_vgpr 48
  .amdhsa_accum_offset 32
  .amdhsa_next_free_sgpr 48
.end_amdhsa_kernel
.text
"""

    @property
    def metadata(self) -> str:
        """The kernel's entry in the metadata note."""
        args = "".join(
            f"""
      - .address_space: global
        .offset: {8 * i}
        .size: 8
        .value_kind: global_buffer"""
            for i in range(self.pointers)
        )
        return f"""
  - .name: {self.name}
    .symbol: {self.name}.kd
    .kernarg_segment_size: {8 * self.pointers}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {self.lds}
    .private_segment_fixed_size: {self.scratch}
    .wavefront_size: 64
    .sgpr_count: 48
    .vgpr_count: 48
    .agpr_count: 16
    .max_flat_workgroup_size: {self.max_block}
    .args:{args}"""


# Without preloading by firmware: 256 bytes that load two pointers to the registers that preloading would fill.
PRELOAD_PROLOGUE = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
  s_mov_b64 s[2:3], s[4:5]
  s_mov_b64 s[4:5], s[6:7]
  .fill 60, 4, 0xbf800000
"""

LOAD_POINTERS = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
"""


def source(kernels: list[Kernel], arch: str) -> str:
    """Return one assembler file with all kernels."""
    functions = "".join(kernel.source for kernel in kernels)
    metadata = "".join(kernel.metadata for kernel in kernels)
    return f"""
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
{functions}
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{arch}
amdhsa.kernels:{metadata}
.end_amdgpu_metadata
"""


@functools.cache
def build_module():
    """Return csrc/build.py, which compiles."""
    return load_build(_CSRC)


def assemble(kernels: list[Kernel], arch: str, folder: Path) -> Path:
    """Assemble and link the kernels, and return the code object."""
    text, output = folder / f"{arch}.s", folder / f"{arch}.co"
    text.write_text(source(kernels, arch))
    build_module().compile_source(text, arch, output)
    return output
