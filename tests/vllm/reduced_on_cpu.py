"""Run all-reduces with norms on ranks of the CPU: gloo replaces the kernel, and times are faked."""

import functools
import types

import torch
from clocks import FakeClock

from vllm_rocm_ops import collectives
from vllm_rocm_ops.core.stats import counter
from vllm_rocm_ops.vllm import worker_startup
from vllm_rocm_ops.vllm.graph import all_reduce_timing


class OverGloo:
    """An all-reduce of ranks that are processes, in one order.

    With `flips` it is wrong by a bit of the first result. The other rank is missing after `missing_after` launches, if
    not 0.
    """

    def __init__(self, cpu_group, device, *, all_reduce, seconds=None, blocks=4, flips=False, missing_after=0):
        self.seconds = seconds
        self.group, self.flips, self.missing, self.is_closed = types.SimpleNamespace(blocks=blocks), flips, "", False
        self.missing_after, self.launched = missing_after, 0

    def sum(self, x):
        found = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(found, x)
        self.launched += 1
        total = sum(each.float() for each in found).to(x.dtype)
        if self.flips:
            total.view(torch.int16)[0, 0] ^= 1
        return total

    def __call__(self, op, x, *args):
        counter(f"all_reduce_{op.name}", "one launch").calls += 1
        return op.reference(self.sum(x), *args)

    def check(self):
        if self.missing_after and self.launched > self.missing_after:
            self.missing = f"all_reduce: rank 1 of 2 did not come in epoch {self.missing_after + 1}"
        if self.missing:
            raise collectives.RankMissing(self.missing)

    def limit(self, seconds=None):
        self.seconds = seconds

    def close(self):
        self.is_closed = True


class Clock(FakeClock):
    """A clock by which the plugin wins with fewer tokens than `slow`; if it `fails`, it raises there."""

    def __init__(self, slow: int, fails: bool = False):
        self.slow, self.fails, self.pairs = slow, fails, []

    def times(self, group, agree, calls, sets, replays):
        tokens = len(sets[0][0])
        self.pairs.append(tokens)
        for name, call in calls.items():
            failing = self.fails and tokens >= self.slow and name == "baseline"
            agree(lambda call=call, failing=failing: call(*sets[0]) and (1 / 0 if failing else None))
        return {"plugin": [3.0 if tokens >= self.slow else 1.0], "baseline": [2.0]}


def install(slow: int, **how) -> None:
    """Make vLLM's CPU engine name all-reduces as a GPU's does, and measure them by `Clock`."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.use_custom_op_collectives = classmethod(lambda cls: True)
    worker_startup.group_clock = lambda: Clock(slow)
    theirs = all_reduce_timing.before_compiling
    all_reduce_timing.before_compiling = functools.partial(theirs, create=functools.partial(OverGloo, **how))
