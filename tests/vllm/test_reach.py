"""Test the report of layers that seams have taken, and of layers that they have not."""

import json
import logging

import pytest
import torch
from fakes import Fake, fake_worker, parameter
from keys import key, pattern

from vllm_rocm_ops.core.op import registered
from vllm_rocm_ops.tools import doctor
from vllm_rocm_ops.vllm import coverage, seam
from vllm_rocm_ops.vllm.worker import Extension


class OtherRMSNorm(torch.nn.Module):
    """A norm of a model's own."""


class Method:
    """The method of a layer, with a kernel of any class."""

    def __init__(self, kernel: str | None, moe: bool = False):
        one = kernel and type(kernel, (), {})()
        self.moe_kernel = Fake(fused_experts=one) if moe else None
        self.fp8_linear = None if moe else one


def linear(kernel: str | None, dtype: torch.dtype = torch.int8) -> torch.nn.Module:
    """Return a linear layer with a kernel."""
    layer = torch.nn.Module()
    layer.weight = parameter(torch.zeros(1, dtype=dtype))
    layer.input_size_per_partition, layer.quant_method = 1, Method(kernel)
    return layer


def experts(kernel: str | None) -> torch.nn.Module:
    """Return a layer of experts with a kernel."""
    layer = torch.nn.Module()
    layer.w13_weight, layer.quant_method = torch.zeros(1), Method(kernel, moe=True)
    return layer


def worker(layers: list[torch.nn.Module], impls=()) -> Fake:
    """Return a worker that has loaded a model of these layers."""
    held = {str(place): Fake(impl=impl) for place, impl in enumerate(impls)}
    return fake_worker(
        torch.nn.ModuleList(layers), compilation_config=Fake(static_forward_context=held), speculative_config=None
    )


@pytest.fixture(autouse=True)
def all_on(monkeypatch):
    monkeypatch.setattr(seam, "active", lambda: [name for names in coverage.SEAMS.values() for name in names])


def test_layers_are_counted_by_kind_and_class():
    """8-bit linear layers without the plugin's kernel, and attention that names a lack, count as missed."""
    mine, lacking, theirs = type("RocmOpsImpl", (), {}), type("RocmOpsOther", (), {}), type("FlashImpl", (), {})
    mine.rocm_ops = Fake(unsupported_reason="")
    lacking.rocm_ops = Fake(unsupported_reason="ALiBi is not supported")
    layers = [linear("RocmOpsScaledLinear"), linear("Marlin"), linear("Marlin"), linear(None, torch.bfloat16)]
    layers += [experts("RocmOpsFp8Experts"), experts("TritonExperts"), OtherRMSNorm()]
    found = coverage.reached(worker(layers, [mine(), lacking(), theirs(), None]))
    assert {kind: (one.taken, dict(one.missed)) for kind, one in found.items()} == {
        "linear layers": (1, {"Method": 2}),
        "layers of experts": (1, {"Method": 1}),
        "norms": (0, {"OtherRMSNorm": 1}),
        "layers of attention": (1, {"RocmOpsOther, ALiBi is not supported": 1, "FlashImpl": 1}),
    }


def test_attention_with_drafts_is_counted_once_more():
    """A line says where vLLM's backend makes their requests prefills, as TRITON_MLA up to 0.30."""
    mine, early = type("RocmOpsImpl", (), {}), type("RocmOpsTritonMLAImpl", (), {})
    mine.rocm_ops = Fake(unsupported_reason="", drafts_refusal="")
    early.rocm_ops = Fake(unsupported_reason="", drafts_refusal="requests with drafts are prefills")
    one = worker([], [mine(), early(), early()])
    kind = "layers of attention with drafts"
    assert kind not in coverage.reached(one)
    one.vllm_config.speculative_config = Fake(num_speculative_tokens=3)
    found = coverage.reached(one)[kind]
    assert (found.taken, found.missed) == (1, {"RocmOpsTritonMLAImpl, requests with drafts are prefills": 2})


def test_layers_of_seams_that_are_off_are_not_counted(monkeypatch):
    """The log has reported these already."""
    monkeypatch.setattr(seam, "active", lambda: ["norm"])
    assert list(coverage.reached(worker([linear("Marlin"), experts(None), OtherRMSNorm()]))) == ["norms"]


def test_a_worker_returns_what_json_can_hold():
    """latency.py writes it into its results."""
    returned = Extension.vllm_rocm_ops_reach(worker([OtherRMSNorm(), OtherRMSNorm()]))
    assert json.loads(json.dumps(returned)) == {"norms": {"taken": 0, "missed": {"OtherRMSNorm": 2}}}


