"""Test the plugin's RMSNorm and SiluAndMul as vLLM's layers: what they serve, leave to vLLM, and hand over."""

import pathlib

import pytest
import torch
from fakes import called_in, graph_of
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.utils import fp8_utils, quant_utils
from vllm.platforms import current_platform

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch, quantization
from vllm_rocm_ops.core.stats import warned
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import activation, fused_quant, vllm_row_kernels
from vllm_rocm_ops.vllm.graph import norm as norm_seam

ROWS, HIDDEN = 5, 256


pytestmark = pytest.mark.usefixtures("configuration")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def norm(dtype: torch.dtype = torch.bfloat16, **options):
    layer = RMSNorm(HIDDEN, dtype=dtype, **options)
    layer.weight.data = 1 + 0.1 * random(HIDDEN, dtype=dtype)
    return layer


def gemma_norm():
    """Return vLLM's norm of 1 + weight."""
    layer = GemmaRMSNorm(HIDDEN).bfloat16()
    layer.weight.data = 0.1 * random(HIDDEN)
    return layer


def linear(key: str, **attributes) -> torch.nn.Module:
    """Return a stand-in for vLLM's layer of one linear, named `linear` in its parent, as its input's producer sees it."""
    parent = torch.nn.Module()
    parent.linear = torch.nn.Module()
    vars(parent.linear).update({"_input_quant_key": getattr(quant_utils, key), **attributes})
    return parent


def test_norm_adds_to_the_residual_in_place():
    """The op is called, and returns the given residual."""
    layer, x, residual = norm(), random(ROWS, HIDDEN), 2 * random(ROWS, HIDDEN)
    expected = layer.vllm_forward(x.clone(), residual.clone())
    out, returned = layer(x, residual)
    assert returned is residual
    assert torch.equal(residual, expected[1])
    torch.testing.assert_close(out, expected[0], atol=0.04, rtol=0.01)
    assert vllm_rocm_ops.stats().keys() == {"fused_add_rms_norm"}


