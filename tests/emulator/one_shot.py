"""Schedules of the all-reduce in one_shot.hip: ranks, sizes and launches, and planted bugs, run by emulated devices."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from assembly import build_module
from marks import AMD

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Devices, errors

SOURCE = Path(__file__).with_suffix(".hip")
PHASES, MOST_RANKS = 2, 8
ARCHS, RANKS = AMD, (2, 4, 8)
TURNS = 500
"""The turns that a run has for each wave: several times what any takes, and few enough that one that goes on for ever ends soon."""
SCHEDULES = {512: 10_000, 7168: 200, 16384: 200}
"""By hidden size, how many schedules show that the protocol is right."""


def compile_one_shot(arch_name: str, folder: Path) -> Path:
    """Compile the kernels with line tables, and return the code object."""
    output = folder / f"{arch_name}.co"
    build_module().compile_source(SOURCE, arch_name, output, debug=True)
    return output


@functools.cache
def lines_of(bug: str) -> frozenset[str]:
    """Return the places, as errors name them, of the statements that "bug:" comments mark for a bug."""
    found = set()
    for number, line in enumerate(SOURCE.read_text().splitlines(), 1):
        code, _, names = line.partition("// bug: ")
        if bug in names.split():
            # A comment of its own marks the statements behind it, up to the end of the block.
            found |= {number} if code.strip() else {number + 1, number + 2}
    return frozenset(f"{SOURCE.name}:{number}" for number in found)


def words_of(hidden: int) -> int:
    """Return the words of one token: two values of 16 bits in each."""
    return hidden // 2


WORDS = words_of(512)
BUGS = {
    "store_scope": (errors.StaleRead, {}),
    "load_scope": (errors.StaleRead, {}),
    "wait": (errors.StaleWord, {}),
    "any_epoch": (errors.StaleWord, {}),
    "swap": ((errors.SlotOverwritten, errors.Deadlock), {}),
    "torn": (errors.TornWord, {}),
    "skip_peer": (errors.StaleWord, {}),
    # the conditions under which two buffers are enough
    "skip_empty": ((errors.SlotOverwritten, errors.Deadlock), {"words": (WORDS, 0, WORDS)}),
    "two_streams": (errors.WrongEpoch, {"kernel": "right", "streams": 2}),
    "block_counter": (errors.WrongEpoch, {"words": (WORDS, WORDS // 2, WORDS)}),
    "narrow_epoch": (errors.WrongEpoch, {"words": (WORDS,) * 4}),
    "fresh_memory": (errors.StaleWord, {"kernel": "right", "epoch": 2**32 - 2}),
    "shared_phase": (errors.SlotOverwritten, {}),
    "residency": (errors.Deadlock, {"kernel": "right", "words": (16 * WORDS,)}),
}
"""As what each planted bug is found, and the arguments of a group that it needs."""


class Group:
    """Ranks with inboxes, counters, and launches. `words` are the sizes of an epoch's all-reduce, one for each epoch. The launches of
    `replayed` epochs have the tensors of the first of them, as a captured graph has. `streams` are the streams that launches alternate
    between; `epoch` is the epoch before the first."""

    def __init__(
        self,
        path: Path,
        arch_name: str,
        ranks: int,
        words,
        seed: int,
        *,
        replayed=(),
        kernel="right",
        streams=1,
        epoch=0,
    ):
        self.ranks, self.words, self.phases = ranks, words, PHASES if "phase" in kernel else 1
        threads = 64 * self.phases
        self.devices = Devices(arch_name, ranks, seed, turns=TURNS)
        generator = torch.Generator().manual_seed(seed)
        capacity = max(*words, 1)
        inboxes = [torch.zeros(2 * PHASES * ranks * capacity, dtype=torch.int64) for _ in range(ranks)]
        for rank, inbox in enumerate(inboxes):
            self.devices.share(rank, inbox, f"the inbox of rank {rank}")
        self.calls: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # by rank and epoch: values and sums
        for rank in range(ranks):
            most = -(-capacity // threads)
            counters = torch.full((1 + most,), epoch - (1 << 32 if epoch >> 31 else 0), dtype=torch.int32)
            counters[0] = 0
            mine = []
            for number, count in enumerate(words):
                call = mine[replayed[0]] if number in replayed[1:] else self._call(count, generator)
                mine.append(call)
                blocks = max(1, -(-count // threads))
                pointers = (*inboxes, *[None] * (MOST_RANKS - ranks), *call, counters)
                launch = Launch(
                    "", f"{kernel}_{ranks}", (blocks, 1, 1), (threads, 1, 1), (*pointers, count, capacity, rank, blocks)
                )
                self.devices.enqueue(rank, path, launch, epoch + number + 1, number % streams)
            self.calls.append(mine)

    @staticmethod
    def _call(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randint(0, 1 << 20, (max(count, 1),), generator=generator, dtype=torch.int32)
        return values, torch.full_like(values, -1)

    def run(self) -> None:
        """Run the schedule, and compare all sums."""
        self.devices.run()
        for number, count in enumerate(self.words):
            expected = sum(mine[number][0] for mine in self.calls) * self.ranks ** (self.phases - 1)
            for rank, mine in enumerate(self.calls):
                assert torch.equal(mine[number][1][:count], expected[:count]), f"rank {rank}, launch {number}"


def run_schedule(path: Path, arch_name: str, ranks: int, hidden: int, seed: int) -> None:
    """Run the right protocol; eager launches, of other sizes and of none, stand between replays of the first launch."""
    words = words_of(hidden)
    if seed % 2:
        epochs = {"words": (words, words // 2, words), "replayed": (0, 2)}
    else:
        epochs = {"words": (words, words, 0, words), "replayed": (0, 1, 3)}
    Group(path, arch_name, ranks, seed=seed, **epochs).run()


def finds(path: Path, arch_name: str, ranks: int, bug: str, seed: int) -> bool:
    """Run a schedule with a planted bug; return whether it is found. It must be found as nothing else, and the message must name a rank,
    an epoch and a marked line."""
    kinds, changed = BUGS[bug]
    arguments = {"words": (WORDS,) * 3, "kernel": bug} | changed
    group = Group(path, arch_name + ":1" * (bug == "residency"), ranks, seed=seed, **arguments)
    try:
        group.run()
    except kinds as error:
        text = str(error)
        assert lines_of(bug) and any(f"({place})" in text for place in lines_of(bug)), text
        assert "rank " in text and "in epoch " in text, text
        return True
    return False
