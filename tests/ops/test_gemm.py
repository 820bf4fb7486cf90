"""Test gemm beyond its cases: refusals, fallbacks to torch, operands of every type and order, and planted bugs."""

from __future__ import annotations

import itertools

import pytest
import torch
from marks import AMD, full
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of, run_and_check
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared.gemm_cases import inputs


def matrices(a: torch.dtype, b: torch.dtype, m: int = 3, k: int = 32, n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(m, k).to(a), torch.ones(k, n).to(b)


@pytest.mark.parametrize(
    "a, b, k, why",
    [
        (torch.float32, torch.float32, 32, "a is not float32, which torch multiplies"),
        (torch.bfloat16, torch.float16, 32, "a and b are not bfloat16 with float16"),
        (
            torch.float8_e4m3fnuz,
            torch.float8_e4m3fn,
            32,
            r"gfx950 supports a's dtype \(int8, e4m3, e5m2, bf16, fp16\)",
        ),
        (torch.int8, torch.int8, 2**17, r"K is below 2\^17, so that int8 sums fit 32 bits"),
    ],
)
def test_what_is_left_to_torch_says_why(a, b, k, why):
    explanation = ops.gemm.explain(*matrices(a, b, k=k), torch.float32, arch="gfx950")
    assert explanation.is_fallback
    with launch.executor(Emulator("gfx950")), pytest.warns(UserWarning, match=why):
        assert ops.gemm(*matrices(a, b, k=k), torch.float32).eq(k).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"b": torch.ones(31, 5).half()}, r"b must be .* \[K=32, N\], got float16\[31, 5\]"),
        ({"out_dtype": torch.int8}, "out_dtype must be .* of int8 with int8, int32 or int8, got torch.int8"),
        ({"scale_a": torch.ones(5)}, "scale_a must be float32 with 1 or 3 elements, got float32"),
        ({"bias": torch.ones(3).half()}, r"bias must be torch.float16, not of ints, \[N=5\] or \[M=3, 1\], got"),
        ({"activation": "gelu"}, "activation must be none or leaky_relu, got gelu"),
        ({"block_scales": True}, r"scale_a must be float32 \[3, 1\], one scale per block, got none"),
        (
            {"block_scales": True, "scale_a": torch.ones(3, 1), "scale_b": torch.ones(5)},
            r"scale_b must be float32 \[1, 1\], one scale per block, got float32\[5\]",
        ),
    ],
)
def test_gemm_names_its_wrong_argument(change, message):
    a, b = matrices(torch.float16, torch.float16)
    with pytest.raises(ValueError, match=f"gemm: {message}"):
        ops.gemm(**{"a": a, "b": b, "out_dtype": torch.float16} | change)


def test_int8_saturates_and_sums_exactly():
    """Some sums exceed float32's integers, and some results exceed int8."""
    k = 1300
    a, b = torch.full((9, k), -127, dtype=torch.int8), torch.full((k, 3), 127, dtype=torch.int8)
    b[:, 1], b[:, 2], a[:, 0] = -127, 0, 126
    sums = (a.double() @ b.double()).long()
    assert sums.abs().max() > 2**24 and sums.abs().max() % 2
    tiny = torch.full((1,), 1e-5)
    with launch.executor(Emulator("gfx942")):
        for rows in (a, a[:1]):
            assert torch.equal(ops.gemm(rows, b, torch.int32).long(), sums[: len(rows)])
            found = ops.gemm(rows, b, torch.int8, scale_a=tiny)
            assert found[0].tolist() == [-128, 127, 0]


BLOCKS = {"scales": "blocks", "block_scales": True}
KINDS = ("int8", "e4m3", "e5m2", "bf16", "fp16")
PAIRS = [pair for pair in itertools.product(KINDS, KINDS) if set(pair) != {"bf16", "fp16"}]


@full
@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("a, b", PAIRS)
def test_every_pair_in_every_order(a, b, arch_name):
    emulator = Emulator(arch_name)
    for order, (m, n, k) in itertools.product(("rr", "rc", "cr", "cc"), ((5, 3, 100), (67, 9, 144), (1, 1, 1))):
        for given in (
            {"scales": "rows", "bias": "row"},
            {"scales": "tensors", "activation": "leaky_relu"},
            BLOCKS,
        ):
            generator = generator_of(f"{a} {b} {order} {m}")
            arguments = inputs(m, n, k, a, b, order, given, "cpu", generator, emulator.arch.fp8_dtype)
            with launch.executor(emulator):
                run_and_check(ops.gemm, arguments, "cpu")
            assert not ops.gemm.explain(*arguments, arch=arch_name).is_fallback


def test_one_scale_for_all_blocks():
    """If only a weight has scales, the other operand's scale has stride 0."""
    a, b = matrices(torch.bfloat16, torch.float8_e4m3fn, 9, 300, 130)
    scale_b, one = torch.arange(1.0, 7.0).view(3, 2), torch.ones(1)
    with launch.executor(Emulator("gfx950")):
        found = ops.gemm(a, b, torch.float32, one.expand(9, 3), scale_b, block_scales=True)
    assert torch.equal(found, (scale_b.T @ torch.tensor([128.0, 128, 44])).repeat_interleave(128)[:130].expand(9, 130))


@full
@pytest.mark.parametrize("n, k", [(23, 128), (4096, 3078), (4096, 4096)])
def test_shapes_of_few_rows_of_perf_kernels(n, k):
    """The shapes are multreduce_matmul_kernel's: fp16, one row, a bias per row."""
    emulator = Emulator("gfx942")
    made = inputs(1, n, k, "fp16", "fp16", "rc", {"bias": "row"}, "cpu", generator_of("few"), emulator.arch.fp8_dtype)
    with launch.executor(emulator):
        run_and_check(ops.gemm, made[:2] + (torch.float16,) + made[3:5] + (made[5].half(), "none"), "cpu")
