"""Test the losses that the contest of experts returns in addition to its output."""

import pytest
import torch
from contests import moe
from contests.contest import compare, unstaged

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_losses_come_with_a_coefficient(arch):
    emulator = Emulator(arch)
    data = moe.CONTEST.data(moe.CONTEST.reduced[0], "cpu", emulator.arch.fp8_dtype)
    x, weights, config = data
    expected = moe.CONTEST.reference(data)
    with launch.executor(emulator):
        assert isinstance(moe.CONTEST.ours(data, unstaged), torch.Tensor)
        result, aux = moe.CONTEST.ours((x, weights, config | {"load_balance_loss_coef": 0.02}), unstaged)
    assert compare(moe.CONTEST, (result, aux), expected) == ""
    assert list(aux) == [
        "router_z_loss",
        "load_balancing_loss",
        "expert_assignment_counts",
        "avg_router_probs_per_expert_stat",
        "fraction_tokens_per_expert_stat",
    ]
    logits = (x.double() @ weights["router.weight"].double().t()).flatten(0, 1)
    topk = config["n_experts_per_token"]
    counts = logits.topk(topk).indices.flatten().bincount(minlength=logits.shape[1])
    assert torch.equal(aux["expert_assignment_counts"], counts)
    fraction, share = counts / (len(logits) * topk), logits.softmax(-1).mean(0)
    wanted = {
        "router_z_loss": 0.001 * logits.logsumexp(-1).square().mean(),
        "load_balancing_loss": 0.02 * logits.shape[1] * (fraction * share).sum(),
        "avg_router_probs_per_expert_stat": share,
        "fraction_tokens_per_expert_stat": fraction,
    }
    for name, value in wanted.items():
        assert torch.allclose(aux[name].double(), value.double(), rtol=4e-3), name
    assert aux["router_z_loss"].dtype == x.dtype == torch.float16
