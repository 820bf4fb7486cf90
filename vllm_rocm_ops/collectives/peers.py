"""Create groups of ranks, each with an inbox that all others store to.

Processes exchange handles to find the inboxes; ranks of one process share them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vllm_rocm_ops.collectives import flagged, launches
from vllm_rocm_ops.collectives import wire as wires
from vllm_rocm_ops.collectives.launches import Group
from vllm_rocm_ops.collectives.one_shot import OneShotAllReduce, limit_us
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import launch as core


class RankMemory:
    """A rank's own memory: its inbox, counters, and the host word that receives errors of kernels."""

    def __init__(self, device: torch.device, capacity: int, payload: int, wire: str):
        arch = archs.of_device(device.index) if device.type == "cuda" else None
        if arch is None:
            raise RuntimeError(f"there are no kernels for {device}")
        self.device, self.arch, self.capacity, self.payload, self.wire = device, arch, capacity, payload, wire
        self.runtime, why = core.runtime()
        if why:
            raise RuntimeError(why)
        self.inbox = self.runtime.shared_memory(device.index, flagged.inbox_bytes(capacity, payload))
        self.counters = torch.zeros(2, 2, dtype=torch.int32, device=device)
        self.report = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        torch.cuda.synchronize(device)

    def group(self, rank: int, inboxes: list[int], on_device: int, limit_us: int) -> Group:
        """Return this rank's view of the group, with `on_device` ranks on its GPU."""
        counters, flagged_counters = (each.data_ptr() for each in self.counters)
        blocks = self.arch.compute_units // on_device
        pointers = counters, self.report.data_ptr()
        sizes = self.capacity, flagged_counters, self.payload
        return Group(rank, tuple(inboxes), *pointers, blocks, limit_us, *sizes, self.wire)

    def free(self) -> None:
        """Free the inbox."""
        self.runtime.free_shared_memory(self.device.index, self.inbox)


def agree(cpu_group, act: Callable[[], object], what: str = "the ranks cannot share memory") -> list:
    """Return an action's results by rank. Raises RuntimeError with `what` on all ranks if it fails on one."""
    import torch.distributed as dist

    try:
        mine = "", act()
    except Exception as error:  # noqa: BLE001  all ranks raise it
        mine = f"{type(error).__name__}: {error}", None
    by_rank: list = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(by_rank, mine, group=cpu_group)
    failed = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(by_rank) if why]
    if failed:
        raise RuntimeError(f"all_reduce: {what}: {'; '.join(failed)}")
    return [value for _, value in by_rank]


def _boot() -> str:
    """Return the identity of the running machine, equal in its processes."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (path.read_text().strip() if path.exists() else "")


def _check_ranks(ranks: int) -> None:
    if ranks not in launches.RANKS:
        raise ValueError(f"all_reduce: ranks must be {launches.RANKS[0]} to {launches.MAX_RANKS}, got {ranks}")


def create(
    cpu_group,
    device: torch.device,
    *,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    capacity: int = launches.CAPACITY,
    payload: int = flagged.PAYLOAD,
    seconds: float | None = None,
    wire: str | None = None,
) -> OneShotAllReduce:
    """Create the all-reduce of a torch.distributed group. Collective.

    Args:
        cpu_group: A group of 2 to 8 processes on this machine, each with its own GPU.
        device: This rank's GPU.
        all_reduce: Sums inputs of calls that no kernel supports.
        capacity: Words per call, of two values each.
        payload: Bytes per buffer of calls with more values, or 0 for none.
        seconds: Time limit of a wait for a rank, by default $VLLM_ROCM_OPS_ALL_REDUCE_LIMIT.
        wire: What calls with more values send, "bf16" or "fp8", by default $VLLM_ROCM_OPS_ALL_REDUCE_WIRE.

    Returns:
        This rank's all-reduce.

    Raises:
        RuntimeError: A rank failed; raised on all ranks with its reason.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    limit, owns, opened = limit_us(seconds), [], {}

    def make():
        _check_ranks(ranks)
        own = RankMemory(device, capacity, payload, wires.chosen(wire))
        owns.append(own)
        return (
            _boot(),
            own.arch.name,
            (capacity, payload),
            own.wire,
            limit,
            own.runtime.memory_handle(device.index, own.inbox),
        )

    def open_all(shared: list) -> None:
        for what, values in zip(("machine", "architecture", "capacity", "wire", "limit"), zip(*shared)):
            if len(set(values)) > 1:
                raise ValueError(f"all ranks must have one {what}, got {', '.join(map(str, values))}")
        for peer, (*_, handle) in enumerate(shared):
            if peer != rank:
                opened[peer] = owns[0].runtime.open_memory(device.index, handle)

    def close() -> None:
        while opened:
            owns[0].runtime.close_memory(device.index, opened.popitem()[1])

    def release() -> None:
        if any(own.report[0] for own in owns):
            return  # a rank is missing, and may still store to this memory
        if owns:
            torch.cuda.synchronize(device)
        agree(cpu_group, lambda: None)  # after this no launch of any rank stores
        agree(cpu_group, close)
        for own in owns:
            own.free()

    try:
        shared = agree(cpu_group, make)
        agree(cpu_group, lambda: open_all(shared))
    except RuntimeError:
        release()
        raise
    own = owns[0]
    inboxes = [own.inbox if peer == rank else opened[peer] for peer in range(ranks)]
    group = own.group(rank, inboxes, 1, limit)
    return OneShotAllReduce(group, own.arch, own.report, all_reduce=all_reduce, release=release)


def in_process(
    ranks: int,
    device: torch.device,
    *,
    capacity: int = launches.CAPACITY,
    payload: int = flagged.PAYLOAD,
    seconds: float | None = None,
    wire: str | None = None,
) -> list[OneShotAllReduce]:
    """Create all ranks of a group in this process, on one GPU. Each rank's calls go to its own stream."""
    _check_ranks(ranks)
    limit, sent = limit_us(seconds), wires.chosen(wire)
    owns = [RankMemory(device, capacity, payload, sent) for _ in range(ranks)]
    inboxes = [own.inbox for own in owns]

    def release() -> None:
        torch.cuda.synchronize(device)
        if all(each.is_closed for each in group):
            for own in owns:
                own.free()

    group = [
        OneShotAllReduce(own.group(rank, inboxes, ranks, limit), own.arch, own.report, release=release)
        for rank, own in enumerate(owns)
    ]
    return group
