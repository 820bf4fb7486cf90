"""Test W_UV with a quantized result: vLLM's calls, their results, decisions, and what is timed."""

import pytest
import torch
from fakes import Counting, Fake, fake_decoder
from keys import key
from test_mla_absorb import Layer as Plain
from test_mla_absorb import require_measured
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

import vllm_rocm_ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.vllm.attention import mla_absorb, mla_v_up, timing
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.kernel_selection import Decided

HEADS, LATENT, SIZE = Plain.num_heads, Plain.kv_lora_rank, 128
SHAPE = f"batched_gemm {HEADS}x{SIZE}x{LATENT} bfloat16"
PLAIN, FUSED, SEPARATE = map(key, (f"{SHAPE} bmm", f"{SHAPE} to e4m3 by 128 bmm", f"{SHAPE} to e4m3 by 128 separate"))


class Layer(Plain):
    """vLLM's layer: decode rows by W_UV, then the others; all else of attention is left out."""

    v_head_dim = SIZE

    def forward_impl(
        self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None, **rest
    ):
        self.given = output.dtype, output_scale, output_block_scale, rest
        if attn_metadata is None:
            return output.fill_(0)
        decode, rows = attn_metadata.num_decode_tokens, attn_metadata.num_actual_tokens
        output[decode:rows] = 3.0
        if decode:
            with torch.no_grad():
                MLAAttention._v_up_proj(self, q[:decode], out=output[:decode])
        return output


def call(layer: Layer, decode: int, rows: int, column_major: bool = False, padded: int = 8, **more):
    """Return the values, scales and 16-bit rows of a step with these decode rows and rows, as vLLM's op calls it."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(padded, HEADS, LATENT, generator=generator).bfloat16()
    metadata = Fake(num_decode_tokens=decode, num_actual_tokens=rows)
    output = torch.full((padded, HEADS * SIZE), torch.nan).to(torch.float8_e4m3fn)
    scales = torch.full((HEADS, padded) if column_major else (padded, HEADS), torch.nan)
    scales = scales.t() if column_major else scales
    forward = mla_v_up.with_quantized_output(Layer.forward_impl)
    rest = latent, latent, latent, latent, metadata
    assert forward(layer, *rest, output=output, output_block_scale=scales, **more) is output
    plain = latent.new_zeros(padded, HEADS * SIZE)
    Layer.forward_impl(Layer(), *rest, output=plain)
    return output, scales, plain


def quantizations(monkeypatch) -> list[int]:
    """Return the rows that vLLM's quantization is called with, from now on."""
    found, theirs = [], mla_v_up.quantize

    def quantize(x, *rest):
        found.append(len(x))
        theirs(x, *rest)

    monkeypatch.setattr(mla_v_up, "quantize", quantize)
    return found


def adopted(is_forced: bool = True) -> Layer:
    layer = Layer()
    mla_absorb.adopt(layer, is_forced, 64)
    mla_v_up.adopt(layer, is_forced, 64)
    return layer


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize(("decode", "rows"), [(3, 3), (3, 6), (0, 5), (8, 8)])
def test_decode_rows_are_quantized_by_w_uv_and_others_behind(configuration, monkeypatch, decode, rows, column_major):
    """Both have the bits of a separate quantization. Rows that pad a graph are not written."""
    behind = quantizations(monkeypatch)
    vllm_rocm_ops.reset_stats()
    values, scales, plain = call(adopted(), decode, rows, column_major)
    assert behind == [rows - decode] * (rows > decode)
    assert sum(vllm_rocm_ops.stats().get("batched_gemm", {}).values()) == (decode > 0)
    wanted, wanted_scales = torch.empty(rows, HEADS * SIZE).to(values.dtype), torch.empty(rows, HEADS)
    mla_v_up.quantize(plain[:rows], wanted, None, wanted_scales)
    assert torch.equal(values[:rows].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales[:rows], wanted_scales)
    assert values[rows:].float().isnan().all() and scales[rows:].isnan().all()


def test_one_kernel_serves_decode_rows(configuration, monkeypatch):
    behind, emulator, layer = quantizations(monkeypatch), Counting("gfx950"), adopted()
    with launch.executor(emulator):
        values, scales, plain = call(layer, 5, 5)
    assert emulator.symbols == ["batched_gemm_quant_bf16_16"] and not behind
    found = timing.dequantized(values[:5], None, scales[:5])
    assert ((found - plain[:5].float()).abs() <= plain[:5].float().abs() / 15 + scales[:5].max() / 256).all()


def test_what_is_not_adopted_is_quantized_behind(configuration, monkeypatch):
    behind = quantizations(monkeypatch)
    values, scales, _ = call(Layer(), 5, 6)
    assert behind == [6] and values[:6].float().isfinite().all() and scales[:6].isfinite().all()


