"""Test fused_experts with int8 and e5m2 weights: refusals, fallbacks with their reasons, and planted bugs."""

import pytest
import torch
from marks import AMD

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.correctness import generator_of

OP = ops.fused_experts


def arguments(name: str, **changes):
    case = next(case for case in OP.cases() if case.name == name)
    return OP.Arguments(*case.make("cpu", generator_of(name), torch.float8_e4m3fn))._replace(**changes)


@pytest.mark.parametrize("kind", ["int8", "e5m2"])
@pytest.mark.parametrize("arch", AMD)
def test_kernels_of_8_bits(kind, arch):
    a = OP.Arguments(
        *next(c for c in OP.cases() if c.name == kind).make(
            "meta", torch.Generator(), torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        )
    )
    assert all(
        "fused_experts_tiled_bytes" in launch.module for launch in planned(a, arch) if "gate_up" in launch.symbol
    )
    assert any(f"{kind}_with_bf16" in launch.symbol for launch in planned(a._replace(weight_only=True), arch))
    of_blocks = a._replace(w1_scale=torch.empty(4, 2, 2, device="meta"), w2_scale=torch.empty(4, 2, 1, device="meta"))
    if kind == "e5m2":
        explained = OP.explain(*of_blocks._replace(weight_only=True), arch=arch)
        assert explained.is_fallback and "weight-only scales are per row or per tensor" in explained.source
        other = "gfx950" if arch == "gfx942" else "gfx942"
        assert f"{other} supports the weights' dtype" in OP.explain(*a, arch=other).source


def planned(a, arch: str) -> tuple:
    chosen = OP.explain(*a, arch=arch)
    assert chosen.config is not None, chosen.source
    return chosen.launches


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"w1_scale": torch.ones(4, 2, 2)}, "w1_scale must be float32"),
        ({"w1_scale": None}, "w1_scale must be float32"),
        (
            {
                "w1": torch.zeros(4, 192, 192).bfloat16(),
                "w2": torch.zeros(4, 192, 96).bfloat16(),
                "w1_scale": torch.ones(4),
            },
            "w1_scale must be None",
        ),
        ({"hidden": torch.zeros(5, 192, dtype=torch.int8)}, "hidden_scale must be"),
        ({"hidden": torch.zeros(5, 192, dtype=torch.int8), "weight_only": True}, "hidden must be"),
        ({"act_scale": torch.ones(1), "weight_only": True}, "act_scale must be"),
    ],
)
def test_refuses(changes, said):
    with pytest.raises(ValueError, match=said):
        OP(*arguments("int8", **changes))


def test_weight_only_is_the_exact_product():
    """W8A16 with int8 weights gives the result of bf16 arithmetic on dequantized weights."""
    a = arguments("int8-alone")
    wide = a._replace(
        w1=(a.w1.float() * a.w1_scale[..., None]).bfloat16(), w2=(a.w2.float() * a.w2_scale[..., None]).bfloat16()
    )
    plain = OP.reference(*wide._replace(w1_scale=None, w2_scale=None, weight_only=False))
    got = OP.reference(*a)
    assert (got - plain).float().norm() < 0.01 * plain.float().norm()
    quantized = OP.reference(*a._replace(weight_only=False))
    assert not torch.equal(got, quantized)


def test_int8_quantization():
    x = torch.tensor([[0.5, -1.5, 2.5, 127.0], [0.0, 0.0, 0.0, 0.0], [1.0, float("nan"), -2.0, 2.0]])
    values, scale = quantization.int8(x)
    assert values.tolist() == [[0, -2, 2, 127], [0, 0, 0, 0], [64, 127, -127, 127]]  # ties to even
    assert scale.flatten().tolist() == pytest.approx([1.0, 1e-10 / 127, 2 / 127])
