"""Test when vLLM's quantizations are marked, and which class runs vLLM's passes."""

import json

import processes
import pytest
import test_selection
import torch
from engines import HERE
from fakes import Fake, called_in, graph_of
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import compiled_ops, pass_manager

pytestmark = pytest.mark.usefixtures("configuration")


def quantization(mode: str, backend: str = "inductor"):
    """Return vLLM's quantization per token in a model with a compilation mode."""
    settings = get_current_vllm_config().compilation_config
    settings.mode, settings.backend = CompilationMode[mode], backend
    return QuantFP8(False, GroupShape.PER_TOKEN, use_ue8m0=False, compile_native=False)


def traced(function) -> set[str]:
    """Return the calls of a function of a row in its graph."""
    return called_in(graph_of(function, torch.ones(2, 256, dtype=torch.bfloat16)))


MARK = "vllm_rocm_ops.marked_quant.default"


@pytest.mark.parametrize(
    ("mode", "backend", "marks"),
    [
        ("VLLM_COMPILE", "inductor", True),
        ("VLLM_COMPILE", "", True),
        ("VLLM_COMPILE", "eager", False),
        ("DYNAMO_TRACE_ONCE", "inductor", False),
        ("NONE", "inductor", False),
    ],
)
def test_quantizations_are_marked_where_passes_run(mode, backend, marks):
    """They are marked only while a graph is traced."""
    quant, x = quantization(mode, backend), torch.ones(2, 256, dtype=torch.bfloat16)
    assert (MARK in traced(quant)) is marks
    values, scale = quant(x)
    assert values.shape == x.shape and scale.shape == (2, 1)


def test_nothing_is_marked_without_the_pass(monkeypatch):
    monkeypatch.setattr(seam, "active", list)
    assert MARK not in traced(quantization("VLLM_COMPILE"))


def test_the_timed_baseline_is_compiled_without_the_plugin():
    params = (None, None, None, None)
    kernel = Fake(quant_fp8=quantization("VLLM_COMPILE"), _get_layer_params=lambda layer: params)
    kernel.quant_fp8.vllm_forward = kernel.quant_fp8.forward_native
    assert MARK not in traced(compiled_ops.quantizer(None, kernel))


@pytest.mark.parametrize("switch", ["+", "-"])
def test_custom_ops_switch_our_subclasses_by_vllms_names(switch):
    """`custom_ops` chooses which of vLLM's forwards runs where the plugin's does not."""
    names = [f"{switch}{theirs.name}" for theirs in (QuantFP8, SiluAndMul, RMSNorm, GemmaRMSNorm)]
    settings = CompilationConfig(custom_ops=["all" if switch == "-" else "none", *names])
    with set_current_vllm_config(VllmConfig(compilation_config=settings), check_compile=False):
        layers = QuantFP8(False, GroupShape.PER_TOKEN), SiluAndMul(), RMSNorm(8), GemmaRMSNorm(8)
        for layer in layers:
            assert type(layer).__name__.startswith("RocmOps") and type(layer).enabled() is (switch == "+")


def test_another_plugins_passes_are_left(monkeypatch):
    monkeypatch.setattr(type(current_platform), "get_pass_manager_cls", classmethod(lambda cls: "other.Passes"))
    with pytest.raises(seam.Unavailable, match="as the platform's passes, got other.Passes"):
        pass_manager.probe()


def test_a_marker_that_runs_quantizes():
    """It runs if nothing runs the passes after all."""
    quant, x = quantization("VLLM_COMPILE"), torch.randn(3, 256).bfloat16()
    found, wanted = quant.marked(x), quant.vllm_forward(x)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("aiter", ["0", "1"])
@pytest.mark.parametrize("release", test_selection.ASKED)
def test_vllms_own_fusions_find_what_is_left(release, aiter):
    """On a faked MI300X the number is the same with markers. vLLM does not find groups of an aten chain."""
    folders = test_selection.python_files(test_selection.RELEASES[release]), HERE.parents[1], HERE
    options = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "none"}
    output = processes.run(f"import own_fusions; own_fusions.main({aiter!r})", *folders, **options)
    found = json.loads(output.splitlines()[-1])
    of_aiter = 4 if release < "0.33" else 6  # since then one has a static scale
    assert sum(without for _, without in found.values()) == (of_aiter if aiter == "1" else 10)
    assert all(marked == without for marked, without in found.values()), found