def heads_of(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the first heads in the output of a wider projection."""
    return qkv[:, : heads * HIDDEN].unflatten(-1, (heads, HIDDEN))


@pytest.mark.parametrize("arch", [None, "gfx942"])
@pytest.mark.parametrize("one_plus", [False, True])
def test_norm_of_heads_in_a_wider_row(arch, one_plus):
    """Queries are normalized per head in a wider projection's output. Rows with strided elements are vLLM's."""
    layer, qkv = gemma_norm() if one_plus else norm(), random(ROWS, 4 * HIDDEN)
    with launch.executor(arch and Emulator(arch)):
        for x in (heads_of(qkv, 2), heads_of(qkv, 1), heads_of(qkv, 4), heads_of(qkv, 3)[:1]):
            vllm_rocm_ops.reset_stats()
            torch.testing.assert_close(layer(x), layer.vllm_forward(x), atol=0.04, rtol=0.01)
            [kernel] = vllm_rocm_ops.stats()["rms_norm"]
            assert kernel.startswith("fallback") == (arch is None)
        vllm_rocm_ops.reset_stats()
        x = random(HIDDEN, ROWS, 2).permute(1, 2, 0)
        assert torch.equal(layer(x), layer.vllm_forward(x)) and not vllm_rocm_ops.stats()


def test_a_residual_that_is_not_in_rows_is_vllms():
    layer, x, residual = norm(), random(ROWS, HIDDEN), random(HIDDEN, ROWS).t()
    wanted = layer.vllm_forward(x.clone(), residual.clone())
    for plugin, theirs in zip(layer(x, residual), wanted):
        assert torch.equal(plugin, theirs)
    assert vllm_rocm_ops.stats() == {}


def test_compiled_norms_are_traced_as_vllms_ir(configuration):
    """A norm is then a node of vLLM's IR, which rewrite.py replaces, and nothing of the plugin."""
    calls = called_in(graph_of(norm(), random(ROWS, HIDDEN), random(ROWS, HIDDEN)))
    assert "vllm_ir.fused_add_rms_norm.maybe_inplace" in calls
    assert not [call for call in calls if "rocm_ops" in call] and vllm_rocm_ops.stats() == {}


def test_norm_of_one_plus_weight():
    """It is the plugin's; with a residual, which vLLM leaves unchanged, vLLM's."""
    layer, x, residual = gemma_norm(), random(ROWS, HIDDEN), random(ROWS, HIDDEN)
    torch.testing.assert_close(layer(x), layer.vllm_forward(x), atol=0.04, rtol=0.01)
    assert vllm_rocm_ops.stats().keys() == {"rms_norm"}
    vllm_rocm_ops.reset_stats()
    added = layer.vllm_forward(x, residual.clone())[0]
    assert torch.equal(layer(x, residual)[0], added) and not vllm_rocm_ops.stats()


def made_again(monkeypatch, module, name: str, keys: tuple):
    """Return vLLM's layer of a name, with a seam installed for which kernels make only these results."""
    monkeypatch.delitem(op_registry_oot, name)
    monkeypatch.setattr(fused_quant, "runnable", lambda table: keys)
    module.install()


@pytest.mark.parametrize("plain", [False, True])
def test_without_kernels_layers_are_vllms(monkeypatch, plain):
    """Kernels are missing or switched off. An activation with a linear then hands over a plain result."""
    monkeypatch.delitem(op_registry_oot, "GemmaRMSNorm")
    made_again(monkeypatch, norm_seam, "RMSNorm", (None,) if plain else ())
    made_again(monkeypatch, activation, "SiluAndMul", (None,) if plain else ())
    layers = norm(), SiluAndMul()
    layers[1].consumer = (linear("kFp8DynamicTokenSym"), "linear")
    for layer in layers:
        assert isinstance(layer(random(ROWS, HIDDEN)), torch.Tensor)
    assert vllm_rocm_ops.stats().keys() == ({"rms_norm", "silu_and_mul"} if plain else set())


def natives() -> list[str]:
    return [*vllm_row_kernels.NORMS, *vllm_row_kernels.ACTIVATIONS]


def groups_of(x, group_size, column_major_scales, use_ue8m0):
    """Quantize in groups as vLLM does on GPUs, in PyTorch."""
    assert not use_ue8m0
    data, scale = quantization.per_token(x.float().unflatten(-1, (-1, group_size)), torch.float8_e4m3fn, None)
    scale = scale.view(len(x), -1)
    return data.flatten(-2), scale.t().contiguous().t() if column_major_scales else scale


STEP = 2.0**-7
"""The relative distance of bfloat16 numbers where it is largest, just above a power of two."""


def bounds(dtype: torch.dtype, sums: bool) -> dict[str, float]:
    """Return how far results of a dtype may lie from the reference's, with a residual or without one.

    vLLM rounds the result, and before it the sum with a residual, each by less than a STEP. The reference rounds to
    nearest, before and after the weight: by a STEP in all. A scale has the relative error of its group's largest value.
    So a value and its scale together are off by less than 6 * STEP, which is less than the distance of two FP8 numbers,
    1/16 to 1/8 of them: they round to the same number or to neighbors, below 2**-6 with a distance of 2**-9.
    Scales of MX are powers of two: equal unless the largest value lies at one.
    """
    if dtype == torch.float8_e4m3fn:
        return {"atol": 2.0**-9, "rtol": 2.0**-3}
    return {"atol": 0.0, "rtol": 0.0 if dtype == torch.uint8 else (3 if sums else 2) * STEP}


@pytest.mark.parametrize("name", natives())
@pytest.mark.parametrize(("shape", "one_plus"), [((3,), False), ((2, 3), False), ((2, 3), True)], ids=str)
def test_what_kernels_do_not_take_is_vllms_on_a_gpu(name, shape, one_plus, monkeypatch):
    """vLLM's results equal the reference, except for rounding by any processor: to nearest or toward zero."""
    monkeypatch.setattr(fp8_utils, "per_token_group_quant_fp8", groups_of)
    op = getattr(ops, name)
    given = {
        "input": random(*shape, 3 * HIDDEN)[..., : HIDDEN * (2 if "silu" in name else 1)],
        "residual": random(*shape, 2 * HIDDEN)[..., :HIDDEN],
        "gate": random(*shape, HIDDEN).roll(64, -1),
        "tokens": random(*shape, HIDDEN).roll(32, -1),
        "expert_gate": random(1, HIDDEN) / 8,
        "weight": 1 + 0.1 * random(HIDDEN),
        "epsilon": 1e-6,
        "scale": torch.tensor([0.02]),
        "quant_dtype": torch.float8_e4m3fn,
        "group_size": 128,
        "is_scale_transposed": True,
        "scale_ub": None if "block" in name else torch.tensor([0.5]),
        "one_plus_weight": one_plus,
        "addend": random(*shape, 3 * HIDDEN)[..., :HIDDEN],
        "addend_factor": 0.5,
    }
    arguments = [given[argument] for argument in op.Arguments._fields]
    copies = [value.clone() if value is given["residual"] else value for value in arguments]
    function = (vllm_row_kernels.NORMS | vllm_row_kernels.ACTIVATIONS)[name]
    found, wanted = function(*arguments), op.reference(*copies)
    for one, two in zip(arguments, copies):
        if one is given["residual"]:
            torch.testing.assert_close(one, two, atol=0, rtol=STEP)
        else:
            assert one is two or torch.equal(one, two)
    if not isinstance(wanted, tuple):
        found, wanted = (found,), (wanted,)
    for one, two in zip(found, wanted, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
        torch.testing.assert_close(one.float(), two.float(), **bounds(one.dtype, "residual" in op.Arguments._fields))


def test_ops_have_vllms_kernels_behind_them_on_a_gpu(monkeypatch):
    """On CPU they have their references."""
    assert {getattr(ops, name).native for name in natives()} == {None}
    for name in natives():
        monkeypatch.setattr(getattr(ops, name), "native", None)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    vllm_row_kernels.install(vllm_row_kernels.NORMS)
    vllm_row_kernels.install(vllm_row_kernels.ACTIVATIONS)
    with launch.executor(Emulator("gfx942")):
        x = random(ROWS, 2 * HIDDEN)[:, ::2]  # rows that no kernel supports
        wanted = ops.rms_norm.native(x, random(HIDDEN), 1e-6, False)
        assert torch.equal(ops.rms_norm(x, random(HIDDEN), 1e-6), wanted)
    assert all(getattr(ops, name).native for name in natives())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_make_all_results_unless_switched_off(monkeypatch, arch):
    monkeypatch.setattr(seam, "arch_here", lambda _: arch)
    monkeypatch.setattr(fused_quant, "QUANT_DTYPE", archs.named(arch).fp8_dtype)
    tables = fused_quant.NORMS, fused_quant.ACTIVATIONS
    for table in tables:
        assert fused_quant.runnable(table) == (None, *fused_quant.KEYS, fused_quant.MX)
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "fused_add_rms_norm,silu_and_mul_per_token_quant")
    assert [len(fused_quant.runnable(table)) for table in tables] == [4, 4]
    assert None not in fused_quant.runnable(fused_quant.NORMS)
    monkeypatch.setattr(launch, "CODE", pathlib.Path("/nowhere"))
    assert [fused_quant.runnable(table) for table in tables] == [(), ()]


class NoBinary:
    """A runtime whose driver refuses code objects."""

    def load(self, path, symbol, device):
        raise RuntimeError(f"{symbol}: no binary for this GPU")


def test_kernels_that_do_not_load_are_none(monkeypatch):
    """The process has initialized its GPU, as when weights are reordered into a layout that vLLM's kernels do not read."""
    monkeypatch.setattr(seam, "arch_here", lambda _: "gfx950")
    monkeypatch.setattr(launch, "runtime", lambda: (NoBinary(), ""))
    assert fused_quant.runnable(fused_quant.ACTIVATIONS) == (None, *fused_quant.KEYS, fused_quant.MX)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    warned.clear()
    with pytest.warns(UserWarning, match="^silu_and_mul runs without its kernels: .*: no binary for this GPU. To run "):
        assert fused_quant.runnable(fused_quant.ACTIVATIONS) == ()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"var_hidden_size": HIDDEN // 2}, torch.bfloat16),
        ({"has_weight": False}, torch.bfloat16),
        ({"dtype": torch.float32}, torch.bfloat16),
        ({"dtype": torch.float32}, torch.float32),
    ],
)
def test_norm_leaves_the_rest_to_vllm(options, dtype):
    """A partial variance, no weight, a weight of another dtype and fp32 run vLLM's own forward."""
    layer, x = norm(**options), random(ROWS, HIDDEN, dtype=dtype)
    assert torch.equal(layer(x), RMSNorm.forward_native(layer, x))
    assert vllm_rocm_ops.stats() == {}


