"""Run schedules of the one-shot all-reduce, right or with planted bugs, on emulated devices.

The kernels are in csrc/collectives, compiled with line tables; one_shot.hip has the planted protocols.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from all_reduce_calls import EPSILON
from assembly import build_module
from emulated_group import TURNS, EmulatedGroup
from marks import AMD

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import launches
from vllm_rocm_ops.core import kernel_arguments
from vllm_rocm_ops.core.launch import I64, Launch, code_object
from vllm_rocm_ops.emulator import errors

__all__ = ["TURNS"]

SOURCE = Path(__file__).with_suffix(".hip")
CSRC = SOURCE.parents[2] / "csrc"
DEVICE = CSRC / "device" / "amd" / "system.h"
MARKED = SOURCE, CSRC / "collectives" / "all_reduce.h", CSRC / "collectives" / "one_shot.h"
ARCHS, RANKS = AMD, (2, 4, 8)
SCHEDULES = {1024: 1_000, 7168: 20, 16384: 20}
"""Schedules to run of the right protocol, by hidden size."""
Size = tuple[int, int]  # rows, hidden


def compile_one_shot(arch_name: str, folder: Path, *defines: str) -> Path:
    """Compile the kernels with line tables, and return the code object. Bugs are for 4 ranks, or ALL_RANKS."""
    output = folder / f"{arch_name}.co"
    build_module().compile_source(SOURCE, arch_name, output, defines, debug=True)
    return output


@functools.cache
def lines_of(bug: str) -> frozenset[str]:
    """Return the places, as errors name them, of a bug's marked statements.

    Comments "bug:" mark them; without a mark, these are all accesses to words.
    """
    found, accesses = set(), set()
    for path in MARKED:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if bug in line.partition("// bug: ")[2].split():
                found |= {f"{path.name}:{number + 1}", f"{path.name}:{number + 2}"}
    for number, line in enumerate(DEVICE.read_text().splitlines(), 1):
        accesses |= {number} if "__scoped_atomic_" in line else set()
    return frozenset(found | {f"{DEVICE.name}:{n}" for n in accesses})


class WrongSum(AssertionError):
    """A result that differs from the sum of the ranks' inputs, though each access was allowed."""


HIDDEN = 512
ONE: Size = (1, HIDDEN)
BUGS = {
    "store_scope": (errors.StaleRead, {}),
    "load_scope": (errors.StaleRead, {}),
    "wait": (errors.StaleWord, {}),
    "any_epoch": (errors.StaleWord, {}),
    "swap": ((errors.SlotOverwritten, errors.Deadlock), {}),
    "torn": (errors.TornWord, {}),
    "skip_peer": ((errors.StaleWord, errors.Uninitialized), {}),
    # conditions under which two buffers suffice
    "two_streams": ((errors.WrongEpoch, errors.GlobalRace), {"kernel": "right", "streams": 2}),
    "block_counter": (errors.WrongEpoch, {"sizes": ((2, HIDDEN), ONE, (2, HIDDEN))}),
    "narrow_epoch": (errors.WrongEpoch, {"sizes": (ONE,) * 4}),
    "fresh_memory": (errors.WrongEpoch, {"epoch": 2**32 - 2}),
    "shared_slots": ((errors.SlotOverwritten, WrongSum), {"sizes": ((1, 1024),) * 3, "parts": 2, "op": ops.rms_norm}),
    "residency": (errors.Deadlock, {"kernel": "right", "sizes": ((40, 1024),), "parts": 2, "op": ops.rms_norm}),
}
"""The error that finds each planted bug, and the arguments of its group."""


