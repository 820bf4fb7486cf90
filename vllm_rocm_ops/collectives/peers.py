"""Create groups of ranks, each with an inbox that all other ranks store to.

Processes map each other's inboxes by IPC handles; ranks of one process share pointers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vllm_rocm_ops.collectives import flagged, launches
from vllm_rocm_ops.collectives.all_reduce import AllReduce, limit_us
from vllm_rocm_ops.collectives.launches import Group
from vllm_rocm_ops.collectives.wire import allowed as allowed_wires
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import launch as core


class RankMemory:
    """A rank's own memory: its inbox, counters, and the host word that receives errors of kernels."""

    def __init__(self, device: torch.device, capacity: int, payload: int, wires: tuple[str, ...] | None):
        self.wires = allowed_wires() if wires is None else wires
        arch = archs.of_device(device.index) if device.type == "cuda" else None
        if arch is None:
            raise RuntimeError(f"there are no kernels for {device}")
        self.device, self.arch, self.capacity, self.payload = device, arch, capacity, payload
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
        return Group(rank, tuple(inboxes), *pointers, blocks, limit_us, *sizes, self.wires)

    def free(self) -> None:
        """Free the inbox."""
        self.runtime.free_shared_memory(self.device.index, self.inbox)


def agree(cpu_group, act: Callable[[], object], what: str = "the ranks cannot share memory") -> list:
    """Run `act` on all ranks and return its results by rank. Raises RuntimeError with `what` on all if it fails on one."""
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


def _boot_id() -> str:
    """Return an identifier of the running machine, equal in all of its processes."""
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
    wires: tuple[str, ...] | None = None,
) -> AllReduce:
    """Create the all-reduce of a torch.distributed group. Collective.

    Args:
        cpu_group: A group of 2 to 8 processes on this machine, each with its own GPU.
        device: This rank's GPU.
        all_reduce: Returns the sum of all ranks' inputs, for calls that no kernel supports.
        capacity: Words of two values per one-shot call.
        payload: Bytes per buffer for calls with more values, in stages; 0 for none.
        seconds: Time limit of a wait for a rank, by default $VLLM_ROCM_OPS_ALL_REDUCE_LIMIT.
        wires: Wire formats of calls with more values, "bf16", "fp8" or both, by default of $VLLM_ROCM_OPS_ALL_REDUCE_WIRE. Of
            both, that with the lowest predicted cost is sent.

    Returns:
        This rank's all-reduce.

    Raises:
        RuntimeError: A rank failed; raised on all ranks with its reason.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    limit, memories, opened = limit_us(seconds), [], {}  # this rank's memory, once made, and other ranks' inboxes

    def make():
        _check_ranks(ranks)
        memory = RankMemory(device, capacity, payload, wires)
        memories.append(memory)
        return (
            _boot_id(),
            memory.arch.name,
            (capacity, payload),
            memory.wires,
            limit,
            memory.runtime.memory_handle(device.index, memory.inbox),
        )

    def open_all(shared: list) -> None:
        for what, values in zip(("machine", "architecture", "capacity", "wire", "limit"), zip(*shared)):
            if len(set(values)) > 1:
                raise ValueError(f"all ranks must have one {what}, got {', '.join(map(str, values))}")
        for peer, (*_, handle) in enumerate(shared):
            if peer != rank:
                opened[peer] = memories[0].runtime.open_memory(device.index, handle)

    def close() -> None:
        while opened:
            memories[0].runtime.close_memory(device.index, opened.popitem()[1])

    def release() -> None:
        if any(memory.report[0] for memory in memories):
            return  # a missing rank may still store to this memory
        if memories:
            torch.cuda.synchronize(device)
        agree(cpu_group, lambda: None)  # after this no launch of any rank stores
        agree(cpu_group, close)
        for memory in memories:
            memory.free()

    try:
        shared = agree(cpu_group, make)
        agree(cpu_group, lambda: open_all(shared))
    except RuntimeError:
        release()
        raise
    memory = memories[0]
    inboxes = [memory.inbox if peer == rank else opened[peer] for peer in range(ranks)]
    group = memory.group(rank, inboxes, 1, limit)
    return AllReduce(group, memory.arch, memory.report, all_reduce=all_reduce, release=release)


def in_process(
    ranks: int,
    device: torch.device,
    *,
    capacity: int = launches.CAPACITY,
    payload: int = flagged.PAYLOAD,
    seconds: float | None = None,
    wires: tuple[str, ...] | None = None,
) -> list[AllReduce]:
    """Create all ranks of a group in this process, on one GPU. Each rank's calls go to its own stream."""
    _check_ranks(ranks)
    limit = limit_us(seconds)
    memories = [RankMemory(device, capacity, payload, wires) for _ in range(ranks)]
    inboxes = [memory.inbox for memory in memories]

    def release() -> None:
        torch.cuda.synchronize(device)
        if all(each.is_closed for each in group):
            for memory in memories:
                memory.free()

    group = [
        AllReduce(memory.group(rank, inboxes, ranks, limit), memory.arch, memory.report, release=release)
        for rank, memory in enumerate(memories)
    ]
    return group
