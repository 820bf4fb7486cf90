"""Test that the loops that stream weights keep their loads in flight, in the code objects of gfx942 and gfx950.

The matrix instructions of a streaming loop read registers that vector loads wrote, or values converted from them. Other
loops read their operands from LDS. The steady path of a loop is the shortest path around it with all of its matrix
instructions. Loads return in order, so the number of loads that an s_waitcnt leaves in flight is the distance from a
load to its matrix instruction. The tests know only the code.

    python tests/test_waits.py commit [folder of code objects]

prints a line of JSON per streaming loop: the loads of one iteration, and the loads that each wait leaves in flight,
stage by stage.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from marks import AMD, CHIPS, full
from mutations.kernel_copy import CSRC

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator.decode import Instruction, decode
from vllm_rocm_ops.emulator.objects import CodeObject
from vllm_rocm_ops.emulator.sanitizer import effects

ATTENTION = "paged_attention_decode"  # alternates keys and values in flight: ops/test_attention.py
STAGED = re.compile(r"flash_attention_(bf16|fp16)_\d+")  # the general kernels convert what they load
STREAM = (
    "_wave_splitk_",
    "_skinny_",
    "_stream_",
    "batched_gemm_quant_",
    "experts_gate_up_",
    "experts_down_",
    "mla_decode_bf16",
    "mla_decode_fp16",
)
EARLY = {
    *("fused_experts_down_biased_int4_32", "fused_experts_down_biased_mxfp4"),
    *(f"mx_gemm_{form}_wave_splitk_{tokens}" for form in ("fp8", "fp4") for tokens in (16, 64)),
    *("w4a16_gemm_32_wave_splitk_32", "w4a16_gemm_32_wave_splitk_64"),
}
"""Kernels of 4-bit weights whose waits leave one load less in flight than they should, as packed multiply-adds read a register
too many: without these gpt-oss's experts are predicted to take 3 % longer; and those whose two stages leave registers for more
waves."""
ALWAYS = ("fused_experts", "mla_decode", "scaled_mm")  # others with --full
MODULES = sorted(path.stem for path in (CSRC / "ops").rglob("*.hip") if path.stem != ATTENTION)


def is_matrix_instruction(ins: Instruction) -> bool:
    return ins.mnemonic.startswith(("v_mfma", "v_smfmac"))


def counts_as_vector_memory(ins: Instruction) -> bool:
    words = ("load", "store", "atomic")
    return ins.encoding in ("GLOBAL", "FLAT", "MUBUF", "SCRATCH") and any(word in ins.mnemonic for word in words)


def is_load(ins: Instruction) -> bool:
    """True if an instruction loads to registers."""
    return counts_as_vector_memory(ins) and "_load_" in ins.mnemonic and bool(effects(ins)[1])


def left_in_flight(ins: Instruction) -> int | None:
    """Return the number of vector memory operations that a wait leaves in flight, or None for other instructions."""
    if ins.mnemonic != "s_waitcnt":
        return None
    field = ins.fields["simm16"]
    count = field & 15 | field >> 10 & 0x30
    return count if count < 63 else None


def is_conversion(ins: Instruction) -> bool:
    """True if an instruction converts e4m3 to 16 bits."""
    return ins.mnemonic.startswith(("v_cvt_pk_f32_fp8", "v_cvt_pk", "v_perm", "v_pack"))


def is_store_or_barrier(ins: Instruction) -> bool:
    """True if an instruction stores or is a barrier, as at the end of a tile."""
    stores = ins.mnemonic.startswith("ds_write") or (counts_as_vector_memory(ins) and not is_load(ins))
    return stores or ins.mnemonic == "s_barrier"


def cycles(nodes: Iterable[int], following: dict[int, list[int]]) -> list[set[int]]:
    """Return the strongly connected components of these nodes that have a cycle (Tarjan)."""
    nodes = set(nodes)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack, found = [], []
    for root in sorted(nodes):
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        work = [(root, iter(following[root]))]
        while work:
            node, rest = work[-1]
            for other in rest:
                if other in nodes and other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(following[other])))
                    break
                if other in nodes and other in low:
                    low[node] = min(low[node], low[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set(stack[stack.index(node) :])
                    del stack[stack.index(node) :]
                    for other in component:
                        del low[other]
                    if len(component) > 1 or node in following[node]:
                        found.append(component)
    return found


class Flow:
    """The control flow graph of a kernel's instructions."""

    def __init__(self, code: CodeObject, name: str):
        kernel = code.kernels[name]
        self.instructions = decode(bytes(code.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry)
        places = {ins.address: place for place, ins in enumerate(self.instructions)}
        self.following = {place: self._following(place, places) for place in range(len(self.instructions))}

    def _following(self, place: int, places: dict[int, int]) -> list[int]:
        ins = self.instructions[place]
        if ins.mnemonic == "s_endpgm" or place + 1 == len(self.instructions):
            return []
        if not ins.mnemonic.startswith(("s_branch", "s_cbranch")):
            return [place + 1]
        offset = ins.fields["simm16"] - ((ins.fields["simm16"] & 0x8000) << 1)
        target = places[ins.address + 4 + 4 * offset]
        return [target] if ins.mnemonic == "s_branch" else [place + 1, target]

    def first_of(self, nodes: set[int], following: dict[int, list[int]]) -> int:
        """Return the instruction at which a loop is entered."""
        return min(after for node in following.keys() - nodes for after in following[node] if after in nodes)

    def loops(self) -> Iterator[Loop]:
        """Return the innermost loops with matrix instructions."""
        yield from self._loops(set(self.following), self.following)

    def _loops(self, nodes: set[int], following: dict[int, list[int]]) -> Iterator[Loop]:
        for body in cycles(nodes, following):
            if not any(is_matrix_instruction(self.instructions[node]) for node in body):
                continue
            first = self.first_of(body, self.following)
            inside = {node: [n for n in following[node] if n in body and n != first] for node in body}
            inner = list(self._loops(body, inside))
            yield from inner or [Loop(self, body, first)]


@dataclass(frozen=True)
class Wait:
    """An s_waitcnt for vector memory: its instruction index, and the number of operations that it leaves in flight."""

    place: int
    left: int


class Loop:
    """A loop: its instructions, its first one, and its steady path."""

    def __init__(self, flow: Flow, body: set[int], first: int):
        self.flow, self.body, self.first = flow, body, first
        self.path = self._steady_path()
        self.on_path = [flow.instructions[node] for node in self.path]
        self.touched = [effects(ins) for ins in self.on_path]

    def _forward(self) -> dict[int, list[int]]:
        """Return the control flow within the loop, without back edges."""
        following = {node: [n for n in self.flow.following[node] if n in self.body] for node in self.body}
        parts = [(self.body, self.first)]
        while parts:
            nodes, first = parts.pop()
            for node in nodes:
                following[node] = [n for n in following[node] if n != first]
            parts += [(part, self.flow.first_of(part, following)) for part in cycles(nodes, following)]
        return following

    def _steady_path(self) -> list[int]:
        following = self._forward()
        best: dict[int, tuple[tuple[int, int], int | None]] = {}
        work = [(self.first, iter(following[self.first]))]
        seen = {self.first}
        while work:
            node, rest = work[-1]
            after = next((n for n in rest if n not in seen), None)
            if after is not None:
                seen.add(after)
                work.append((after, iter(following[after])))
                continue
            work.pop()
            ways = [((0, 0), None)] if self.first in self.flow.following[node] else []
            ways += [(best[n][0], n) for n in following[node] if n in best]
            if ways:
                (products, length), way = max(ways, key=lambda way: way[0])
                best[node] = (products + is_matrix_instruction(self.flow.instructions[node]), length - 1), way
        path, node = [], self.first
        while node is not None:
            path.append(node)
            node = best[node][1]
        return path

    @property
    def loads(self) -> int:
        """The loads to registers of one iteration."""
        return sum(map(is_load, self.on_path))

    @cached_property
    def streams(self) -> bool:
        """True if a matrix instruction reads a loaded register, or a value converted from one."""
        loaded: set[int] = set()
        for _ in range(2):
            for ins, (reads, writes) in zip(self.on_path, self.touched, strict=True):
                operands = {register for operand in ins.sources[:2] for register in operand.registers}
                if is_matrix_instruction(ins) and operands & loaded:
                    return True
                is_loaded = is_load(ins) or (is_conversion(ins) and reads & loaded)
                loaded = loaded | writes if is_loaded else loaded - writes
        return False

    @cached_property
    def stages(self) -> list[list[Wait]]:
        """Return the waits of one iteration, by stage.

        A stage ends when loads follow a matrix instruction that reads loaded registers.
        """
        unused: set[int] = set()
        waits: list[Wait] = []
        used = False
        for _ in range(3):  # the first iteration starts without loads
            stages: list[list[Wait]] = []
            for place, ins, (reads, writes) in zip(self.path, self.on_path, self.touched, strict=True):
                left = left_in_flight(ins)
                if left is not None:
                    waits.append(Wait(place, left))
                if is_matrix_instruction(ins) and reads & unused:
                    used = True
                    unused -= reads
                if is_conversion(ins) and reads & unused:
                    unused |= writes
                if is_load(ins):
                    if used:
                        stages.append(waits)
                        waits, used = [], False
                    unused |= writes
        return stages

    @property
    def stage_loads(self) -> float:
        return self.loads / len(self.stages)

    def detours(self) -> Iterator[Wait]:
        """Return the waits on detours from the steady path that store nothing."""
        left = self.body - set(self.path)
        beside: dict[int, set[int]] = {node: set() for node in left}
        for node in left:
            for other in self.flow.following[node]:
                if other in left:
                    beside[node].add(other)
                    beside[other].add(node)
        while left:
            part, work = set(), [min(left)]
            while work:
                node = work.pop()
                if node not in part:
                    part.add(node)
                    work += beside[node]
            left -= part
            if not any(is_store_or_barrier(self.flow.instructions[node]) for node in part):
                for node in sorted(part):
                    count = left_in_flight(self.flow.instructions[node])
                    if count is not None:
                        yield Wait(node, count)


def streaming_loops(path: Path) -> list[tuple[str, Loop]]:
    """Return the streaming loops of a code object, each with its kernel's name."""
    code = CodeObject(path)
    return [(name, loop) for name in code.kernels for loop in Flow(code, name).loops() if loop.streams]


@functools.cache
def shipped_loops(arch: str, module: str) -> list[tuple[str, Loop]]:
    return streaming_loops(launch.CODE / arch / f"{module}.co")


def faults(loop: Loop) -> list[str]:
    """Return the errors in the waits of a streaming loop."""
    if len(loop.stages) < 3:
        return [f"{loop.loads} loads are in {len(loop.stages)} stages"]
    least = int(loop.loads - 1.5 * loop.stage_loads)
    found = []
    waits = [(wait, "") for stage in loop.stages for wait in stage]
    waits += [(wait, " on a way that stores nothing") for wait in loop.detours()]
    for wait, where in waits:
        if wait.left < least:
            ins = loop.flow.instructions[wait.place]
            offset = ins.address - loop.flow.instructions[0].address
            found.append(f"+{offset:#x} leaves {wait.left} of {loop.loads} loads in flight, not {least} or more{where}")
    lowest = [min(wait.left for wait in stage) for stage in loop.stages if stage]
    if lowest and max(lowest) - min(lowest) > loop.stage_loads:
        found.append(
            f"stages leave {lowest} loads: these differ by more than the {loop.stage_loads:.0f} loads of a stage"
        )
    return found


def early_waits(loop: Loop) -> list[int]:
    """Return the waits of a loop through LDS that leave too few operations in flight.

    Such a wait follows all loads since the last barrier, precedes a matrix instruction, and leaves fewer operations in
    flight than these loads.
    """
    instructions, body = loop.flow.instructions, loop.body
    following = {
        node: [n for n in loop.flow.following[node] if n in body and instructions[node].mnemonic != "s_barrier"]
        for node in body
    }
    assert not cycles(body, following), "a way around without a barrier"

    multiplies, loads_more = {}, {}  # from an instruction to the next barrier
    for node in (order := _last_first(following)):
        for found, is_one in ((multiplies, is_matrix_instruction), (loads_more, is_load)):
            found[node] = is_one(instructions[node]) or any(found[n] for n in following[node])
    loads, early = dict.fromkeys(body, 0), []
    for node in reversed(order):
        left = left_in_flight(instructions[node])
        if left is not None and left < loads[node] and multiplies[node] and not loads_more[node]:
            early.append(node)
        after = loads[node] + is_load(instructions[node])
        for other in following[node]:
            loads[other] = max(loads[other], after)
    assert max(loads.values()) > 4, "nothing is loaded behind a barrier"
    return early


def _last_first(following: dict[int, list[int]]) -> list[int]:
    """Return the nodes of an acyclic graph, each after its successors."""
    found: dict[int, None] = {}
    for root in following:
        work = [root]
        while work:
            left = [n for n in following[work[-1]] if n not in found]
            if left:
                work.append(left[0])
            else:
                found[work.pop()] = None
    return list(found)


@pytest.mark.parametrize("arch", AMD)
def test_the_next_keys_are_in_flight_while_keys_are_multiplied(arch):
    """Check flash attention."""
    code = CodeObject(launch.CODE / arch / "flash_attention.co")
    names = [name for name in code.kernels if STAGED.fullmatch(name)]
    assert len(names) == 8
    for name in names:
        (loop,) = Flow(code, name).loops()
        assert not early_waits(loop), name


@pytest.mark.parametrize("module", [pytest.param(m, marks=() if m in ALWAYS else full) for m in MODULES])
@pytest.mark.parametrize("arch", CHIPS)
def test_stages_stay_in_flight(arch, module):
    """A wait leaves all stages in flight, except the one being multiplied and half of the next.

    The loads of the next stage may be issued between the matrix instructions. The waits of two stages differ by at most
    the loads of one stage.
    """
    wrong = {name: found for name, loop in shipped_loops(arch, module) if (found := faults(loop)) and name not in EARLY}
    assert not wrong


@full
@pytest.mark.parametrize("arch", AMD)
def test_streaming_kernels_are_found(arch):
    """The skinny kernels stream, except those that load through LDS, and no other kernel does."""
    streaming = {name for module in MODULES for name, _ in shipped_loops(arch, module)}
    expected = {
        name
        for module in MODULES
        for name in CodeObject(launch.CODE / arch / f"{module}.co").kernels
        if any(word in name for word in STREAM) and "_lds_" not in name
    }
    assert streaming == expected


def drained(path: Path) -> set[str]:
    """Return the kernels of a code object that wait for operands that they need later."""
    return {name for name, loop in streaming_loops(path) if faults(loop)}


def unsteady(path: Path) -> set[str]:
    """Return the kernels of a code object that have faults, or do not stream: no loads are on their steady path."""
    return set(CodeObject(path).kernels) - {name for name, loop in streaming_loops(path) if not faults(loop)}


def early(path: Path) -> set[str]:
    """Return the kernels of a code object that wait for the next keys too early."""
    code = CodeObject(path)
    return {name for name in code.kernels for loop in Flow(code, name).loops() if early_waits(loop)}


def main() -> None:
    commit, *folder = sys.argv[1:]
    root = Path(*folder) if folder else launch.CODE
    for arch in AMD:
        for path in sorted((root / arch).glob("*.co")):
            for name, loop in streaming_loops(path):
                left = [[wait.left for wait in stage] for stage in loop.stages]
                print(json.dumps({"commit": commit, "arch": arch, "kernel": name, "loads": loop.loads, "left": left}))


if __name__ == "__main__":
    main()
