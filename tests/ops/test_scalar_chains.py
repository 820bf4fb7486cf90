"""Test the waits of kernels before their data loads, and between data and results, in their code objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from marks import AMD, CHIPS

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch, op
from vllm_rocm_ops.core.correctness import generator_of, run_and_check
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.decode import Instruction, decode
from vllm_rocm_ops.emulator.objects import CodeObject, KernelObject
from vllm_rocm_ops.ops.shared import gemm

ROWS = sorted(
    {Path(o.reference.__code__.co_filename).stem for o in op.registered() if "rowwise" in o.reference.__globals__}
    - {
        "batched_gemm",
        "mla_norm_rope_and_cache",
    }  # a product; this one loads positions, slots and angles after the latents
)
PRODUCTS = ("block_scaled_mm", "mxfp8_scaled_mm", "scaled_mm", "scaled_mm_tiled", "unquantized_gemm")
DIVIDES = {  # by the prefix of kernels' names
    "fused_experts_tiled": "tiles are counted on the device, and pairs divided by slots",
    "mla_decode": "as below",
    "paged_attention_decode": "the parts of a request follow from its length, which only the device knows",
    "mxfp8_scaled_mm_tile": "they have no scalar registers left for divisors and arguments",
}
LATE = (
    "_mxfp8_quant",
    "_with_clamp",
    "_with_expert_gate",
)  # norms and activations that load arguments after the data, as firmware does not preload them
PRELOADING = ("gfx942",)  # archs whose kernels ask for it: csrc/build.py
PRELOADED = 14  # words
NO_WAIT_VM, NO_WAIT_LGKM = 63, 15


def kernels(arch: str, *stems: str) -> Iterator[tuple[CodeObject, KernelObject]]:
    for stem in stems or [path.stem for path in sorted((launch.CODE / arch).glob("*.co"))]:
        code = CodeObject(launch.code_object(stem, arch))
        yield from ((code, kernel) for kernel in code.kernels.values())


class State(NamedTuple):
    """The state of a wave before an instruction."""

    loads: bool = False  # vector loads were issued
    waited: bool = False  # vector loads were waited for
    scalars: bool = False  # scalar loads are in flight
    chain: int = 0  # number of dependent waits for scalar loads


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
    """Follow every path through the kernel, from the entry with preloaded arguments.

    `visit` gets the states before and after an instruction, and returns whether to continue.
    """
    instructions = decode(bytes(code.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry)
    index = {ins.address: i for i, ins in enumerate(instructions)}
    todo, seen = [(index[kernel.preloaded_entry], State())], set()
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


MORE_ARGUMENTS = "sigmoid_and_mul"  # kernels whose arguments for addresses are more than what is preloaded


@pytest.mark.parametrize("arch", AMD)
def test_rows_are_loaded_and_finished_without_waiting_for_scalars(arch):
    """Norms and activations load arguments, then scales along with the data, then compute the result.

    No argument or scale is loaded after the first load of data, or waited for once the data are there. Before the data,
    only the general kernels wait for one, where arguments are preloaded. Elsewhere clang loads those in up to two steps.
    """
    found, for_arguments = [], 0 if arch in PRELOADING else 2
    for code, kernel in kernels(arch, *ROWS):
        if any(name in kernel.name for name in LATE):
            continue

        def visit(before: State, after: State, ins: Instruction, name=kernel.name) -> bool:
            if before.loads and ins.encoding == "SMEM":
                found.append(f"{name}: {ins.text} behind data")
            waits = for_arguments + name.endswith("_general") + name.startswith(MORE_ARGUMENTS)
            if after.loads and not before.loads and before.chain > waits:
                found.append(f"{name}: data behind {before.chain} waits for scalar loads")
            if before.waited and after.chain > before.chain:
                found.append(f"{name}: waits for a scalar load at {ins.address:#x}, after data")
            return True

        walk(code, kernel, visit)
    assert not found, "\n".join(found)


def test_no_argument_is_preloaded_on_gfx950():
    """Its firmware may start waves with stale values of preloaded arguments: csrc/build.py."""
    for _, kernel in kernels("gfx950"):
        assert kernel.kernarg_preload == 0 and kernel.preloaded_entry == kernel.entry, kernel.name
        assert kernel.user_sgprs == 2, kernel.name


def test_first_arguments_are_preloaded_on_gfx942():
    """All that fit are preloaded, up to the first structure; the wave's registers include them."""
    for _, kernel in kernels("gfx942"):
        end = 0
        for argument in kernel.metadata[".args"]:
            if argument[".size"] > 8 or argument[".offset"] + argument[".size"] > 4 * PRELOADED:
                break
            end = argument[".offset"] + argument[".size"]
        assert kernel.kernarg_preload * 4 == end and kernel.kernarg_preload_offset == 0, kernel.name
        assert kernel.user_sgprs == 2 + kernel.kernarg_preload, kernel.name


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("the_op", (ops.silu_and_mul_quant, ops.fused_add_rms_norm), ids=lambda the_op: the_op.name)
def test_arguments_are_loaded_where_firmware_does_not_preload_them(the_op, arch):
    emulator = Emulator(arch, preloads_arguments=False)
    arguments = next(iter(the_op.cases())).make("cpu", generator_of(the_op.name), emulator.arch.fp8_dtype)
    with launch.executor(emulator):
        run_and_check(the_op, arguments, "cpu")
    assert any(emulator.last.mnemonics[f"s_load_dwordx{n}"] for n in (2, 4, 8))


