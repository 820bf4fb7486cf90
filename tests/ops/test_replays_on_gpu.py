"""Test on a GPU that what the start-up timing captures leaves what eager calls leave."""

import pytest
import torch

from vllm_rocm_ops.core import archs, clock, correctness
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.tools import smoke
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.replays import Replays, copies

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or archs.of_device(torch.cuda.current_device()) is None,
    reason="no GPU that there is code for",
)
CASES = 8


@pytest.mark.parametrize("op", op_module.registered(), ids=lambda op: op.name)
def test_each_op_is_timed_with_equal_replays(op):
    """Two sets of arguments, of which a call may write some."""
    arch = archs.of_device(torch.cuda.current_device())
    cases = smoke.smallest_first(op, arch)
    for case in cases[:: max(len(cases) // CASES, 1)]:
        sets = []
        for seed in ("one", "other"):
            given = case.make("cpu", correctness.generator_of(seed), arch.fp8_dtype)
            sets.append(tuple(correctness.clone(value, "cuda") for value in given))
        if not op.explain(*sets[0], arch=arch, require_code=True).launches:
            continue
        calls = {"plugin": op, "baseline": op}
        with torch.inference_mode():
            times = kernel_timing.GraphClock().times(calls, sets, Replays(calls, sets, fresh=copies))
        assert times.keys() == calls.keys(), case.name


def test_a_replay_that_differs_is_seen():
    x = torch.ones(4, 4, device="cuda")
    calls = {"plugin": lambda x: x * 2, "baseline": lambda x: x + 1}
    graphs = {name: clock.capture(call, [(x,)]) for name, call in calls.items()}
    replays = Replays(calls, [(x,)])
    assert replays.differing(graphs) == []
    x += 1
    assert replays.differing(graphs) == ["plugin", "baseline"]
