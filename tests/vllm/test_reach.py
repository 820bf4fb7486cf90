"""What is said of the layers that seams have taken, and of those that they have not."""

import json
import logging
import types

import pytest
import torch

from vllm_rocm_ops.vllm import reach, seam
from vllm_rocm_ops.vllm.worker import Extension


class OtherRMSNorm(torch.nn.Module):
    """A norm of a model's own."""


class Method:
    """How a layer's weight is used, by a kernel of whatever class."""

    def __init__(self, kernel: str | None, moe: bool = False):
        one = kernel and type(kernel, (), {})()
        self.moe_kernel = types.SimpleNamespace(fused_experts=one) if moe else None
        self.fp8_linear = None if moe else one


def linear(kernel: str | None, dtype: torch.dtype = torch.int8) -> torch.nn.Module:
    """A linear layer with a kernel."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)
    layer.input_size_per_partition, layer.quant_method = 1, Method(kernel)
    return layer


def experts(kernel: str | None) -> torch.nn.Module:
    """A layer of experts with a kernel."""
    layer = torch.nn.Module()
    layer.w13_weight, layer.quant_method = torch.zeros(1), Method(kernel, moe=True)
    return layer


def worker(layers: list[torch.nn.Module], impls: list | None = None):
    """A worker that has loaded a model of these layers."""
    held = {str(place): types.SimpleNamespace(impl=impl) for place, impl in enumerate(impls or [])}
    config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context=held))
    model = torch.nn.ModuleList(layers)
    return types.SimpleNamespace(vllm_config=config, model_runner=types.SimpleNamespace(get_model=lambda: model))


@pytest.fixture(autouse=True)
def all_on(monkeypatch):
    monkeypatch.setattr(seam, "active", lambda: [name for names in reach.SEAMS.values() for name in names])


def test_layers_are_counted_by_kind_and_class():
    """8-bit linear layers without a kernel of ours, and attention that says what it lacks, are missed."""
    mine, lacking, theirs = type("RocmOpsImpl", (), {}), type("RocmOpsOther", (), {}), type("FlashImpl", (), {})
    mine.rocm_ops, lacking.rocm_ops = types.SimpleNamespace(lacks=""), types.SimpleNamespace(lacks="it has ALiBi")
    layers = [linear("RocmOpsScaledLinear"), linear("Marlin"), linear("Marlin"), linear(None, torch.bfloat16)]
    layers += [experts("RocmOpsFp8Experts"), experts("TritonExperts"), OtherRMSNorm()]
    found = reach.found(worker(layers, [mine(), lacking(), theirs(), None]))
    assert {kind: (one.taken, dict(one.missed)) for kind, one in found.items()} == {
        "linear layers": (1, {"Method": 2}),
        "layers of experts": (1, {"Method": 1}),
        "norms": (0, {"OtherRMSNorm": 1}),
        "layers of attention": (1, {"RocmOpsOther, it has ALiBi": 1, "FlashImpl": 1}),
    }


def test_layers_of_seams_that_are_off_are_not_counted(monkeypatch):
    """Which the log has said already."""
    monkeypatch.setattr(seam, "active", lambda: ["norm"])
    assert list(reach.found(worker([linear("Marlin"), experts(None), OtherRMSNorm()]))) == ["norms"]


def test_a_worker_returns_what_json_can_hold():
    """As latency.py writes it into its results."""
    returned = Extension.vllm_rocm_ops_reach(worker([OtherRMSNorm(), OtherRMSNorm()]))
    assert json.loads(json.dumps(returned)) == {"norms": {"taken": 0, "missed": {"OtherRMSNorm": 2}}}


def test_one_line_warns(caplog):
    """Of all that no seam took; one informs of the rest."""
    with caplog.at_level(logging.INFO):
        reach.say(reach.found(worker([linear("RocmOpsInt8Linear"), linear("Marlin"), OtherRMSNorm(), OtherRMSNorm()])))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "vllm-rocm-ops: takes 1 linear layers"),
        ("WARNING", "vllm-rocm-ops: vLLM's own code runs 1 linear layers (1 Method); 2 norms (2 OtherRMSNorm)"),
    ]
    caplog.clear()
    reach.say({})
    assert not caplog.records


def test_a_pattern_that_no_graph_holds_is_warned_of(monkeypatch, caplog):
    """It was chosen, but no call of its op has been seen when all is captured."""
    calls = {"silu_and_mul_quant": {"kernel": 3, "fallback": 1}}
    monkeypatch.setattr(reach.vllm_rocm_ops, "stats", lambda: calls)
    with caplog.at_level(logging.INFO):
        reach.say_calls({"silu_and_mul_quant 512 bfloat16": True, "rms_norm_static_fp8_quant 512 bfloat16": False})
    assert caplog.messages == ["vllm-rocm-ops: calls up to the end of the warm-up: silu_and_mul_quant 4"]
    caplog.clear()
    calls.clear()
    reach.say_calls({"silu_and_mul_quant 512 bfloat16": True})
    assert caplog.messages == ["vllm-rocm-ops: chosen, but in no graph of this model: silu_and_mul_quant 512 bfloat16"]
