"""Test shared-memory stores of devices and the launches of their queues.

Each rule of words.py and devices.py has a short program that is right, and one that is rejected.
"""

from __future__ import annotations

import re

import pytest
import torch
from assembly import Kernel, assemble
from fabric import AGENT, NONE, SEEDS, SYSTEM, VALUE, WAIT, WRITE_BACK, Fabric, kernel, polls
from one_shot import ARCHS

from vllm_rocm_ops.emulator import Devices, devices, errors

RESIDENT = 32  # blocks of one wave that a compute unit holds


def stores_word(epoch: int) -> Kernel:
    return kernel(
        f"stores_word_{epoch}", f"v_mov_b32 v5, {epoch}", f"global_store_dwordx2 v2, v[4:5], s[4:5] {SYSTEM}", WAIT
    )


def awaits_word(epoch: int) -> Kernel:
    load = f"global_load_dwordx2 v[8:9], v2, s[4:5] {SYSTEM}"
    return polls(f"awaits_word_{epoch}", load, "v9", epoch, "global_store_dword v1, v8, s[6:7]")


def stores(name: str, scope: str, value: int = VALUE) -> Kernel:
    return kernel(name, f"v_mov_b32 v4, {value}", f"global_store_dword v1, v4, s[4:5] {scope}")


RAISES = f"global_store_dword v3, v4, s[6:7] {SYSTEM}"  # a flag
AWAITS = f"global_load_dword v8, v3, s[6:7] {SYSTEM}"
COPIES = kernel("copies", "global_load_dword v8, v1, s[4:5]", WAIT, "global_store_dword v1, v8, s[6:7]")
SENDS = kernel("sends", f"global_store_dword v1, v4, s[4:5] {SYSTEM}", WAIT, RAISES)
AWAITS_FLAG = polls("awaits_flag", AWAITS, "v8", VALUE)
LOOKS_FIRST = kernel(
    "looks_first",
    "s_branch .Llook",
    ".Lsleep:",
    "s_sleep 1",
    ".Llook:",
    AWAITS,
    WAIT,
    f"v_cmp_ne_u32 vcc, {VALUE}, v8",
    "s_cbranch_vccnz .Lsleep",
)
LOADS_BACK = kernel(
    "loads_back",
    f"global_store_dword v1, v4, s[4:5] {SYSTEM}",
    f"global_load_dword v8, v1, s[4:5] {SYSTEM}",
    WAIT,
    "global_store_dword v1, v8, s[6:7]",
)
LOADS_WORD_BACK = kernel(
    "loads_word_back",
    "v_mov_b32 v5, 1",
    f"global_store_dwordx2 v2, v[4:5], s[4:5] {SYSTEM}",
    f"global_load_dwordx2 v[8:9], v2, s[4:5] {SYSTEM}",
    WAIT,
    "global_store_dword v1, v8, s[6:7]",
)
STORES_WORD_AGAIN = kernel(
    "stores_word_again",
    "v_mov_b32 v5, 1",
    f"global_store_dwordx2 v2, v[4:5], s[4:5] {SYSTEM}",
    f"global_load_dwordx2 v[8:9], v2, s[4:5] {SYSTEM}",
    WAIT,
    f"global_store_dwordx2 v2, v[4:5], s[4:5] {SYSTEM}",
)
STORES_TWICE = kernel(
    "stores_twice",
    f"global_store_dword v1, v3, s[4:5] {SYSTEM}",
    f"global_store_dword v1, v4, s[4:5] {SYSTEM}",
)
STORES_PARTS_AND_WORD = kernel(
    "stores_parts_and_word",
    "v_mov_b32 v5, 1",
    f"global_store_dword v2, v3, s[4:5] {SYSTEM}",
    f"global_store_dword v2, v3, s[4:5] offset:4 {SYSTEM}",
    f"global_store_dwordx2 v2, v[4:5], s[4:5] {SYSTEM}",
)
ADDS_TO_ITS_STORE = kernel(
    "adds_to_its_store",
    f"global_store_dword v1, v4, s[4:5] {SYSTEM}",
    "global_atomic_add v1, v4, s[4:5] sc1",
)
LOADS_FROM_BOTH = kernel(
    "loads_from_both",
    *(f"v_mov_b32 v{6 + n}, s{4 + n}" for n in range(4)),
    "v_cmp_gt_u32 vcc, 32, v0",
    "v_cndmask_b32 v6, v8, v6, vcc",
    "v_cndmask_b32 v7, v9, v7, vcc",
    f"global_load_dwordx2 v[10:11], v[6:7], off {SYSTEM}",
)
LOADS_ANOTHERS = kernel(
    "loads_anothers",
    "s_lshl_b32 s10, s2, 8",
    "v_add_u32 v5, s10, v1",
    "global_store_dword v5, v4, s[6:7]",
    "s_xor_b32 s10, s10, 0x100",
    "v_add_u32 v5, s10, v1",
    "global_load_dword v8, v5, s[6:7]",
    WAIT,
)
MEETS = kernel(
    "meets",
    "v_mov_b32 v6, 1",
    "global_atomic_add v3, v6, s[4:5]",
    WAIT,
    ".Lmeet:",
    "s_sleep 1",
    "global_load_dword v8, v3, s[4:5] sc1",
    WAIT,
    f"v_cmp_ne_u32 vcc, {5 * RESIDENT * 64}, v8",
    "s_cbranch_vccnz .Lmeet",
)
LOADS_PART = polls("loads_part", f"global_load_dword v8, v2, s[4:5] {SYSTEM}", "v8", VALUE)
ADDS = kernel("adds", "global_atomic_add v3, v4, s[4:5]")
LOOPS = 600
ADDS_OFTEN = kernel(
    "adds_often",
    f"s_mov_b32 s10, {LOOPS}",
    ".Ladd:",
    "global_atomic_add v3, v4, s[4:5]",
    WAIT,
    "s_sub_u32 s10, s10, 1",
    "s_cbranch_scc0 .Ladd",
)
ADDS_FOR_THE_SYSTEM = kernel("adds_for_the_system", "global_atomic_add v3, v4, s[4:5] sc1")


