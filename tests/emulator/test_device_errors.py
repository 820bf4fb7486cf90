"""Test the error for a word that has not come: it names the faulting wave, and the load that returned the word."""

from __future__ import annotations

import pytest
from assembly import Kernel, assemble
from fabric import BARRIER, SEEDS, SYSTEM, WAIT, Fabric, kernel
from one_shot import ARCHS

from vllm_rocm_ops.emulator import errors


def of_two_waves(name: str, both: tuple, first: tuple, second: tuple) -> Kernel:
    """Return a kernel of lines that both waves run, followed by lines of each."""
    branch = ("v_readfirstlane_b32 s10, v0", "s_cmp_lg_u32 s10, 0", f"s_cbranch_scc1 .L{name}")
    return kernel(name, *both, *branch, *first, "s_endpgm", f".L{name}:", *second, threads=128)


def load(register: int, offset: int = 0) -> str:
    return f"global_load_dwordx2 v[{register}:{register + 1}], v2, s[4:5] offset:{offset} {SYSTEM}"


def use(register: int) -> str:
    return f"global_store_dword v1, v{register}, s[6:7]"


MEET = WAIT, BARRIER
OWN, OTHER, BOTH = (load(8), *MEET), (load(10), *MEET), (load(8), load(12, 16), *MEET)
OF_SECOND = 64 * 8  # the byte of the second wave's first word
OWN_LOADS = {
    of_two_waves("first_of_two_loads", (), (*OWN, use(8)), OTHER): (0, 8, 0),
    of_two_waves("second_of_two_loads", (), OWN, (*OTHER, use(10))): (1, 10, OF_SECOND),
    of_two_waves("first_of_a_load", BOTH, (use(8),), ()): (0, 8, 0),
    of_two_waves("second_of_a_load", BOTH, (), (use(8),)): (1, 8, OF_SECOND),
    of_two_waves("a_second_word", BOTH, (), (use(12),)): (1, 12, OF_SECOND + 16),
}
"""The wave at fault, the register that it uses, and the byte that this was loaded from."""
NEVER_WRITTEN = [
    of_two_waves("has_no_word", (), OWN, (*MEET, use(14))),
    of_two_waves("has_a_word", (), OWN, (*OTHER, use(14))),
]
COMES = kernel(  # the first word comes, once stored here; the one after both waves' words does not
    "comes",
    "s_mov_b32 s10, 0",
    "v_mov_b32 v5, 1",
    ".Lagain:",
    load(8),
    WAIT,
    "s_cmp_lg_u32 s10, 0",
    "s_cbranch_scc1 .Lcame",
    f"global_store_dwordx2 v2, v[4:5], s[4:5] {SYSTEM}",
    "s_mov_b32 s10, 1",
    "s_branch .Lagain",
    ".Lcame:",
    load(12, 2 * OF_SECOND),
    WAIT,
    "v_add_u32 v14, v12, v8",
    use(14),
)
WAITS = (".Lwait:", "s_sleep 1", f"global_load_dword v14, v3, s[6:7] {SYSTEM}", WAIT, "v_cmp_eq_u32 vcc, 0, v14")
ENDS = of_two_waves("ends", (), (load(8), WAIT), (*WAITS, "s_cbranch_vccnz .Lwait"))
ADDRESS = ("v_mov_b32 v6, s4", "v_mov_b32 v7, s5", "s_mov_b64 s[8:9], s[4:5]", "s_mov_b32 s10, -1")
FLAT = kernel("flat", *ADDRESS, f"flat_load_dwordx2 v[8:9], v[6:7] {SYSTEM}")


@pytest.fixture(scope="module", params=ARCHS)
def code(request, tmp_path_factory):
    """Return the architecture, and the code object of all kernels."""
    kernels = [*OWN_LOADS, *NEVER_WRITTEN, FLAT, COMES, ENDS]
    return request.param, assemble(kernels, request.param, tmp_path_factory.mktemp("errors"))


def refused(code, kernel: Kernel, kind: type[errors.EmulatorError], message: str) -> None:
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed)
        fabric.enqueue(0, kernel, fabric.devices.share(0, fabric.zeros(512), "the words"), fabric.zeros(128))
        with pytest.raises(kind, match=message):
            fabric.run()


@pytest.mark.parametrize("kernel", OWN_LOADS, ids=lambda kernel: kernel.name)
def test_a_wave_is_told_of_its_own_load(code, kernel):
    wave, register, byte = OWN_LOADS[kernel]
    own = (
        f"v{register} is computed .*: `global_load_dwordx2 v.{register}:.* awaits byte {byte} of the words, .* epoch 0"
    )
    refused(code, kernel, errors.StaleWord, f"wave {wave}, lane 0: {own}")


@pytest.mark.parametrize("kernel", NEVER_WRITTEN, ids=lambda kernel: kernel.name)
def test_no_word_is_to_blame_for_a_register_that_nothing_wrote(code, kernel):
    refused(code, kernel, errors.Uninitialized, "wave 1, lane 0: v14 was never written")


def test_words_are_awaited_with_global_loads(code):
    """Buffer instructions load a payload, which a flag orders."""
    refused(code, FLAT, errors.UnsupportedInstruction, "flat_load_dwordx2.*: words are awaited with global_load")


def test_a_word_that_has_come_is_not_to_blame(code):
    awaits = f"v14 is computed .*: `global_load_dwordx2 v.12:13., .* awaits byte {2 * OF_SECOND} of the words"
    refused(code, COMES, errors.StaleWord, awaits)


def test_a_wave_that_has_ended_waits_for_nothing(code):
    refused(code, ENDS, errors.Deadlock, "\nrank 0 in epoch 1: .*, wave 1 is at `")
