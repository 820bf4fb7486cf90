"""Test the baseline of MXFP4 experts that calls OpenAI's triton_kernels, without them: the parameters of vLLM's functions, and what they get."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.tools.bench import experts
from vllm_rocm_ops.tools.bench.baselines import triton_kernels

pytest.importorskip("vllm")

MODULES = (
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe",
    "vllm.model_executor.layers.quantization.utils.mxfp4_utils",
    "vllm.model_executor.layers.fused_moe.oracle.mxfp4",
)


def test_triton_kernels_get_gpt_oss_experts_as_vllm_holds_them(monkeypatch):
    """Its kernels need a GPU: the plugin's reference replaces them, behind the parameters of vLLM's functions."""
    imported, (moe, utils, oracle) = importlib.import_module, map(importlib.import_module, MODULES)

    def stands_in(output, hidden, w1, w2, ids, weights, experts, **named):
        config = named["quant_config"]
        scales = (quant.scale.weight_scale.data.transpose(1, 2) for quant in (config._w1, config._w2))
        biases = config.w1_bias, config.w2_bias
        assert [bias.dtype for bias in biases] == 2 * [torch.float32] and (w1.dtype, w2.dtype) == ("fp4", "fp4")
        assert experts == 8 and named["topk"] == 2 and output.shape == hidden.shape
        values, rest = (w1.data.transpose(1, 2), w2.data.transpose(1, 2)), (*biases, *triton_kernels.SWIGLU)
        given = weights, ids, torch.bfloat16, *scales, None, None, None, 0, False, False, False
        return ops.fused_experts.reference(hidden, *values, *given, *rest)

    def stands_in_for_both(hidden, w1, w2, logits, topk, renormalize, quant_config):
        weights, ids = logits.float().topk(topk)
        routing = ids.int(), weights.softmax(1), logits.shape[1]
        return stands_in(torch.empty_like(hidden), hidden, w1, w2, *routing, topk=topk, quant_config=quant_config)

    def behind(name: str, call) -> None:
        signature = inspect.signature(getattr(moe, name))
        monkeypatch.setattr(
            moe, name, lambda *given, **named: signature.bind(*given, **named) and call(*given, **named)
        )

    behind("make_routing_data", lambda ids, weights, experts: (ids, weights, experts))
    behind("triton_kernel_fused_experts", stands_in)
    behind("triton_kernel_moe_forward", stands_in_for_both)
    set_flags = []
    wrap = lambda data, dtype=None: SimpleNamespace(data=data, dtype=dtype)
    fakes = {
        "triton_kernels.swiglu": SimpleNamespace(),
        "triton_kernels.tensor": SimpleNamespace(FP4="fp4", wrap_torch_tensor=wrap),
        "triton_kernels.matmul_ogs_details.opt_flags": SimpleNamespace(
            reset_opt_flags_constraints=set_flags.clear, update_opt_flags_constraints=set_flags.append
        ),
    }
    monkeypatch.setattr(triton_kernels.importlib, "import_module", lambda name: fakes.get(name) or imported(name))
    monkeypatch.setattr(oracle, "PrecisionConfig", SimpleNamespace, raising=False)
    swizzled = lambda values, scale: (wrap(values.mT, "fp4"), None, wrap(scale.mT))
    monkeypatch.setattr(utils, "_swizzle_mxfp4", swizzled)
    share = experts.Share(8, 8, 2, 128, 128, swiglu=triton_kernels.SWIGLU)
    monkeypatch.setattr(experts, "FOUR_BIT_SHARES", {"one": (share, "mxfp4"), "other": (share, "mxfp8")})
    [shape, other] = experts.four_bit_experts((3,))
    sets = [shape.arguments("cpu", torch.float8_e4m3fn)]
    found = shape.baselines(sets)
    assert len(found) == 6 and [*found][:2] == [
        "vllm triton_kernels strided",
        "vllm triton_kernels strided from logits",
    ]
    line = shape.check(sets, "cpu", found)()
    assert len(line["differs"]) == 6 and max(line["differs"].values()) < 2e-2 and line["vllm_tiles"] is None
    assert set_flags == [{"split_k": 1}]  # of the last
    a = ops.fused_experts.Arguments(*sets[0])
    for wrong, why in ((a._replace(swiglu_limit=None), "activation"), (a._replace(shared_experts=1), "none shared")):
        with pytest.raises(ValueError, match=why):
            found["vllm triton_kernels strided"].prepare(*wrong)
    [baseline] = other.baselines([arguments := other.arguments("cpu", torch.float8_e4m3fn)]).values()
    with pytest.raises(ValueError, match="without biases only"):
        baseline.prepare(*arguments)
