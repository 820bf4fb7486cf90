"""A group of ranks on emulated devices: calls of its all-reduces are queued, and run together."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_rocm_ops.collectives import OneShotAllReduce, launches
from vllm_rocm_ops.core import launch as core
from vllm_rocm_ops.core.launch import Address, Launch
from vllm_rocm_ops.emulator import Devices

TURNS = 500
"""The turns that a run has for each wave: several times what any takes, and few enough that one that goes on for ever ends soon."""
LIMIT_US = 10**6  # instructions of a launch in hundreds, on the emulator's clock: never


class EmulatedGroup:
    """`reduces` are the ranks' all-reduces. `run` runs what they were called for. `epoch` is the epoch before the first."""

    def __init__(
        self,
        arch_name: str,
        ranks: int,
        seed: int = 0,
        *,
        capacity: int = launches.CAPACITY,
        limit_us: int = LIMIT_US,
        epoch: int = 0,
        streams: int = 1,
        blocks: int = 64,
        code: Path | None = None,
        turns: int = TURNS,
    ):
        self.devices = Devices(arch_name, ranks, seed, turns=turns)
        arch, self.code = self.devices.arch, code
        words = launches.inbox_bytes(capacity) // 8
        self.inboxes = [torch.zeros(words, dtype=torch.int64) for _ in range(ranks)]
        self.counters = [
            torch.tensor([0, epoch - (1 << 32 if epoch >> 31 else 0)], dtype=torch.int32) for _ in range(ranks)
        ]
        self.reports = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        for rank, inbox in enumerate(self.inboxes):
            self.devices.share(rank, inbox, f"the inbox of rank {rank}")
        tensors = (*self.inboxes, *self.counters, *self.reports)
        self.tensor_at = {tensor.data_ptr(): tensor for tensor in tensors}
        addresses = tuple(inbox.data_ptr() for inbox in self.inboxes)
        self.reduces = []
        for rank, (counters, report) in enumerate(zip(self.counters, self.reports)):
            pointers = counters.data_ptr(), report.data_ptr()
            group = launches.Group(rank, addresses, *pointers, blocks, limit_us, capacity)
            executor = _Queue(self, rank, epoch, streams)
            self.reduces.append(OneShotAllReduce(group, arch, report, executor=executor))

    def run(self) -> list:
        """Run the launches of all calls so far; return their counters."""
        return self.devices.run()


class _Queue:
    """Puts the launches of a rank into its device's queue, in turn into those of its streams."""

    def __init__(self, group: EmulatedGroup, rank: int, epoch: int, streams: int):
        self.group, self.rank, self.epoch, self.streams = group, rank, epoch, streams
        self.arch, self.count = group.devices.arch, 0

    def launch(self, launch: Launch, uninitialised: tuple = ()) -> None:
        """Queue a launch."""
        tensor_at = self.group.tensor_at
        launch = launch.with_each(lambda arg: tensor_at[arg] if isinstance(arg, Address) else arg)
        path = self.group.code or core.code_object(launch.module, self.arch.name)
        self.epoch = 2 if self.epoch == (1 << 32) - 1 else self.epoch + 1
        self.group.devices.enqueue(self.rank, path, launch, self.epoch, self.count % self.streams)
        self.count += 1