def test_an_unquantized_call_of_an_adopted_layer_stays(configuration):
    """So do quantizations of vLLM's own pass, which has the group's size, and ones with a static scale."""
    layer, latent = adopted(), torch.ones(4, HEADS, LATENT).bfloat16()
    metadata = Fake(num_decode_tokens=0, num_actual_tokens=4)
    forward, plain, scale = (
        mla_v_up.with_quantized_output(Layer.forward_impl),
        torch.zeros(4, HEADS * SIZE),
        torch.ones(1),
    )
    for scales in ((None, None, {}), (scale, None, {}), (None, scale, {"quant_group_size": 128})):
        given = {"output_scale": scales[0], "output_block_scale": scales[1], **scales[2]}
        forward(layer, latent, latent, latent, latent, metadata, output=plain, **given)
        assert layer.given == (plain.dtype, *scales)
    assert layer.W_UV.rocm_ops_fused.output is None


def test_the_profile_run_has_scales_to_multiply_by(configuration):
    output, scales = torch.ones(4, HEADS * SIZE).to(torch.float8_e4m3fn), torch.zeros(4, HEADS)
    given = (torch.ones(4, HEADS, LATENT),) * 4
    mla_v_up.with_quantized_output(Layer.forward_impl)(
        adopted(), *given, None, output=output, output_block_scale=scales
    )
    assert (scales == 1).all() and (output.float() == 0).all()


def test_an_error_leaves_no_output_behind(configuration, monkeypatch):
    layer = adopted()
    monkeypatch.setattr(mla_absorb, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(layer, 3, 3)
    assert layer.W_UV.rocm_ops_fused.output is None


# Decisions


@pytest.fixture
def noted(configuration):
    """Yield a layer whose weights are noted to be timed."""
    kernel_selection.begin_recording()
    yield adopted(False)
    kernel_selection.invalidate()


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        ({}, []),
        ({FUSED: b"\0\1\1\1", SEPARATE: b"\0\1\1\0"}, [1, 2]),
        ({FUSED: b"\0\0\1\1", SEPARATE: b"\0\1\1\1"}, [2, 3]),
        ({PLAIN: b"\0\0\0\0", FUSED: b"\0\1\0\0", SEPARATE: b"\0\1\0\0"}, [1]),
        ({PLAIN: b"\0\0\0\0", FUSED: b"\0\0\0\0", SEPARATE: b"\0\1\0\0"}, []),
    ],
)
def test_w_uv_quantizes_where_it_won_against_both(noted, monkeypatch, shapes, rows):
    """It keeps its class for that, also where the plain GEMM never wins."""
    assert {FUSED, SEPARATE, PLAIN} <= {one.key for one in kernel_selection.all_choices()}
    kernel_selection.apply_decisions(Decided({}, shapes))
    behind = quantizations(monkeypatch)
    for count in (1, 2, 3, 1):
        behind.clear()
        call(noted, count, count)
        assert behind == [] if count in rows else behind == [count]
    assert isinstance(noted.W_UV, mla_absorb.Absorbed) is bool(rows)


@pytest.mark.parametrize(
    ("shapes", "changed", "quantizes"),
    [
        ({}, {}, False),
        ({PLAIN: b"\0\1"}, {}, True),
        ({PLAIN: b"\0\0"}, {}, False),
        ({PLAIN: b"\0\1", FUSED: b"\0\0"}, {}, False),
        ({PLAIN: b"\0\0", FUSED: b"\0\1"}, {}, True),
        ({PLAIN: b"\0\1", FUSED: b"\0\1", SEPARATE: b"\0\0"}, {}, False),
        ({}, {"is_forced": True}, True),
        ({}, {"is_forced": True, "is_batch_invariant": True}, False),
        ({}, {"is_forced": True, "impl": Fake(dcp_world_size=2)}, False),
    ],
)
def test_records_decide_whether_the_result_is_quantized(configuration, shapes, changed, quantizes):
    decoder = fake_decoder(**changed)
    assert mla_v_up.may_quantize(decoder, Layer().W_UV, Decided({}, shapes)) is quantizes
    assert not mla_v_up.may_quantize(decoder, Plain().W_UV, Decided({}, shapes)), "heads of 64"
    assert not mla_v_up.may_quantize(decoder, Layer().W_UK_T, Decided({}, shapes)), "another shape"
    assert not mla_v_up.may_quantize(decoder, Layer().W_UV.contiguous(), Decided({}, shapes)), "another order"
    assert not mla_v_up.may_quantize(decoder, None, Decided({}, shapes)), "vLLM has it quantized"
    off = Decided({"batched_gemm": "wrong"}, shapes)
    assert mla_v_up.may_quantize(decoder, Layer().W_UV, off) is (quantizes and decoder.is_forced)


@pytest.mark.parametrize("factor", [1.0, 1.2])
@pytest.mark.parametrize("kernels", mla_v_up.COMPARISONS, ids=lambda kernels: str(kernels.beside))
def test_a_wrong_result_is_noticed_when_it_is_measured(noted, monkeypatch, kernels, factor, tmp_path):
    [choice] = (choice for choice in kernel_selection.all_choices() if choice.kernels is kernels)
    spoiled = lambda out, *scales: [scale.mul_(factor) for scale in scales]
    require_measured(choice, monkeypatch, spoiled, factor == 1.0, tmp_path, most=0.05)
