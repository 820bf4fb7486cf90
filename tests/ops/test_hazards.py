"""Test that no kernel needs more wait states than it has, in the code objects: scalar registers of memory instructions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from assembly import Kernel, assemble
from marks import full

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator.decode import Instruction, decode
from vllm_rocm_ops.emulator.objects import CodeObject, KernelObject
from vllm_rocm_ops.emulator.sanitizer import effects

WAIT_STATES = 5
"""From a vector instruction that writes a scalar register to a vector memory instruction that reads it (CDNA3 and CDNA4 ISA, 4.5)."""
VECTOR_MEMORY = ("MUBUF", "MTBUF", "GLOBAL", "FLAT", "SCRATCH")
SCALARS = frozenset(range(128))

_sizes_and_kinds: dict[int, tuple[int, str]] = {}  # by what of an instruction's first word decides them


def size_and_kind(key: int, data: bytes) -> tuple[int, str]:
    """Return an instruction's words, and whether it writes scalars as a vector instruction, accesses memory or branches."""
    ins = decode(data, 0)[0]
    kind = ""
    if ins.encoding.startswith("VOP") and effects(ins)[1] & SCALARS:
        kind = "writes"
    elif ins.encoding in VECTOR_MEMORY:
        kind = "memory"
    elif ins.mnemonic.startswith(("s_branch", "s_cbranch")):
        kind = "branch"
    return _sizes_and_kinds.setdefault(key, (ins.size // 4, kind))


def keys(words: np.ndarray) -> list[int]:
    """Return what decides size and kind: the upper half, VOP1's opcode, and whether an operand means a further word."""
    first, second, opcode = words & 0x1FF, words >> 8 & 0xFF, words >> 9 & 0x7F
    key = words.astype(np.int64) >> 16 << 7 | opcode * (words >> 25 == 0x3F)
    for flag in (first & 0xFF == 255, second == 255, first == 249, first == 250, first == 255):
        key = key << 1 | flag
    return key.tolist()


class Code:
    """A kernel's instructions, of which few are decoded in full."""

    def __init__(self, body: bytes):
        self.body, self.starts, self.kinds = body, [], []
        at, end, found = 0, len(body) // 4, keys(np.frombuffer(body[: len(body) // 4 * 4], np.uint32))
        while at < end:
            known = _sizes_and_kinds.get(found[at]) or size_and_kind(found[at], body[4 * at : 4 * at + 16])
            self.starts.append(at)
            self.kinds.append(known[1])
            at += known[0]
        self.index = {start: i for i, start in enumerate(self.starts)}

    def __getitem__(self, i: int) -> Instruction:
        return decode(self.body[4 * self.starts[i] : 4 * self.starts[i] + 16], 4 * self.starts[i])[0]

    def early_reads(self) -> Iterator[str]:
        """Yield pairs of instructions with too few wait states between them, on all paths.

        `s_nop n` is n + 1 wait states, any other instruction is one, a branch too.
        """
        for i, kind in enumerate(self.kinds):
            after = self.kinds[i + 1 : i + 1 + WAIT_STATES]
            if kind == "writes" and ("memory" in after or "branch" in after):
                yield from self.early_reads_of(i)

    def early_reads_of(self, writer: int) -> Iterator[str]:
        todo = [(writer + 1, 0, effects(self[writer])[1] & SCALARS)]
        while todo:
            i, states, written = todo.pop()
            if i >= len(self.starts) or states >= WAIT_STATES or not written:
                continue
            ins = self[i]
            reads, writes = effects(ins)
            if self.kinds[i] == "memory" and reads & written:
                yield f"{self[writer].text}; {states} wait states; {ins.text}"
            states += ins.fields["simm16"] + 1 if ins.mnemonic == "s_nop" else 1
            if self.kinds[i] == "branch":
                offset = (ins.fields["simm16"] ^ 0x8000) - 0x8000
                todo.append((self.index[self.starts[i] + 1 + offset], states, written))
            if ins.mnemonic not in ("s_branch", "s_endpgm"):
                todo.append((i + 1, states, written - writes))


def code_of(code: CodeObject, kernel: KernelObject) -> Code:
    return Code(bytes(code.image[kernel.entry : kernel.entry + kernel.size]))


@pytest.mark.parametrize("arch", ["gfx950", pytest.param("gfx942", marks=full)])
def test_no_memory_instruction_reads_a_scalar_register_too_early(arch):
    """The compiler waits between its own instructions, but does not look into inline assembly: device/amd/lds_async.h."""
    found, checked = [], 0
    for path in sorted((launch.CODE / arch).glob("*.co")):
        code = CodeObject(path)
        for name, kernel in code.kernels.items():
            of = code_of(code, kernel)
            checked += of.kinds.count("memory")
            found += [f"{name}: {pair}" for pair in of.early_reads()]
    assert not found, "\n".join(found)
    assert checked > 20_000


PLANTED = {
    "a descriptor": "v_readfirstlane_b32 s19, v1\n buffer_load_dword v2, v0, s[16:19], 0 offen",
    "an offset": "v_readfirstlane_b32 s20, v1\n buffer_load_dword v2, v0, s[16:19], s20 offen",
    "an address of a store": "v_readlane_b32 s5, v1, 3\n global_store_dword v0, v1, s[4:5]",
    "a comparison": "v_cmp_lt_u32 s[4:5], v0, v1\n global_load_dword v2, v0, s[4:5]",
    "four wait states": "v_readfirstlane_b32 s4, v1\n s_nop 2\n v_mov_b32 v3, 0\n global_load_dword v2, v0, s[4:5]",
    "past m0": "v_readfirstlane_b32 s20, v1\n s_mov_b32 m0, s21\n s_nop 0\n buffer_load_dword v0, s[16:19], s20 offen lds",
    "a branch": "v_readfirstlane_b32 s4, v1\n s_branch .Lnear\n v_nop\n .Lnear:\n global_load_dword v2, v0, s[4:5]",
    "a loop": ".Lagain:\n global_load_dword v2, v0, s[4:5]\n v_readfirstlane_b32 s4, v1\n s_cbranch_scc1 .Lagain",
}
RIGHT = {
    "five wait states": "v_readfirstlane_b32 s4, v1\n s_nop 4\n global_load_dword v2, v0, s[4:5]",
    "another register": "v_readfirstlane_b32 s6, v1\n global_load_dword v2, v0, s[4:5]",
    "a scalar write": "s_mov_b32 s4, 0\n global_load_dword v2, v0, s[4:5]",
    "a scalar write behind": "v_readfirstlane_b32 s4, v1\n s_mov_b32 s4, 0\n global_load_dword v2, v0, s[4:5]",
    "a vector result": "v_readfirstlane_b32 s4, v1\n v_add_u32 v0, s4, v0\n global_load_dword v2, v[0:1], off",
    "no path": "v_readfirstlane_b32 s4, v1\n s_branch .Laway\n global_load_dword v2, v0, s[4:5]\n .Laway:",
}


def test_a_read_that_is_too_early_is_found(tmp_path):
    """In every form of access, and over branches. Nothing else is."""
    texts = list((PLANTED | RIGHT).values())
    bodies = [text.replace(".L", f".L{i}_") for i, text in enumerate(texts)]
    path = assemble([Kernel(f"case_{i}", body) for i, body in enumerate(bodies)], "gfx942", tmp_path)
    code = CodeObject(path)
    found = [len(list(code_of(code, code.kernels[f"case_{i}"]).early_reads())) for i in range(len(texts))]
    assert dict(zip(PLANTED | RIGHT, found)) == dict.fromkeys(PLANTED, 1) | dict.fromkeys(RIGHT, 0)


@pytest.mark.parametrize("stem", ["fused_experts_tiled", "mxfp8_scaled_mm"])
def test_instructions_start_where_the_decoder_says(stem):
    code = CodeObject(launch.code_object(stem, "gfx950"))
    kernel = min(code.kernels.values(), key=lambda kernel: kernel.size)
    body = bytes(code.image[kernel.entry : kernel.entry + kernel.size])
    assert [4 * start for start in Code(body).starts] == [ins.address for ins in decode(body, 0)]
