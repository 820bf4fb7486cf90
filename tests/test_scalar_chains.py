"""What kernels wait for before they load their data, and between their data and their result, as their code objects say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from emulator.decode import Instruction, decode
from emulator.objects import CodeObject, KernelObject

from vllm_rocm_ops import launch

AMD = ("gfx942", "gfx950")
ROWS = ("rms_norm", "silu_and_mul")
NO_WAIT_VM, NO_WAIT_LGKM = 63, 15


def kernels(arch: str, *stems: str) -> Iterator[tuple[CodeObject, KernelObject]]:
    for stem in stems or [path.stem for path in sorted((launch.CODE / arch).glob("*.co"))]:
        code = CodeObject(launch.code_object(stem, arch))
        yield from ((code, kernel) for kernel in code.kernels.values())


class State(NamedTuple):
    """What a wave has done on its way to an instruction."""

    loads: bool = False  # vector loads were issued
    waited: bool = False  # and waited for
    scalars: bool = False  # scalar loads are under way
    chain: int = 0  # scalar loads that were waited for one after the other


def step(state: State, ins: Instruction) -> State:
    if ins.encoding in ("GLOBAL", "MUBUF", "FLAT") and "load" in ins.mnemonic:
        return state._replace(loads=True)
    if ins.encoding == "SMEM" and "load" in ins.mnemonic:
        return state._replace(scalars=True)
    if ins.mnemonic == "s_waitcnt":
        immediate = ins.fields["simm16"]
        vm, lgkm = immediate & 15 | immediate >> 10 & 48, immediate >> 8 & 15
        if vm != NO_WAIT_VM and state.loads:
            state = state._replace(waited=True)
        if lgkm != NO_WAIT_LGKM and state.scalars:
            state = state._replace(scalars=False, chain=state.chain + 1)
    return state


def walk(code: CodeObject, kernel: KernelObject, visit: Callable[[State, State, Instruction], bool]) -> None:
    """Takes every path through the kernel. `visit`, with the states before and after an instruction, says whether to go on."""
    instructions = decode(bytes(code.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry)
    index = {ins.address: i for i, ins in enumerate(instructions)}
    todo, seen = [(0, State())], set()
    while todo:
        at, state = todo.pop()
        if (at, state) in seen:
            continue
        seen.add((at, state))
        ins = instructions[at]
        after = step(state, ins)
        if not visit(state, after, ins) or ins.mnemonic == "s_endpgm":
            continue
        if ins.mnemonic.startswith(("s_branch", "s_cbranch")):
            offset = (ins.fields["simm16"] ^ 0x8000) - 0x8000
            todo.append((index[ins.address + 4 + 4 * offset], after))
        if ins.mnemonic != "s_branch":
            todo.append((at + 1, after))


@pytest.mark.parametrize("arch", AMD)
def test_rows_are_loaded_and_finished_without_waiting_for_scalars(arch):
    """Norms and activations: arguments, then scales beside the data, then the data, then the result. No argument or scale is
    loaded behind the first load of data, or waited for once the data are there."""
    found = []
    for code, kernel in kernels(arch, *ROWS):

        def visit(before: State, after: State, ins: Instruction, name=kernel.name) -> bool:
            if before.loads and ins.encoding == "SMEM":
                found.append(f"{name}: {ins.text} behind data")
            if before.waited and after.chain > before.chain:
                found.append(f"{name}: waits for a scalar load at {ins.address:#x}, after data")
            return True

        walk(code, kernel, visit)
    assert not found, "\n".join(found)
