"""Test the all-reduce with payload and flag apart, on emulated devices: right, bit-equal on all ranks, no hang."""

from __future__ import annotations

import pytest
import torch
from emulated_group import EmulatedGroup
from marks import AMD, CHIPS
from test_all_reduce import KERNELS, check_call, name_of

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import flagged, launches

PAYLOAD = 1 << 20


@pytest.fixture
def check(monkeypatch):
    """Return a function that checks a call with a configuration of these stages and blocks per row."""

    def check(arch_name, ranks, op, dtype, rows, hidden, stages=2, parts=1, blocks=64, **how):
        def default(*of):
            return next(each for each in flagged.configs(*of) if (each.stages, each.parts) == (stages, parts))

        monkeypatch.setattr(flagged, "default", default)
        group = EmulatedGroup(arch_name, ranks, rows + hidden, capacity=0, payload=PAYLOAD, blocks=blocks)
        check_call(arch_name, ranks, op, dtype, rows, hidden, group=group, **how)
        symbols = {launch.symbol for queue in group.queues for _, launch, _ in queue.launches}
        assert all("_flagged_" in symbol for symbol in symbols)

    return check


@pytest.mark.parametrize(("op", "dtype"), KERNELS, ids=name_of)
def test_every_kind(check, op, dtype):
    check(CHIPS[0], 2, op, dtype, 2, 1024, epochs=1)


@pytest.mark.parametrize("ranks", launches.RANKS)
@pytest.mark.parametrize("stages", flagged.STAGES)
def test_every_number_of_ranks(check, ranks, stages):
    """Rows are fewer and more than ranks, blocks fewer than rows, and slices no multiple of a wave."""
    check(AMD[0], ranks, ops.rms_norm_dynamic_per_token_quant, torch.bfloat16, 5, 1080, stages, blocks=3, epochs=3)
