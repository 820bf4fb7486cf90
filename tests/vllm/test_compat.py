"""Test what replaces things that older releases of vLLM lack, by taking them away from the installed one."""

import inspect
import pathlib
import sys

import pytest
import torch
from fakes import Fake
from vllm.model_executor import utils
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers import fusion
from vllm.model_executor.layers.fusion import fused_act_quant, quant_activation

from vllm_rocm_ops.vllm import compat

LINES = 150  # at most: what needs more is no difference between two releases


def test_compat_stays_small():
    assert len(pathlib.Path(compat.__file__).read_text().splitlines()) <= LINES


@pytest.mark.parametrize("has_function", [True, False])
def test_the_key_of_quantized_input(monkeypatch, has_function):
    layer, name = torch.nn.Module(), "_input_quant_key" if has_function else "input_quant_key"
    if not has_function:
        monkeypatch.delattr(quant_activation, "get_input_quant_key")
    assert compat.input_quant_key_getter()(layer) is None
    setattr(layer, name, "key")
    assert compat.input_quant_key_getter()(layer) == "key"


@pytest.mark.parametrize("inverse", [None, "scale"])
def test_the_parameter_with_scales_per_block(inverse):
    names = {"WEIGHT_SCALE": "weight_scale", "WEIGHT_SCALE_INV": "weight_scale_inv"}
    old = Fake(weight_scale_inv=inverse, **names)
    assert compat.block_scale_attr(old) == ("weight_scale_inv" if inverse else "weight_scale")
    assert compat.block_scale_attr(Fake(block_scale_attr="other")) == "other"


@pytest.mark.parametrize("asks", [True, False])
def test_a_choice_of_kernels_by_kind_of_quantization(monkeypatch, asks):
    def new(config, possible_kernels, *, quantization):
        return config, possible_kernels, quantization

    def old(config, possible_kernels):
        return config, possible_kernels, "not asked"

    assert "quantization" in inspect.signature(linear.choose_scaled_mm_linear_kernel).parameters
    monkeypatch.setattr(linear, "choose_scaled_mm_linear_kernel", new if asks else old)
    chosen = compat.choose_linear_kernel("config", {}, "int8_w8a8")
    assert chosen == ("config", {}, "int8_w8a8" if asks else "not asked")


@pytest.mark.parametrize("has_kinds", [True, False])
def test_the_option_that_names_a_linear_backend(monkeypatch, has_kinds):
    kinds = {"linear_backend_per_quant": {"mxfp8": "emulation"}} if has_kinds else {}
    config = Fake(kernel_config=Fake(linear_backend="triton", **kinds))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    for_all = "--linear-backend", "triton"
    assert compat.linear_backend("mxfp8") == (("linear_backend_per_quant", "emulation") if has_kinds else for_all)
    assert compat.linear_backend("int8_w8a8") == for_all
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: None)
    assert compat.linear_backend("mxfp8") == ("--linear-backend", "auto")


def test_a_table_of_activations_that_quantize(monkeypatch):
    assert compat.fused_act_quants() is fused_act_quant._FUSED_ACT_QUANT
    monkeypatch.delattr(fusion, "fused_act_quant", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fusion.fused_act_quant", None)
    assert compat.fused_act_quants() == {} and compat.fused_act_quants() is not fused_act_quant._FUSED_ACT_QUANT


def test_weights_that_are_prepared_already(monkeypatch):
    monkeypatch.setattr(utils, "is_weights_pre_processed", lambda: True)
    assert compat.is_weights_pre_processed() is True
    monkeypatch.delattr(utils, "is_weights_pre_processed")
    assert compat.is_weights_pre_processed() is False


def test_experts_that_vllm_returns():
    on, off = Fake(enable_return_routed_experts=True), Fake()
    assert compat.returns_routed_experts(Fake(aux_output_config=on, model_config=off))
    assert not compat.returns_routed_experts(Fake(aux_output_config=off, model_config=on))
    assert compat.returns_routed_experts(Fake(model_config=on))
