"""Test the gate of shared experts in the launch of their activation: layers, what stays vLLM's, and what is timed."""

import types

import pytest
import torch
from engines import counted
from fakes import change, check_and_time, graph_of, require_near
from linears import one_rank  # noqa: F401
from test_layers import linear
from test_row_selection import Linear
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import coverage
from vllm_rocm_ops.vllm.graph import compiled_ops, fused_quant, model_queries
from vllm_rocm_ops.vllm.linear import mxfp8_linear
from vllm_rocm_ops.vllm.moe import expert_support, shared_expert_gate
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.key import EAGER

pytestmark = pytest.mark.usefixtures("configuration", "one_rank")
HIDDEN, INNER, ROWS = 256, 128, 5
OP = "silu_and_mul_with_expert_gate"
QUANTIZED = {
    "kFp8StaticTensorSym": f"{OP}_quant",
    "kFp8DynamicTokenSym": f"{OP}_per_token_quant",
    "kFp8Dynamic128Sym": f"{OP}_per_block_quant",
    "MX": f"{OP}_mxfp8_quant",
}


class SharedExperts(torch.nn.Module):
    """vLLM's name of the holder of a shared expert, which it calls within an op."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self._layer = layer


def mlp(kind: type = Qwen2MoeMLP, gate: type = ReplicatedLinear, columns: int = 1, **options) -> torch.nn.Module:
    """Return vLLM's shared expert of Qwen2-MoE, Qwen3-Next and Qwen3.5, with a gate."""
    generator = torch.Generator().manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = kind(
            HIDDEN, INNER, "silu", reduce_results=False, expert_gate=gate(HIDDEN, columns, bias=False, **options)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    for weight in made.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5 * 2)
    for one in (made.gate_up_proj, made.down_proj, made.expert_gate):
        one.cpu_linear = torch.nn.functional.linear
    made.act_fn.vllm_forward = made.act_fn.forward_native  # it compiles nothing
    return made


def tokens(rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def found(layer: torch.nn.Module, compiles: bool = True, dtype: torch.dtype = torch.bfloat16) -> list:
    """Return the comparisons that a model with this shared expert has."""
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().model_config = types.SimpleNamespace(dtype=dtype)
    fused_quant.runnable_gates.cache_clear()
    return list(shared_expert_gate.gates(SharedExperts(layer), compiles))


def adopted(**options) -> torch.nn.Module:
    layer = mlp(**options)
    [one] = found(layer)
    one.apply_decision(True)
    return layer


def called() -> dict[str, int]:
    return counted(vllm_rocm_ops.stats())


@pytest.mark.parametrize("arch", [None, "gfx942"])
def test_the_activation_multiplies_by_the_gate(arch):
    """vLLM runs a product of one column, a sigmoid and a product more."""
    layer, x = mlp(), tokens()
    wanted = layer(x)
    without = called()
    [one] = found(layer)
    one.apply_decision(True)
    assert isinstance(layer, Qwen2MoeMLP) and type(layer).__name__ == "Qwen2MoeMLP"
    vllm_rocm_ops.reset_stats()
    change(layer.expert_gate, "forward", None)  # nothing calls it
    with launch.executor(arch and Emulator(arch)):
        result = layer(x)
    assert (result.float() - wanted.float()).norm() < 0.01 * wanted.float().norm()
    [name] = [name for name in called() if "silu" in name]
    assert name == OP and sum(called().values()) == sum(without.values()) - bool(without.get("unquantized_gemm"))
    one.apply_decision(False)
    assert type(layer) is Qwen2MoeMLP


@pytest.mark.parametrize(("key", "name"), QUANTIZED.items())
def test_the_projection_gets_the_product_quantized(key, name):
    """Values and exponents of MX-FP8 are the input of the plugin's kernel, and of vLLM's, which then quantizes none."""
    (layer, x), got = (adopted(), tokens()), []
    if key == "MX":
        down = torch.nn.Module()
        down.vllm_rocm_ops_quantize, down.vllm_rocm_ops_is_mx = mxfp8_linear.quantize, True
    else:
        down = linear(key, input_scale=torch.tensor(0.02), vllm_rocm_ops_quantize=None).linear
    layer._modules["down_proj"] = down
    down.forward = lambda given: (got.append(given) or torch.zeros(ROWS, HIDDEN), None)
    layer(x)
    [given] = got
    gate, up = layer.gate_up_proj(x)[0].float().chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up * torch.sigmoid(layer.expert_gate(x)[0].float())
    assert name in called()
    if key == "kFp8StaticTensorSym":
        wanted = wanted.clamp(-0.02 * 448, 0.02 * 448)
    if key == "MX":
        assert isinstance(given, mxfp8_linear.QuantizedRows)
        assert (given.shape, given.dtype, given.numel()) == (wanted.shape, x.dtype, wanted.numel())
        found = compiled_ops.dequantized(given.values, given.scale)
    else:
        assert given.data.dtype == fused_quant.QUANT_DTYPE
        found = given.data.float() * (
            given.scale.float() if given.scale.numel() > 1 else given.scale.float().view(1, 1)
        )
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.07)
    delattr(down, "vllm_rocm_ops_quantize")  # as a layer of LoRA's
    layer(x)
    assert isinstance(got[1], torch.Tensor) and got[1].dtype == x.dtype