def test_batch_invariance_is_vllms(monkeypatch):
    """The plugin's split of a row over blocks depends on the number of rows, so VLLM_BATCH_INVARIANT keeps vLLM's norm."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = norm()
    assert layer._forward_method == layer.vllm_forward


def test_swiglu_runs_the_plugins_op_except_in_fp32():
    layer, x = SiluAndMul(), random(ROWS, 2 * HIDDEN)
    torch.testing.assert_close(layer(x), SiluAndMul.forward_native(x), atol=0.02, rtol=0.01)
    assert vllm_rocm_ops.stats().keys() == {"silu_and_mul"}
    vllm_rocm_ops.reset_stats()
    layer(x.float())
    assert vllm_rocm_ops.stats() == {}


KINDS = {
    "kFp8StaticTensorSym": {"input_scale": torch.tensor(0.02)},
    "kFp8DynamicTokenSym": {"input_scale_ub": torch.tensor(0.5)},
    "kFp8Dynamic128Sym": {"vllm_rocm_ops_column_major_scales": True},
}


@pytest.mark.parametrize("key", KINDS)
def test_activation_hands_over_quantized(key):
    """An activation hands its linear e4m3 with the requested scales, within e4m3's rounding of the plain result."""
    layer, x = SiluAndMul(), random(ROWS, 2 * HIDDEN)
    plain = layer(x)
    layer.consumer = (linear(key, **KINDS[key]), "linear")
    quantized, wanted = layer(x), plain.float()
    assert quantized.data.dtype == current_platform.fp8_dtype()
    assert (quantized.shape, quantized.orig_dtype) == (plain.shape, plain.dtype)
    scale = quantized.scale
    if key == "kFp8DynamicTokenSym":
        assert scale.shape == (ROWS, 1) and scale.max() <= 0.5 / 448  # the upper bound holds
        wanted = wanted.clamp(-0.5, 0.5)
    elif key == "kFp8Dynamic128Sym":
        assert (scale.shape, scale.stride()) == ((ROWS, HIDDEN // 128), (1, ROWS))
        scale = scale.repeat_interleave(128, 1)
    torch.testing.assert_close(quantized.data.float() * scale, wanted, atol=0.01, rtol=0.07)


def test_an_adapter_gets_unquantized_input():
    """LoRA wraps a linear after its activation knows it; its layer needs the plain activation."""
    layer, parent = SiluAndMul(), linear("kFp8DynamicTokenSym")
    layer.consumer = (parent, "linear")
    wrapper = torch.nn.Module()
    wrapper.base_layer, wrapper.requires_unquantized_input = parent.linear, True
    parent.linear = wrapper
    assert isinstance(layer(random(ROWS, 2 * HIDDEN)), torch.Tensor)


def test_columns_that_do_not_fill_groups_stay_unquantized():
    """128-group scales need whole groups."""
    layer = SiluAndMul()
    layer.consumer = (linear("kFp8Dynamic128Sym"), "linear")
    assert isinstance(layer(random(ROWS, 2 * 192)), torch.Tensor)
