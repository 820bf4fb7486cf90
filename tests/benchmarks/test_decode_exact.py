"""serving_benchmarks/decode_exact.py: the layers of a decode step beside float32, on the CPU, and errors that it must see."""

import argparse
import importlib
import pathlib
import sys

import pytest
import torch

from vllm_rocm_ops import op, ops

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "serving_benchmarks"
sys.path.append(str(SCRIPTS))
decode_exact, decode_step, stock = map(importlib.import_module, ("decode_exact", "decode_step", "stock"))
sys.path.remove(str(SCRIPTS))

LLAMA, DEEPSEEK = "tiny-llama-fp8", "tiny-deepseek-v3-fp8"


def steps(model: str, layers: int = 2, tp: int = 1, ep: int | None = None, **more) -> dict:
    """Both paths of a step; the references compute both."""
    chosen = {"tp": tp, "ep": ep, "layers": layers, "quantization": "token", "fold_shared": False, "device": "cpu"}
    rank = decode_step.build(model, argparse.Namespace(**chosen | more), torch.float8_e4m3fn)
    inputs = decode_step.Inputs(rank, 3, 8)
    references = {o.name: stock.Stock(o, "cpu") for o in op.registered()}
    ours = {"stock": frozenset(), "ours": frozenset(decode_step.REPLACEABLE)}
    return {path: decode_step.Step(rank, inputs, kinds, references) for path, kinds in ours.items()}


@pytest.mark.parametrize(
    ("model", "most", "given"),
    [
        ("tiny-llama", 0.01, {}),
        (LLAMA, 0.06, {"tp": 2}),
        (LLAMA, 0.06, {"quantization": "config"}),
        (DEEPSEEK, 0.06, {"tp": 2}),
        (DEEPSEEK, 0.06, {"ep": 4}),
        (DEEPSEEK, 0.06, {"fold_shared": True}),
        ("tiny-deepseek-v3", 0.01, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_layers_are_those_of_float32_but_for_rounding(model, most, given):
    """To the model's dtype, and of activations to e4m3. Without kernels both paths are off by the same."""
    errors = decode_exact.layer_errors(steps(model, **given))
    assert [len(of) for of in errors.values()] == [3, 3]
    assert 0 < min(errors["stock"]) and max(errors["stock"]) < most
    if "fold_shared" not in given:
        assert errors["ours"] == errors["stock"]
    decode_exact.check(errors)


def test_what_starts_a_layer_is_left_as_it_is():
    both = steps(LLAMA)
    hidden = both["ours"].inputs.hidden.clone()
    assert decode_exact.layer_errors(both) == decode_exact.layer_errors(both)
    assert torch.equal(hidden, both["ours"].inputs.hidden)


WRONG = {
    "the scale of a weight": (LLAMA, "scaled_mm", {"scale_b": 1.1}, 2),
    "the scales of a weight's blocks": (DEEPSEEK, "block_scaled_mm", {"scale_b": 1.1}, 4),
    "the weights of experts": (DEEPSEEK, "fused_experts", {"w2_scale": 1.2}, 0),
    "the weight of a norm": ("tiny-llama", "fused_add_rms_norm", {"weight": 1.02}, 1),
    "an unquantised weight": ("tiny-llama", "unquantized_gemm", {"weight": 1.02}, 2),
    "the scale of scores": (LLAMA, "paged_attention_decode", {"scale": 1.3}, 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_factor_in_one_call_is_an_error(what, monkeypatch):
    """Of ours; the same of stock is none."""
    model, name, factors, at = WRONG[what]
    the_op, calls = getattr(ops, name), []
    exact = the_op.reference

    def wrong(*arguments):
        calls.append(name)
        a = the_op.Arguments(*arguments)
        if len(calls) - 1 == at:
            a = a._replace(**{argument: getattr(a, argument) * by for argument, by in factors.items()})
        return exact(*a)

    both = steps(model)
    decode_exact.check(decode_exact.layer_errors(both))  # stock has chosen, and calls the reference no more to do so
    monkeypatch.setattr(the_op, "reference", wrong)
    errors = decode_exact.layer_errors(both)
    assert len(calls) > at
    with pytest.raises(RuntimeError, match=r"ours must be off by at most 1\.\d times as much as stock, of float32's"):
        decode_exact.check(errors)
    decode_exact.check({"stock": errors["ours"], "ours": errors["stock"]})


def test_results_that_are_no_numbers_are_an_error():
    with pytest.raises(RuntimeError, match="of float32's layer 1, got nan"):
        decode_exact.check({"stock": [0.01, 0.01, 0.01], "ours": [0.01, float("nan"), 0.01]})
    with pytest.raises(RuntimeError, match="of float32's logits, got 0.0200 and 0.0100"):
        decode_exact.check({"stock": [0.01, 0.01], "ours": [0.011, 0.02]})
