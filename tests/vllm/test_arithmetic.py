"""Test arithmetic.py: what it records of a model, the calls it makes of that, and that it notices a wrong op."""

import contextlib
import functools
import json

import arithmetic
import checkpoints
import marks
import pytest
import torch
import trained
from safetensors.torch import save_file

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.correctness import as_tuple, clone
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.emulator import Emulator

FNUZ = torch.float8_e4m3fnuz


def call(name: str, case: str, layer: str = "layers.0.norm") -> arithmetic.Call:
    """Return the call of a case, as vLLM's CPU engine makes it."""
    [one] = (one for one in getattr(ops, name).cases() if one.name == case)
    return name, layer, one.make("cpu", torch.Generator().manual_seed(0), torch.float8_e4m3fn)


CALLS = [
    call("rms_norm", "hidden8"),
    call("rms_norm_static_fp8_quant", "hidden8"),
    call("scaled_mm", "m2", "layers.0.o"),
]


@pytest.fixture(params=["gfx942", "gfx950"])
def machine(request) -> tuple:
    emulator = Emulator(request.param)
    return "cpu", emulator.arch, functools.partial(launch.executor, emulator)


def test_ops_are_as_near_as_baseline(machine):
    found = arithmetic.judged(CALLS, *machine)
    assert found["wrong"] == [] and found["fallbacks"] == {}
    assert [(one["op"], one["result"]) for one in found["results"]] == [
        ("rms_norm", "output"),
        ("rms_norm_static_fp8_quant", "values"),
        ("scaled_mm", "output"),
    ]
    assert all(1e-4 < one["ours"] < 0.1 and 0 < one["of_allowed"] <= 1 for one in found["results"])
    [*lines] = arithmetic.text({"case": "llama token", "machine": "gfx942, emulated", **found})
    assert lines[0] == "llama token, gfx942, emulated:" and "in layers.0.o" in lines[-1]


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda x: x * 1.02, "scaled_mm's output is off by"),
        (lambda x: x + 2.0**-9 * x * torch.randint(-2, 3, x.shape), "scaled_mm's output has error"),
        (lambda x: x * torch.nan, "scaled_mm's output is off by nan"),
    ],
    ids=["2 percent", "a step", "NaN"],
)
def test_an_op_that_is_wrong_is_noticed(monkeypatch, machine, plant, why):
    exact = Op.__call__

    def planted(self, *args):
        found = exact(self, *args)
        return plant(found.float()).to(found.dtype) if self.name == "scaled_mm" else found

    monkeypatch.setattr(Op, "__call__", planted)
    found = arithmetic.judged(CALLS, *machine)
    assert any(what.startswith(f"layers.0.o: {why}") for what in found["wrong"]), found
    assert [one["wrong"] for one in found["results"]] == [False, False, True]


def test_baseline_is_vllms_kernel_where_it_has_one():
    """vLLM's norm on CPU updates as the plugin's does; without AVX-512 it rounds toward zero."""
    name, _, given = call("fused_add_rms_norm", "hidden8")
    the_op = getattr(ops, name)
    mine, theirs = (the_op.Arguments(*map(clone, given)) for _ in range(2))
    [wanted], [found] = as_tuple(the_op.reference(*mine)), arithmetic.of_vllm(the_op, theirs)
    assert (found.double() - wanted.double()).norm() < 0.01 * wanted.double().norm()
    torch.testing.assert_close(mine.residual, theirs.residual, atol=0, rtol=2**-7)
    assert not torch.equal(theirs.residual, given[1])
    assert arithmetic.of_vllm(ops.router_z_loss, ()) is None
    assert arithmetic.baseline(the_op, mine)[1] == "reference"


def test_where_no_kernel_runs_nothing_is_right():
    found = arithmetic.judged(CALLS[:1], "cpu", archs.ARCHS["gfx942"], contextlib.nullcontext)
    assert found["wrong"] == ["no kernel ran"] and found["fallbacks"].keys() == {"rms_norm"}


def test_a_gpus_fp8_stands_for_the_same_values():
    for name, _, given in CALLS:
        the_op = getattr(ops, name)
        other = the_op.Arguments(*arithmetic.in_type_of(FNUZ, the_op, given))
        before, factor = the_op.Arguments(*given), 0.5 if name.endswith("quant") else 1.0
        wanted, same = (as_tuple(the_op.reference(*a)) for a in (before, other))
        for x, y in zip(wanted, same, strict=True):
            assert torch.equal(x.double() * factor, y.double()) and (x.dtype == y.dtype) == (factor == 1.0)
    name, _, given = call("mxfp8_scaled_mm", "m1")
    assert arithmetic.in_type_of(FNUZ, getattr(ops, name), given) is given


def test_calls_are_recorded_by_layer_in_the_last_pass_of_so_many_rows():
    class Norm(torch.nn.Module):
        def forward(self, x):
            return ops.rms_norm(x, torch.ones(x.shape[1]), 1e-5)

    model = torch.nn.Sequential(Norm(), torch.nn.Sequential(Norm()))
    with arithmetic.recorded(model, rows=3) as calls:
        for value, rows in ((1, 3), (2, 5), (4, 3), (8, 1)):
            model(torch.full((rows, 8), float(value)))
        ops.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)
    assert [(name, layer) for name, layer, _ in calls] == [("rms_norm", "0"), ("rms_norm", "1.0")]
    assert torch.equal(calls[0][2][0], torch.full((3, 8), 4.0))
    model(torch.ones(3, 8))
    assert len(calls) == 2


def test_products_of_a_cpu_are_recorded():
    """They are vLLM's, in place of the plugin's."""

    class Layer(torch.nn.Linear):
        cpu_linear = staticmethod(torch.nn.functional.linear)

        def forward(self, x):
            return self.cpu_linear(x, self.weight, self.bias)

    model, x = torch.nn.Sequential(Layer(8, 4, dtype=torch.bfloat16)), torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.no_grad(), arithmetic.recorded(model, rows=2) as calls:
        model(x)
    [(name, layer, (tokens, weight, bias))] = calls
    assert (name, layer) == ("unquantized_gemm", "0") and torch.equal(tokens, x)
    assert torch.equal(weight, model[0].weight) and torch.equal(bias, model[0].bias)


def test_no_requests_are_refused(capsys):
    with pytest.raises(SystemExit):
        arithmetic.parse(["--requests", "0"])
    assert "--requests must be at least 1, got 0" in capsys.readouterr().err


@marks.full
@pytest.mark.slow
def test_in_vllm(tmp_path, capsys):
    """The ops of a random model are as close as the baseline."""
    save_file(checkpoints.llama_weights(trained.CONFIGS["llama"]), tmp_path / "llama.safetensors")
    options = ["--folder", str(tmp_path), "--model", "llama", "--kind", "token", "--requests", "2"]
    output = tmp_path / "{}.jsonl"
    assert arithmetic.main([*options, "--output", str(output)]) == 0, capsys.readouterr().out
    for name in ("gfx942", "gfx950"):
        [line] = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        ran = {(one["op"], one["layer"].removeprefix("model.layers.1.")) for one in line["results"]}
        assert ran >= {
            ("fused_add_rms_norm", "input_layernorm"),
            ("scaled_mm", "self_attn.qkv_proj"),
            ("paged_attention_decode", "self_attn.attn"),
            ("silu_and_mul_per_token_quant", "mlp.act_fn"),
            ("scaled_mm", "mlp.down_proj"),
            ("fused_add_rms_norm", "model.norm"),
            ("unquantized_gemm", "lm_head"),
        }
        assert not line["wrong"] and not line["fallbacks"]
