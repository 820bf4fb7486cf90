"""Test the registry of ops that vLLM calls: what commands read from it holds for any call of an op."""

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.vllm.comparisons import COMPARISONS
from vllm_rocm_ops.vllm.selection.comparison import GROUP, relative

SHARES = {ops.scaled_mm_silu_and_mul_quant: 0.05, ops.fused_experts: 0.1}  # error shares: these ops quantize inside


@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.name)
def test_exact_of_a_call_is_near_the_reference(op):
    """Compare the last group of columns of two tokens, in up to six cases of each op."""
    found = 0
    for case in op.cases():
        a = op.Arguments(*case.make("cpu", generator_of(case.name), torch.float8_e4m3fn))
        given = a._asdict()
        is_layers = given.get("activation", "none") == "none" and given.get("scale_a", a) is not None
        is_plain = not given.get("shuffled") and a[1].dim() <= 3 and not given.get("block_scales")
        is_plain = is_plain and given.get("out_scales") is None
        if not is_layers or not is_plain or len(a[0]) < 2 or a[0].numel() > 2**20 or found == 6:
            continue
        if "topk_ids" in given and not (
            0 <= a.topk_ids.min() and a.topk_ids.max() < len(a.w1)
        ):  # tokens of other ranks
            continue
        result = op.reference(*a)
        if result.dtype == torch.int8:
            continue
        result = result.float().flatten(1)
        rows, found = torch.tensor([0, len(result) - 1]), found + 1
        columns = torch.arange(result.shape[1] // GROUP * GROUP)[-GROUP:]
        wanted = result[rows][:, columns]
        assert relative(COMPARISONS[op].exact_of(a, rows, columns) - wanted, wanted) < SHARES.get(op, 0.02), case.name
    assert found


@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.name)
def test_a_call_has_descriptions(op):
    made = (op.Arguments(*case.make("meta", torch.Generator(), torch.float8_e4m3fn)) for case in op.cases())
    a = next(a for a in made if getattr(a, "scale_a", a) is not None)
    described = [COMPARISONS[op].describe(layer) for layer in COMPARISONS[op].layers_of(a)]
    assert described and len(set(described)) == len(described)


def test_linears_are_those_of_models():
    assert {op for op in COMPARISONS if op not in (ops.fused_experts, ops.batched_gemm)} == set(model_layers.LINEARS)