class Group:
    """Ranks with their launches.

    `sizes` has rows and hidden size of each epoch's all-reduce. The launches of `replayed` epochs reuse the tensors of
    the first of them, as in a captured graph. Launches alternate between `streams` streams; `epoch` is the epoch before
    the first; `parts` is the maximum number of blocks per row; `op` is None or RMSNorm.
    """

    def __init__(
        self,
        path: Path,
        arch_name: str,
        ranks: int,
        sizes,
        seed: int,
        *,
        replayed=(),
        kernel="right",
        parts=1,
        op=None,
        **options,
    ):
        self.ranks, self.sizes, self.op = ranks, sizes, op
        kind = "norm" if op else "sum"
        capacity = max(rows * hidden for rows, hidden in sizes) // 2

        def adapt(launch: Launch) -> Launch:
            takes = kernel_arguments.parameters(code_object(launch.module, arch_name.partition(":")[0]), launch.symbol)
            given = {
                name: I64(launch.args[name]) if type == "i64" else launch.args[name]
                for name, (_, type) in takes.arguments.items()
            }
            symbol = f"{kernel}_{kind}_{ranks}_{launch.symbol[-2:]}"
            return Launch("", symbol, launch.grid, launch.block, tuple(given.values()))

        self.group = EmulatedGroup(arch_name, ranks, seed, capacity=capacity, code=path, adapt=adapt, **options)
        self.devices = self.group.devices
        generator = torch.Generator().manual_seed(seed)
        self.calls: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(ranks)]  # inputs and sums
        with pytest.MonkeyPatch.context() as patch:
            usual = launches.configs
            patch.setattr(launches, "default", lambda *of: min(usual(*of), key=lambda c: (c.parts > parts, -c.parts)))
            for number, rank in itertools.product(range(len(sizes)), range(ranks)):
                if number in replayed[1:]:
                    self.group.queues[rank].replay(replayed[0])
                    self.calls[rank].append(self.calls[rank][replayed[0]])
                    continue
                values = torch.randint(-15, 16, sizes[number], generator=generator).bfloat16()
                reduce = self.group.reduces[rank]
                result = reduce(op, values, None, EPSILON) if op else reduce.sum(values)
                self.calls[rank].append((values, result))

    def run(self) -> list:
        """Run the schedule, compare all results, and return the launches' counters."""
        counters = self.group.run()
        for number in range(len(self.sizes)):
            expected = sum(mine[number][0] for mine in self.calls)
            if self.op:  # bits that all ranks have, within an ulp of the reference
                expected, first = self.op.reference(expected, None, EPSILON), self.calls[0][number][1]
                expected = first if torch.allclose(first, expected, rtol=2**-7, atol=0) else expected
            for rank, mine in enumerate(self.calls):
                if not torch.equal(mine[number][1], expected):
                    raise WrongSum(f"rank {rank}, launch {number}")
        return counters


def run_schedule(path: Path, arch_name: str, ranks: int, hidden: int, seed: int) -> None:
    """Run the right protocol, with eager launches of other sizes between replays of the first launch.

    Twelve seeds cover sums and norms in eight, two and one block per row, as far as the row is wide enough.
    """
    op, parts = (ops.rms_norm, None)[seed // 2 % 2], (8, 2, 1)[seed // 4 % 3]
    one, half = (1, hidden), (1, hidden // 2)
    if seed % 2:
        epochs = {"sizes": (one, half, one), "replayed": (0, 2)}
    else:
        epochs = {"sizes": (one, one, (2, hidden // 2), one), "replayed": (0, 1, 3)}
    Group(path, arch_name, ranks, seed=seed, parts=parts, op=op, **epochs).run()


def finds(path: Path, arch_name: str, ranks: int, bug: str, seed: int) -> bool:
    """Run a schedule with a planted bug, and return whether it is found.

    No other error may occur, and the message must name a rank, an epoch and a marked line.
    """
    kinds, changed = BUGS[bug]
    arguments = {"sizes": (ONE,) * 3, "kernel": bug} | changed
    group = Group(path, arch_name + ":1" * (bug == "residency"), ranks, seed=seed, **arguments)
    try:
        group.run()
    except kinds as error:
        if isinstance(error, WrongSum):
            return True
        text = str(error)
        assert any(f"({place})" in text for place in lines_of(bug)), text
        assert "rank " in text and "in epoch " in text, text
        return True
    return False
