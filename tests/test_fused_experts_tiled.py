"""The kernels of fused_experts for many tokens, at any number of them, and as the experts of the contest's mixture-of-experts."""

from __future__ import annotations

import functools

import pytest
import torch
from emulator import Emulator
from test_ops import generator_of, outputs_start_as_nan, run_and_check

from vllm_rocm_ops import launch, op, ops
from vllm_rocm_ops.op import Case
from vllm_rocm_ops.ops import fused_experts_tiled as tiled

OP = ops.fused_experts
assert outputs_start_as_nan  # a fixture of every test here


def case(name: str, m: int, topk: int, experts: int, hidden: int, intermediate: int, **given) -> Case:
    (any_case, *_) = OP.cases()
    return Case(name, functools.partial(any_case.make.func, m, topk, experts, hidden, intermediate, given))


CASES = [
    case("block-m129-one-expert", 129, 1, 3, 128, 128, one=True),
    case("block-m200", 200, 2, 4, 256, 192, shared_experts=1, ids=torch.int64),
    case("block-odd-m70", 70, 2, 6, 208, 80, shared_experts=2),
    case("block-map-m90", 90, 3, 5, 208, 208, mapped=True, ids=torch.int64, shared_experts=1),
    case("block-quantized-m66", 66, 2, 4, 208, 128, quantized=True),
    case("block-static-m66", 66, 2, 4, 208, 80, static=True),
    case("block-input-weight-m65", 65, 1, 4, 128, 128, apply_router_weight_on_input=True, shared_experts=1),
    case("block-repeated-m65", 65, 3, 2, 128, 64, repeated=True),
    case("block-few-of-many", 65, 1, 96, 128, 16),
    case("channel-m130", 130, 2, 3, 208, 80, scheme="channel", out_dtype=torch.float16),
    case("channel-static-m65", 65, 2, 4, 144, 96, scheme="channel", static=True),
    case("tensor-m70", 70, 2, 4, 208, 208, scheme="tensor"),
    case("bf16-m130", 130, 2, 3, 200, 136, scheme="none"),
    case("fp16-m70", 70, 2, 4, 136, 72, scheme="none", out_dtype=torch.float16, shared_experts=1),
]


@pytest.fixture(params=["gfx942", "gfx950"])
def emulator(request, monkeypatch):
    """Where every call of the op is by the tiled kernels."""
    emulator = Emulator(request.param)
    monkeypatch.setattr(OP, "envelope", tiled.envelope)
    monkeypatch.setattr(OP, "configs", tiled.configs)
    monkeypatch.setattr(OP, "plan", tiled.launches)
    with launch.executor(emulator):
        OP._executions.clear()
        yield emulator
        OP._executions.clear()


@pytest.mark.parametrize("config", tiled.configs(None, None), ids=str)
@pytest.mark.parametrize("case", [*OP.cases(), *CASES], ids=lambda case: case.name)
def test_case(case, config, emulator, monkeypatch):
    monkeypatch.setattr(OP, "default", lambda *_: config)
    op.reset_stats()
    run_and_check(OP, case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype), "cpu")
    (ran,) = op.stats()[OP.name]
    assert ran == "nothing to do" or f"_{config.tokens} + {tiled.MODULE}_combine" in ran
