"""Test mxfp8_scaled_mm beyond its cases: loads stay in flight, and sums do not depend on the last block."""

from __future__ import annotations

import pytest
import torch
from marks import full
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.mxfp8_scaled_mm import UNIT_BYTES, MxConfig, mxfp8_scaled_mm

ARCH = "gfx950"
WEIGHT_BYTES = 16 * UNIT_BYTES  # weight bytes per wave


def run(emulator: Emulator, config: MxConfig, arguments: tuple, monkeypatch) -> torch.Tensor:
    monkeypatch.setattr(mxfp8_scaled_mm, "default", lambda *_: config)
    mxfp8_scaled_mm.invalidate()
    with launch.executor(emulator):
        return mxfp8_scaled_mm(*arguments)


def inputs(m: int, n: int, k: int) -> tuple:
    generator = generator_of("mxfp8")
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    scales = (torch.randint(120, 134, (rows, k // 32), generator=generator, dtype=torch.uint8) for rows in (m, n))
    return a, b, *scales, torch.float32


@pytest.mark.parametrize("m, tokens", [(1, 16), (32, 32), (64, 64)])
def test_three_units_are_in_flight_whenever_a_wave_waits(m, tokens, monkeypatch):
    """The compiler could move the loads of the ring, or wait for more of them than necessary."""
    emulator = Emulator(ARCH, traffic=True)
    run(emulator, MxConfig(tokens, streams=1, blocks=1), inputs(m, 64, 20 * UNIT_BYTES), monkeypatch)
    in_flight = emulator.last.traffic.bytes_in_flight("argument problem.b")  # four waves
    assert in_flight >= 4 * 3 * WEIGHT_BYTES


@pytest.mark.parametrize(
    "m, config",
    [
        (16, MxConfig(16, 1, 7)),
        pytest.param(40, MxConfig(64, 1, 5), marks=full),
        pytest.param(70, MxConfig(64, 0, 7), marks=full),
    ],
    ids=str,
)
def test_same_bits_in_any_order_of_waves(m, config, monkeypatch):
    """Several blocks share each tile, and their waves run in random orders."""
    arguments = inputs(m, 130, 1536)
    results = [run(Emulator(ARCH, seed=seed), config, arguments, monkeypatch) for seed in range(4)]
    assert all(torch.equal(result, results[0]) for result in results)
