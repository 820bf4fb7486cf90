"""Test gated_delta_net_decode: its states over many steps, drafts beside single steps, and both layouts."""

from __future__ import annotations

import pytest
import torch
from marks import FULL
from op_tests import test_case  # noqa: F401
from torch.nn.functional import silu, softplus

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.correctness import clone, generator_of
from vllm_rocm_ops.ops.shared import gated_delta_net
from vllm_rocm_ops.tools.bench import gated_delta_net as bench
from vllm_rocm_ops.tools.bench.baselines import BASELINES

OP = ops.gated_delta_net_decode
HALF = torch.bfloat16


def given(name: str, arch, device: str = "cpu"):
    case = next(case for case in OP.cases() if case.name == name)
    made = case.make("cpu", generator_of(name), arch.fp8_dtype)
    return OP.Arguments(*(clone(value, device) for value in made))


# States after many steps

FEW, MANY = 24, 2000
"""Rows in the emulator by default and with --full, where drafts have fewer steps; on a GPU there are `MANY` steps."""
SMALL = {"heads": (1, 1), "is_interleaved": False}
DRAFTS = 4  # rows
NEAR = 1.02


def as_vllm(a) -> None:
    """Advance the states with the roundings of vLLM's kernels: of q, k and v to 16 bits, and of every state that is stored."""
    sizes, (mixed, _, b, alpha) = gated_delta_net.sizes_of(a), gated_delta_net.parts(a, torch.float32)
    decay = torch.exp(-a.a_log.exp() * softplus(alpha + a.dt_bias.float()))
    for first, slots, source, taken in gated_delta_net.requests(a):
        rows = slice(first, first + len(slots))
        window = torch.cat([a.conv_state[slots[0], :, taken - 1 : taken + 2].float(), mixed[rows].t()], 1)
        s = a.state[source].float()
        a.conv_state[slots[0], :, : window.shape[1] - 1] = window[:, 1:].to(HALF)
        for t, slot in enumerate(slots):
            of_row = silu((window[:, t : t + 4] * a.conv_weight.float()).sum(1)).to(HALF).float()
            _, k, v = of_row.split([sizes.key_heads * 128] * 2 + [sizes.heads * 128])
            k = k.view(sizes.key_heads, 128)
            k = (k * torch.rsqrt(k.square().sum(1, keepdim=True) + 1e-6)).repeat_interleave(
                sizes.heads // sizes.key_heads, 0
            )
            s = s * decay[first + t, :, None, None]
            delta = (v.view(-1, 128) - (s * k[:, None]).sum(2)) * b[first + t].sigmoid()[:, None]
            s = s + delta[:, :, None] * k[:, None]
            a.state[slot] = s.to(a.state.dtype)


def by_triton(a) -> None:
    """Advance the states by vLLM's kernels."""
    baseline = BASELINES[OP.name]["vllm triton"]
    baseline.call(*baseline.prepare(*a))


def state_errors(theirs, steps: int, device: str, requests: int, **layer) -> tuple[float, float]:
    """Return the root mean square errors of the op's states and of another's, beside float64, after many steps of the same rows.

    Heads forget at rates from half of a state a step to a thousandth. With drafts each step accepts any number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    a = OP.Arguments(*bench.make(requests, "cpu", generator, **layer))
    heads = layer["heads"][1]
    a.a_log.copy_(torch.linspace(-7.0, -0.5, heads) if heads > 1 else torch.tensor(-4.0))
    a.state.zero_()
    a, other = (OP.Arguments(*(clone(value, device) for value in a)) for _ in range(2))
    exact = OP.Arguments(*(v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in a))
    for _ in range(steps):
        for name in ("qkvz", "ba"):
            drawn = torch.randn(getattr(a, name).shape, generator=generator).to(HALF)
            for each in (a, other, exact):
                getattr(each, name).copy_(drawn)
        if a.accepted is not None:
            drawn = torch.randint(1, layer["rows"] + 1, (requests,), generator=generator, dtype=torch.int32)
            for each in (a, other):
                each.accepted.copy_(drawn)
        OP(*a)
        theirs(other)
        gated_delta_net.advance(exact)
    slots = a.indices.flatten().long()
    off = (each.state[slots].double() - exact.state[slots] for each in (a, other))
    mine, others = (error.square().mean().sqrt().item() for error in off)
    return mine, others


def require_no_worse(errors: tuple[float, float], what: str, capsys) -> None:
    """Raise unless the op's error is at most vLLM's, and print both."""
    with capsys.disabled():
        print(f"\nstate of {what}: {errors[0]:.3e} from float64, vLLM {errors[1]:.3e}")
    assert 0 < errors[0] <= NEAR * errors[1]


@pytest.mark.parametrize("rows", [1, DRAFTS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_state_after_many_steps_is_no_worse_than_vllms(dtype, rows, executor, capsys):
    """`as_vllm` repeats the roundings of vLLM's kernels."""
    device, arch = executor
    emulated = (MANY if FULL and arch == archs.ARCHS["gfx942"] else FEW) // rows
    steps = MANY if device == "cuda" else emulated
    errors = state_errors(as_vllm, steps, device, 1, **SMALL, dtype=getattr(torch, dtype), rows=rows)
    require_no_worse(errors, f"a head in {dtype}, {rows} rows in each of {steps} steps", capsys)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs vLLM's Triton kernels")
@pytest.mark.parametrize("name", [name for name in bench.LAYERS if "tokens" not in name])
def test_the_state_of_models_after_many_steps_is_no_worse_than_vllms(name, capsys):
    """vLLM's kernels run beside the op."""
    pytest.importorskip("vllm")
    errors = state_errors(by_triton, MANY, "cuda", 2, **bench.LAYERS[name])
    require_no_worse(errors, f"{name} after {MANY} steps", capsys)


# Drafts, layouts and padding


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