@pytest.mark.parametrize("arch", AMD)
def test_products_wait_for_their_arguments_once(arch):
    """At most one wait for scalar loads precedes the first load of an operand."""
    for code, kernel in kernels(arch, *PRODUCTS):
        if kernel.name.startswith("mxfp8_scaled_mm_tile"):  # see DIVIDES
            continue

        def visit(before: State, after: State, ins: Instruction, name=kernel.name) -> bool:
            # Not a product: it returns early, so it loads its pointers behind the rest where they are not preloaded.
            most = 1 + (name == "block_scaled_mm_widen" and arch not in PRELOADING)
            assert not after.loads or before.chain <= most, (
                f"{name}: loads behind {before.chain} waits for scalar loads"
            )
            return not after.loads

        walk(code, kernel, visit)


def has_reciprocal(code: CodeObject, kernel: KernelObject) -> bool:
    """True if a kernel has a v_rcp_iflag_f32, as VOP1 (also with SDWA or DPP) or VOP3.

    Words that look like one are decoded in their kernel: they may be another instruction's second word.
    """
    body = bytes(code.image[kernel.entry : kernel.entry + kernel.size])
    words = np.frombuffer(body[: len(body) // 4 * 4], np.uint32)
    alike = (words & 0xFE01FE00 == 0x7E004600) | (words & 0xFFFF0000 == 0xD1630000)
    return alike.any() and any(ins.mnemonic == "v_rcp_iflag_f32" for ins in decode(body, kernel.entry))


@pytest.mark.parametrize("arch", CHIPS)
def test_no_kernel_divides_whole_numbers_at_run_time(arch):
    """Each such division takes a float reciprocal and corrections: some twenty instructions of the vector unit.

    Kernels of `DIVIDES` have one, so that a search that finds nothing fails.
    """
    found = [kernel.name for code, kernel in kernels(arch) if has_reciprocal(code, kernel)]
    assert not [name for name in found if not name.startswith(tuple(DIVIDES))]
    assert any(name.startswith("mla_decode") for name in found)


@pytest.mark.parametrize("value", [*range(1, 130), 1000, 3 * 2**20, 2**29 - 1, 2**29, 2**29 + 1, 2**31 - 2, 2**31 - 1])
def test_divisors_are_exact(value):
    """The values are around multiples of the divisor, and at the end of the range: csrc/device/divisor.h's operator /."""
    inverse, shift = gemm.divisor(value).values()
    assert 0 <= inverse < 2**32 and 0 <= shift < 32
    most = (2**31 - 1) // value
    multiples = {*range(min(most, 3000)), *range(max(most - 3000, 0), most + 1), *(most * i // 997 for i in range(997))}
    around = {multiple * value + i for multiple in multiples for i in (-1, 0, 1, value - 1)} | {2**31 - 1}
    values = np.array(sorted(n for n in around if 0 <= n < 2**31), np.uint64)
    found = (2 * values * np.uint64(inverse % 2**32) >> np.uint64(32)) >> np.uint64(shift)
    assert np.array_equal(found, values // np.uint64(value))
