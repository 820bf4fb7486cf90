"""Test a latent cache split over two ranks, see dcp.py: two threads with emulated kernels, or two GPUs."""

import datetime
import pathlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import dcp
import pytest
import torch

from vllm_rocm_ops import ops, reset_stats, stats
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator

RANKS = 2
LENS = [33, 1, 40]  # of the second request the second rank has nothing


def run(lens: list[int], interleave: int, change=lambda *found: found) -> list[Exception | None]:
    """Return the exception of each rank, whose attention has results after a `change`."""
    store, lock = torch.distributed.HashStore(), threading.Lock()

    def attend(*arguments, **keywords):
        with lock:
            return change(*ops.mla_decode(*arguments, **keywords))

    def rank(number: int) -> Exception | None:
        processes = torch.distributed.ProcessGroupGloo(store, number, RANKS, datetime.timedelta(seconds=60))
        group = dcp.Group(processes, number, RANKS)
        try:
            dcp.check(group, lens, interleave, "cpu", attend)
        except AssertionError as error:
            return error
        finally:
            group.all_reduce(torch.zeros(1))  # none leaves before all are done
        return None

    with ThreadPoolExecutor(RANKS) as threads:
        return [*threads.map(rank, range(RANKS))]


@pytest.mark.parametrize("interleave", [1, 16])
def test_merged_ranks_equal_the_undivided_result(interleave):
    reset_stats()
    with launch.executor(Emulator("gfx942")):
        assert run(LENS, interleave) == [None, None]
    assert not any(kernel.startswith("fallback") for kernel in stats()["mla_decode"])


WRONG = {
    "logarithms to base 2": lambda out, lse: (out, lse / torch.tensor(2.0).log()),
    "rows that are not divided by their sums": lambda out, lse: (out * lse.exp()[..., None].to(out.dtype), lse),
    "a logarithm of the largest score alone": lambda out, lse: (out, lse.floor()),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_partial_results_fail_the_merge_check(what):
    """The op's reference computes the parts."""
    assert all(isinstance(error, AssertionError) for error in run(LENS, 1, WRONG[what]))


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="ranks need a GPU each")
def test_on_two_gpus():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    script = str(pathlib.Path(dcp.__file__))
    result = subprocess.run([*command, script], capture_output=True, text=True, check=False)
    assert "2 ranks: rows and logarithms are those of the whole" in result.stdout, result.stdout + result.stderr
