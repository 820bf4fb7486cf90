"""Test paged_attention_decode: quantized results have the bits of a separate quantization of the 16-bit result.

test_attention.py and test_attention_lengths.py have more.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from marks import AMD
from op_tests import test_case  # noqa: F401
from test_attention import inputs

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch, quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.emulator import Emulator

OP = ops.paged_attention_decode
GROUP = 128


def quantized(out: torch.Tensor, given) -> tuple[torch.Tensor, ...]:
    """Return the values and group scales of a quantization of a 16-bit result."""
    wide, dtype = out.float(), given.out.dtype
    if given.out_scale is not None:
        return (quantization.static(wide, given.out_scale, dtype),)
    values, scales = quantization.per_token(wide.flatten(1).unflatten(1, (-1, GROUP)), dtype, None)
    return values.view(out.shape), scales.view(given.out_scales.shape)


def require_same_bits(name: str, arch: Arch) -> None:
    """Raise unless a case's quantized results have the bits of the two steps, in each configuration."""
    case = next(case for case in OP.cases() if case.name == name)
    given = OP.Arguments(*case.make("cpu", generator_of(name), arch.fp8_dtype))
    apart = given._replace(out=torch.empty_like(given.query), out_scale=None, out_scales=None)
    for config in OP.configs(given, arch):
        with OP.running(config):
            OP(*given)
            OP(*apart)
        wanted = quantized(apart.out, given)
        found = given.out, *([] if given.out_scales is None else [given.out_scales])
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, wanted, strict=True))


QUANTIZED = [case.name for case in OP.cases() if case.name.startswith(("groups", "out-fp8")) and "-64" not in case.name]


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_results_have_the_bits_of_two_steps(case, arch):
    emulator = Emulator(arch)
    with launch.executor(emulator):
        require_same_bits(case, emulator.arch)


def test_scales_that_cannot_be_written_are_refused():
    given = OP.Arguments(*inputs(OP, "groups", Emulator("gfx942")))
    wrong = {
        "out_scales must be float32 .*, one per 128 elements": {"out_scales": given.out_scales[:, :1]},
        "out_scales must be None with an out_scale": {"out_scale": torch.ones(1)},
        "out must be a tensor with an out_scale or out_scales": {"out": None},
        "out must be e4m3": {"out": given.out.bfloat16()},
        "out_scales must be without overlapping elements": {"out_scales": given.out_scales[:1].expand(3, 3)},
    }
    for text, change in wrong.items():
        with pytest.raises(ValueError, match=text):
            OP(*given._replace(**change))


def test_any_order_of_blocks_gives_the_same_scales():
    emulator, found = Emulator("gfx950", races=False), set()
    given = OP.Arguments(*inputs(OP, "groups-fp16-of-fp8", emulator))
    with launch.executor(emulator):
        for seed in range(4):
            emulator.options = dataclasses.replace(emulator.options, seed=seed)
            OP(*given)
            found.add(given.out_scales.numpy().tobytes())
    assert len(found) == 1