def block_sends(name: str, before: tuple, behind: tuple) -> Kernel:
    """Return a kernel of two waves that store below system scope, and of which the first raises the flag.

    `before` and `behind` are the code before and after the barrier between.
    """
    leaves = ("v_readfirstlane_b32 s10, v0", "s_cmp_lg_u32 s10, 0", f"s_cbranch_scc1 .L{name}_done")
    lines = ("global_store_dword v1, v4, s[4:5]", *before, "s_barrier", *leaves, *behind, RAISES, f".L{name}_done:")
    return kernel(name, *lines, threads=128)


RECEIVES = polls(
    "receives",
    AWAITS,
    "v8",
    VALUE,
    "s_load_dwordx2 s[8:9], s[0:1], 0x10",
    f"global_load_dword v10, v1, s[4:5] {SYSTEM}",
    f"global_load_dword v11, v1, s[4:5] offset:256 {SYSTEM}",
    "s_waitcnt vmcnt(0) lgkmcnt(0)",
    "global_store_dword v1, v10, s[8:9]",
    "global_store_dword v1, v11, s[8:9] offset:256",
    pointers=3,
)

BLOCKS_RIGHT = [
    block_sends("first_writes_back", (WAIT,), (WRITE_BACK, WAIT)),
    block_sends("each_writes_back", (WRITE_BACK, WAIT), ()),
]
BLOCKS_WRONG = [
    block_sends("nobody_waits", (), (WRITE_BACK, WAIT)),
    block_sends("nobody_writes_back", (WAIT,), ()),
    block_sends("written_back_to_the_agent", (WAIT,), ("buffer_wbl2 sc1", WAIT)),
    block_sends("not_waited_for", (WRITE_BACK,), ()),
]
STORES = {scope: stores(f"stores_{len(scope)}", scope) for scope in (SYSTEM, AGENT, NONE)}
STORES_ANOTHER = stores("stores_another", NONE, VALUE + 1)
STORES_ALONE = stores("stores_alone", NONE)
WORDS_OF = [each(epoch) for each in (stores_word, awaits_word) for epoch in (1, 2)]
KERNELS = [
    *STORES.values(),
    *WORDS_OF,
    *BLOCKS_RIGHT,
    *BLOCKS_WRONG,
    *(COPIES, SENDS, AWAITS_FLAG, LOADS_BACK, LOADS_WORD_BACK, STORES_TWICE, STORES_PARTS_AND_WORD, LOADS_PART, ADDS),
    *(
        ADDS_OFTEN,
        MEETS,
        LOOKS_FIRST,
        LOADS_ANOTHERS,
        LOADS_FROM_BOTH,
        ADDS_TO_ITS_STORE,
        ADDS_FOR_THE_SYSTEM,
        RECEIVES,
        STORES_ANOTHER,
        STORES_ALONE,
        STORES_WORD_AGAIN,
    ),
]


