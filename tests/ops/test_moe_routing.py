"""Test topk_softmax, topk_sigmoid and grouped_topk, and scores of very negative logits.

The error of these scores grows with the logit like Triton's exp, which vLLM's compiled routing uses.
"""

from __future__ import annotations

import fuzz
import pytest
import torch
from marks import AMD
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import as_tuple, generator_of
from vllm_rocm_ops.emulator import Emulator

LOGITS = (-46.0, -80.0)
CALLS = {
    ops.topk_sigmoid: lambda logits, renormalize: (logits, 8, renormalize),
    ops.grouped_topk: lambda logits, renormalize: (logits, 8, renormalize, 4, 2, "sigmoid", 2.5),
}


def call(the_op, logit: float, renormalize: bool) -> tuple:
    """Return arguments with fp32 logits within 3 of a logit."""
    logits = logit + 6 * torch.rand(32, 64, generator=generator_of(f"{the_op.name} {logit}")) - 3
    return CALLS[the_op](logits, renormalize)


def each(test):
    for name, values in (("logit", LOGITS), ("the_op", CALLS), ("renormalize", (False, True))):
        test = pytest.mark.parametrize(name, values, ids=lambda value: getattr(value, "name", value))(test)
    return test


@each
@pytest.mark.parametrize("arch", AMD)
def test_kernels(arch, the_op, renormalize, logit):
    with launch.executor(Emulator(arch)):
        assert fuzz.run(the_op, call(the_op, logit, renormalize), None, "cpu") == "moe_topk_fp32_x2"


def by_rounded_log(x: torch.Tensor) -> torch.Tensor:
    """Return a sigmoid with a log2(e) of three bits less."""
    return 1 / (1 + torch.exp2(x * -1.4426956))


RIGHT = [lambda x: torch.special.expit(x), lambda x: 1 / (1 + torch.exp2(x * -1.4426950408889634))]
WRONG = [lambda x: 0.5 * torch.tanh(0.5 * x) + 0.5, by_rounded_log]


def check(the_op, given: tuple, monkeypatch, sigmoid) -> None:
    """Check the reference's results with another sigmoid."""
    a = the_op.Arguments(*given)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "sigmoid", sigmoid)
        outputs = as_tuple(the_op.reference(*given))
    fuzz.check(the_op, a, a, outputs)


@each
@pytest.mark.parametrize("sigmoid", RIGHT)
def test_fp32_sigmoids_are_within_the_bound(monkeypatch, the_op, renormalize, logit, sigmoid):
    check(the_op, call(the_op, logit, renormalize), monkeypatch, sigmoid)


@pytest.mark.parametrize("sigmoid", WRONG)
@pytest.mark.parametrize("the_op", CALLS, ids=lambda the_op: the_op.name)
@pytest.mark.parametrize("logit", LOGITS)
def test_sigmoids_of_lower_precision_exceed_the_bound(monkeypatch, the_op, logit, sigmoid):
    """Without renormalization an error common to all scores shows in the weights."""
    with pytest.raises(fuzz.Wrong, match="weights: .* are off"):
        check(the_op, call(the_op, logit, False), monkeypatch, sigmoid)
