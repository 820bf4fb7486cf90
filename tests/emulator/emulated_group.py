"""Ranks on emulated devices: their all-reduces are queued, and run together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_rocm_ops.collectives import AllReduce, flagged, launches
from vllm_rocm_ops.core import launch as core
from vllm_rocm_ops.core.launch import Address, Launch
from vllm_rocm_ops.emulator import Devices

TURNS = 500
"""Turns per wave of a run: several times what any wave needs, and few enough to end an endless run soon."""
LIMIT_US = 10**6  # hundreds of instructions of a launch, on the emulator's clock: never reached


class EmulatedGroup:
    """Ranks whose all-reduces, `reduces`, queue their launches until `run`.

    `epoch` is the epoch before the first.
    """

    def __init__(
        self,
        arch_name: str,
        ranks: int,
        seed: int = 0,
        *,
        capacity: int = launches.CAPACITY,
        payload: int = 0,
        limit_us: int = LIMIT_US,
        epoch: int = 0,
        streams: int = 1,
        blocks: int = 64,
        code: Path | None = None,
        adapt: Callable[[Launch], Launch] = lambda launch: launch,
        turns: int = TURNS,
        wires: tuple[str, ...] = ("bf16",),
    ):
        self.devices = Devices(arch_name, ranks, seed, turns=turns)
        arch, self.code, self.adapt = self.devices.arch, code, adapt
        words = flagged.inbox_bytes(capacity, payload) // 8
        self.inboxes = [torch.zeros(words, dtype=torch.int64) for _ in range(ranks)]
        before = epoch - (1 << 32 if epoch >> 31 else 0)
        self.counters = [torch.full((1 + blocks,), before, dtype=torch.int32) for _ in range(ranks)]
        self.flagged_counters = [torch.full((2,), before, dtype=torch.int32) for _ in range(ranks)]
        for counters in (*self.counters, *self.flagged_counters):
            counters[0] = 0
        self.reports = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        for rank, inbox in enumerate(self.inboxes):
            self.devices.share(rank, inbox, f"the inbox of rank {rank}")
        tensors = (*self.inboxes, *self.counters, *self.flagged_counters, *self.reports)
        self.tensor_at = {tensor.data_ptr(): tensor for tensor in tensors}
        addresses = tuple(inbox.data_ptr() for inbox in self.inboxes)
        self.reduces, self.queues = [], []
        for rank, (counters, report) in enumerate(zip(self.counters, self.reports)):
            pointers = counters.data_ptr(), report.data_ptr()
            sizes = capacity, self.flagged_counters[rank].data_ptr(), payload
            group = launches.Group(rank, addresses, *pointers, blocks, limit_us, *sizes, wires)
            self.queues.append(Queue(weakref.proxy(self), rank, epoch, streams))  # a cycle would keep the inboxes
            self.reduces.append(AllReduce(group, arch, report, executor=self.queues[-1]))

    def run(self) -> list:
        """Run the launches of all calls so far, and return their counters."""
        return self.devices.run()


class Queue:
    """A queue that puts a rank's launches into its device's queue, or in turn into its streams' queues."""

    def __init__(self, group: EmulatedGroup, rank: int, epoch: int, streams: int):
        self.group, self.rank, self.streams = group, rank, streams
        self.epochs: dict[int, int] = {}  # by address of the counter
        self.before = epoch
        self.arch = group.devices.arch
        self.launches: list[tuple[Path, Launch, int]] = []

    def launch(self, launch: Launch, uninitialized: tuple = ()) -> None:
        """Queue a launch."""
        tensor_at = self.group.tensor_at
        path = self.group.code or core.code_object(launch.module, self.arch.name)
        counters = launch.args["counters"]
        launch = launch.with_each(lambda arg: tensor_at[arg] if isinstance(arg, Address) else arg)
        self._enqueue(path, self.group.adapt(launch), counters)

    def replay(self, number: int) -> None:
        """Queue a launch again."""
        self._enqueue(*self.launches[number])

    def _enqueue(self, path: Path, launch: Launch, counters: int) -> None:
        epoch = self.epochs.get(counters, self.before)
        self.epochs[counters] = epoch = 2 if epoch == (1 << 32) - 1 else epoch + 1
        self.group.devices.enqueue(self.rank, path, launch, epoch, len(self.launches) % self.streams)
        self.launches.append((path, launch, counters))