@pytest.fixture(scope="module", params=ARCHS)
def code(request, tmp_path_factory):
    """Return the architecture, and the code object of all kernels."""
    return request.param, assemble(KERNELS, request.param, tmp_path_factory.mktemp("fabric"))


# Store buffers


@pytest.mark.parametrize("kernel", [LOADS_BACK, LOADS_WORD_BACK], ids=lambda kernel: kernel.name)
def test_a_wave_sees_its_own_stores(code, kernel):
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed)
        output = fabric.enqueue(0, kernel)
        fabric.run()
        assert (output == VALUE).all(), seed


@pytest.mark.parametrize(("kernel", "value"), [(STORES_TWICE, VALUE), (ADDS_TO_ITS_STORE, 2 * VALUE)])
def test_stores_of_a_wave_to_one_place_stay_in_order(code, kernel, value):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        fabric.enqueue(0, kernel)
        fabric.run()
        assert (fabric.shared[:64] == value).all(), seed


def test_a_word_stays_behind_its_parts(code):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        fabric.enqueue(0, STORES_PARTS_AND_WORD)
        fabric.run()
        assert (fabric.shared.view(torch.int64) == VALUE | 1 << 32).all(), seed


@pytest.mark.parametrize("scope", STORES)
def test_stores_are_visible_when_all_launches_have_ended(code, scope):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        fabric.enqueue(0, STORES[scope])
        fabric.run()
        assert (fabric.shared[:64] == VALUE).all(), seed


@pytest.mark.parametrize("scope", STORES)
def test_a_launch_finds_what_the_one_before_it_stored(code, scope):
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed)
        fabric.enqueue(0, STORES[scope])
        output = fabric.enqueue(0, COPIES)
        fabric.run()
        assert (output == VALUE).all(), seed


def test_a_launch_finds_what_the_one_before_it_has_seen(code):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        flag = fabric.devices.share(1, fabric.zeros(1), "the flag")
        fabric.enqueue(0, SENDS, fabric.shared, flag)
        fabric.enqueue(1, AWAITS_FLAG, fabric.shared, flag)
        output = fabric.enqueue(1, COPIES)
        fabric.run()
        assert (output == VALUE).all(), seed


# Waves of a block at system scope


def receive(code, kernel: Kernel, seed: int) -> torch.Tensor:
    fabric = Fabric(code, 2, seed)
    flag, output = fabric.devices.share(1, fabric.zeros(1), "the flag"), fabric.zeros(128)
    fabric.enqueue(0, kernel, fabric.shared, flag)
    fabric.enqueue(1, RECEIVES, fabric.shared, flag, output)
    fabric.run()
    return output


@pytest.mark.parametrize("kernel", BLOCKS_RIGHT, ids=lambda kernel: kernel.name)
def test_synchronized_blocks_receive_the_value(code, kernel):
    for seed in SEEDS:
        assert (receive(code, kernel, seed) == VALUE).all(), seed


@pytest.mark.parametrize("kernel", BLOCKS_WRONG, ids=lambda kernel: kernel.name)
def test_unsynchronized_blocks_read_stale_values(code, kernel):
    for seed in SEEDS:
        with pytest.raises(errors.StaleRead, match="rank 0 in epoch 1"):
            receive(code, kernel, seed)


