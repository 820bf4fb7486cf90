"""Test gated_delta_net_decode: its states over many steps, drafts beside single steps, and both layouts."""

from __future__ import annotations

import pytest
import torch
from op_tests import test_case  # noqa: F401
from torch.nn.functional import silu, softplus

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.correctness import clone, generator_of
from vllm_rocm_ops.ops.shared import gated_delta_net

OP = ops.gated_delta_net_decode
HALF = torch.bfloat16


def given(name: str, arch, device: str = "cpu"):
    case = next(case for case in OP.cases() if case.name == name)
    made = case.make("cpu", generator_of(name), arch.fp8_dtype)
    return OP.Arguments(*(clone(value, device) for value in made))


def as_vllm(a, state: torch.Tensor, conv: torch.Tensor) -> None:
    """Advance one head's state [V, K] and its convolution's [channels, 3] by a step with vLLM's roundings of q, k and v."""
    rows = torch.cat([conv, a.qkvz[0, :384, None]], 1)
    conv.copy_(rows[:, 1:])
    _, k, v = silu((rows.float() * a.conv_weight.float()).sum(1)).to(HALF).float().split(128)
    k = k / (k.square().sum() + 1e-6).sqrt()
    b, alpha = a.ba[0].float()
    s = state.float() * torch.exp(-a.a_log.exp() * softplus(alpha + a.dt_bias.float()))
    state.copy_(s + ((v - s @ k) * b.sigmoid())[:, None] * k)


@pytest.mark.parametrize("name", ["bf16-plain", "fp32-plain"])
def test_the_state_after_many_steps_is_no_worse_than_vllms(name, executor):
    """Both are compared with float64, which reads the same inputs."""
    device, arch = executor
    steps, a = 200 if device == "cuda" else 40, given(name, arch, device)
    theirs = [x.cpu().clone() for x in (a.state[a.indices[0, 0]][0], a.conv_state[a.indices[0, 0]])]
    a.a_log.fill_(-2.0)
    exact = OP.Arguments(*(v.cpu().double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in a))
    exact = exact._replace(indices=a.indices.cpu())
    generator = generator_of("steps")
    for _ in range(steps):
        for mine, other in ((a.qkvz, exact.qkvz), (a.ba, exact.ba)):
            mine.copy_(torch.randn(mine.shape, generator=generator))
            other.copy_(mine)
        OP(*a)
        gated_delta_net.advance(exact)
        as_vllm(OP.Arguments(*(v.cpu() if isinstance(v, torch.Tensor) else v for v in a)), *theirs)
    slot = int(a.indices[0, 0])
    mine, others = (
        (x.double() - exact.state[slot, 0]).square().mean().sqrt() for x in (a.state[slot, 0].cpu(), theirs[0])
    )
    assert 0 < mine <= others


@pytest.mark.parametrize("threads", [256, 512])
def test_drafts_have_the_results_of_single_steps(executor, threads):
    """In fp32, where a stored state is what registers hold, bit for bit; the state after each row is in its slot."""
    device, arch = executor
    a = given("drafts-fp32", arch, device)
    config = next(config for config in OP.configs(a, arch) if config.threads == threads)
    starts, accepted = a.row_starts.tolist(), a.accepted.tolist()
    one = OP.Arguments(*(clone(value, device) for value in a))
    with OP.running(config):
        OP(*a)
        for request, slots in enumerate(one.indices.tolist()):
            if slots[0] <= 0:
                continue
            source, taken = slots[accepted[request] - 1], accepted[request]
            conv = one.conv_state[slots[0] : slots[0] + 1, :, taken - 1 : taken + 2].clone().expand(2, -1, -1).clone()
            state = one.state[source : source + 1].clone().expand(2, -1, -1, -1).clone()
            for t, row in enumerate(range(*starts[request : request + 2])):
                place = slice(row, row + 1)
                step = one._replace(
                    qkvz=one.qkvz[place],
                    ba=one.ba[place],
                    conv_state=conv,
                    state=state,
                    indices=torch.ones(1, 1, dtype=torch.int32, device=device),
                    out=one.out[place],
                    accepted=None,
                    row_starts=None,
                    out_scales=one.out_scales[place],
                )
                OP(*step)
                assert torch.equal(a.out[row].float(), one.out[row].float())
                assert torch.equal(a.out_scales[row], one.out_scales[row])
                assert torch.equal(a.state[slots[t]], state[1])


def test_interleaved_rows_have_the_results_of_contiguous_ones(executor):
    """Bit for bit, as only places differ."""
    device, arch = executor
    a = given("three-per-key", arch, device)
    mixed, z, b, alpha = gated_delta_net.parts(a, HALF)
    other = OP.Arguments(*(clone(value, device) for value in a))
    qkvz, ba = torch.cat([mixed, z.flatten(1)], 1).contiguous(), torch.cat([b, alpha], 1).contiguous()
    other = other._replace(qkvz=qkvz, ba=ba, is_interleaved=False)
    OP(*a)
    OP(*other)
    for name in ("out", "state", "conv_state"):
        assert torch.equal(getattr(a, name).nan_to_num(), getattr(other, name).nan_to_num())


def test_padding_leaves_nan_where_it_is_and_writes_zeros(executor):
    """Requests whose slot is 0 or less have any rows."""
    device, arch = executor
    a = given("padded", arch, device)
    a.qkvz[a.indices[:, 0] <= 0] = torch.nan
    before = a.state[0].clone()
    OP(*a)
    is_padding = a.indices[:, 0] <= 0
    assert is_padding.sum() == 2 and before.isnan().all() and a.state[0].isnan().all()
    assert not a.out[is_padding].float().any() and a.out[~is_padding].float().isfinite().all()
    smallest = 1 / (512 * {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}[arch.fp8_dtype])
    assert torch.allclose(a.out_scales[is_padding].cpu(), torch.tensor(smallest))