def test_one_line_warns(caplog):
    """It has all layers that no seam took; another line has the rest."""
    layers = [linear("RocmOpsInt8Linear"), linear("Marlin"), OtherRMSNorm(), OtherRMSNorm()]
    with caplog.at_level(logging.INFO):
        coverage.log_results(coverage.reached(worker(layers)))
    missed = "not covered, vLLM's own code runs: 1 linear layers (1 Method); 2 norms (2 OtherRMSNorm)"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "vllm-rocm-ops: covers 1 linear layers"),
        ("WARNING", f"vllm-rocm-ops: {missed}"),
    ]
    caplog.clear()
    coverage.log_results({})
    assert not caplog.records


@pytest.fixture
def called(monkeypatch):
    """Return the calls of a start whose linears were chosen for 8 tokens, with four seams on."""
    counts = {"silu_and_mul_quant": {"kernel": 3, "fallback": 1}, "scaled_mm": {"kernel": 2}}
    plugin = {
        pattern(f"{op} 512 bfloat16"): op.startswith("silu")
        for op in ("silu_and_mul_quant", "rms_norm_static_fp8_quant")
    }
    linears = [Fake(key=key(f"scaled_mm {n}x512 VllmKernel"), plugin_serves=lambda m, n=n: m in (8, n)) for n in (2, 4)]
    attention = Fake(key=key("paged_attention_decode 64 Backend"), plugin_serves=lambda tokens: True)
    monkeypatch.setattr(coverage.vllm_rocm_ops, "stats", lambda: counts)
    monkeypatch.setattr(coverage.compiled_ops.choices, "decisions", plugin)
    monkeypatch.setattr(coverage.kernel_selection, "all_choices", lambda: [*linears, attention])
    active = ["fusion", "activation", "scaled_linear", "fp8_experts", "mxfp8_experts", "decode_attention"]
    monkeypatch.setattr(seam, "active", lambda: active)
    return counts


def test_calls_are_counted_by_seam_and_pattern(called, caplog):
    """Seams that share their op share its count; calls without a seam, and seams without calls, have none."""
    found = coverage.calls((1, 8))
    assert found.seams == {"activation": 4, "scaled_linear": 2, "fp8_experts/mxfp8_experts": 0, "decode_attention": 0}
    assert found.patterns == {"silu_and_mul_quant 512 bfloat16": 4} and found.unreached == []
    with caplog.at_level(logging.INFO):
        coverage.log_calls(found)
    assert caplog.messages == ["vllm-rocm-ops: calls until the end of the warm-up: activation 4, scaled_linear 2"]


def test_a_pattern_may_be_reached_with_its_linear(called):
    """One launch replaces both, for up to its maximum of tokens."""
    called.pop("silu_and_mul_quant")
    called["scaled_mm_silu_and_mul_quant"] = {"kernel": 5}
    found = coverage.calls((1, 8))
    assert found.patterns == {"silu_and_mul_quant 512 bfloat16": 5} and found.unreached == []
    assert found.seams["scaled_linear"] == 7


@pytest.mark.parametrize(("captured", "seams"), [((1, 8), ["scaled_linear"]), ((1, 2), []), ((), [])])
def test_what_was_chosen_and_not_called_is_warned_of(called, caplog, captured, seams):
    """A pattern always causes a warning, a seam if a captured number of tokens is its for all shapes."""
    called.clear()
    assert coverage.calls(captured).unreached == []  # nothing has run
    called["fused_experts"] = {"kernel": 1}
    found = coverage.calls(captured)
    assert found.unreached == ["silu_and_mul_quant 512 bfloat16", *seams]
    coverage.log_calls(found)
    [record] = caplog.records
    assert record.getMessage().endswith(f"in no graph of this model: {', '.join(found.unreached)}")


def test_doctor_shows_what_the_last_start_has_reached(called, monkeypatch, tmp_path):
    """One start is shown for each architecture, and other files are skipped."""
    monkeypatch.setattr(coverage.kernel_selection, "path_of", lambda machine: tmp_path / "gfx942" / "measured-1.json")
    one = worker([OtherRMSNorm()])
    one.vllm_config.model_config = Fake(model="Llama")
    monkeypatch.setattr(seam, "active", lambda: ["norm", "activation"])
    coverage.write(one, coverage.calls())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "reached.json").write_text("{}")
    [found] = doctor.find_reached(tmp_path)
    assert found["seams"] == {"norm": 0, "activation": 4} and found["layers"]["norms"]["missed"] == {"OtherRMSNorm": 1}
    first, second = doctor.reached_lines([found])
    assert first.endswith("reached.json: Llama called norm 0, activation 4")
    assert second == "vLLM's own code ran 1 OtherRMSNorm"


def test_every_seam_names_ops_that_there_are():
    """Seams that only change vLLM around the ops have none."""
    begins = {name: seam.load(name).ops for name in seam.NAMES}
    names = ["all_reduce", *(one.name for one in registered())]
    assert all(any(name.startswith(begin) for name in names) for ops in begins.values() for begin in ops)
    others = {"checked_scales", "compile_cache", "cpu_shims", "fusion", "measured_selection", "norm_residuals"}
    others |= {"quantized_input"}
    assert {name for name, ops in begins.items() if not ops} == others