def test_other_tokens_and_compiled_graphs_have_vllms_gate():
    layer = adopted()
    strided = torch.randn(HIDDEN, ROWS, generator=torch.Generator().manual_seed(1)).bfloat16().t()
    layer(strided)
    assert OP not in called()
    targets = [str(node.target) for node in graph_of(layer, tokens()).nodes]
    assert any("sigmoid" in target for target in targets) and OP not in called()


class Tanh(Qwen2MoeMLP):
    def forward(self, x):
        out, _ = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))
        return out if self.expert_gate is None else torch.tanh(self.expert_gate(x)[0]) * out


class Gate(ReplicatedLinear):
    """A class that may do more, as LoRA's."""


STAY = {
    "another function of the gate": ({"kind": Tanh}, None, ""),
    "no gate": ({}, ("expert_gate", None), ""),
    "a gate of another class": ({"gate": Gate}, None, "gates of class Gate"),
    "two columns": ({"columns": 2}, None, "gates with a weight of [2, 256]"),
    "a float32 gate": ({"params_dtype": torch.float32}, None, "gates of torch.float32 with torch.bfloat16 tokens"),
    "a bias of the projection": ({}, ("down_proj.bias", torch.ones(HIDDEN)), "a bias of the gate or of down_proj"),
}


@pytest.mark.parametrize("why", STAY)
def test_layers_that_stay_vllms(why, caplog):
    options, changed, said = STAY[why]
    layer = mlp(**options)
    if changed:
        path, value = changed
        holder, _, name = path.rpartition(".")
        setattr(layer.get_submodule(holder), name, torch.nn.Parameter(value) if value is not None else None)
    expert_support.log_unsupported.cache_clear()
    with caplog.at_level("INFO"):
        assert not found(layer)
    assert said in caplog.text and ("gates of shared experts stay on vLLM's kernels" in caplog.text) == bool(said)


@pytest.mark.parametrize("how", ["compiled outside of an op", "batch invariance", "float32", "kernels"])
def test_settings_that_keep_the_gate_vllms(monkeypatch, how):
    layer = mlp()
    assert found(layer)
    if how == "compiled outside of an op":
        monkeypatch.setattr(model_queries, "opaque", lambda model: set())
        assert found(layer, compiles=False)
    elif how == "batch invariance":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    elif how == "kernels":
        monkeypatch.setattr(fused_quant, "runnable", lambda table: ())
    assert not found(layer, dtype=torch.float32 if how == "float32" else torch.bfloat16)
    fused_quant.runnable_gates.cache_clear()


@pytest.mark.parametrize("key", [None, *QUANTIZED])
def test_it_is_measured_beside_vllms_launches(monkeypatch, key):
    """The emulated kernel is as close to the exact product as vLLM's launches. A wrong gate is found."""
    layer = mlp()
    layer.down_proj.vllm_rocm_ops_quantize = None
    if key == "MX":
        layer.down_proj.vllm_rocm_ops_quantize, layer.down_proj.vllm_rocm_ops_is_mx = mxfp8_linear.quantize, True
        layer.down_proj.vllm_rocm_ops_column_major_scales = False
    elif key:
        layer._modules["down_proj"] = Linear(key, INNER)
    else:
        del layer.down_proj.vllm_rocm_ops_quantize
    [one] = found(layer)
    name = (QUANTIZED | {None: OP})[key]
    assert str(one.key) == f"{name} 128 bfloat16 gate of 256 {EAGER}" and one.runs_unmeasured()
    if key != "kFp8StaticTensorSym":  # whose scale does not fit random numbers
        require_near(one)
    for fault in (lambda given: (given[0], -given[1]), lambda given: (given[0], given[1] * 1.5)):
        monkeypatch.setattr(
            one.op, "run_kernels", lambda *given, fault=fault: one.op.reference(*fault(given), *given[2:])
        )
        with pytest.raises(kernel_timing.Mismatch):
            check_and_time(one)


def test_the_gated_launch_counts_as_the_activations_pattern(monkeypatch):
    """Else a start warned that the activation is in no graph."""
    pattern = fused_quant.pattern(ops.silu_and_mul_per_block_quant, INNER, torch.bfloat16, False, False, False)
    monkeypatch.setattr(compiled_ops, "choices", compiled_ops.CompileChoices({pattern: True}))
    adopted()(tokens())
    monkeypatch.setattr(vllm_rocm_ops, "stats", lambda: {f"{OP}_per_block_quant": {"": 3}})
    assert coverage.calls().patterns == {str(pattern): 3} and not coverage.calls().unreached