# Words and atomics


def test_only_the_owner_reads_a_slot_free(code):
    """Another device's read does not free the slot for the next word."""
    for seed in SEEDS:
        fabric = Fabric(code, 3, seed)
        fabric.enqueue(0, WORDS_OF[0])
        fabric.enqueue(0, WORDS_OF[1])
        fabric.enqueue(1, WORDS_OF[2])
        with pytest.raises(errors.SlotOverwritten, match="before device 2 has read"):
            fabric.run()


def test_a_word_is_stored_once_in_an_epoch(code):
    """Its reader cannot tell two words of one epoch apart, though it has read the first."""
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed)
        fabric.enqueue(0, STORES_WORD_AGAIN)
        with pytest.raises(errors.SlotOverwritten, match="byte 0 of shared gets a second word of epoch 1"):
            fabric.run()
        fabric = Fabric(code, 1, seed)  # two blocks, whose waves may go as one
        fabric.enqueue(0, WORDS_OF[0], blocks=2)
        with pytest.raises(
            errors.SlotOverwritten, match="gets a second word of epoch 1|is overwritten before device 0"
        ):
            fabric.run()


def test_epochs(code):
    """The launches of a queue are counted from 1, and epochs have 32 bits."""
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        fabric.enqueue(0, WORDS_OF[0])
        fabric.enqueue(0, WORDS_OF[1], fabric.devices.share(1, fabric.zeros(128), "more"), fabric.zeros(64))
        outputs = [fabric.enqueue(1, WORDS_OF[2], epoch=1 << 32 | 1)]
        fabric.run()
        assert all((output == VALUE).all() for output in outputs), seed


def test_a_word_is_not_read_in_parts(code):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        fabric.enqueue(0, WORDS_OF[0])
        fabric.enqueue(1, LOADS_PART)
        with pytest.raises(errors.TornWord, match="is read in parts; .* stored it as a word"):
            fabric.run()


def test_words_are_not_read_with_other_memory(code):
    fabric = Fabric(code, 1, 0)
    fabric.enqueue(0, LOADS_FROM_BOTH)
    with pytest.raises(errors.OutOfBounds, match="shared is read together with other memory"):
        fabric.run()


def test_atomics_between_devices(code):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        for device, adds in ((0, ADDS_FOR_THE_SYSTEM), (1, ADDS)):
            fabric.enqueue(device, adds)
        fabric.run()
        assert fabric.shared[0] == 128 * VALUE
        fabric.enqueue(0, ADDS)
        with pytest.raises(errors.StaleRead, match="shared is another device's, and this atomic has no sc1"):
            fabric.run()


# Queues


def test_launches_of_two_streams_race(code):
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed)
        data = fabric.zeros(64)
        for stream, storing in enumerate((STORES_ALONE, STORES_ANOTHER)):
            fabric.enqueue(0, storing, data, fabric.zeros(1), stream=stream)
        with pytest.raises(errors.GlobalRace, match="without synchronization"):
            fabric.run()


def test_blocks_of_a_launch_race(code):
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed)
        fabric.enqueue(0, LOADS_ANOTHERS, fabric.shared, fabric.zeros(128), blocks=2)
        with pytest.raises(errors.GlobalRace, match="without synchronization"):
            fabric.run()


def test_devices_race(code):
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        for device, storing in enumerate((STORES[SYSTEM], STORES_ANOTHER)):
            fabric.enqueue(device, storing)
        with pytest.raises(errors.GlobalRace, match="of shared, overwritten here, was written by rank"):
            fabric.run()


def test_streams_take_room_from_each_other(code):
    """If waiting blocks start first, they fill the device, and the launch they wait for does not fit."""
    found: set[str] = set()
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed, ":1")
        flag = fabric.devices.share(0, fabric.zeros(1), "the flag")
        fabric.enqueue(0, AWAITS_FLAG, fabric.shared, flag, blocks=RESIDENT)
        fabric.enqueue(0, SENDS, fabric.shared, flag, stream=1)
        try:
            fabric.run()
            found.add("right")
        except errors.Deadlock as error:
            unchanged, *waits = str(error).splitlines()
            assert unchanged == "nothing has changed for 1000 instructions of every wave"
            assert any(re.search(r"rank 0 in epoch 1, block .*, wave 0 is at `", line) for line in waits)
            assert any("1 blocks wait for" in line for line in waits)
            found.add("deadlock")
        if len(found) == 2:
            return
    pytest.fail(f"only {found}")


