"""Test dequantize_int4 on bugs that its cases catch, and attention over 4-bit keys and values."""

from __future__ import annotations

import pytest
import torch
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.standalone.dequantize_int4 import quantize


def test_the_format_is_that_of_perf_kernels():
    """A row made by hand has scale and shift of two groups, then bytes of two values, the first in the lower half."""
    pairs = torch.tensor([0.5, -1.0, 2.0, 3.0]).half()
    rising = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    falling = [0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01]
    packed = torch.tensor(rising + falling, dtype=torch.uint8)
    row = torch.cat((pairs.view(torch.uint8), packed)).view(torch.int32)
    wanted = torch.cat((torch.arange(16) * 0.5 - 1, torch.arange(15, -1, -1) * 2.0 + 3))
    assert torch.equal(ops.dequantize_int4(row, 2).float(), wanted)
    with launch.executor(Emulator("gfx942")):
        assert torch.equal(ops.dequantize_int4(row, 2).float(), wanted)
    assert torch.equal(quantize(wanted, 2), row)


@pytest.mark.parametrize("groups", [1, 4])
def test_attention_to_keys_and_values_of_4_bits(groups):
    """This is 06-attention-decode of perf-kernels: 16 heads of 128 that share a key head, without pages.

    Two launches make 16-bit keys and values, and a third computes attention.
    """
    requests, n, heads, size = 2, 200, 16, 128
    generator = generator_of(f"int4 {groups}")
    query = torch.randn(requests, heads, size, generator=generator).half()
    both = torch.randn(2, requests, n, 1, size, generator=generator)
    bits = [quantize(x, groups) for x in both]
    assert bits[0].shape == (requests, n, 1, groups + size // 8)
    lens, places = torch.tensor([n, 63], dtype=torch.int32), torch.arange(requests, dtype=torch.int32)[:, None]
    with launch.executor(Emulator("gfx950")):
        keys, values = (ops.dequantize_int4(x, groups) for x in bits)
        out, _ = ops.paged_attention_decode(query, keys, values, places, lens, size**-0.5)
    for given, near in ((torch.stack((keys, values)), 4e-3), (both, 0.15)):
        for r, length in enumerate(lens.tolist()):
            k, v = (x[r, :length, 0].double() for x in given)
            wanted = (query[r].double() @ k.t() * size**-0.5).softmax(-1) @ v
            assert (out[r].double() - wanted).abs().max() < near