def test_all_blocks_of_a_launch_meet(code):
    """Each block waits for all others, on 5 compute units, where a block's share of resources is not a binary fraction."""
    fabric = Fabric(code, 1, 0, ":5")
    fabric.enqueue(0, MEETS, fabric.zeros(1), fabric.zeros(1), blocks=5 * RESIDENT)
    fabric.run()


def test_a_run_that_changes_memory_for_ever_ends(code):
    """A turn has fewer than 200 instructions, and a loop four: 3 turns do not reach the end."""
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed, turns=3)
        fabric.enqueue(0, ADDS_OFTEN)
        with pytest.raises(errors.Deadlock, match="not ended after 3 turns\nrank 0 in epoch 1: .*, wave 0 is at `"):
            fabric.run()


def test_a_run_that_changes_memory_is_no_deadlock(code):
    for seed in SEEDS:
        fabric = Fabric(code, 1, seed, patience=100)
        fabric.enqueue(0, ADDS_OFTEN)
        fabric.run()
        assert fabric.shared[0] == 64 * (LOOPS + 1) * VALUE


def test_schedules_vary(code):
    """A device ends all its launches before another's first, or after its last, or their launches interleave."""
    ends = set()
    for seed in range(64):
        fabric = Fabric(code, 2, seed)
        for device in range(2):
            for number in range(3):
                fabric.enqueue(device, COPIES, blocks=1 + 3 * device + number)
        per_block = fabric.run()
        counts = [each.instructions["global"] for each in per_block]
        assert sorted(counts) == [2 * blocks for blocks in range(1, 7)]
        ends.add("".join("01"[count > 6] for count in counts))
    assert {"000111", "111000"} < ends and len(ends) > 6


def test_a_flag_wakes_waves(code, monkeypatch):
    """Waves that looked before they sleep resume at the flag, and none is woken because no other can run."""
    forced, turn = set(), devices._Run._turn
    monkeypatch.setattr(devices._Run, "_turn", lambda run, queue: (forced.add(run.is_forced), turn(run, queue)))
    for seed in range(2 * len(SEEDS)):
        fabric = Fabric(code, 2, seed)
        flag = fabric.devices.share(1, fabric.zeros(1), "the flag")
        fabric.enqueue(0, SENDS, fabric.shared, flag)
        fabric.enqueue(1, LOOKS_FIRST, fabric.shared, flag)
        fabric.run()
    assert forced == {False}


def test_devices_are_skewed(code, monkeypatch):
    """Some schedules have devices of equal speed, some one several times faster, and some pauses between launches."""
    ratios, pauses = set(), set()
    turn = devices._Run._turn

    def watched(run, queue):
        turn(run, queue)
        ratios.add(round(max(run.weights) / min(run.weights), 3))
        if queue.running is None and queue.launches:
            pauses.add(queue.begins - run.fabric.now)

    monkeypatch.setattr(devices._Run, "_turn", watched)
    for seed in SEEDS:
        fabric = Fabric(code, 2, seed)
        for device in (0, 0, 1, 1):
            fabric.enqueue(device, COPIES)
        fabric.run()
    assert 1 in ratios and max(ratios) > 4
    assert 0 in pauses and max(pauses) > 20


def test_invalid_devices_and_launches_are_refused(code, tmp_path):
    with pytest.raises(ValueError, match="devices must be 1 to 8, got 0"):
        Devices(code[0], 0)
    fabric = Fabric(code, 1, 0)
    fabric.enqueue(0, COPIES)
    fabric.path = assemble([COPIES], code[0], tmp_path)
    fabric.enqueue(0, COPIES)
    with pytest.raises(errors.LaunchError, match="must be of one code object"):
        fabric.run()
